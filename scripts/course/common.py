"""Parts of several stops: their configs, steps compiled for a target, small training runs, and times on this
machine."""

import contextlib
import io
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import yaml

from jaxmem.config import load_config
from jaxmem.errors import UserError
from jaxmem.machine import devices
from jaxmem.planning.compile import CompiledProgram, compile_program
from jaxmem.planning.targets import parse_target
from jaxmem.search.compilers import CompilerPool, RefusedError
from jaxmem.sharding.layout import first_dim_sharding
from jaxmem.typing import JsonDict, JsonView, Tree

Overrides = Mapping[str, Sequence[str]]  # name of a row -> overrides
CONFIGS: JsonView = yaml.safe_load(Path(__file__).with_name("configs.yaml").read_text(encoding="utf-8"))


def rows_of(topic: str, table: str) -> Overrides:
    """The overrides of each row of a table in configs.yaml."""
    return {name: tuple((overrides or "").split()) for name, overrides in CONFIGS[topic][table].items()}


def title(base: JsonView) -> str:
    """The model and the length of the base config of a stop."""
    return f"{base['model'].get('preset', base['name'])}, {base['data']['sequence_length']:,} tokens"


def require_gpus(topic: str, target: str, count: int) -> str:
    """The kind of GPU of a target, for a stop whose layouts are for `count` GPUs."""
    kind, _, number = target.partition(":")
    if number not in ("", str(count)):
        raise UserError(
            f"{topic} does not support --target {target}: its layouts are for {count} GPUs; remove the number"
        )
    return kind


def plans(target: str, base: JsonView, rows: Overrides) -> dict[str, JsonDict]:
    """For each row the output of `jaxmem plan --json` for its step, compiled without a memory limit. Rows are compiled
    in parallel, and cached."""
    cfgs = {name: load_config(dict(base), overrides) for name, overrides in rows.items()}
    names = {id(cfg): name for name, cfg in cfgs.items()}
    compiled = {}
    with CompilerPool(parse_target(target)) as compilers:
        for cfg, answer in compilers.ask_all(compilers.plan, cfgs.values()):
            name = names[id(cfg)]
            if isinstance(answer, RefusedError):
                raise UserError(f"{name}: {answer}")
            compiled[name] = answer
    return {name: compiled[name] for name in rows}


def compile_for(device: Any, run: Callable[..., Any], *arguments: Tree) -> CompiledProgram:
    """A function of arrays of these shapes, compiled for one device, which may be absent."""
    mesh = jax.sharding.Mesh(np.array([device]), ("one",))
    place = first_dim_sharding(mesh, None)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments)
    # Inside `shard_map` kernels know the kind of GPU, from the mesh.
    mapped = jax.shard_map(run, mesh=mesh, in_specs=place.spec, out_specs=place.spec, check_vma=False)
    return compile_program(jax.jit(mapped).lower(*placed), here=device in jax.devices(), runs=False)


class Outcome(NamedTuple):
    """The plan of a run, as in `jaxmem plan --json`, and its metrics on held-out data."""

    plan: JsonDict
    held_out: dict[str, float]


def train_all(
    configs: Mapping[str, JsonView], overrides: Overrides | None = None, keep: str | None = None
) -> dict[str, Outcome]:
    """Trains each config, changed by the overrides of its name, on one device, and prints nothing. `keep`: the
    directory of the run, otherwise temporary. Most of the time is compilation on one core, so a CPU has a process per
    core."""
    processes = 1 if devices.has_nvidia_gpu() else devices.cores()
    jobs = [(config, (overrides or {}).get(name, ()), keep) for name, config in configs.items()]
    context = multiprocessing.get_context("spawn")  # jax does not work after a fork
    with ProcessPoolExecutor(min(len(jobs), processes), context, initializer=devices.use_cpu_without_gpu) as pool:
        try:
            return dict(zip(configs, pool.map(_train, jobs), strict=True))
        except Exception as error:
            raise UserError(f"a run of the course failed: {error}") from error


def _train(job: tuple[JsonView, Sequence[str], str | None]) -> Outcome:
    config, overrides, keep = job
    steps = config["train"]["steps"]
    with tempfile.TemporaryDirectory() as temporary, contextlib.redirect_stdout(io.StringIO()):
        place = Path(keep or f"{temporary}/run")
        fields = {"name": place.name, "output": str(place.parent)}
        train = {**config["train"], "evaluate_every": steps, "log_every": steps}
        cfg = load_config({**config, **fields, "train": train}, overrides)
        from jaxmem.training.run import run

        result = run(cfg, jax.devices()[:1])
        return Outcome(result.plan.as_json(), dict(result.held_out))


def seconds(run: Callable[..., Any], *arguments: Tree, times: int = 3) -> float:
    """The time of the fastest of several calls, after a call that compiles: on a CPU processor time, since other
    programs run too; on a GPU clock time."""
    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    jax.block_until_ready(run(*arguments))
    durations = []
    for _ in range(times):
        start = clock()
        jax.block_until_ready(run(*arguments))
        durations.append(clock() - start)
    return min(durations)


def clock_name() -> str:
    """The kind of time that `seconds` measures, for titles."""
    return "processor time here" if jax.default_backend() == "cpu" else f"on {jax.devices()[0].device_kind}"
