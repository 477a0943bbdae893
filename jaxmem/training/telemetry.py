"""What a run says while it goes: progress for people, metrics for files and trackers.

The metrics of a step are read when the next one has been handed to the devices, so that they never wait.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, pstdev

import jax

from jaxmem.errors import UserError
from jaxmem.step import nonfinite
from jaxmem.step.step import Metrics
from jaxmem.training.progress import Progress, Work
from jaxmem.training.trackers import Trackers


class DivergedError(UserError):
    """A loss that is no number, or far above those before."""

    def __init__(self, told: str, key: str) -> None:
        """`key`: of the config, what is to be done."""
        super().__init__(f"{told}: lower optimizer.learning_rate or optimizer.clip; the last checkpoint is from before")
        self.told, self.key = told, key


class Spikes:
    """Which losses are more than so many standard deviations above the mean of the last `WINDOW`; a run that goes on
    begins to look anew."""

    WINDOW, LEAST = 100, 20

    def __init__(self, deviations: float) -> None:
        self._deviations = deviations
        self._last: deque[float] = deque(maxlen=self.WINDOW)

    def has(self, loss: float) -> bool:
        if len(self._last) >= self.LEAST:
            most = fmean(self._last) + self._deviations * pstdev(self._last)
            if loss > most:
                return True
        self._last.append(loss)
        return False


class Telemetry:
    """Reads metrics one step late, and stops a run whose loss is no number, at once or after `max_skipped` updates in
    a row that were left out, or one of `spikes`. `culprits` are what the metric of that name counts."""

    def __init__(
        self,
        progress: Progress,
        trackers: Trackers,
        culprits: Sequence[str] = (),
        max_skipped: int = 0,
        spikes: Spikes | None = None,
    ) -> None:
        self._progress, self._trackers = progress, trackers
        self._culprits, self._most_skipped, self._spikes = culprits, max_skipped, spikes
        self._skipped = 0  # updates in a row
        self._pending: tuple[int, Metrics, Work | None] | None = None
        self.last: dict[str, float] = {}  # of the last step that was read

    def update(self, step: int, metrics: Metrics, work: Work | None = None) -> None:
        """`work`: of this step, where it is not the usual."""
        self.flush()
        self._pending = step, metrics, work

    def flush(self) -> None:
        """Read what is still to be read."""
        if self._pending is None:
            return
        step, metrics, work = self._pending
        self._pending = None
        self.last = {name: float(value) for name, value in jax.device_get(metrics).items()}
        place = int(self.last.pop(nonfinite.METRIC, -1))
        overflowed = "loss_scale" in self.last and math.isfinite(self.last["loss"])  # which is how a scale is found
        if math.isfinite(self.last["loss"]) and (place < 0 or overflowed):
            self._skipped = 0
            if self._spikes and self._spikes.has(self.last["loss"]):
                raise DivergedError(f"loss rose to {self.last['loss']:.5g} at step {step}", "on_spike")
        else:
            self._skipped += 1
            self._not_finite(step, f"; the first that is no number: {self._culprits[place]}" if place >= 0 else "")
        if row := self._progress.update(step, self.last, work):
            del row["step"]
            self._trackers.log(step, row)

    def _not_finite(self, step: int, first: str) -> None:
        told = f"loss is {self.last['loss']:.5g} at step {step}, gradient norm {self.last['gradient_norm']:.3g}{first}"
        if self._skipped > self._most_skipped:
            raise DivergedError(told, "on_nan")
        self._progress.say(f"{told}: left out")

    def back_to(self, step: int) -> None:
        """What was told of the steps after this one is undone."""
        self._skipped = 0
        self._trackers.back_to(step)
        self._progress.back_to(step)

    def held_out(self, step: int, means: dict[str, float]) -> None:
        self.flush()
        told = "  ".join(f"{name} {value:.4g}" for name, value in means.items() if name != "count")
        self._progress.say(f"step {step}  held out: {told}")
        self._trackers.log(step, {f"held_out_{name}": value for name, value in means.items() if name != "count"})
