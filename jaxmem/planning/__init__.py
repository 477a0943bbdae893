"""Memory per device before anything is allocated: the real step is compiled, and the compiler's assignment is read.

For local devices, or for any number of GPUs that are not here: XLA's GPU compiler runs without one. Every byte of the
compiled step belongs to a named buffer, which is classified; beside it stand the prediction by arithmetic and the
estimated time of a step. A plan of 8 B parameters for 8 GPUs takes some ten seconds of a processor and 1 GiB of memory;
for 1,024 GPUs hardly more, since every device runs the same program.
"""

from __future__ import annotations

import time
from typing import Unpack

import jax

from jaxmem.config.methods import RunOptions, RunSource, run_config
from jaxmem.planning.advice import recomputed_values
from jaxmem.planning.budget import resolve_budget
from jaxmem.planning.compile import Compiled, compile_all, compiler_remarks
from jaxmem.planning.predict import ideal_flops
from jaxmem.planning.result import Plan
from jaxmem.planning.state import bytes_on_device
from jaxmem.planning.targets import Target, local_target, parse_target, target_devices, usable_memory
from jaxmem.planning.units import format_bytes
from jaxmem.step import Program, program


def plan(
    source: RunSource,
    target: str | None = None,
    *,
    reserve_gib: float | None = None,
    **options: Unpack[RunOptions],
) -> Plan:
    """Plan every phase of a run for a target such as `h100-80gb:16x8`, by default for the devices of this machine.

    `source`: a config, a preset such as `llama3-8b`, or a Hugging Face directory. `options`: `method` (a name in
    `config.methods.METHODS`), `sequence_length`, `batch`, `overrides`. `reserve_gib`: memory of each GPU outside the
    compiled program; by default that of `jaxmem.machine.gpus.reserved`.
    """
    start = time.perf_counter()
    aim = local_target(jax.devices()) if target is None else parse_target(target)
    cfg = run_config(source, devices=aim.count, **options)
    limit = usable_memory(aim, cfg, reserve_gib)
    cfg = resolve_budget(cfg, aim, reserve_gib)
    built = program(cfg, target_devices(aim, limit))
    with compiler_remarks() as remarks:
        step, others = compile_all(built.lower_step(), built.lower_others(), here=aim.is_here, code=aim.is_here)
        unlimited = None
        if recomputed_values(step.module) and not aim.is_here:
            free = program(cfg, target_devices(aim, 1000 * limit))
            unlimited, _ = compile_all(free.lower_step(), {}, here=False, code=False)
    return Plan(built, aim, step, time.perf_counter() - start, reserve_gib, unlimited, remarks, others)


def plan_program(built: Program) -> Plan:
    """Plan a program for the local devices that it was made for. The step of each bucket is compiled once, to be run;
    other phases are compiled when they are read."""
    start = time.perf_counter()
    steps = {n: compile_all(at.lower_step(), {}, here=True)[0] for n, at in built.buckets.items()}
    step = steps.pop(built.cfg.data.sequence_length)
    target = local_target(list(built.layout.mesh.devices.flat))
    return Plan(built, target, step, time.perf_counter() - start, shorter=steps)


__all__ = [
    "Compiled", "Plan", "Target", "bytes_on_device", "format_bytes", "ideal_flops", "parse_target", "plan",
    "plan_program", "resolve_budget",
]  # fmt: skip
