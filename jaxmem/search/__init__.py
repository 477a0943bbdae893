"""Which config fits, and which of those is fastest: mesh, ZeRO stage, recomputation, micro-batches and more, together.

Estimated by arithmetic first, thousands in seconds; the promising ones are compiled, which tells their bytes exactly,
a few seconds of a processor each, on all cores, and kept on disk. No GPU is needed.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxmem.config import Config
from jaxmem.errors import UserError
from jaxmem.planning import Target, decided
from jaxmem.planning.targets import check_compiler, local_target, parse_target
from jaxmem.search.compilers import Compilers
from jaxmem.search.find import COMPILES, search
from jaxmem.search.knobs import BY_DEFAULT
from jaxmem.search.most import Most
from jaxmem.search.most import maximize as _maximize
from jaxmem.search.result import Fit


def fit(
    cfg: Config,
    target: str | None = None,
    *,
    allow: Sequence[str] = BY_DEFAULT,
    reserve_gib: float | None = None,
    compiles: int = COMPILES,
    processes: int | None = None,
) -> Fit:
    """Search for what fits a target such as `h100-80gb:8` (by default this machine's devices), fastest first.

    `allow`: what may change (`knobs.KNOBS` says which settings a word stands for). `compiles`: at most so many
    programs. `processes`: of so many compilers; by default as many as there are cores and memory for.
    """
    aim = _aim(target)
    cfg = decided(cfg, aim, reserve_gib)
    with Compilers(aim, reserve_gib, processes) as compilers:
        return search(cfg, aim, allow, compilers, compiles=compiles)


def maximize(
    cfg: Config,
    key: str,
    target: str | None = None,
    *,
    allow: Sequence[str] = (),
    reserve_gib: float | None = None,
    processes: int | None = None,
) -> Most:
    """The largest `model.layers`, `data.sequence_length` or `batch.global_size` that fits; the next one does not. Of
    each value the config that needs least is tried, among those that `allow` permits: by default the one given."""
    aim = _aim(target)
    if cfg.memory.remat == "budget":
        raise UserError(f"memory.remat: budget is another policy for each {key}; use none, full, dots or names")
    with Compilers(aim, reserve_gib, processes) as compilers:
        return _maximize(cfg, aim, key, allow, compilers)


def _aim(target: str | None) -> Target:
    if target is not None:
        aim = parse_target(target)
        check_compiler(aim)  # now, not in each of its processes
        return aim
    import jax

    here = local_target(jax.devices())
    if here.gpu is None and not here.is_cpu:
        raise UserError(f"target: nothing is known of {here.name}; give a target, or a YAML file of its facts")
    return parse_target(here.name)  # its compilers are other processes, which do not touch the devices


__all__ = ["BY_DEFAULT", "COMPILES", "Fit", "Most", "fit", "maximize"]
