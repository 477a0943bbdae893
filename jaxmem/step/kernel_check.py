"""The check of the kernels of a run on its devices, before the first step.

Each chosen kernel is compared with plain JAX on small random inputs, in less than a second. If it fails, it is replaced
by the next choice (kernel_choice.py), and a line reports this; if the config names the kernel, the failure is an error.
Passed checks are stored in the user's cache directory, by device, version of jax and properties of the call.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import kernels
from jaxmem.config import Config
from jaxmem.config.combinations import value_of
from jaxmem.errors import UserError, one_line
from jaxmem.kernels import triton_launch
from jaxmem.kernels.grouped_matmul import map_groups, sort_rows, sum_of_groups
from jaxmem.kernels.support import Request
from jaxmem.kernels.validation import PLAIN
from jaxmem.machine.devices import cudnn_remedy, package_versions
from jaxmem.machine.terminal import say
from jaxmem.models.mixture import matrices
from jaxmem.quant import FORMATS, quantize
from jaxmem.step.kernel_choice import ATTENTION, EXPERTS, UPDATE, Choice, attention_request, kernel_choices
from jaxmem.step.programs import program
from jaxmem.typing import JsonDict

# The shapes of a check, and its limits.
LENGTH, WINDOW, SOFT_CAP = 192, 70, 2.0
ROWS, COLUMNS = 512, 1024  # shape of the weights in matmuls and updates
EXPERT_COUNT = 4
MAX_ERROR_EPS = 8  # largest error, in units of the machine epsilon times the largest value
MAX_CHANGED_CODES = 1e-3  # share of integer codes that may differ by 1: values may be near the border of two codes
# Packages whose versions determine what a kernel computes.
PACKAGES = (
    *("jax", "jaxlib", "jax-triton", "jaxmem", "triton"),
    *("nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cuda-nvcc"),
)


def refuse_gpu_kernels(cfg: Config, platform: str) -> None:
    """Refuses kernels that a CPU cannot run."""
    if platform != "cpu" or triton_launch.INTERPRETER is not None:
        return
    for key in (ATTENTION, EXPERTS, UPDATE):
        value = value_of(cfg, key)
        if value in ("cudnn", "triton"):
            raise UserError(f"{key}={value} needs an NVIDIA GPU; use {key}=auto")


def with_passing_kernels(cfg: Config, devices: Sequence[jax.Device], agree: Callable[[bool], bool]) -> Config:
    """The config with kernels that passed their check on these devices; CPUs have none to check. `agree`: as in
    `checked_kernels`."""
    if devices[0].platform == "cpu":
        return cfg
    built = program(cfg, devices)
    settings, failures = checked_kernels(built.cfg, built.platform, built.model.execution.capability, agree)
    say(*failures, file=sys.stderr)
    for setting, implementation in settings.items():
        section, key = setting.split(".")
        cfg = cfg.replace(**{section: {key: implementation}})
    return cfg


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
        why = choice_failure(cfg, platform, setting, chosen)
        if agree(why is not None):
            return setting, chosen.implementation, why or "it failed in another process"
    return None


def choice_failure(cfg: Config, platform: str, setting: str, chosen: Choice) -> str | None:
    """The reason why the choice for a setting of a config cannot be used on the first local device; None: it is
    correct, or plain JAX."""
    if chosen.implementation in (*PLAIN, "none"):
        return None
    call: Any = attention_request(cfg, platform) if setting == ATTENTION else chosen.kind
    return kernel_failure(setting, chosen.implementation, call)


def kernel_failure(setting: str, implementation: str, call: Request | str) -> str | None:
    """The reason why an implementation cannot be used for such calls on the first local device; None: it is correct.
    `call`: the request (attention), or the kind of the choice (matmuls and updates)."""
    device = jax.local_devices()[0]
    if isinstance(call, Request):
        call = dataclasses.replace(call, queries=LENGTH, keys=LENGTH, batch=2, heads=4, max_segments=4)
    # The version of the platform has those of CUDA and of the driver.
    versions = package_versions(PACKAGES) | {"": device.client.platform_version}
    facts = [device.device_kind, versions, setting, implementation, str(call)]
    seen = _directory() / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
    if seen.exists():
        return None
    try:
        with jax.default_device(device):
            why = _difference_from_plain(setting, implementation, call)
    except Exception as error:  # noqa: BLE001 - a compiler or a driver may raise any type
        return (cudnn_remedy() if implementation == "cudnn" else None) or one_line(error)
    if why is None:
        with contextlib.suppress(OSError):
            seen.parent.mkdir(parents=True, exist_ok=True)
            seen.write_text(json.dumps(facts))
    return why


def _difference_from_plain(setting: str, implementation: str, call: Any) -> str | None:
    plain, results = _CHECKS[setting]
    with jax.default_matmul_precision("highest"):  # GPUs would round operands in float32 to TF32
        expected = results(call, plain)
    for name, x in results(call, implementation).items():
        if why := _difference_beyond_limit(np.asarray(x), np.asarray(expected[name])):
            return f"its {name} differs from plain JAX's by {why}"
    return None


def _difference_beyond_limit(x: np.ndarray, y: np.ndarray) -> str | None:
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
