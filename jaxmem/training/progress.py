"""The progress of a run: a bar on a terminal, plain lines elsewhere, and the measurements for both.

The clock and the counters of the device are read once per logged step. A thread redraws the bar four times per second,
so the loop never waits for the terminal. A narrow terminal shows the beginning of the line, with the most important
values.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple, Self

import jax
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table

from jaxmem.machine.console import Console
from jaxmem.machine.gpus import GIB
from jaxmem.machine.terminal import say
from jaxmem.typing import JsonDict, JsonView


class Work(NamedTuple):
    """Tokens and FLOPs of an update on all devices."""

    tokens: int
    flops: float = 0.0


@dataclass(frozen=True)
class RunSpec:
    """A run to report on. `peak_flops` (per second) is the peak of the devices whose work is reported: one or all. The
    last three fields are the progress of a resumed run."""

    total_steps: int
    peak_flops: float | None = None
    log_every: int = 1
    unit: str = "tok"
    step: int = 0
    seconds: float = 0.0
    tokens: int = 0


class Progress:
    """with Progress(RunSpec(total), enabled=process == 0) as progress:
        for step in ...:
            if row := progress.update(step, metrics, Work(tokens, flops)):
                trackers.log(step, row)

    A step that is neither a multiple of `log_every` nor the last one only moves the bar.
    """

    def __init__(
        self,
        spec: RunSpec,
        *,
        enabled: bool = True,
        console: Console | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.spec = spec
        self._tokens = spec.tokens
        self._since = Work(0)  # the work since the last logged step
        self._enabled = enabled
        self._clock = clock
        self._console = console or PipeSafeConsole(highlight=False)
        self._step = self._first = spec.step
        self._seconds = spec.seconds
        self._paused = 0.0
        self._start = self._last = clock()
        self._parts: list[str] = []
        self._live: Live | None = None

    def update(self, step: int, metrics: JsonView, work: Work) -> JsonDict | None:
        """At a logged step, shows these metrics and returns them with the measurements: tokens and seconds since the
        start of the run, tokens per second since the last logged step, model FLOPs utilization (mfu), and the bytes in
        use on the fullest device. `work`: the work of the steps since the last call of `update`."""
        self._tokens += work.tokens
        self._since = Work(self._since.tokens + work.tokens, self._since.flops + work.flops)
        self._step = step
        if step % self.spec.log_every and step != self.spec.total_steps:
            return None
        return self.log_step(metrics)

    @property
    def has_unlogged_steps(self) -> bool:
        return self._since.tokens > 0

    def log_step(self, metrics: JsonView) -> JsonDict:
        """Shows the metrics of the last step, and returns them with the measurements since the last logged step."""
        step = self._step
        now = self._clock()
        working = max(now - self._last - self._paused, 1e-9)
        self._seconds += now - self._last
        row: JsonDict = {
            "step": step,
            **metrics,
            "tokens": self._tokens,
            "seconds": round(self._seconds, 3),
            "tokens_per_second": self._since.tokens / working,
        }
        if self.spec.peak_flops:
            row["mfu"] = self._since.flops / working / self.spec.peak_flops
        row |= device_memory()
        self._since = Work(0)
        self._last = now
        self._paused = 0.0
        self._parts = self._shown(row, now)
        if self._live is None:
            self.say(f"step {step}/{self.spec.total_steps}  {'  '.join(self._parts)}")
        return row

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context whose duration (evaluation, waiting for a save) does not count in tokens per second."""
        before = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - before

    def say(self, text: str | None) -> None:
        """Prints a line, above the bar if there is one."""
        if not self._enabled or text is None:
            return
        text = text.encode(self._console.encoding, "backslashreplace").decode(self._console.encoding)
        try:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        except OSError:  # training continues if the disk of a log file is full
            self._enabled = False

    def __enter__(self) -> Self:
        self._start = self._last = self._clock()
        if self._enabled and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(get_renderable=self._bar, console=self._console, refresh_per_second=4)
            self._live.start()
            self._console.show_cursor()  # a killed process would leave the terminal without a cursor
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            with suppress(OSError):  # the terminal was closed
                self._live.stop()
            self._live = None

    def _shown(self, row: JsonView, now: float) -> list[str]:
        """The parts of a progress line, most important first."""
        parts = [f"loss {short_loss(float(row['loss']))}"] if "loss" in row else []
        parts.append(f"{short_count(row['tokens_per_second'])} {self.spec.unit}/s")
        if done := self._step - self._first:
            left = max(self.spec.total_steps - self._step, 0) * (now - self._start) / done
            parts.append(f"{short_time(left)} left")
        if "mfu" in row:
            parts.append(f"{row['mfu']:.0%} MFU")
        if "bytes_in_use" in row:
            parts.append(f"{row['bytes_in_use'] / GIB:.1f} GiB")
        return parts

    def _bar(self) -> Table:
        # Some terminals wrap after writing the last column.
        line = Table.grid(Column(no_wrap=True, overflow="crop"), Column(ratio=1), padding=(0, 1, 0, 0))
        line.width = self._console.width - 1
        bar = ProgressBar(self.spec.total_steps, self._step, complete_style="green", finished_style="green")
        line.add_row(" ".join([f"{self._step}/{self.spec.total_steps}", *self._parts]), bar)
        return line


@contextmanager
def spinner(text: str, *, enabled: bool) -> Iterator[None]:
    """Prints a text; on a terminal its last line turns while the context lasts, and then disappears."""
    console = PipeSafeConsole(highlight=False)
    if enabled and console.is_terminal and not console.is_dumb_terminal:
        *lines, last = text.splitlines()
        console.print(*lines, sep="\n", markup=False, soft_wrap=True)
        with console.status(last, spinner="line" if console.options.ascii_only else "dots"):
            yield
    else:
        if enabled:
            say(text)
        yield


class PipeSafeConsole(Console):
    """rich ends the process when its output is closed (`| head`); here training continues."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def device_memory() -> dict[str, int]:
    """Bytes in use, and their peak, on the fullest device of this process; empty if devices do not report them."""
    stats = [stat for device in jax.local_devices() if (stat := device.memory_stats())]
    keys = ("bytes_in_use", "peak_bytes_in_use")
    return {key: max(stat[key] for stat in stats) for key in keys} if stats else {}


def short_count(number: float) -> str:
    """A number as three digits and a power of 1000.

    >>> [short_count(x) for x in (0.25, 7.25, 999.4, 12345, 999_999, 2.5e9)]
    ['0.25', '7.25', '999', '12.3k', '1.00M', '2.50G']
    """
    units = ["", "k", "M", "G", "T"]
    while abs(number) >= 999.5 and len(units) > 1:
        number /= 1000
        units.pop(0)
    return f"{number:.{0 if abs(number) >= 99.95 else 1 if abs(number) >= 9.995 else 2}f}{units[0]}"


def short_time(seconds: float) -> str:
    """A duration as days and hours, or h:mm:ss.

    >>> [short_time(x) for x in (5, 65, 3 * 3600 + 62, 100 * 3600)]
    ['0:05', '1:05', '3:01:02', '4d 4h']
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def short_loss(loss: float) -> str:
    """A loss with at most five digits.

    >>> [short_loss(x) for x in (0.00012, 3.14159, 123.4, float("nan"))]
    ['1.2e-04', '3.1416', '123.4', 'nan']
    """
    if loss and abs(loss) < 1e-3:
        return f"{loss:.1e}"
    return f"{loss:.4f}" if abs(loss) < 100 else f"{loss:.5g}"
