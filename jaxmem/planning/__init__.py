"""Bytes per device before anything is allocated: the real step is compiled, and the compiler says what it holds.

For devices that are here, or for any number of GPUs that are not: XLA's GPU compiler runs without one. Every byte
of the compiled step belongs to a named buffer and is sorted by what it is; beside it stands what arithmetic
predicts, and how long the step would take. A plan of 8 B parameters for 8 GPUs takes some ten seconds of a
processor and 1 GiB of memory; for 1,024 GPUs it takes hardly more, since every device runs the same program.
"""

from __future__ import annotations

import time

import jax

from jaxmem.config import Config
from jaxmem.planning.advice import recomputed
from jaxmem.planning.budget import decided
from jaxmem.planning.compile import Compiled, compile_all, listening
from jaxmem.planning.names import names, names_table
from jaxmem.planning.planned import Plan
from jaxmem.planning.predict import held, ideal_flops
from jaxmem.planning.targets import Target, local_target, parse_target, target_devices, usable
from jaxmem.planning.text import readable
from jaxmem.step import Program, program


def plan(cfg: Config, target: str | None = None, *, reserve_gib: float | None = None) -> Plan:
    """Plan every phase of a run for a target such as `h100-80gb:16x8`, by default the devices of this machine.

    `reserve_gib`: of each GPU's memory, what the compiler does not count; by default `hardware.reserved`.
    """
    start = time.perf_counter()
    aim = local_target(jax.devices()) if target is None else parse_target(target)
    limit = usable(aim, cfg, reserve_gib)
    cfg = decided(cfg, aim, reserve_gib)
    built = program(cfg, target_devices(aim, limit))
    with listening() as remarks:
        step, sized = compile_all(built.lower_step(), built.lower_others(), here=aim.is_here, code=aim.is_here)
        unlimited = None
        if recomputed(step.module) and not aim.is_here:
            free = program(cfg, target_devices(aim, 1000 * limit))
            unlimited, _ = compile_all(free.lower_step(), {}, here=False, code=False)
    seconds = time.perf_counter() - start
    return Plan(built, aim, step, seconds, reserve_gib, unlimited, remarks.found, sized)


def plan_program(built: Program) -> Plan:
    """Plan a program for the devices that it was made for, which are here. The step of each bucket is compiled once, to
    be run; other phases are compiled when asked for."""
    start = time.perf_counter()
    steps = {n: compile_all(at.lower_step(), {}, here=True)[0] for n, at in built.buckets.items()}
    step = steps.pop(built.cfg.data.sequence_length)
    target = local_target(list(built.layout.mesh.devices.flat))
    return Plan(built, target, step, time.perf_counter() - start, shorter=steps)


__all__ = [
    "Compiled", "Plan", "Target", "decided", "held", "ideal_flops", "names", "names_table", "parse_target", "plan",
    "plan_program", "readable",
]  # fmt: skip
