"""Training steps compiled for GPUs that need not be present. Importing this keeps jax on the CPU."""

from __future__ import annotations

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxmem.config import Config
from jaxmem.planning import Plan
from jaxmem.planning.compile import compile_all
from jaxmem.planning.targets import parse_target, target_devices
from jaxmem.step import program


def compile_step(cfg: Config, target: str) -> Plan:
    """The plan of a training step alone, for a target such as `h100-80gb:8`, whether it fits there or not."""
    goal = parse_target(target)
    built = program(cfg, target_devices(goal, 1000 * goal.memory))
    step, _ = compile_all(built.lower_step(), {}, here=False, code=False)
    return Plan(built, goal, step, 0.0)
