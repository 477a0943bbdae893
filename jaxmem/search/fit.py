"""`fit`: the fastest configs that fit a target, or the methods of training that fit it."""

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Unpack

from jaxmem.config import Config
from jaxmem.config.methods import RunOptions, RunSource, is_model, run_config
from jaxmem.errors import UserError
from jaxmem.planning import Target, resolve_remat
from jaxmem.search.comparison import Comparison, command_line, compare
from jaxmem.search.compilers import CompilerPool, compile_target
from jaxmem.search.fastest import Progress, Search
from jaxmem.search.knobs import DEFAULT_ALLOW, allowed
from jaxmem.search.result import Fit

COMPILES = 12  # steps to compile at most, by default
KERNEL_SHARE = 4  # one in this number of compiled steps is reserved for other kernels


def fit(
    source: RunSource,
    target: str | None = None,
    *,
    allow: Sequence[str] = DEFAULT_ALLOW,
    reserve_gib: float | None = None,
    compiles: int = COMPILES,
    processes: int | None = None,
    progress: Progress = lambda _: None,
    **options: Unpack[RunOptions],
) -> Fit | Comparison:
    """Search for the configs that fit a target such as `h100-80gb:8` (default: this machine's devices), fastest first.

    `source`: a config, a preset or a Hugging Face directory; for the last two, the methods of training are compared
    unless `method` is set. `allow`: words for the settings that may change (`knobs.KNOBS` lists the settings of each).
    `compiles`: steps to compile at most. `processes`: number of compiler processes, by default one per core, if the
    memory is sufficient. `progress` is called with lines of text.
    """
    aim = compile_target(target)
    config = functools.partial(run_config, source, devices=aim.count, **options)
    command = command_line(source, options)
    with CompilerPool(aim, reserve_gib, processes) as compilers:
        if is_model(source) and options.get("method") is None:
            return compare(config, command, compilers, progress)
        cfg, _ = resolve_remat(config(), aim, reserve_gib, compiles=False)
        found = search(cfg, aim, allow, compilers, compiles=compiles, progress=progress)
        if found.best:
            return found
        progress("nothing fits; comparing other methods of training")
        return dataclasses.replace(found, others=compare(config, command, compilers, progress, current=cfg))


def search(
    cfg: Config,
    target: Target,
    allow: Sequence[str],
    compilers: CompilerPool,
    *,
    compiles: int = COMPILES,
    progress: Progress = lambda _: None,
) -> Fit:
    start = time.perf_counter()
    if compiles < 1:
        raise UserError(f"compiles={compiles} is too small; use 1 or more")
    one = Search(cfg, allowed(allow), compilers, progress)
    progress(f"{len(one.trials.all):,} configs estimated; compiling at most {compiles}")
    left = compiles - one.compile(compiles - compiles // KERNEL_SHARE)
    one.add_other_kernels()
    one.compile(left)
    if not one.trials.compiled:
        reasons = [trial.refused for trial in one.trials.all if trial.refused]
        raise UserError(f"{cfg.name} on {target.name}: all {len(reasons)} configs failed to compile: {reasons[0]}")
    return Fit(cfg, target, one.trials, tuple(allow), time.perf_counter() - start)
