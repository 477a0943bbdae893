"""What several stops share: steps compiled for a target, small training runs, and seconds of a function here."""

import contextlib
import io
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmem.config import Config, load_config
from jaxmem.errors import UserError
from jaxmem.lab.peak_memory import measure_apart
from jaxmem.machine import devices, gpus
from jaxmem.planning import Target
from jaxmem.planning.compile import Compiled, compile_all
from jaxmem.planning.targets import parse_target
from jaxmem.search.compilers import CompilerPool, RefusedError
from jaxmem.sharding.layout import first_dim_sharding

Overrides = Mapping[str, Sequence[str]]  # by the name of a row
BFLOAT16 = {"parameters": "bfloat16", "rounding": "stochastic"}  # a config's `precision`
INT8 = ("precision.parameters=int8", "precision.rounding=auto")
# A language model of bytes that trains in seconds.
DECODER: Mapping[str, Any] = {
    "family": "decoder", "vocab": 257, "layers": 2, "embed": 64, "mlp": 192, "heads": 4, "kv_heads": 4, "head_dim": 16,
}  # fmt: skip
TEXT = {"source": "stdlib", "sequence_length": 128}


def llm_config(preset: str, sequence_length: int, **sections: Any) -> dict[str, Any]:
    """The config of a step on one sequence per device, to be compiled only."""
    data = {"source": "tokens", "path": "unused", "sequence_length": sequence_length}
    base = {"name": "tour", "model": {"preset": preset}, "data": data, "batch": {"global_size": 1}}
    return {**base, "train": {"steps": 1000}, **sections}


def title(base: Mapping[str, Any]) -> str:
    """The model and the length of an `llm_config`."""
    return f"{base['model'].get('preset', base['name'])}, {base['data']['sequence_length']:,} tokens"


def plans(target: str, base: Mapping[str, Any], rows: Overrides) -> dict[str, dict[str, Any]]:
    """For each row what `jaxmem plan --json` says of its step, with no limit on memory, and `measured`: bytes per
    device of one step run here, None if it did not run. Compiled in parallel; what was compiled before is reused."""
    aim = parse_target(target)
    cfgs = {name: load_config(dict(base), overrides) for name, overrides in rows.items()}
    compiled = compile_plans(aim, cfgs)
    return {name: {**compiled[name], "measured": _measured(aim, cfg, compiled[name])} for name, cfg in cfgs.items()}


def compile_plans(aim: Target, cfgs: Mapping[str, Config]) -> dict[str, dict[str, Any]]:
    names = {id(cfg): name for name, cfg in cfgs.items()}
    found = {}
    with CompilerPool(aim) as compilers:
        for cfg, answer in compilers.each(compilers.plan, cfgs.values()):
            if isinstance(answer, RefusedError):
                raise UserError(f"{names[id(cfg)]}: {answer}")
            found[names[id(cfg)]] = answer
    return found


def is_this_machine(gpu: gpus.Gpu | None, count: int) -> bool:
    """Whether this machine has exactly these GPUs. Asks the driver, because jax would take their memory."""
    names = [gpus.find(one["name"], one["memory"]) for one in devices.nvidia_gpus()] if gpu else []
    return len(names) == count and all(one is not None and gpu is not None and one.name == gpu.name for one in names)


def _measured(aim: Target, cfg: Config, plan: Mapping[str, Any]) -> int | None:
    fits = plan["bytes_per_device"]["total"] <= aim.memory - gpus.reserved(aim.count)
    if not (fits and is_this_machine(aim.gpu, aim.count)):
        return None
    return measure_apart(cfg.model_dump(mode="json")).get("measured")


def compile_for(device: Any, run: Callable[..., Any], *arguments: Any) -> Compiled:
    """A function of arrays of these shapes, compiled for one device that need not be here, and not run."""
    mesh = jax.sharding.Mesh(np.array([device]), ("one",))
    place = first_dim_sharding(mesh, None)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments)
    # Within `shard_map` the mesh provides the kind of GPU, which kernels need.
    mapped = jax.shard_map(run, mesh=mesh, in_specs=place.spec, out_specs=place.spec, check_vma=False)
    return compile_all(jax.jit(mapped).lower(*placed), {}, here=device in jax.devices(), code=False)[0]


class Outcome(NamedTuple):
    """A run's plan as `jaxmem plan --json` has it, and its means on held-out data."""

    plan: dict[str, Any]
    held_out: dict[str, float]


def train_all(
    configs: Mapping[str, Mapping[str, Any]], overrides: Overrides | None = None, keep: str | None = None
) -> dict[str, Outcome]:
    """Trains each config, changed by the overrides of its name, on one device; nothing is printed. The run is left in
    the directory `keep`, if there is one. Most of the time is compilation on one core, so on a CPU there are as many
    processes as cores."""
    if devices.has_nvidia_gpu():
        processes = 1
    else:
        processes = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = [(config, (overrides or {}).get(name, ()), keep) for name, config in configs.items()]
    context = multiprocessing.get_context("spawn")  # jax does not survive a fork
    with ProcessPoolExecutor(min(len(jobs), processes), context, initializer=devices.use_cpu_without_gpu) as pool:
        try:
            return dict(zip(configs, pool.map(_train, jobs), strict=True))
        except Exception as error:
            raise UserError(f"a run of the tour failed: {error}") from error


def _train(job: tuple[Mapping[str, Any], Sequence[str], str | None]) -> Outcome:
    config, overrides, keep = job
    steps = config["train"]["steps"]
    with tempfile.TemporaryDirectory() as temporary, contextlib.redirect_stdout(io.StringIO()):
        place = Path(keep or f"{temporary}/run")
        own = {"name": place.name, "output": str(place.parent)}
        train = {**config["train"], "evaluate_every": steps, "log_every": steps}
        cfg = load_config({**config, **own, "train": train}, overrides)
        from jaxmem.training.run import run

        result = run(cfg, jax.devices()[:1])
        return Outcome(result.plan.as_json(), dict(result.held_out))


def seconds(run: Callable[..., Any], *arguments: Any, times: int = 3) -> float:
    """The shortest of several calls, after one that compiles: processor time on a CPU, which other programs use as
    well; clock time on a GPU."""
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    jax.block_until_ready(run(*arguments))
    durations = []
    for _ in range(times):
        start = clock()
        jax.block_until_ready(run(*arguments))
        durations.append(clock() - start)
    return min(durations)


def clock_name() -> str:
    """What `seconds` measures, for titles."""
    return "processor time here" if jax.default_backend() == "cpu" else f"on {jax.devices()[0].device_kind}"
