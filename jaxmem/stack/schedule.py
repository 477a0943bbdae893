"""Which boundaries of N layers are saved, and which layers run again to make the others for the backward pass.

A boundary is a layer's input. A segment of layers whose first boundary is saved is gone back through so: run on to a
layer within it, save its boundary in the next slot, go back through what follows, then through what comes before. How
far to run on is all that the policies differ in: their split (`jaxmem.config.recompute`). Every layer runs once more
beside, to be differentiated.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxmem.config.recompute import split_of


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


def schedule(remat: str | tuple[str, ...], layers: int) -> Schedule | None:
    """None: the policy keeps every boundary.

    >>> [(plan.slots, plan.runs) for name in ("sqrt", "recursive", "slots_4") if (plan := schedule(name, 16))]
    [(7, 9), (5, 17), (5, 12)]
    """
    split = split_of(remat, layers)
    if split is None or layers == 1:
        return None
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
