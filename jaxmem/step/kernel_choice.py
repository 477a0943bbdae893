"""Chooses the implementation of each operation that has a fused kernel, and says why. The settings are
`memory.attention`, `memory.experts` and `optimizer.kernel`. `mesh.context_method`, the communication of attention over
`context`, is chosen together with attention."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxmem.config import Config, Decoder, ImageText, Vit
from jaxmem.config.mesh import head_group_counts
from jaxmem.errors import UserError
from jaxmem.kernels.choice import Choice, triton_refusal
from jaxmem.kernels.fused_attention.arguments import pairs
from jaxmem.kernels.fused_attention.context import METHODS
from jaxmem.kernels.fused_attention.support import NONE_FAILED, Request, choose, refusal
from jaxmem.kernels.quantized_matmul import FORMS
from jaxmem.quant import FORMATS
from jaxmem.quant.precision import compute_dtype
from jaxmem.quant.qtensor import even_block_size
from jaxmem.sharding.weights import MIN_BLOCK

ATTENTION, EXPERTS, UPDATE = "memory.attention", "memory.experts", "optimizer.kernel"


# The implementations that failed their check on this device, and the reasons: {setting: {implementation: reason}}.
Failures = Mapping[str, Mapping[str, str]]
NO_FAILURES: Failures = {}


def kernel_choices(
    cfg: Config, platform: str, capability: int | None, failures: Failures = NO_FAILURES
) -> dict[str, Any]:
    """The choice for each operation of the config, by setting. The arguments are those of `attention_choice`."""
    attention, experts, update = (failures.get(setting, NONE_FAILED) for setting in (ATTENTION, EXPERTS, UPDATE))
    choices = {
        ATTENTION: attention_choice(cfg, platform, capability, attention),
        EXPERTS: experts_choice(cfg, platform, capability, experts),
        UPDATE: update_choice(cfg, capability, update),
    }
    return {setting: choice for setting, choice in choices.items() if choice is not None}


def resolve_kernels(cfg: Config, platform: str, capability: int | None) -> Config:
    """The config with `auto` replaced, in these settings and in `mesh.context_method`, by the choice for the given
    device. The setting of an operation that the config does not have stays `auto`."""
    choices = kernel_choices(cfg, platform, capability)
    names = {setting: choice.implementation for setting, choice in choices.items()}
    attention = choices.get(ATTENTION)
    return cfg.replace(
        memory={"attention": names.get(ATTENTION, "auto"), "experts": names.get(EXPERTS, "auto")},
        mesh={"context_method": attention.context_method if attention else "auto"},
        optimizer={"kernel": names.get(UPDATE, "auto")},
    )


def _rows(cfg: Config) -> int:
    """Rows of a micro-batch on one device."""
    return max(1, cfg.batch.global_size // (cfg.batch.accumulate * max(1, cfg.mesh.row_shards)))


def experts_choice(
    cfg: Config, platform: str, capability: int | None, failed: Mapping[str, str] = NONE_FAILED
) -> Choice | None:
    """The choice for the matmuls of experts, or None if the config has no experts."""
    model, form = cfg.model, cfg.expert_precision.parameters
    if not isinstance(model, Decoder) or model.experts is None:
        return None
    compute = compute_dtype(cfg.precision, platform).name
    stays_quantized = cfg.expert_precision.is_quantized and bool(cfg.trainable_patterns)
    kind = f"{form if stays_quantized else 'dense'} {compute}"
    reason = failed.get("triton") or triton_refusal(capability)
    if reason is None and stays_quantized:
        reason = _no_quantized_experts(cfg, model)
    why = "all experts at once; blockwise computes one block of tokens after the other"
    return _resolve(cfg, EXPERTS, Choice("triton", why, kind), "blockwise", reason)


def _resolve(cfg: Config, setting: str, triton: Choice, plain: str, reason: str | None) -> Choice:
    """The implementation that the config names. If it is `auto`: `triton`, or `plain` if `reason` excludes `triton`."""
    section, key = setting.split(".")
    named = getattr(getattr(cfg, section), key)
    if named != "auto":
        return replace(triton, implementation=named, why=setting)
    return triton if reason is None else replace(triton, implementation=plain, why=reason)


def _no_quantized_experts(cfg: Config, model: Decoder) -> str | None:
    """The reason why the fused kernel cannot dequantize the experts, or None if it can."""
    precision = cfg.expert_precision
    if (form := FORMS.get(precision.parameters)) is None:
        return f"triton does not dequantize {precision.parameters}; blockwise dequantizes one expert at a time"
    for inputs, parts in ((model.embed, 1), (model.mlp, cfg.mesh.tensor)):
        limit = precision.block_size or FORMATS[precision.parameters].block_size
        block = math.gcd(even_block_size(inputs, limit) or min(limit, inputs), inputs // parts)
        if inputs >= MIN_BLOCK and block % form.together:
            return f"triton needs blocks of a multiple of {form.together} values; {inputs} inputs have {block}"
    return None


def update_choice(cfg: Config, capability: int | None, failed: Mapping[str, str] = NONE_FAILED) -> Choice | None:
    """The choice for updates of 8-bit Adam's state and of int8 weights, or None if the config has neither."""
    has_state, has_weights = cfg.optimizer.name == "adamw8bit", cfg.precision.parameters == "int8"
    if not has_state and not has_weights:
        return None
    kind = " and ".join(["adamw8bit"] * has_state + ["int8 weights"] * has_weights)
    reason = failed.get("triton") or triton_refusal(capability)
    if has_weights and not cfg.precision.stochastic_rounding:
        reason = f"triton does not support precision.rounding={cfg.precision.rounding}"
    triton = Choice("triton", "reads and writes less than half of the bytes of plain JAX", kind)
    return _resolve(cfg, UPDATE, triton, "none", reason)


# Rates of an H100, to compare methods; the ratios of other GPUs are similar. FLOP/s of kernels: cuDNN, and Triton (as
# FlashAttention-2) from arXiv:2407.08608; Pallas from the jax repository. Bytes/s of memory, of NVLink within a host,
# and of a 400 Gb/s network.
_FLOPS = {"cudnn": 5.3e14, "mosaic": 4.5e14, "triton": 3.3e14}
_PLAIN, _MEMORY, _NVLINK, _NETWORK = 5e13, 3.3e12, 4.5e11, 5e10
_CLOSE = 1.05  # among methods within this factor of the fastest, the first of METHODS (least memory) is chosen
_HOST = 8  # GPUs of a host


@dataclass(frozen=True)
class AttentionChoice(Choice):
    context_method: str = "ring"


def attention_choice(
    cfg: Config, platform: str, capability: int | None, failed: Mapping[str, str] = NONE_FAILED
) -> AttentionChoice | None:
    """The choice for attention, or None without attention. `capability`: that of the GPU (90 for 9.0), or None for a
    CPU. `failed`: implementations that failed their check, and the reasons. Raises UserError if the config names an
    implementation that does not support the call."""
    call = attention_request(cfg, platform)
    if call is None:
        return None

    def kernel(call: Request) -> Choice:
        named = cfg.memory.attention
        if named == "auto":
            return choose(call, capability, failed)
        if capability is not None and (why := refusal(named, call, capability)):
            raise UserError(f"memory.attention={named}: {why}; use memory.attention=auto")
        return Choice(named, ATTENTION, call.kind)

    if cfg.mesh.context == 1:
        return AttentionChoice(**vars(kernel(call)))
    by_method, refused = {}, []
    for method in _methods(cfg):
        try:
            choice = kernel(call.over_context(method, cfg.mesh.context))
        except UserError as error:
            refused.append(error)
        else:
            by_method[method] = _seconds(cfg, call, method, choice.implementation), choice
    if not by_method:
        raise refused[0]
    least = min(seconds for seconds, _ in by_method.values())
    best = next(method for method, (seconds, _) in by_method.items() if seconds <= _CLOSE * least)
    time, choice = by_method.pop(best)
    others = ", ".join(f"{method} {other / time - 1:+.0%}" for method, (other, _) in by_method.items())
    why = f"{best} over context{f', estimated time of others: {others}' if others else ''}; {choice.why}"
    return AttentionChoice(**(vars(choice) | {"why": why, "context_method": best}))


def attention_request(cfg: Config, platform: str) -> Request | None:
    """Attention of a micro-batch for complete sequences and the heads of one device, or None without attention."""
    model = cfg.model
    if not isinstance(model, Decoder | Vit) or isinstance(model, ImageText):  # two kinds of attention
        return None
    if isinstance(model, Decoder):
        length, dim, window, soft_cap = cfg.row_length, model.head_dim, model.window, model.attention_soft_cap
    else:
        length, dim, window, soft_cap = (model.image_size // model.patch) ** 2, model.embed // model.heads, None, None
    is_text = isinstance(model, Decoder)
    return Request(
        dtype=compute_dtype(cfg.precision, platform).name,
        queries=length,
        keys=length,
        heads=_heads(cfg, model.heads),
        dim=dim,
        batch=_rows(cfg),
        masked=is_text,
        window=window is not None,
        soft_cap=soft_cap is not None,
        deterministic=cfg.train.deterministic,
        has_segments=is_text and cfg.data.packing,
        max_segments=cfg.data.max_segments,
    )


def _methods(cfg: Config) -> list[str]:
    """The communication methods that support this config. Kernels are checked later."""
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
    """The number of heads per device along `tensor`. If `heads` is not divisible, each device has all heads."""
    tensor = cfg.mesh.tensor if "tensor" in cfg.rules.heads else 1
    return heads // tensor if heads % max(1, tensor) == 0 else heads


def context_traffic(cfg: Config, method: str) -> tuple[float, float]:
    """Elements in the compute dtype that a device sends for attention, per layer and sequence: (forward, backward)."""
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
    """The estimated time of attention in one layer, forward and backward, to compare methods."""
    model, devices = cfg.model, cfg.mesh.context
    assert isinstance(model, Decoder)
    numbers = call.batch * call.heads * call.dim
    pairs_of_layers = [pairs(call.queries, call.keys, causal=True, window=window) for window in model.windows]
    visible = sum(pairs_of_layers) / len(pairs_of_layers)
    compute = 14 * numbers * visible / devices / _FLOPS.get(implementation, _PLAIN)
    link = _NVLINK if devices * cfg.mesh.tensor <= _HOST else _NETWORK
    width = 4 if call.dtype == "float32" else 2
    sent = call.batch * sum(context_traffic(cfg, method)) * width / link
    if method == "ulysses" or model.window is not None:
        return compute + sent
    # The outputs for blocks of keys are summed in float32: each block reads two arrays and writes one.
    merged = 6 * 4 * numbers * (devices - 1) * call.queries / devices / _MEMORY
    return merged + (max(compute, sent) if method == "ring" else compute + sent)
