"""Which boundaries of N layers are saved, and which layers are recomputed to obtain the others in the backward pass.

A boundary is the input of a layer. The backward pass of a segment whose first boundary is saved recomputes up to a
layer within the segment and saves the boundary of that layer in the next slot. It then goes backward through the
layers from there on, and after that through the layers before. Policies differ only in the number of layers before the
next saved boundary (`splits` in `jaxmem.config.recompute`). In addition, every layer is recomputed once to be
differentiated.
"""

from dataclasses import dataclass

from jaxmem.config.recompute import split_of


@dataclass(frozen=True)
class Schedule:
    """The slots in which boundaries are saved. Every tuple except `again` has an entry for each layer."""

    slots: int
    first: tuple[int, ...]  # the slot of the layer's input in the forward pass
    at: tuple[int, ...]  # the slot of the layer's input in the backward pass
    begin: tuple[int, ...]  # `again[begin:end]` is recomputed before the layer's backward pass
    end: tuple[int, ...]
    again: tuple[tuple[int, int, int], ...]  # (layer, slot of its input, slot of its output)

    @property
    def runs(self) -> int:
        """The number of recomputed layers, in addition to the recomputation of each layer for its derivative."""
        return len(self.again)

    @property
    def saves_all(self) -> bool:
        """Whether each boundary has its own slot, so that none is recomputed."""
        return self.first == tuple(range(len(self.at)))


def schedule(remat: str | tuple[str, ...], layers: int) -> Schedule | None:
    """The schedule of a policy; None if it saves every boundary.

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
    # The forward pass computes all that is needed for the backward pass of the last layer.
    before_last = layers - 1
    first = [0] + [target for _, _, target in steps[:before_last]]
    slots = 1 + max(target for _, _, target in steps)
    return Schedule(
        slots,
        tuple(first),
        tuple(at),
        tuple(max(at - before_last, 0) for at in begin),
        tuple(max(at - before_last, 0) for at in end),
        tuple(steps[before_last:]),
    )
