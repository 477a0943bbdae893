"""The implementation of attention that a config runs on a GPU, its communication over `context`, and why:
`memory.attention: auto` and `mesh.context_method: auto`, resolved."""

import math
from dataclasses import dataclass

from jaxmem.config import Config, Decoder, ImageText, Vit
from jaxmem.config.mesh import head_group_counts
from jaxmem.errors import UserError
from jaxmem.kernels.choice import Choice
from jaxmem.kernels.fused_attention.arguments import pairs
from jaxmem.kernels.fused_attention.context import METHODS
from jaxmem.kernels.fused_attention.support import Request, choose, refusal
from jaxmem.quant.precision import compute_dtype

# Rates of an H100, to compare methods; the ratios of other GPUs are similar. FLOP/s of kernels: cuDNN, and Triton (as
# FlashAttention-2) from arXiv:2407.08608; Pallas from the jax repository. Bytes/s of memory, of NVLink within a host,
# and of a 400 Gb/s network.
_KERNELS = {"cudnn": 5.3e14, "mosaic": 4.5e14, "triton": 3.3e14}
_PLAIN, _MEMORY, _NVLINK, _NETWORK = 5e13, 3.3e12, 4.5e11, 5e10
_CLOSE = 1.05  # of the methods within this factor of the least time, the first of METHODS needs the least memory
_HOST = 8  # GPUs of a host


@dataclass(frozen=True)
class AttentionChoice(Choice):
    context_method: str = "ring"


def attention_choice(cfg: Config, platform: str, capability: int | None, device: str) -> AttentionChoice | None:
    """The choice for devices of a compute capability (90 for 9.0; None: a CPU) and this name; None: the model has no
    attention. UserError if the implementation that the config names does not support it."""
    call = attention_request(cfg, platform)
    if call is None:
        return None

    def kernel(call: Request) -> Choice:
        named = cfg.memory.attention
        if named == "auto":
            return choose(call, capability, device)
        if capability is not None and (why := refusal(named, call, capability)):
            raise UserError(f"memory.attention={named}: {why}; use memory.attention=auto")
        return Choice(named, "memory.attention", call.kind, call.sizes)

    if cfg.mesh.context == 1:
        return AttentionChoice(**vars(kernel(call)))
    found, refused = {}, []
    for method in _methods(cfg):
        try:
            one = kernel(call.over_context(method, cfg.mesh.context))
        except UserError as error:
            refused.append(error)
        else:
            found[method] = _seconds(cfg, call, method, one.implementation), one
    if not found:
        raise refused[0]
    least = min(seconds for seconds, _ in found.values())
    best = next(method for method, (seconds, _) in found.items() if seconds <= _CLOSE * least)
    time, one = found.pop(best)
    others = ", ".join(f"{method} {other / time - 1:+.0%}" for method, (other, _) in found.items())
    why = f"{best} over context{f', estimated time of others: {others}' if others else ''}; {one.why}"
    return AttentionChoice(**(vars(one) | {"why": why, "context_method": best}))


def attention_request(cfg: Config, platform: str) -> Request | None:
    """Attention of one micro-batch for the heads of one device and complete sequences; None: the model has none."""
    model, mesh = cfg.model, cfg.mesh
    if not isinstance(model, Decoder | Vit) or isinstance(model, ImageText):  # its towers differ in their attention
        return None
    if isinstance(model, Decoder):
        length, dim, window, soft_cap = cfg.row_length, model.head_dim, model.window, model.attention_soft_cap
    else:
        length, dim, window, soft_cap = (model.image_size // model.patch) ** 2, model.embed // model.heads, None, None
    is_text = isinstance(model, Decoder)
    rows = max(1, cfg.batch.global_size // (cfg.batch.accumulate * max(1, mesh.row_shards)))
    return Request(
        dtype=compute_dtype(cfg.precision, platform).name,
        queries=length,
        keys=length,
        heads=_heads(cfg, model.heads),
        dim=dim,
        batch=rows,
        masked=is_text,
        window=window is not None,
        soft_cap=soft_cap is not None,
        deterministic=cfg.train.deterministic,
        has_segments=is_text and cfg.data.packing,
        max_segments=cfg.data.max_segments,
    )


def _methods(cfg: Config) -> list[str]:
    """The methods that support this config, whether or not a kernel supports them."""
    if cfg.mesh.context_method != "auto" or not isinstance(cfg.model, Decoder):
        return [cfg.mesh.context_method]
    heads, kv_heads = (_heads(cfg, n) for n in (cfg.model.heads, cfg.model.kv_heads))
    groups = cfg.memory.head_groups
    counts = head_group_counts(heads, kv_heads, cfg.mesh.context) if heads % kv_heads == 0 else []
    excluded = set() if counts and groups in ("auto", *counts) else {"ulysses"}
    excluded |= set() if cfg.model.window is None else {"all_gather"}
    excluded |= {"ring", "all_gather"} if cfg.model.windows_differ or cfg.model.attention_sinks else set()
    return [method for method in METHODS if method not in excluded]


def _heads(cfg: Config, heads: int) -> int:
    """The heads of one of the devices along `tensor`; all if they are not divisible."""
    tensor = cfg.mesh.tensor if "tensor" in cfg.rules.heads else 1
    return heads // tensor if heads % max(1, tensor) == 0 else heads


def context_traffic(cfg: Config, method: str) -> tuple[float, float]:
    """Elements in the compute dtype that a device sends for attention in one layer, per sequence: forward, backward."""
    model, devices = cfg.model, cfg.mesh.context
    assert isinstance(model, Decoder)
    time, heads, kv_heads = cfg.row_length / devices, _heads(cfg, model.heads), _heads(cfg, model.kv_heads)
    queries, keys = time * heads * model.head_dim, 2 * time * kv_heads * model.head_dim
    if method == "ulysses":
        sent = (2 * queries + keys * devices / math.gcd(kv_heads, devices)) * (devices - 1) / devices
        return sent, 2 * sent
    if model.window is not None:
        sent = min((model.window - 1) / time, devices - 1) * keys
        return sent, sent
    sent, widening = (devices - 1) * keys, 1 if cfg.precision.compute == "float32" else 2  # float32 gradients
    return sent, sent + widening * (devices * keys if method == "ring" else sent)


def _seconds(cfg: Config, call: Request, method: str, implementation: str) -> float:
    """An estimate of the time of attention in one layer, forward and backward, to compare methods."""
    model, devices = cfg.model, cfg.mesh.context
    assert isinstance(model, Decoder)
    numbers = call.batch * call.heads * call.dim
    each = [pairs(call.queries, call.keys, causal=True, window=window) for window in model.windows]
    visible = sum(each) / len(each)
    compute = 14 * numbers * visible / devices / _KERNELS.get(implementation, _PLAIN)
    link = _NVLINK if devices * cfg.mesh.tensor <= _HOST else _NETWORK
    width = 4 if call.dtype == "float32" else 2
    sent = call.batch * sum(context_traffic(cfg, method)) * width / link
    if method == "ulysses" or model.window is not None:
        return compute + sent
    # The outputs for blocks of keys are summed in float32: each block reads two arrays and writes one.
    merged = 6 * 4 * numbers * (devices - 1) * call.queries / devices / _MEMORY
    return merged + (max(compute, sent) if method == "ring" else compute + sent)
