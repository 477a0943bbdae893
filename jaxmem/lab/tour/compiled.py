"""Steps compiled for a target, as many side by side as there are cores; what an earlier visit compiled is kept.

Where the target's GPUs are in this machine, a step that fits also runs, and the device says what it held.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxmem.config import Config
from jaxmem.errors import UserError
from jaxmem.lab.tour.stops import Columns, Row
from jaxmem.machine import devices, gpus

if TYPE_CHECKING:
    from jaxmem.planning import Target


def plans(target: str, cfgs: Mapping[str, Config]) -> dict[str, dict[str, Any]]:
    """Of each by its name what `jaxmem plan --json` says of its step, with no limit on memory; and `measured`, bytes of
    a device, None where it did not run."""
    from jaxmem.planning.targets import parse_target

    aim = parse_target(target)
    found = _compiled(aim, cfgs)
    return {name: {**found[name], "measured": _measured(aim, cfg, found[name])} for name, cfg in cfgs.items()}


def measured(rows: Iterable[Row]) -> Columns:
    """A column of what rows' steps held, if any ran."""
    if not any(row.get("measured") for row in rows):
        return {}
    return {"measured, GiB": lambda row: f"{row['measured'] / 2**30:.2f}" if row.get("measured") else ""}


def are_here(gpu: gpus.Gpu | None, count: int) -> bool:
    """Whether this machine's GPUs are just these; asked of the driver, since jax would take their memory."""
    names = [gpus.find(one["name"], one["memory"]) for one in devices.nvidia_gpus()] if gpu else []
    return len(names) == count and all(one is not None and gpu is not None and one.name == gpu.name for one in names)


def _compiled(aim: Target, cfgs: Mapping[str, Config]) -> dict[str, dict[str, Any]]:
    from jaxmem.search.compilers import CompilerPool, RefusedError

    names = {id(cfg): name for name, cfg in cfgs.items()}
    found = {}
    with CompilerPool(aim) as compilers:
        for cfg, answer in compilers.each(compilers.plan, cfgs.values()):
            if isinstance(answer, RefusedError):
                raise UserError(f"{names[id(cfg)]}: {answer}")
            found[names[id(cfg)]] = answer
    return found


def _measured(aim: Target, cfg: Config, plan: Mapping[str, Any]) -> int | None:
    from jaxmem.planning import measure

    if not are_here(aim.gpu, aim.count):
        return None
    if plan["bytes_per_device"]["total"] > aim.memory - gpus.reserved(aim.count):
        return None
    return measure.apart(cfg.model_dump(mode="json")).get("measured")
