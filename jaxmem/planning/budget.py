"""`memory.remat: budget`: of all that layers can keep, what fits the memory with the least arithmetic repeated.

Every set of names is a rung: what it keeps and what it repeats follow from one trace of a layer (`layers.py`). Above
them stands `none`, below them `slots_K`, which keeps K boundaries as well as they can be kept. A rung that another one
beats in both is left out. What lies beside no arithmetic tells to a percent: the step is compiled, up to four times,
with the rung that should be the last to fit, and what it really needs says which one is.

The answer is a policy like any other, known before the step is made: a plan and a run come to the same, and the run's
directory has it in the place of the word.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmem.config import Config, Save
from jaxmem.config.devices import for_devices
from jaxmem.config.names import IN_CHUNKS, IN_GROUPS
from jaxmem.planning.breakdown import SAVED
from jaxmem.planning.compile import sized
from jaxmem.planning.layers import Layer, layers_of
from jaxmem.planning.passes import passes_of
from jaxmem.planning.predict import estimate
from jaxmem.planning.share import passes_held, rows_of
from jaxmem.planning.targets import Target, target_devices, usable
from jaxmem.stack import schedule
from jaxmem.step import program

TRIES = 4  # steps that are compiled, if one of them fits
ROOM = 1000  # times the memory: or XLA would repeat things of its own accord


@dataclass(frozen=True)
class Rung:
    remat: str | Save
    kept: int  # bytes of a device
    again: tuple[int, int]  # of a row, in all layers: FLOPs of products that are repeated, and other numbers


def decided(cfg: Config, target: Target, reserve_gib: float | None = None) -> Config:
    """The config with what `memory.remat: budget` comes to on a target; any other as it is."""
    if cfg.memory.remat != "budget":
        return cfg
    limit, whole = usable(target, cfg, reserve_gib), for_devices(cfg, target.count)
    platform = "cpu" if target.is_cpu else "gpu"
    ladder = rungs(whole, platform)
    devices = target_devices(target, ROOM * limit)

    def needed(rung: Rung) -> int:
        return sized(program(keeping(cfg, rung), devices).lower_step(), here=target.is_here)

    guess = estimate(keeping(whole, Rung("full", 0, (0, 0))), platform)
    return keeping(cfg, highest(ladder, limit, needed, guess.total - guess.kinds[SAVED]))


def keeping(cfg: Config, rung: Rung) -> Config:
    return cfg.model_copy(update={"memory": cfg.memory.model_copy(update={"remat": rung.remat})})


def highest(ladder: Sequence[Rung], limit: int, needed: Callable[[Rung], int], beside: float) -> Rung:
    """The last rung that needs no more than the limit, as far as TRIES tell; where none does, the first. `beside`: what
    a step is thought to need beside what its layers keep."""
    known: dict[int, int] = {}  # bytes of those that were compiled
    low, high = -1, len(ladder)  # those up to `low` fit, from `high` on they do not
    while high - low > 1 and (len(known) < TRIES or low < 0):
        slope, last = 1.0, list(known)[-2:]
        if len(last) == 2:  # not every byte that is kept lies there at the fullest moment
            slope = (known[last[1]] - known[last[0]]) / (ladder[last[1]].kept - ladder[last[0]].kept)
        if last:
            beside = known[last[-1]] - slope * ladder[last[-1]].kept
        guess = sum(slope * rung.kept + beside <= limit for rung in ladder) - 1
        if guess <= low and len(last) == 2:
            break  # by what two have shown, the next one does not
        number = min(max(guess, low + 1), high - 1)
        known[number] = needed(ladder[number])
        low, high = (number, high) if known[number] <= limit else (low, number)
    return ladder[max(low, 0)]


def rungs(cfg: Config, platform: str) -> list[Rung]:
    """Of a config whose mesh is filled in, from what keeps least to what keeps most; each repeats less than the one
    before."""
    layers, copies = layers_of(cfg, platform), rows_of(cfg) * passes_held(cfg)
    every = keeping(cfg, Rung("none", 0, (0, 0)))
    found = [Rung("none", round(copies * passes_of(every, platform).saved), (0, 0))]
    found += [Rung(remat, round(copies * kept), again) for remat, kept, again in _by_name(cfg, layers)]
    if cfg.mesh.stage == 1 and (cfg.memory.update == "after" or cfg.batch.accumulate == 1):
        again = next(rung.again for rung in found if rung.remat == "full")
        found += [
            Rung(remat, round(copies * kept), (again[0] + more, again[1])) for remat, kept, more in _by_schedule(layers)
        ]
    best: list[Rung] = []
    for rung in sorted(found, key=lambda rung: (rung.kept, rung.again)):
        if not best or rung.again < best[-1].again:
            best.append(rung)
    return best


def _by_name(cfg: Config, layers: Sequence[Layer]) -> Iterator[tuple[str | Save, int, tuple[int, int]]]:
    """Every set of names, with bytes and what is repeated of all layers."""
    memory = cfg.memory
    hidden = {*(IN_CHUNKS if memory.mlp_chunk != "auto" else ()), *(IN_GROUPS if memory.head_groups != "auto" else ())}
    known = [name for name in cfg.model.activations if name not in hidden]
    for count in range(len(known) + 1):
        for names in itertools.combinations(known, count):
            each = [(layer.count, layer.boundary, *layer.kept(names)) for layer in layers]
            kept = sum(count * (boundary + size) for count, boundary, size, *_ in each)
            again = sum(count * products for count, _, _, products, _ in each), sum(n * more for n, *_, more in each)
            yield Save(save=names) if names else "full", kept, again


def _by_schedule(layers: Sequence[Layer]) -> Iterator[tuple[str, int, int]]:
    for slots in range(1, max(layer.count for layer in layers)):
        plans: list[tuple[Layer, Any]] = [(layer, schedule(f"slots_{slots}", layer.count)) for layer in layers]
        kept = sum(layer.boundary * (plan.slots if plan else 1) for layer, plan in plans)
        yield f"slots_{slots}", kept, sum(layer.forward * plan.runs for layer, plan in plans if plan)
