"""Which sizes of blocks are the fastest for each kernel: all that a GPU has room for take turns, each right first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax

from jaxmem.bench.contest import REFUSALS, RIGHT, Call, Contestant, take_turns
from jaxmem.kernels import tuning

SOME = 2  # are enough to see that it works, where nothing is measured


class Tried(NamedTuple):
    """A pass by itself, as an implementation's kernel of that name makes it."""

    of: str
    compiled: Callable[[str], Call]  # by this implementation, cut as the kernels are told to
    error: Callable[[Any], float]  # of what a call made, in steps


def winners(
    tried: Iterable[Tried], implementations: Iterable[str], seconds: float, *, dry: bool
) -> Iterator[dict[str, Any]]:
    """Entries of the table of winners: one for each kernel whose sizes can be chosen and that runs here."""
    capability = getattr(jax.devices()[0], "compute_capability", "")
    shared = tuning.SHARED.get(capability, min(tuning.SHARED.values()))
    for one in tried:
        for implementation in implementations:
            kernel = f"{implementation} {one.of}"
            with tuning.listening() as heard:
                try:
                    one.compiled(implementation)
                except REFUSALS:
                    continue
            if kernel not in heard:
                continue
            asked = heard[kernel]
            space = asked.space(shared)
            contestants = list(_right(one, implementation, space[:SOME] if dry else space))
            take_turns(contestants, seconds)
            taken = {contestant.name: min(contestant.seconds[one.of]) for contestant in contestants}
            if taken:
                best = min(taken, key=lambda key: taken[key])
                yield {
                    "kind": f"{kernel} {asked.kind}",
                    "sizes": list(asked.sizes),
                    "blocks": [int(size) for size in best.split("x")],
                    "of": len(taken),
                    "milliseconds": 1e3 * taken[best],
                }


def _right(one: Tried, implementation: str, space: Iterable[tuple[int, ...]]) -> Iterator[Contestant]:
    """Those that compile and give what they should."""
    for blocks in space:
        try:
            with tuning.forced(f"{implementation} {one.of}", blocks):
                call = one.compiled(implementation)
            error = one.error(call())
        except REFUSALS:
            continue
        if error <= RIGHT:
            yield Contestant("x".join(map(str, blocks)), {one.of: call})
