"""Small runs to plan."""

from collections.abc import Callable
from typing import Any

import jax
import pytest

from jaxmem.config import Config, load_config
from jaxmem.planning.compile import CompiledProgram, compile_program
from jaxmem.planning.hlo import Module, read_module
from jaxmem.planning.result import Plan, plan_program
from jaxmem.planning.targets import parse_target, target_devices
from jaxmem.step.programs import Program, program

SMALL = {
    "family": "decoder",
    "vocab": 264,
    "layers": 2,
    "embed": 32,
    "mlp": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 8,
}


def config(**sections: Any) -> Config:
    base = {
        "name": "small",
        "model": SMALL,
        "data": {"sequence_length": 24},
        "batch": {"global_size": 8},
        "train": {"steps": 10},
    }
    return load_config({**base, **sections})


def plan_here(devices: int = 8, **sections: Any) -> Plan:
    """Of a small run, for some of the simulated devices."""
    return plan_program(program(config(**sections), jax.devices()[:devices]))


def compiled_for(cfg: Config, name: str) -> tuple[Program, CompiledProgram]:
    """The step for GPUs that are not here, without the other phases of a plan."""
    target = parse_target(name)
    built = program(cfg, target_devices(target, target.memory))
    step = compile_program(built.lower_step(), here=False)
    return built, step


def module_of(function: Callable[..., Any], *arguments: Any, **options: Any) -> Module:
    """A function as XLA compiles and schedules it for this CPU."""
    compiled = jax.jit(function, **options).lower(*arguments).compile()
    return read_module(compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto())


@pytest.fixture(scope="session")
def cpu_plan() -> Plan:
    return plan_here(mesh={"fsdp": 4, "tensor": 2}, memory={"remat": "full"})
