"""Device memory of a run: refuses a plan that does not fit, compares planned and measured memory, and explains errors.

A plan counts the memory that XLA allocates. It does not include the memory of other processes, nor what the driver,
NCCL and fragmentation take beyond the reserve.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

from jaxmem.errors import UserError
from jaxmem.machine.devices import HOST_LIMIT
from jaxmem.machine.files import write_file
from jaxmem.machine.gpus import GIB
from jaxmem.planning.result import Plan
from jaxmem.planning.units import format_bytes
from jaxmem.training.progress import device_memory

MEASURED_AFTER = 3  # number of steps after which every program of the loop has run
# If the device does not report the missing bytes, another config must be smaller than the plan by this share of it.
MARGIN = 0.1
REQUESTED_BYTES = re.compile(r"allocate (?:([\d.]+) ?([KMGT])iB|(\d+) bytes)")


class DoesNotFitError(UserError):
    """Raised before anything is allocated."""

    exit_code = 3


class OutOfMemoryError(DoesNotFitError):
    """Raised instead of XLA's error."""


def check_fits(plan: Plan) -> None:
    """Stops a run that does not fit, and prints its plan to standard error."""
    if plan.fits:
        return
    from jaxmem.machine.console import Console

    if jax.process_index() == 0:
        Console(stderr=True).print(plan.table())
    cfg = plan.program.cfg
    if plan.room >= 0:
        arrays = "the step" if plan.target.is_cpu else "offloaded arrays"
        raise DoesNotFitError(
            f"{cfg.name} does not fit: {arrays} and a checkpoint's copy need {format_bytes(plan.host_bytes)}"
            f" of host memory per device, {format_bytes(plan.target.host_memory)} are available; `jaxmem fit CONFIG`"
            " searches for settings that fit"
        )
    phase, size = max(plan.phases.items(), key=lambda pair: pair[1])
    parts = {name: size for name, size in plan.bytes_per_device.items() if name != "total"}
    largest = max(parts, key=lambda name: parts[name])
    limit = "available" if cfg.memory.budget is None else "allowed by memory.budget"
    raise DoesNotFitError(
        f"{cfg.name} does not fit: phase {phase} needs {format_bytes(size)} per device, {format_bytes(plan.limit)} are"
        f" {limit}; the largest part of a step is {largest} with {format_bytes(parts[largest])};"
        " `jaxmem fit CONFIG` searches for settings that fit"
    )


@contextmanager
def explained_out_of_memory(plan: Plan) -> Iterator[None]:
    """A context for everything that runs with this plan; explains out-of-memory errors."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        message = str(error)
        if "RESOURCE_EXHAUSTED" not in message:
            raise
        if "host memory" in message:
            raise OutOfMemoryError(
                f"{plan.program.cfg.name}: out of pinned host memory; set {HOST_LIMIT} to more than the"
                f" {format_bytes(plan.host_bytes)} per device that are planned"
            ) from error
        in_use = device_memory().get("bytes_in_use")
        requested = _requested(message)
        budget = 0.995 * _available(plan, in_use, requested) / GIB  # rounded to three digits it is not too large
        search = f" `jaxmem fit CONFIG memory.budget={budget:.3g}` searches for settings that fit" if budget > 0 else ""
        observed = f"; {format_bytes(in_use)} were in use" if in_use else ""
        observed += f"; {format_bytes(requested)} more were requested" if requested else ""
        raise OutOfMemoryError(
            f"{plan.program.cfg.name}: out of memory although the plan fits: planned {format_bytes(plan.peak)} of"
            f" {format_bytes(plan.limit)} per device{observed}. Another process may use the device: see `jaxmem"
            f" doctor`.{search}"
        ) from error


class PeakCheck:
    """Compares planned and measured peak memory once, after the first steps, if the devices report it, and writes the
    result to plan.json. Memory is measured on the devices of the first process; all run the same program."""

    def __init__(self, plan: Plan, file: Path) -> None:
        self._plan = plan
        self._file = file
        self._steps = 0
        # The largest planned peak of the phases that have run.
        self._planned = max(plan.phases["initialise"], plan.compiled_step.total)

    def after_step(self) -> str | None:
        """A line to print, once; otherwise None."""
        self._steps += 1
        if self._steps != MEASURED_AFTER or jax.process_index():
            return None
        peak = device_memory().get("peak_bytes_in_use")
        if peak is None:
            return None
        difference = peak / self._planned - 1
        saved = self._plan.as_json()
        saved["measured"] = {"peak_bytes": peak, "planned_bytes": self._planned, "difference": difference}
        write_file(self._file, json.dumps(saved, indent=2))
        planned = f"memory: planned {format_bytes(self._planned)}"
        return f"{planned}, measured peak {format_bytes(peak)} ({difference:+.1%})"


def _available(plan: Plan, in_use: int | None, requested: int | None) -> int:
    """Bytes per device that another plan may take, from the memory that the failed plan had."""
    planned = plan.peak
    if in_use is None or requested is None:
        return int((1 - MARGIN) * planned)
    needed = in_use + requested
    # If the run needed more than planned, subtract the difference. If it needed less, the rest was not available.
    return min(plan.limit - (needed - planned), planned - 1) if needed > planned else needed - 1


def _requested(message: str) -> int | None:
    """Bytes of the allocation that failed.

    >>> _requested("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.50GiB.")
    1610612736
    >>> _requested("allocate 12 bytes")
    12
    """
    if not (match := REQUESTED_BYTES.search(message)):
        return None
    number, unit, whole = match.groups()
    return int(whole) if whole else int(float(number) * 1024 ** (1 + "KMGT".index(unit)))
