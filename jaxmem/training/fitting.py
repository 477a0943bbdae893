"""Before anything is allocated: whether a run fits. After its first steps: whether it took what was planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxmem.errors import UserError
from jaxmem.machine.devices import spills
from jaxmem.planning import Plan, readable
from jaxmem.search.nearest import Near, named, nearest_that_fit
from jaxmem.training.progress import device_memory

MEASURED_AFTER = 3  # steps of this process; by then every program of the loop has run


class DoesNotFitError(UserError):
    """Said before anything is allocated, in place of running out of memory at the first step."""

    exit_code = 3

    def __init__(self, planned: Plan, near: list[Near]) -> None:
        phase, size = max(((name, size or 0) for name, size in planned.phases.items()), key=lambda pair: pair[1])
        parts = {name: size for name, size in planned.bytes_per_device.items() if name != "total"}
        largest = max(parts, key=lambda name: parts[name])
        has = "which has" if planned.program.cfg.memory.budget is None else "of which it may take"
        needs = f"to {phase} takes {readable(size)} of each device, {has} {readable(planned.limit)}"
        name = planned.program.cfg.name
        told = f"{name} does not fit: {needs}; of a step {readable(parts[largest])} are {largest}"
        super().__init__(f"{told}\n{named(near)}")


def check_fits(planned: Plan) -> None:
    """Stop a run that does not fit: its table on standard error, and the nearest configs that do."""
    if planned.fits:
        return
    near = nearest_that_fit(planned)
    if jax.process_index() == 0:
        Console(stderr=True).print(planned.table())
    raise DoesNotFitError(planned, near)


class Measured:
    """Planned against measured: after the first steps, said and written beside the plan, where devices tell. Of the
    first process's devices; all run the same program."""

    def __init__(self, planned: Plan, file: Path) -> None:
        self._planned, self._file, self._steps = planned, file, 0
        self._largest = planned.phases["initialise"] or 0  # of what has run

    def after_step(self, bucket: int) -> str | None:
        """A line to say, once. `bucket`: how long the step's rows were."""
        self._steps += 1
        self._largest = max(self._largest, self._planned.total_for(bucket))
        if self._steps != MEASURED_AFTER or jax.process_index():
            return None
        peak = device_memory().get("peak_bytes_in_use")
        if peak is None:
            return None
        expected = self._largest
        off = peak / expected - 1
        told: dict[str, Any] = json.loads(self._file.read_text())
        told["measured"] = {"peak_bytes": peak, "planned_bytes": expected, "difference": off}
        partial = self._file.with_name(f".{self._file.name}")
        partial.write_text(json.dumps(told, indent=2))
        partial.replace(self._file)
        over = peak - self._planned.limit
        spilled = f", {readable(over)} of it in host memory (memory.spill): slow" if over > 0 and spills() else ""
        return f"memory: planned {readable(expected)}, measured {readable(peak)} at its peak ({off:+.1%}){spilled}"
