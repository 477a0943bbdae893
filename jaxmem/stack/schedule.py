"""Which boundaries of N layers are kept, and which layers run again to make the others for the backward pass.

A boundary is a layer's input, B bytes. A segment of layers whose first boundary is there is gone back through so: run
on to a layer within it, keep its boundary in the next slot, go back through what follows, then through what comes
before. How far to run on is all that the policies differ in. Every layer runs once more beside, to be differentiated.

    every_K    N / K + K slots          below N runs      boundaries of segments of K, and those of one segment
    sqrt       2 sqrt N                 below N           the same with K = sqrt N (Chen et al., arXiv:1604.06174)
    recursive  1 + log2 N               N / 2 log2 N      halves of halves (the same paper, section 4.3)
    slots_K    K, and one to run on     the fewest        Griewank and Walther, ACM TOMS 26(1), 2000: revolve
    constant   1, and one to run on     N (N - 1) / 2     every boundary from the stack's own input
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

Split = Callable[[int, int], int]  # (layers of a segment, its slot) -> how far to run on, at least 1 and less than all
NAMED = re.compile(r"(every|slots)_([1-9]\d*)")


@dataclass(frozen=True)
class Schedule:
    """Each tuple but `again` has an entry for each layer."""

    slots: int
    first: tuple[int, ...]  # where the first pass writes its input
    at: tuple[int, ...]  # where its input is when it is gone back through
    begin: tuple[int, ...]  # the first of `again` that runs before that, and the one after the last
    end: tuple[int, ...]
    again: tuple[tuple[int, int, int], ...]  # a layer that runs, the slot of its input, the slot for its result

    @property
    def runs(self) -> int:
        """Layers that run again, beside those that are differentiated."""
        return len(self.again)


def is_scheduled(remat: str) -> bool:
    return remat in ("sqrt", "recursive", "constant") or NAMED.fullmatch(remat) is not None


def schedule(remat: str | tuple[str, ...], layers: int) -> Schedule | None:
    """None: the policy keeps every boundary.

    >>> [(plan.slots, plan.runs) for name in ("sqrt", "recursive", "slots_4") if (plan := schedule(name, 16))]
    [(7, 9), (5, 17), (5, 12)]
    """
    if isinstance(remat, tuple) or not is_scheduled(remat) or layers == 1:
        return None
    split = _split(remat, layers)
    steps: list[tuple[int, int, int]] = []
    begin, end, at = ([0] * layers for _ in range(3))
    todo, done = [(0, layers, 0)], 0
    while todo:
        low, high, slot = todo.pop()
        if high - low == 1:
            begin[low], end[low], at[low] = done, len(steps), slot
            done = len(steps)
            continue
        far = split(high - low, slot)
        steps += [(low + i, slot + min(i, 1), slot + 1) for i in range(far)]
        todo += [(low, low + far, slot), (low + far, high, slot + 1)]
    # What runs before the last layer is gone back through is the first pass itself.
    own = layers - 1
    first = [0] + [target for _, _, target in steps[:own]]
    slots = 1 + max(target for _, _, target in steps)
    return Schedule(
        slots,
        tuple(first),
        tuple(at),
        tuple(max(at - own, 0) for at in begin),
        tuple(max(at - own, 0) for at in end),
        tuple(steps[own:]),
    )


def _split(remat: str, layers: int) -> Split:
    if remat == "sqrt":
        return _every(math.isqrt(layers - 1) + 1)
    if remat == "recursive":
        return lambda n, _: -(-n // 2)
    if remat == "constant":
        return lambda n, _: n - 1
    kind, _, size = remat.partition("_")
    return {"every": _every, "slots": _revolve}[kind](int(size))


def _every(size: int) -> Split:
    return lambda n, _: size if n > size else 1


def _revolve(slots: int) -> Split:
    def split(n: int, slot: int) -> int:
        free = slots - slot
        if free <= 1:
            return n - 1
        return min(range(1, n), key=lambda far: far + fewest(n - far, free - 1) + fewest(far, free))

    return split


def fewest(layers: int, slots: int) -> int:
    """Layers that run again at the least, with so many boundaries kept: r N - C(slots + r, r - 1), where r is how often
    one layer runs at the most.

    >>> fewest(16, 16), fewest(16, 4), fewest(16, 1)
    (15, 27, 120)
    """
    r = 0
    while math.comb(slots + r, r) < layers:
        r += 1
    return r * layers - math.comb(slots + r, r - 1) if r else 0
