"""Measurements that several stops share: steps compiled for a target, and seconds of a function on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxmem.config import Config
from jaxmem.errors import UserError
from jaxmem.machine import devices, gpus
from jaxmem.planning import Target
from jaxmem.planning.compile import Compiled, compile_all
from jaxmem.planning.measure import measure_apart
from jaxmem.planning.targets import parse_target
from jaxmem.search.compilers import CompilerPool, RefusedError

BFLOAT16 = {"parameters": "bfloat16", "rounding": "stochastic"}  # a config's `precision`


def llm_config(preset: str, sequence_length: int, **sections: Any) -> dict[str, Any]:
    """The config of a step on one sequence per device, to be compiled only."""
    data = {"source": "tokens", "path": "unused", "sequence_length": sequence_length}
    base = {"name": "tour", "model": {"preset": preset}, "data": data, "batch": {"global_size": 1}}
    return {**base, "train": {"steps": 1000}, **sections}


def plans(target: str, cfgs: Mapping[str, Config]) -> dict[str, dict[str, Any]]:
    """For each name: what `jaxmem plan --json` says of its step, with no limit on memory, and `measured`: bytes per
    device of one step run here, None if it did not run. Compiled in parallel; what was compiled before is reused."""
    aim = parse_target(target)
    compiled = _compiled(aim, cfgs)
    return {name: {**compiled[name], "measured": _measured(aim, cfg, compiled[name])} for name, cfg in cfgs.items()}


def is_this_machine(gpu: gpus.Gpu | None, count: int) -> bool:
    """Whether this machine has exactly these GPUs. Asks the driver, because jax would take their memory."""
    names = [gpus.find(one["name"], one["memory"]) for one in devices.nvidia_gpus()] if gpu else []
    return len(names) == count and all(one is not None and gpu is not None and one.name == gpu.name for one in names)


def _compiled(aim: Target, cfgs: Mapping[str, Config]) -> dict[str, dict[str, Any]]:
    names = {id(cfg): name for name, cfg in cfgs.items()}
    found = {}
    with CompilerPool(aim) as compilers:
        for cfg, answer in compilers.each(compilers.plan, cfgs.values()):
            if isinstance(answer, RefusedError):
                raise UserError(f"{names[id(cfg)]}: {answer}")
            found[names[id(cfg)]] = answer
    return found


def _measured(aim: Target, cfg: Config, plan: Mapping[str, Any]) -> int | None:
    if not is_this_machine(aim.gpu, aim.count):
        return None
    if plan["bytes_per_device"]["total"] > aim.memory - gpus.reserved(aim.count):
        return None
    return measure_apart(cfg.model_dump(mode="json")).get("measured")


def compile_for(device: Any, run: Callable[..., Any], *arguments: Any) -> Compiled:
    """A function of arrays of these shapes, compiled for one device that need not be here, and not run."""
    place = jax.sharding.SingleDeviceSharding(device)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments)
    with devices.lowering_for(device):
        lowered = jax.jit(run).lower(*placed)
    here = device in jax.devices()
    return compile_all(lowered, {}, here=here, code=False)[0]


def seconds(run: Callable[..., Any], *arguments: Any, times: int = 3) -> float:
    """The shortest of several calls, after one that compiles: processor time on a CPU, which other programs use as
    well; clock time on a GPU."""
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    jax.block_until_ready(run(*arguments))
    taken = []
    for _ in range(times):
        started = clock()
        jax.block_until_ready(run(*arguments))
        taken.append(clock() - started)
    return min(taken)


def clock_name() -> str:
    """What `seconds` measures, for titles."""
    return "processor time here" if jax.default_backend() == "cpu" else f"on {jax.devices()[0].device_kind}"
