"""What compiling a config's step tells of it, small enough to send between processes and to keep on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxmem.config import Config
from jaxmem.machine.gpus import CPU
from jaxmem.planning import Plan, Target
from jaxmem.planning.advice import recomputed
from jaxmem.planning.compile import compile_all, sized
from jaxmem.planning.predict import held
from jaxmem.planning.targets import target_devices, usable
from jaxmem.planning.timeline import timeline
from jaxmem.search import kept
from jaxmem.step import Program, program


@dataclass(frozen=True)
class Facts:
    """Of one device."""

    total: int  # bytes in a step
    host: int  # bytes of its share of the host's memory
    seconds: float  # of a step, estimated from the compiled program; of a CPU they only compare
    kinds: Mapping[str, int]  # the step's bytes by part, its activations by what they are
    recomputed: int  # values that XLA computes again by itself because the memory is short


def step_facts(cfg: Config, target: Target, reserve_gib: float | None = None) -> Facts:
    """Compile the training step; nothing is allocated and no machine code made."""
    built = built_for(cfg, target, reserve_gib)
    step, _ = compile_all(built.lower_step(), {}, here=target.is_here, code=False)
    return facts_of(Plan(built, target, step, 0.0, reserve_gib))


def step_plan(cfg: Config, target: Target) -> dict[str, Any]:
    """The step's part of a plan as JSON, compiled without a limit on memory: nothing is recomputed but what the config
    says."""
    built = program(cfg, target_devices(target, 1000 * target.memory))
    step, _ = compile_all(built.lower_step(), {}, here=target.is_here, code=False)
    return Plan(built, target, step, 0.0).step_as_json()


def facts_of(plan: Plan) -> Facts:
    target, module = plan.target, plan.compiled_step.module
    paced = timeline(module, target.gpu or CPU, target.count, target.per_host)
    parts = {name: size for name, size in plan.bytes_per_device.items() if name not in ("activations", "total")}
    return Facts(
        plan.compiled_step.total,
        plan.compiled_step.host_total + held(plan.program.spec.state),
        paced.seconds,
        parts | plan.kinds.get("activations", {}),
        recomputed(module),
    )


def other_phases(cfg: Config, target: Target, reserve_gib: float | None = None) -> dict[str, int]:
    """Bytes of the phases beside the step. Configs share many of these programs, so each is kept by its content."""
    built = built_for(cfg, target, reserve_gib)
    found = {}
    for phase, lower in built.lower_others().items():
        one = lower()
        name = kept.name_of_program(one.as_text(), target, reserve_gib)
        known = kept.read(name) or {"total": sized(one, here=target.is_here)}
        kept.write(name, known)
        found[phase] = known["total"]
    if "evaluate" in found:
        found["evaluate"] += held(built.spec.state.opt_state) - held(built.spec.host_state)
    return found


def built_for(cfg: Config, target: Target, reserve_gib: float | None) -> Program:
    return program(cfg, target_devices(target, usable(target, cfg, reserve_gib)))


def as_dict(facts: Facts) -> dict[str, Any]:
    return {**vars(facts), "kinds": dict(facts.kinds)}
