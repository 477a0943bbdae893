"""The policy that decides which checkpoints are kept when a newer one is written.

Orbax has such policies (`LatestN`, `BestN`), but they cannot tell in advance whether a checkpoint with some loss would
be kept as the best, which decides whether a step is saved at all.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orbax.checkpoint as ocp


@dataclass
class Retention(ocp.checkpoint_managers.PreservationPolicy):
    """Keeps the newest `keep` checkpoints, and with `keep_best` the one with the lowest held-out loss."""

    keep: int
    keep_best: bool
    losses: dict[int, float | None] = field(default_factory=dict)  # the held-out loss of each step

    def is_best(self, loss: float | None) -> bool:
        """Whether a checkpoint with this loss would be kept as the best."""
        others = [other for other, _ in self._finite(self.losses)]
        return self.keep_best and loss is not None and math.isfinite(loss) and loss < min(others, default=math.inf)

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        steps = [info.step for info in checkpoints]
        kept = set(sorted(steps)[-self.keep :])
        if self.keep_best and (finite := self._finite(steps)):
            kept.add(min(finite)[1])
        return [step in kept for step in steps]

    def _finite(self, steps: Iterable[int]) -> list[tuple[float, int]]:
        """(loss, step) of the steps whose loss is known and finite."""
        known = [(self.losses.get(step), step) for step in steps]
        return [(loss, step) for loss, step in known if loss is not None and math.isfinite(loss)]
