"""How a run gets its kernels: the choice of the implementation of each operation, and its check on the device of a run.

`auto` is the first implementation that supports the calls of the run (`jaxmem.kernels.support`). The communication of
attention over `context` (`mesh.context_method`) is chosen together with attention (context_methods.py). The network
receives the choices as `ExecutionSpec.of_network`, and its layers pass them to an operation, such as
`kernels.attention(..., implementation="cudnn")`.

At the start of a run, each chosen kernel is compared with plain JAX on small random inputs, in less than a second. If
it fails, it is replaced by the next choice, and a line reports this; if the config names the kernel, the failure is an
error. Passed checks are stored in the user's cache directory, by device, version of jax and properties of the call.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import kernels
from jaxmem.config import Config, Decoder, Precision, Vit
from jaxmem.config.combinations import value_of
from jaxmem.errors import UserError, one_line, unsupported
from jaxmem.kernels import triton_launch
from jaxmem.kernels.grouped_matmul import map_groups, sort_rows, sum_of_groups
from jaxmem.kernels.support import Request, attention_refusal, experts_refusal, triton_refusal
from jaxmem.kernels.validation import PLAIN
from jaxmem.machine.devices import cudnn_remedy, package_versions
from jaxmem.models.mixture import matrices
from jaxmem.quant import FORMATS, quantize
from jaxmem.quant.precision import compute_dtype
from jaxmem.quant.qtensor import even_block_size
from jaxmem.sharding.share import share_of
from jaxmem.sharding.weights import MIN_BLOCK
from jaxmem.step.context_methods import context_methods, context_seconds
from jaxmem.typing import JsonDict

ATTENTION, EXPERTS, UPDATE = "memory.attention", "memory.experts", "optimizer.kernel"
# The fused implementations of each operation, the preferred one first, and the reason to choose each.
_FUSED_ATTENTION = {
    "cudnn": "cuDNN supports this attention",
    "triton": "the kernel for compute capability 8.0 and newer",
}
_FUSED_EXPERTS = {"triton": "all experts at once; blockwise computes one block of tokens after the other"}
_FUSED_UPDATE = {"triton": "reads and writes less than half of the bytes of plain JAX"}
_CLOSE = 1.05  # among methods within this factor of the fastest, the first of METHODS (least memory) is chosen
# The shapes of a check, and its limits.
LENGTH, WINDOW, SOFT_CAP = 192, 70, 2.0
ROWS, COLUMNS = 512, 1024  # shape of the weights in matmuls and updates
EXPERT_COUNT = 4
MAX_ERROR_EPS = 8  # largest error, in units of the machine epsilon times the largest value
MAX_CHANGED_CODES = 1e-3  # share of integer codes that may differ by 1: values may be near the border of two codes

# The implementations that failed their check on this device, and the reasons: {setting: {implementation: reason}}.
Failures = Mapping[str, Mapping[str, str]]
NO_FAILURES: Failures = {}
NONE_FAILED: Mapping[str, str] = {}


@dataclass(frozen=True)
class Choice:
    """The implementation that a run uses for an operation. `kind`: the dtypes and formats of its calls."""

    implementation: str
    why: str
    kind: str


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
        _update_choice(cfg, capability, failures.get(UPDATE, NONE_FAILED)),
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
    if isinstance(model, Decoder):
        length = share.row_length
        dim = model.head_dim
        window = model.window
        soft_cap = model.attention_soft_cap
    else:
        length = model.patches
        dim = model.embed // model.heads
        window = None
        soft_cap = None
    is_text = isinstance(model, Decoder)
    return Request(
        dtype=compute_dtype(cfg.precision, platform).name,
        queries=length,
        keys=length,
        heads=share.heads_of(model.heads),
        dim=dim,
        batch=share.complete_rows,
        masked=is_text,
        window=window is not None,
        soft_cap=soft_cap is not None,
        deterministic=cfg.train.deterministic,
        has_segments=is_text and cfg.data.packing,
        max_segments=cfg.data.max_segments,
    )


def attention_choice(
    cfg: Config, platform: str, capability: int | None, failed: Mapping[str, str] = NONE_FAILED
) -> AttentionChoice | None:
    """The choice for attention, or None without attention. `capability`: that of the GPU (90 for 9.0), or None for a
    CPU. `failed`: implementations that failed their check, and the reasons. Raises UserError if the config names an
    implementation that does not support the call."""
    call = attention_request(cfg, platform)
    named = cfg.memory.attention
    if call is None:
        return None
    if cfg.mesh.context == 1:
        return AttentionChoice(**vars(attention_kernel(call, named, capability, failed)))
    share = share_of(cfg)
    by_method: dict[str, tuple[float, Choice]] = {}  # estimated seconds, and the kernel
    refused: list[UserError] = []
    for method in context_methods(share, cfg.memory.head_groups):
        try:
            choice = attention_kernel(call.over_context(method, cfg.mesh.context), named, capability, failed)
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


def attention_kernel(
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
        of_format = experts_refusal(form, _expert_blocks(precision, model, cfg.mesh.tensor))
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


def _expert_blocks(precision: Precision, model: Decoder, tensor: int) -> Iterator[tuple[int, int]]:
    """The inputs of each matrix of an expert, and the number of values that share a scale on one device."""
    for inputs, parts in ((model.embed, 1), (model.mlp, tensor)):
        limit = precision.block_size or FORMATS[precision.parameters].block_size
        if inputs >= MIN_BLOCK:
            yield inputs, math.gcd(even_block_size(inputs, limit) or min(limit, inputs), inputs // parts)


def _update_choice(cfg: Config, capability: int | None, failed: Mapping[str, str]) -> Choice | None:
    """The choice for updates of 8-bit Adam's state and of int8 weights, or None if the config has neither."""
    precision = cfg.precision
    has_state = cfg.optimizer.name == "adamw8bit"
    has_weights = precision.parameters == "int8"
    if not has_state and not has_weights:
        return None
    kind = " and ".join(["adamw8bit"] * has_state + ["int8 weights"] * has_weights)
    if cfg.optimizer.kernel != "auto":
        return Choice(cfg.optimizer.kernel, UPDATE, kind)
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


def refuse_gpu_kernels(cfg: Config) -> None:
    """Refuses kernels that a CPU cannot run."""
    for key in (ATTENTION, EXPERTS, UPDATE):
        value = value_of(cfg, key)
        if value in ("cudnn", "triton") and triton_launch.INTERPRETER is None:
            raise UserError(f"{key}={value} needs an NVIDIA GPU; use {key}=auto")


def checked_kernels(
    cfg: Config, platform: str, capability: int | None, agree: Callable[[bool], bool] = bool
) -> tuple[dict[str, str], list[str]]:
    """The next choice for each setting whose kernel failed its check, and a line for each failure. `agree` returns
    whether a check failed in any process."""
    failures: dict[str, dict[str, str]] = {}
    lines: list[str] = []
    while True:
        choices = kernel_choices(cfg, platform, capability, failures).by_setting
        failed = _first_failed(cfg, platform, choices, agree)
        if failed is None:
            break
        setting, name, why = failed
        if value_of(cfg, setting) != "auto":
            raise UserError(f"{setting}={name} failed its check on this device: {why}; use {setting}=auto")
        failures.setdefault(setting, {})[name] = f"{name} failed its check: {why}"
        lines.append(f"warning: {setting}={name} failed its check and is not used: {why}")
    return {setting: choices[setting].implementation for setting in failures}, lines


def _first_failed(
    cfg: Config, platform: str, choices: Mapping[str, Choice], agree: Callable[[bool], bool]
) -> tuple[str, str, str] | None:
    """The setting and the name of the first kernel that fails its check in any process, and the reason."""
    for setting, chosen in choices.items():
        why = failure_of(cfg, platform, setting, chosen)
        if agree(why is not None):
            return setting, chosen.implementation, why or "it failed in another process"
    return None


def failure_of(cfg: Config, platform: str, setting: str, chosen: Choice) -> str | None:
    """The reason why the choice for a setting of a config cannot be used on the first local device; None: it is
    correct, or plain JAX."""
    if chosen.implementation in (*PLAIN, "none"):
        return None
    call: Any = attention_request(cfg, platform) if setting == ATTENTION else chosen.kind
    return failure(setting, chosen.implementation, call)


def failure(setting: str, implementation: str, call: Request | str) -> str | None:
    """The reason why an implementation cannot be used for such calls on the first local device; None: it is correct.
    `call`: the request (attention), or the kind of the choice (matmuls and updates)."""
    device = jax.local_devices()[0]
    if isinstance(call, Request):
        call = dataclasses.replace(call, queries=LENGTH, keys=LENGTH, batch=2, heads=4, max_segments=4)
    # The version of the platform has that of CUDA and of the driver.
    versions = package_versions(("jax", "jaxlib", "jax-triton", "jaxmem")) | {"": device.client.platform_version}
    facts = [device.device_kind, versions, setting, implementation, str(call)]
    seen = _directory() / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
    if seen.exists():
        return None
    try:
        with jax.default_device(device):
            why = _difference(setting, implementation, call)
    except Exception as error:  # noqa: BLE001 - a compiler or a driver may raise any type
        return (cudnn_remedy() if implementation == "cudnn" else None) or one_line(error)
    if why is None:
        with contextlib.suppress(OSError):
            seen.parent.mkdir(parents=True, exist_ok=True)
            seen.write_text(json.dumps(facts))
    return why


def _difference(setting: str, implementation: str, call: Any) -> str | None:
    plain, results = _CHECKS[setting]
    expected = results(call, plain)
    for name, x in results(call, implementation).items():
        if why := _error(np.asarray(x), np.asarray(expected[name])):
            return f"its {name} differs from plain JAX's by {why}"
    return None


def _error(x: np.ndarray, y: np.ndarray) -> str | None:
    if jnp.issubdtype(y.dtype, jnp.integer):
        steps = np.abs(x.astype(np.int32) - y.astype(np.int32))
        share = float((steps > 0).mean())
        within = steps.max() <= 1 and share <= MAX_CHANGED_CODES
        limits = f"limits 1 and {MAX_CHANGED_CODES:.1%}"
        return None if within else f"up to {steps.max()} quantization levels, in {share:.2%} of the elements ({limits})"
    limit = MAX_ERROR_EPS * float(jnp.finfo(y.dtype).eps)
    x = x.astype(np.float32)
    y = y.astype(np.float32)
    error = float(np.max(np.abs(x - y)) / np.max(np.abs(y)))
    return None if error <= limit else f"{error:.2g} of the largest value (limit {limit:.2g})"  # NaN <= limit is false


def _random_normal(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).standard_normal(shape), dtype)


def _attention(call: Request, implementation: str) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    kv_heads = 2
    sizes = (call.heads, kv_heads, kv_heads, call.heads)
    arrays = [jnp.asarray(rng.standard_normal((call.batch, LENGTH, n, call.dim)), call.dtype) for n in sizes]
    ids = np.sort(rng.integers(0, call.max_segments, (call.batch, LENGTH))) if call.has_segments else None
    options: JsonDict = {"causal": call.masked}
    options |= {"segment_ids": ids, "max_segments": call.max_segments, "window": WINDOW if call.window else None}
    options |= {"soft_cap": SOFT_CAP if call.soft_cap else None}

    def both(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> Any:
        out, pull = jax.vjp(lambda *a: kernels.attention(*a, implementation=implementation, **options), q, k, v)
        return out, *pull(g)

    return dict(zip(("output", "dq", "dk", "dv"), jax.jit(both)(*arrays), strict=True))


def _experts(kind: str, implementation: str) -> dict[str, jax.Array]:
    from jaxmem.kernels.grouped_matmul import triton

    form, dtype = kind.split()
    w = _random_normal(EXPERT_COUNT, ROWS, COLUMNS, dtype=dtype)
    chosen = np.random.default_rng(0).random((LENGTH, EXPERT_COUNT))
    groups = sort_rows(jnp.asarray(np.argsort(chosen, axis=1)[:, :2], jnp.int32), EXPERT_COUNT)
    q = None if form == "dense" else quantize(w, form, FORMATS[form].block_size, -2)
    dense = w if q is None else q.dequantize(dtype)

    def both(x: jax.Array, w: jax.Array, g: jax.Array) -> Any:
        def run(x: jax.Array, w: jax.Array) -> jax.Array:
            if implementation == "blockwise":
                values = jnp.ones(groups.rows.shape, dtype)
                return map_groups(lambda w, _, x, __: x @ w, w, {}, x, values, groups).astype(dtype)
            y = triton.grouped_matmul(x, w if q is None else matrices(q), None, None, groups, True)
            return sum_of_groups(y, groups, LENGTH)

        out, pull = jax.vjp(run, x, w)
        of_x, of_w = pull(g)
        return {"result": out, "gradient of tokens": of_x} | ({"gradient of weights": of_w} if q is None else {})

    return jax.jit(both)(_random_normal(LENGTH, ROWS, dtype=dtype), dense, _random_normal(LENGTH, COLUMNS, dtype=dtype))


def _updates(kind: str, implementation: str) -> dict[str, jax.Array]:
    values = _random_normal(ROWS, COLUMNS)
    g = _random_normal(COLUMNS, ROWS, dtype=jnp.bfloat16).T
    results: dict[str, jax.Array] = {}
    if "adamw8bit" in kind:
        m = quantize(values, "dynamic8", 256, -1)
        v = quantize(values**2, "udynamic8", 256, -1)
        state = kernels.Moments8(m.codes, jnp.maximum(v.codes, 1), m.scale, v.scale)
        update = jax.jit(lambda *a: kernels.adam8_update(*a, implementation=implementation))
        u, new = update(g, state, jnp.asarray([0.5, 0.5]))
        results |= {"update": u, **new._asdict()}
    if "int8" in kind:
        w = quantize(values, "int8", 256, -2)
        seeds = jnp.arange(w.scale.size, dtype=jnp.uint32).reshape(w.scale.shape)
        add = jax.jit(lambda *a: kernels.int8_add(*a, implementation=implementation))
        results |= zip(("codes", "scale"), add(w.codes, w.scale, g * jnp.bfloat16(1e-3), seeds), strict=True)
    return results


# For each setting: the implementation in plain JAX, and a function of the results of an implementation, by name.
_CHECKS: dict[str, tuple[str, Callable[[Any, str], dict[str, jax.Array]]]] = {
    ATTENTION: ("blockwise", _attention),
    EXPERTS: ("blockwise", _experts),
    UPDATE: ("reference", _updates),
}


def _directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxmem" / "kernels"
