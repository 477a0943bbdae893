"""Chooses the implementation of each operation that has a fused kernel, and says why.

`auto` is the first implementation that supports the call on the device of the run. `mesh.context_method`, the
communication of attention over `context`, is chosen together with attention."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxmem.config import Config, Decoder, Optimizer, Precision
from jaxmem.errors import UserError, unsupported
from jaxmem.kernels.choice import NONE_FAILED, Choice, choose, triton_refusal
from jaxmem.kernels.codes import KERNEL_FORMATS
from jaxmem.kernels.fused_attention import support
from jaxmem.kernels.fused_attention.support import Request
from jaxmem.quant import FORMATS
from jaxmem.quant.precision import compute_dtype
from jaxmem.quant.qtensor import even_block_size
from jaxmem.sharding.share import share_of
from jaxmem.sharding.weights import MIN_BLOCK
from jaxmem.step.kernel_choice.attention import attention_request, context_methods, context_seconds

ATTENTION, EXPERTS, UPDATE = "memory.attention", "memory.experts", "optimizer.kernel"
_CLOSE = 1.05  # among methods within this factor of the fastest, the first of METHODS (least memory) is chosen

# The implementations that failed their check on this device, and the reasons: {setting: {implementation: reason}}.
Failures = Mapping[str, Mapping[str, str]]
NO_FAILURES: Failures = {}


@dataclass(frozen=True)
class AttentionChoice(Choice):
    """The implementation of attention, and the communication over `mesh.context`."""

    context_method: str = "ring"


@dataclass(frozen=True)
class KernelChoices:
    """The choice for each operation; None: the config does not have the operation."""

    attention: AttentionChoice | None
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
            return support.choose(call, capability, failed)
        if capability is not None and (why := support.refusal(named, call, capability)):
            raise UserError(f"{ATTENTION}={named}: {why}; use {ATTENTION}=auto")
        return Choice(named, ATTENTION, call.kind)

    if cfg.mesh.context == 1:
        return AttentionChoice(**vars(kernel(call)))
    share = share_of(cfg)
    by_method: dict[str, tuple[float, Choice]] = {}  # estimated seconds, and the kernel
    refused: list[UserError] = []
    for method in context_methods(share, cfg.memory.head_groups):
        try:
            choice = kernel(call.over_context(method, cfg.mesh.context))
        except UserError as error:
            refused.append(error)
        else:
            by_method[method] = context_seconds(share, cfg.precision, call, method, choice.implementation), choice
    if not by_method:
        raise refused[0]
    least = min(seconds for seconds, _ in by_method.values())
    best = next(method for method, (seconds, _) in by_method.items() if seconds <= _CLOSE * least)
    time, choice = by_method.pop(best)
    others = ", ".join(f"{method} {other / time - 1:+.0%}" for method, (other, _) in by_method.items())
    why = f"{best} over context{f', estimated time of others: {others}' if others else ''}; {choice.why}"
    return AttentionChoice(choice.implementation, why, choice.kind, best)


def _experts_choice(
    cfg: Config, platform: str, capability: int | None, failed: Mapping[str, str] = NONE_FAILED
) -> Choice | None:
    """The choice for the matmuls of experts, or None if the config has no experts."""
    model = cfg.model
    precision = cfg.expert_precision
    if not isinstance(model, Decoder) or model.experts is None:
        return None
    stays_quantized = precision.is_quantized and bool(cfg.trainable_patterns)
    form = precision.parameters if stays_quantized else "dense"
    kind = f"{form} {compute_dtype(cfg.precision, platform).name}"
    in_fp8 = any(cfg.precision.is_fp8(f"blocks.mlp.{name}") for name in ("gate", "up", "down"))

    def refusal(name: str) -> str | None:
        if in_fp8:
            return "triton does not support precision.compute=fp8"
        missing = failed.get(name) or triton_refusal(capability)
        unsupported = _no_quantized_experts(precision, model, cfg.mesh.tensor) if stays_quantized else None
        return missing or unsupported

    order = {"triton": "all experts at once; blockwise computes one block of tokens after the other"}
    named = cfg.memory.experts
    if named == "triton" and in_fp8:
        use = "memory.experts=auto, or precision.fp8_layers without experts, e.g. ['*.attention.*']"
        raise UserError(unsupported(f"{EXPERTS}=triton", "experts in precision.fp8_layers", use))
    return Choice(named, EXPERTS, kind) if named != "auto" else choose(order, "blockwise", capability, refusal, kind)


def _no_quantized_experts(precision: Precision, model: Decoder, tensor: int) -> str | None:
    """The reason why the fused kernel cannot dequantize the experts, or None if it can."""
    if (form := KERNEL_FORMATS.get(precision.parameters)) is None:
        return f"triton does not dequantize {precision.parameters}; blockwise dequantizes one expert at a time"
    for inputs, parts in ((model.embed, 1), (model.mlp, tensor)):
        limit = precision.block_size or FORMATS[precision.parameters].block_size
        block = math.gcd(even_block_size(inputs, limit) or min(limit, inputs), inputs // parts)
        if inputs >= MIN_BLOCK and block % form.together:
            return f"triton needs blocks of a multiple of {form.together} values; {inputs} inputs have {block}"
    return None


def _update_choice(
    optimizer: Optimizer, precision: Precision, capability: int | None, failed: Mapping[str, str] = NONE_FAILED
) -> Choice | None:
    """The choice for updates of 8-bit Adam's state and of int8 weights, or None if the config has neither."""
    has_state = optimizer.name == "adamw8bit"
    has_weights = precision.parameters == "int8"
    if not has_state and not has_weights:
        return None
    kind = " and ".join(["adamw8bit"] * has_state + ["int8 weights"] * has_weights)

    def refusal(name: str) -> str | None:
        if has_weights and not precision.stochastic_rounding:
            return f"triton does not support precision.rounding={precision.rounding}"
        return failed.get(name) or triton_refusal(capability)

    order = {"triton": "reads and writes less than half of the bytes of plain JAX"}
    named = optimizer.kernel
    return Choice(named, UPDATE, kind) if named != "auto" else choose(order, "none", capability, refusal, kind)
