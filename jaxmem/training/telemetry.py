"""Passes the metrics of each step to the progress display, files and trackers, and checks them for divergence.

The metrics of a step are read after the next step has been dispatched, so that the devices never wait.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

import jax

from jaxmem.config import Train
from jaxmem.errors import UserError
from jaxmem.step import nonfinite
from jaxmem.step.state import MIN_SCALE
from jaxmem.step.step import Metrics
from jaxmem.training.progress import Progress, Work
from jaxmem.training.trackers import Trackers
from jaxmem.typing import JsonDict, Tree

HELD_OUT = "held_out_"  # before the names of an evaluation's metrics
ADVICE = "lower optimizer.learning_rate or optimizer.clip"


class DivergedError(UserError):
    """A loss, gradient or weight that is not finite."""

    def __init__(self, finding: str, advice: str = ADVICE) -> None:
        super().__init__(f"{finding}; {advice}, and run the same command again")


class Telemetry:
    """Reads metrics one step late. Stops a run whose loss is not finite (at once, or after `train.max_skipped`
    consecutive skipped updates). The metric `nonfinite.METRIC` indexes `gradient_names`.

    A dynamic loss scale is chosen by overflows, so they are expected until it is as small as it can be. With a fixed
    one an overflow is like any other gradient that is not finite.
    """

    def __init__(
        self,
        train: Train,
        gradient_names: Sequence[str],
        progress: Progress,
        trackers: Trackers,
        loss_scale: Literal["none", "dynamic"] | float = "none",
    ) -> None:
        self._names = gradient_names
        self._progress = progress
        self._trackers = trackers
        self._loss_scale = loss_scale
        self._max_skipped = train.max_skipped if train.on_nan == "skip" else 0
        self._skipped = 0  # consecutive skipped updates
        self._pending: tuple[int, Metrics, Work] | None = None
        self.last: dict[str, float] = {}  # metrics of the last step that was read
        self.has_targets = False  # whether any step had a token (or image) to train on

    def update(self, step: int, metrics: Metrics, work: Work) -> None:
        self.flush()
        self._pending = step, metrics, work

    def flush(self) -> None:
        """Reads the pending metrics."""
        if self._pending is None:
            return
        step, metrics, work = self._pending
        self._pending = None
        self.last = {name: float(value) for name, value in jax.device_get(metrics).items()}
        place = int(self.last.pop(nonfinite.METRIC, -1))
        loss = self.last["loss"]
        self.has_targets |= self.last.get("count", 1.0) > 0
        is_expected = self._loss_scale == "dynamic" and self.last["loss_scale"] > MIN_SCALE
        if math.isfinite(loss) and (place < 0 or is_expected):
            self._skipped = 0
        else:
            self._skipped += 1
            first = f"; first non-finite: {self._names[place]}" if place >= 0 else ""
            finding = f"loss is {loss:.5g} at step {step}, gradient norm {self.last['gradient_norm']:.3g}{first}"
            if self._skipped > self._max_skipped:
                raise DivergedError(finding, self._overflow_advice if math.isfinite(loss) else ADVICE)
            self._progress.say(f"{finding}: update skipped")
        if row := self._progress.update(step, self.last, work):
            self._log(row)

    def finish(self) -> None:
        """Logs the last step of a run whose data has ended, or that was stopped, between two logged steps."""
        self.flush()
        if self._progress.has_unlogged_steps:
            self._log(self._progress.log_step(self.last))

    def _log(self, row: JsonDict) -> None:
        step = row.pop("step")
        self._trackers.log(step, row)

    @property
    def _overflow_advice(self) -> str:
        """What to change if a gradient is not finite although the loss is."""
        if isinstance(self._loss_scale, str):
            return ADVICE
        return f"lower precision.loss_scale={self._loss_scale:g}, or use precision.loss_scale=dynamic"

    def held_out(self, step: int, means: dict[str, float]) -> None:
        self.flush()
        shown = {name: value for name, value in means.items() if name != "count"}
        self._progress.say(f"step {step}  held-out {'  '.join(f'{name} {x:.4g}' for name, x in shown.items())}")
        self._trackers.log(step, {f"{HELD_OUT}{name}": value for name, value in shown.items()})


class Profile(AbstractContextManager["Profile"]):
    """A JAX profile for TensorBoard or Perfetto: `train.profile: [first, last]` records these steps. Several processes
    have a directory each, since JAX names a profile by its host."""

    def __init__(self, directory: Path, steps: tuple[int, int] | None) -> None:
        is_alone = jax.process_count() == 1
        self._directory = directory if is_alone else directory / f"process-{jax.process_index()}"
        self._running = False
        self._first, self._last = steps or (0, 0)

    def before(self, step: int) -> None:
        if step == self._first:
            jax.profiler.start_trace(self._directory)
            self._running = True

    def after(self, step: int, results: Tree) -> None:
        """Waits for the last profiled step, so that it is recorded completely."""
        if self._running and step == self._last:
            jax.block_until_ready(results)
            self.__exit__()

    def __exit__(self, *_: object) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
