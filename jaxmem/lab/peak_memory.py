"""Planned and measured peak memory of a config, from a few steps in a separate process.

The peak that a device reports never decreases, so `measure_apart` starts a process for each config.
"""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxmem.config import Config, load_config
from jaxmem.errors import UserError
from jaxmem.inference.load import initial_state
from jaxmem.lab.bench.contest import Say, isolated_rows
from jaxmem.machine import devices
from jaxmem.planning import plan_program
from jaxmem.step import program

STEPS = 3
LONGEST = 86_400.0  # seconds of a process


def measure(cfg: Config) -> dict[str, Any]:
    """Planned and measured bytes of one device; `measured` is None if the device does not report them (a CPU)."""
    built = program(cfg)
    plan = plan_program(built)
    if not plan.fits:
        raise UserError(f"{built.cfg.name} does not fit on this machine; it needs {-plan.room:,} bytes more")
    batch = {name: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding) for name, x in built.spec.batch.items()}
    state, metrics = initial_state(built), None
    for _ in range(STEPS):
        state, metrics = plan.step(state, batch)
    jax.block_until_ready(metrics)
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    measured = max((peak for peak in peaks if peak is not None), default=None)
    return {
        "name": built.cfg.name,
        "parameters": built.model.parameters,
        "planned": plan.peak,
        "measured": measured,
        "difference": measured / plan.peak - 1 if measured else None,
    }


def measure_apart(raw: dict[str, Any], simulate: int | None = None, seconds: float | None = None) -> dict[str, Any]:
    """`measure` in a separate process, for at most `seconds`. If it fails, the result has `error`."""
    found = next(isolated_rows(_measured, (raw, simulate), without=[], limit=seconds or LONGEST))
    return {"name": raw["name"], "error": found["why_not"]} if "why_not" in found else found


def _measured(job: tuple[dict[str, Any], int | None], *, say: Say, **_: Any) -> Iterator[dict[str, Any]]:
    raw, simulated = job
    say(raw["name"])
    if simulated:
        devices.simulate(simulated)
    else:
        devices.use_cpu_without_gpu()
    yield measure(load_config(raw))
