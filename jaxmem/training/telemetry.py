"""What a run says while it goes: progress for people, metrics for files and trackers.

The metrics of a step are read when the next one has been handed to the devices, so that they never wait.
"""

from __future__ import annotations

import math

import jax

from jaxmem.errors import UserError
from jaxmem.program.step import Metrics
from jaxmem.training.progress import Progress
from jaxmem.training.trackers import Trackers


class Telemetry:
    """Reads metrics one step late, and stops a run whose loss is no number."""

    def __init__(self, progress: Progress, trackers: Trackers) -> None:
        self._progress, self._trackers = progress, trackers
        self._pending: tuple[int, Metrics] | None = None
        self.last: dict[str, float] = {}  # of the last step that was read

    def update(self, step: int, metrics: Metrics) -> None:
        self.flush()
        self._pending = step, metrics

    def flush(self) -> None:
        """Read what is still to be read."""
        if self._pending is None:
            return
        step, metrics = self._pending
        self._pending = None
        self.last = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if not math.isfinite(self.last["loss"]):
            raise UserError(
                f"loss is {self.last['loss']} at step {step}, gradient norm {self.last['gradient_norm']:.3g}: "
                "lower optimizer.learning_rate or optimizer.clip; the last checkpoint is from before"
            )
        if row := self._progress.update(step, self.last):
            del row["step"]
            self._trackers.log(step, row)

    def held_out(self, step: int, means: dict[str, float]) -> None:
        self.flush()
        told = "  ".join(f"{name} {value:.4g}" for name, value in means.items() if name != "count")
        self._progress.say(f"step {step}  held out: {told}")
        self._trackers.log(step, {f"held_out_{name}": value for name, value in means.items() if name != "count"})
