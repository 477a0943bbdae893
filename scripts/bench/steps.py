"""Planned and measured bytes and seconds of a config's training step on this machine.

    python -m scripts.bench.steps < CONFIG.json

A device's peak of bytes never decreases, so each config is measured in a process of its own.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import jax
import numpy as np

from jaxmem.config import Config, load_config
from jaxmem.errors import UserError
from jaxmem.inference.load import initial_state
from jaxmem.machine import devices
from jaxmem.planning.result import plan_program
from jaxmem.step.programs import Program, program
from scripts.bench.contest import Row, error_line, write_row

WARM_UP = 2  # steps before those that are timed
STEPS = 8


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
        state, metrics = plan.executable(state, batch)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--simulate", type=int, metavar="N", help="N simulated CPU devices")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="also write the row, a line of JSON")
    options = parser.parse_args()
    if options.simulate:
        devices.simulate(options.simulate)
    else:
        devices.use_cpu_without_gpu()
        devices.reserve_gpu_memory()
    try:
        row = measure_step(load_config(json.load(sys.stdin)), options.steps)
    except Exception as error:  # noqa: BLE001 (each compiler has errors of its own)
        sys.exit(f"error: {error_line(error)}")
    print(json.dumps(row))
    write_row(options.rows, row)


if __name__ == "__main__":
    main()
