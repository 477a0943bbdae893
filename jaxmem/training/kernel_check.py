"""Compares a kernel with plain JAX on a small random input, on the device of a run, before the run uses it.

A kernel that `auto` chose is compiled and run once, forward and backward, in less than a second. If it fails, it is
replaced by the next choice, and a line reports this; if the config names it, this is an error. Results are stored in
the user's cache directory, by device, version of jax and properties of the call.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.config import Config
from jaxmem.errors import UserError, one_line
from jaxmem.kernels import attention, choice, triton_launch
from jaxmem.kernels.fused_attention.support import OPERATION, PLAIN, Request
from jaxmem.step import Program

LENGTH, WINDOW, SOFT_CAP = 192, 70, 2.0
STEPS = 8  # largest error, in rounding errors of the dtype relative to the largest value


def refuse_gpu_kernels(cfg: Config) -> None:
    """Refuses kernels that a CPU cannot run."""
    named = {
        "memory.attention": cfg.memory.attention,
        "optimizer.kernel": cfg.optimizer.kernel,
        "adapter.matmul": cfg.adapter.matmul,
    }
    for key, value in named.items():
        if value in ("cudnn", "mosaic", "triton") and triton_launch.INTERPRETER is None:
            use = "none" if key == "optimizer.kernel" else "auto"
            raise UserError(f"{key}={value} needs an NVIDIA GPU; use {key}={use}")


def checked_attention(build: Callable[[], Program], agree: Callable[[bool], bool] = bool) -> Iterator[str]:
    """Replaces implementations of attention that fail their check, and yields a line for each. `build` returns the
    program, whose choice excludes failed implementations. `agree` returns whether a check failed in any process."""
    while True:
        built = build()
        chosen = built.model.attention
        if built.platform != "gpu" or chosen is None or chosen.implementation in (PLAIN, "reference"):
            return
        why = failure(chosen.implementation, built.model.attention_request)
        if not agree(why is not None):
            return
        why = why or "it failed in another process"
        if built.cfg.memory.attention != "auto":
            raise UserError(
                f"memory.attention={chosen.implementation} failed its check on this device: {why}; use auto"
            )
        choice.FAILURES[OPERATION, chosen.implementation] = f"{chosen.implementation} failed its check: {why}"
        yield f"warning: memory.attention={chosen.implementation} failed its check and is not used: {why}"


def failure(implementation: str, call: Request) -> str | None:
    """The reason why an implementation cannot be used for such calls on the first local device; None: it is correct."""
    device = jax.local_devices()[0]
    call = dataclasses.replace(call, queries=LENGTH, keys=LENGTH, batch=2, heads=4, max_segments=4)
    facts = [device.device_kind, jax.__version__, implementation, *dataclasses.astuple(call)]
    seen = _directory() / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
    if seen.exists():
        return None
    try:
        with jax.default_device(device):
            why = _difference(implementation, call)
    except Exception as error:  # noqa: BLE001 - a compiler or a driver may raise any type
        return one_line(error)
    if why is None:
        with contextlib.suppress(OSError):
            seen.parent.mkdir(parents=True, exist_ok=True)
            seen.write_text(json.dumps(facts))
    return why


def _difference(implementation: str, call: Request) -> str | None:
    rng = np.random.default_rng(0)
    kv_heads = 2
    sizes = (call.heads, kv_heads, kv_heads, call.heads)
    arrays = [jnp.asarray(rng.standard_normal((call.batch, LENGTH, n, call.dim)), call.dtype) for n in sizes]
    ids = np.sort(rng.integers(0, call.max_segments, (call.batch, LENGTH))) if call.has_segments else None
    options: dict[str, Any] = {"causal": call.masked, "deterministic": call.deterministic}
    options |= {"segment_ids": ids, "max_segments": call.max_segments, "window": WINDOW if call.window else None}
    options |= {"soft_cap": SOFT_CAP if call.soft_cap else None}

    def run(way: str) -> list[np.ndarray]:
        def both(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> Any:
            out, pull = jax.vjp(lambda *a: attention(*a, implementation=way, **options), q, k, v)
            return out, *pull(g)

        return [np.asarray(x, np.float32) for x in jax.jit(both)(*arrays)]

    limit = STEPS * float(jnp.finfo(call.dtype).eps)
    for name, x, y in zip(("output", "dq", "dk", "dv"), run(implementation), run(PLAIN), strict=True):
        error = float(np.max(np.abs(x - y)) / np.max(np.abs(y)))
        if not error <= limit:  # also NaN
            return f"its {name} differs from plain JAX's by {error:.2g} of the largest value (limit {limit:.2g})"
    return None


def _directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxmem" / "kernels"
