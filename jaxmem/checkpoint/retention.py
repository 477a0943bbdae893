"""The policy that decides which checkpoints are kept when a newer one is written.

Orbax has such policies (`LatestN`, `BestN`), but they cannot tell in advance whether a loss would be kept as the best,
which decides whether a step is saved at all.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orbax.checkpoint as ocp


@dataclass(frozen=True)
class Best:
    """The checkpoint with the lowest held-out loss."""

    step: int
    loss: float


@dataclass
class Retention(ocp.checkpoint_managers.PreservationPolicy):
    """The newest `keep`, and with `keep_best` the best."""

    keep: int
    keep_best: bool
    losses: dict[int, float | None]  # by step

    def best(self, steps: Sequence[int]) -> Best | None:
        losses = [(step, self.losses.get(step)) for step in steps]
        finite = [Best(step, loss) for step, loss in losses if loss is not None and math.isfinite(loss)]
        return min(finite, key=lambda best: (best.loss, best.step), default=None)

    def is_best(self, loss: float | None) -> bool:
        """Whether a checkpoint with this loss would be kept as the best."""
        if not self.keep_best or loss is None or not math.isfinite(loss):
            return False
        best = self.best(list(self.losses))
        return best is None or loss < best.loss

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        steps = [info.step for info in checkpoints]
        newest = set(sorted(steps)[-self.keep :])
        best = self.best(steps) if self.keep_best else None
        return [step in newest or (best is not None and step == best.step) for step in steps]
