"""Planned and measured peak memory of a config, from a few steps in a process of its own.

The peak that a device reports never decreases, so `measure_apart` starts a process for each config.
"""

import json
import subprocess
import sys
from typing import Any

from jaxmem.config import Config, load_config
from jaxmem.errors import UserError
from jaxmem.inference.load import initial_state

STEPS = 3


def measure(cfg: Config) -> dict[str, Any]:
    """Planned and measured bytes of one device; `measured` is None if the device does not report them (a CPU)."""
    import jax
    import numpy as np

    from jaxmem.planning import plan_program
    from jaxmem.step import program

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
    """`measure` in a process of its own, for at most `seconds`. The result of a failure has `error`."""
    command = [sys.executable, "-m", "jaxmem.lab.peak_memory", json.dumps(raw), str(simulate or "")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)  # noqa: S603
    except subprocess.TimeoutExpired:
        return {"name": raw["name"], "error": f"took more than {seconds:.0f} seconds"}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"name": raw["name"], "error": lines[-1] if lines else f"ended with code {done.returncode}"}
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def _main(raw: str, simulate: str) -> None:
    from jaxmem.machine import devices

    if simulate:
        devices.simulate(int(simulate))
    else:
        devices.use_cpu_without_gpu()
    print(json.dumps(measure(load_config(json.loads(raw)))))


if __name__ == "__main__":
    _main(*sys.argv[1:])
