"""The implementation of each operation that has a fused kernel: what `auto` means, and why.

From the setting to the call, for `memory.attention`, `memory.experts` and `optimizer.kernel`:

1. `kernel_choices` has a `Choice` for each. `auto` is the first implementation that supports the calls of the run and
   the GPU (`jaxmem.kernels.support` has the refusals). The communication of attention over `context`
   (`mesh.context_method`) is chosen together with attention (context_methods.py).
2. A run checks the choices first (`kernel_check.with_passing_kernels`). If one fails, the next choice replaces `auto`
   in its config; a failure of an implementation that the config names is an error.
3. `ExecutionSpec.kernels` has the choices of the config. The network receives them as `ExecutionSpec.of_network`, the
   update as `StepSpec.update_kernel`.
4. The layers pass them to an operation, such as `kernels.attention(..., implementation="cudnn")`. Exception: with a
   slot of a KV cache, `Attention.__call__` replaces implementations that XLA cannot shard by `blockwise`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from jaxmem.config import Config, Decoder, Optimizer, Precision, Vit
from jaxmem.errors import UserError, unsupported
from jaxmem.kernels.support import Request, attention_refusal, experts_refusal, triton_refusal
from jaxmem.quant.precision import compute_dtype
from jaxmem.sharding.share import share_of
from jaxmem.sharding.weights import MIN_BLOCK, block_size_of
from jaxmem.step.context_methods import context_methods, context_seconds

ATTENTION, EXPERTS, UPDATE = "memory.attention", "memory.experts", "optimizer.kernel"
# The fused implementations of each operation, the preferred one first, and the reason to choose each.
_FUSED_ATTENTION = {
    "cudnn": "cuDNN supports this attention",
    "triton": "the kernel for compute capability 8.0 and newer",
}
_FUSED_EXPERTS = {"triton": "all experts at once; blockwise computes one block of tokens after the other"}
_FUSED_UPDATE = {"triton": "reads and writes less than half of the bytes of plain JAX"}
_CLOSE = 1.05  # among methods within this factor of the fastest, the first of METHODS (least memory) is chosen

# The implementations that failed their check on this device, and the reasons: {setting: {implementation: reason}}.
Failures = Mapping[str, Mapping[str, str]]
NO_FAILURES: Failures = {}
NONE_FAILED: Mapping[str, str] = {}


@dataclass(frozen=True)
class Choice:
    """The implementation that a run uses for an operation."""

    implementation: str
    why: str
    kind: str  # the dtypes and formats of its calls
    context_method: str = "ring"  # of attention: its communication over `mesh.context`


@dataclass(frozen=True)
class KernelChoices:
    """The choice for each operation; None: the config does not have the operation."""

    attention: Choice | None
    experts: Choice | None
    update: Choice | None

    @property
    def by_setting(self) -> dict[str, Choice]:
        choices = {ATTENTION: self.attention, EXPERTS: self.experts, UPDATE: self.update}
        return {setting: choice for setting, choice in choices.items() if choice is not None}


def kernel_choices(
    cfg: Config, platform: str, capability: int | None, failures: Failures = NO_FAILURES
) -> KernelChoices:
    """The choices for a config. The arguments are those of `attention_choice`."""
    return KernelChoices(
        attention_choice(cfg, platform, capability, failures.get(ATTENTION, NONE_FAILED)),
        _experts_choice(cfg, platform, capability, failures.get(EXPERTS, NONE_FAILED)),
        _update_choice(cfg.optimizer, cfg.precision, capability, failures.get(UPDATE, NONE_FAILED)),
    )


def resolve_kernels(cfg: Config, platform: str, capability: int | None) -> Config:
    """The config with `auto` replaced, in these settings and in `mesh.context_method`, by the choice for the given
    device. The setting of an operation that the config does not have stays `auto`."""
    choices = kernel_choices(cfg, platform, capability)
    names = {setting: choice.implementation for setting, choice in choices.by_setting.items()}
    return cfg.replace(
        memory={"attention": names.get(ATTENTION, "auto"), "experts": names.get(EXPERTS, "auto")},
        mesh={"context_method": "auto" if choices.attention is None else choices.attention.context_method},
        optimizer={"kernel": names.get(UPDATE, "auto")},
    )


def attention_request(cfg: Config, platform: str) -> Request | None:
    """Attention of a micro-batch for complete sequences and the heads of one device, or None without attention."""
    model = cfg.model
    share = share_of(cfg)
    if not isinstance(model, Decoder | Vit):
        return None
    is_text = isinstance(model, Decoder)
    length = share.row_length if isinstance(model, Decoder) else model.patches
    return Request(
        dtype=compute_dtype(cfg.precision, platform).name,
        queries=length,
        keys=length,
        heads=share.heads,
        dim=model.head_dim if isinstance(model, Decoder) else model.embed // model.heads,
        batch=share.complete_rows,
        masked=is_text,
        window=isinstance(model, Decoder) and model.window is not None,
        soft_cap=isinstance(model, Decoder) and model.attention_soft_cap is not None,
        deterministic=cfg.train.deterministic,
        has_segments=is_text and cfg.data.packing,
        max_segments=cfg.data.max_segments,
    )


def attention_choice(
    cfg: Config, platform: str, capability: int | None, failed: Mapping[str, str] = NONE_FAILED
) -> Choice | None:
    """The choice for attention, or None without attention. `capability`: that of the GPU (90 for 9.0), or None for a
    CPU. `failed`: implementations that failed their check, and the reasons. Raises UserError if the config names an
    implementation that does not support the call on this GPU; for a CPU a run calls `refuse_gpu_kernels`."""
    call = attention_request(cfg, platform)
    named = cfg.memory.attention
    if call is None:
        return None
    if cfg.mesh.context == 1:
        return attention_for_call(call, named, capability, failed)
    share = share_of(cfg)
    by_method: dict[str, tuple[float, Choice]] = {}  # estimated seconds, and the kernel
    refused: list[UserError] = []
    for method in context_methods(share, cfg.memory.head_groups):
        try:
            choice = attention_for_call(call.over_context(method, cfg.mesh.context), named, capability, failed)
        except UserError as error:
            refused.append(error)
        else:
            by_method[method] = context_seconds(share, cfg.precision, call, method, choice.implementation), choice
    if not by_method:
        raise refused[0]
    least = min(seconds for seconds, _ in by_method.values())
    best = next(method for method, (seconds, _) in by_method.items() if seconds <= _CLOSE * least)
    time, choice = by_method.pop(best)
    others = ", ".join(f"{method} {seconds / time - 1:+.0%}" for method, (seconds, _) in by_method.items())
    why = f"{best} over context{f', estimated time of others: {others}' if others else ''}; {choice.why}"
    return replace(choice, why=why, context_method=best)


def attention_for_call(
    call: Request, named: str, capability: int | None, failed: Mapping[str, str] = NONE_FAILED
) -> Choice:
    """The choice for a call of attention. `named`: the implementation in the config, or auto. The other arguments are
    those of `attention_choice`."""
    if named == "auto":
        missing = {"triton": triton_refusal(capability)}
        refusals = {
            name: failed.get(name) or missing.get(name) or attention_refusal(name, call, capability)
            for name in _FUSED_ATTENTION
        }
        return _first_supported(_FUSED_ATTENTION, refusals, "blockwise", capability, call.kind)
    if capability is not None and (why := attention_refusal(named, call, capability)):
        raise UserError(f"{ATTENTION}={named}: {why}; use {ATTENTION}=auto")
    return Choice(named, ATTENTION, call.kind)


def _experts_choice(cfg: Config, platform: str, capability: int | None, failed: Mapping[str, str]) -> Choice | None:
    """The choice for the matmuls of experts, or None if the config has no experts."""
    model = cfg.model
    precision = cfg.expert_precision
    if not isinstance(model, Decoder) or model.experts is None:
        return None
    stays_quantized = precision.is_quantized and bool(cfg.trainable_patterns)
    form = precision.parameters if stays_quantized else "dense"
    kind = f"{form} {compute_dtype(cfg.precision, platform).name}"
    in_fp8 = any(cfg.precision.is_fp8(f"blocks.mlp.{name}") for name in ("gate", "up", "down"))
    of_format = None
    if stays_quantized:
        is_exact = cfg.base_quantization is not None
        of_format = experts_refusal(form, _expert_blocks(precision, model, cfg.mesh.tensor, is_exact))
    named = cfg.memory.experts
    if named == "triton" and in_fp8:
        use = "memory.experts=auto, or precision.fp8_layers without experts, e.g. ['*.attention.*']"
        raise UserError(unsupported(f"{EXPERTS}=triton", "experts in precision.fp8_layers", use))
    if named == "triton" and of_format:
        raise UserError(f"{EXPERTS}=triton: {of_format}; use {EXPERTS}=auto")
    if named != "auto":
        return Choice(named, EXPERTS, kind)
    refusal = "triton does not support precision.compute=fp8" if in_fp8 else failed.get("triton")
    refusal = refusal or triton_refusal(capability) or of_format
    return _first_supported(_FUSED_EXPERTS, {"triton": refusal}, "blockwise", capability, kind)


def _expert_blocks(precision: Precision, model: Decoder, tensor: int, is_exact: bool) -> Iterator[tuple[int, int]]:
    """The inputs of each matrix of an expert, and the number of values that share a scale on one device. `is_exact`: as
    in `block_size_of`."""
    for inputs, parts in ((model.embed, 1), (model.mlp, tensor)):
        if inputs >= MIN_BLOCK:
            yield inputs, math.gcd(block_size_of(inputs, precision, is_exact=is_exact), inputs // parts)


def _update_choice(
    optimizer: Optimizer, precision: Precision, capability: int | None, failed: Mapping[str, str]
) -> Choice | None:
    """The choice for updates of 8-bit Adam's state and of int8 weights, or None if the config has neither."""
    has_state = optimizer.name == "adamw8bit"
    has_weights = precision.parameters == "int8"
    if not has_state and not has_weights:
        return None
    kind = " and ".join(["adamw8bit"] * has_state + ["int8 weights"] * has_weights)
    if optimizer.kernel != "auto":
        return Choice(optimizer.kernel, UPDATE, kind)
    refusal = failed.get("triton") or triton_refusal(capability)
    if has_weights and not precision.stochastic_rounding:
        refusal = f"triton does not support precision.rounding={precision.rounding}"
    return _first_supported(_FUSED_UPDATE, {"triton": refusal}, "none", capability, kind)


def _first_supported(
    fused: Mapping[str, str], refusals: Mapping[str, str | None], plain: str, capability: int | None, kind: str
) -> Choice:
    """The first implementation that is not refused, and why.

    Args:
        fused: fused implementations, and the reason to choose each.
        refusals: the reason why each cannot be used, or None.
        plain: the implementation in plain JAX, if all others are refused.
        capability: the compute capability of the GPU; None: not a GPU.
        kind: the dtypes and formats of the calls.
    """
    if capability is None:
        return Choice(plain, "no NVIDIA GPU", kind)
    refused: list[str] = []
    for name, reason in fused.items():
        why = refusals[name]
        if why is None:
            return Choice(name, "; ".join([reason, *refused]), kind)
        refused.append(why)
    return Choice(plain, "; ".join(refused), kind)
