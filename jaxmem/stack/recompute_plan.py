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
class RecomputePlan:
    """The slots in which boundaries are saved. Every tuple except `steps` has an entry for each layer."""

    slots: int
    forward_slots: tuple[int, ...]  # the slot of the layer's input in the forward pass
    backward_slots: tuple[int, ...]  # the slot of the layer's input in the backward pass
    begin: tuple[int, ...]  # `steps[begin:end]` are recomputed before the layer's backward pass
    end: tuple[int, ...]
    steps: tuple[tuple[int, int, int], ...]  # (layer, slot of its input, slot of its output)

    @property
    def runs(self) -> int:
        """The number of recomputed layers, in addition to the recomputation of each layer for its derivative."""
        return len(self.steps)

    @property
    def saves_all(self) -> bool:
        """Whether each boundary has its own slot, so that none is recomputed."""
        return self.forward_slots == tuple(range(len(self.backward_slots)))


def recompute_plan(remat: str | tuple[str, ...], layers: int) -> RecomputePlan | None:
    """The plan of a policy; None if it saves every boundary.

    >>> [(plan.slots, plan.runs) for name in ("sqrt", "recursive", "slots_4") if (plan := recompute_plan(name, 16))]
    [(7, 9), (5, 17), (5, 12)]
    """
    split = split_of(remat, layers)
    if split is None or layers == 1:
        return None
    steps: list[tuple[int, int, int]] = []
    begin, end, backward_slots = ([0] * layers for _ in range(3))
    segments = [(0, layers, 0)]  # (first layer, layer after the last, slot of the first boundary), the last one first
    begin_of_layer = 0
    while segments:
        low, high, slot = segments.pop()
        if high - low == 1:
            begin[low] = begin_of_layer
            begin_of_layer = end[low] = len(steps)
            backward_slots[low] = slot
            continue
        far = split(high - low, slot)
        steps += [(low + i, slot + min(i, 1), slot + 1) for i in range(far)]
        segments += [(low, low + far, slot), (low + far, high, slot + 1)]
    # The forward pass computes all that is needed for the backward pass of the last layer.
    before_last = layers - 1
    return RecomputePlan(
        slots=1 + max(target for _, _, target in steps),
        forward_slots=(0, *(target for _, _, target in steps[:before_last])),
        backward_slots=tuple(backward_slots),
        begin=tuple(max(step - before_last, 0) for step in begin),
        end=tuple(max(step - before_last, 0) for step in end),
        steps=tuple(steps[before_last:]),
    )
