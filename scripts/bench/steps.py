"""Planned and measured bytes and seconds of a config's training step on this machine."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxmem.config import Config, load_config
from jaxmem.errors import UserError
from jaxmem.inference.load import initial_state
from jaxmem.machine import devices
from jaxmem.planning import plan_program
from jaxmem.step import Program, program
from scripts.bench.contest import Row, Say, isolated_rows

WARM_UP = 2  # steps before those that are timed
STEPS = 8
MAX_SECONDS = 86_400.0  # seconds of a process


def measure_step(cfg: Config, steps: int = STEPS) -> Row:
    """The plan of a step beside what this machine does in it, on one batch of random values. What a device does not
    report is None: a CPU has no peak of bytes and no rate to plan seconds with."""
    built = program(cfg)
    plan = plan_program(built)
    if not plan.fits:
        raise UserError(f"{built.cfg.name} does not fit on this machine; it needs {-plan.room:,} bytes more")
    batch = random_batch(built)
    state = initial_state(built)
    losses = list[float]()
    durations = list[float]()
    for _ in range(steps):
        start = time.perf_counter()
        state, metrics = plan.step(state, batch)
        losses.append(float(metrics["loss"]))  # waits for the step
        durations.append(time.perf_counter() - start)
    seconds = statistics.median(durations[WARM_UP:])
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    measured = max((peak for peak in peaks if peak is not None), default=None)
    rate = devices.peak_flops(jax.devices()[0])
    parts = sorted(plan.bytes_per_device.items(), key=lambda part: -part[1])
    return {
        "name": built.cfg.name,
        "parameters": built.model.parameter_count,
        "planned": plan.peak,
        "measured": measured,
        "difference": measured / plan.peak - 1 if measured else None,
        "parts": dict(parts),  # planned bytes
        "kernels": plan.kernels,
        "planned_seconds": plan.estimated_step_seconds,
        "seconds": seconds,
        "all_seconds": durations,
        "tokens_per_second": batch["mask"].size / seconds,
        "mfu": plan.ideal_flops_per_device / seconds / rate if rate else None,
        "losses": losses,
    }


def random_batch(built: Program) -> dict[str, jax.Array]:
    """A full batch of random values: on zeros a GPU can be faster than on text."""
    random = np.random.default_rng(0)
    vocab = getattr(built.cfg.model, "vocab", 2)

    def values(name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        if name in ("mask", "segment_ids"):
            return np.ones(shape, dtype)
        if name == "positions":
            return np.broadcast_to(np.arange(shape[-1], dtype=dtype), shape)
        if np.issubdtype(dtype, np.integer):
            return random.integers(vocab, size=shape, dtype=dtype)
        return random.standard_normal(shape).astype(dtype)

    return {name: jax.device_put(values(name, x.shape, x.dtype), x.sharding) for name, x in built.spec.batch.items()}


# The peak that a device reports never decreases, so each config runs in a process of its own.


def measure_apart(
    raw: dict[str, Any], steps: int = STEPS, simulate: int | None = None, seconds: float = MAX_SECONDS
) -> Row:
    """`measure_step` in a separate process, for at most `seconds`. If it fails, the result has `error`. `simulate`: on
    so many CPU devices."""
    row = next(isolated_rows(_step_rows, (raw, steps, simulate), without=[], limit=seconds))
    return {"name": raw["name"], "error": row["why_not"]} if "why_not" in row else row


def _step_rows(job: tuple[dict[str, Any], int, int | None], *, say: Say, **_: Any) -> Iterator[Row]:
    raw, steps, simulated = job
    say(raw["name"])
    if simulated:
        devices.simulate(simulated)
    else:
        devices.use_cpu_without_gpu()
    yield measure_step(load_config(raw), steps)
