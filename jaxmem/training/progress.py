"""How a run is going: a bar on a terminal, plain lines elsewhere, and the numbers behind both.

The clock and the device's counters are read once a logged step; the bar is redrawn by a thread of its own, four times
a second, so the loop waits for neither. Everything is drawn in ASCII where the output knows no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, Self

import jax
from rich.console import Console
from rich.live import Live
from rich.text import Text

GIB = 1 << 30
BAR = 40  # columns, at most
LEAST_BAR = 8  # a shorter one says nothing


class Work(NamedTuple):
    """What goes through a step."""

    tokens: int
    flops: float


class Progress:
    """with Progress(total, tokens_per_step, flops_per_step, peak_flops, enabled=process == 0) as progress:
        for step in ...:
            if row := progress.update(step, metrics):
                trackers.log(step, row)

    `flops_per_step` and `peak_flops` are of the same devices, be it one or all. A run that goes on gives the step
    and the seconds and tokens where it stands. A step that is no multiple of `log_every`, nor the last, only moves the
    bar.
    """

    def __init__(
        self,
        total_steps: int,
        tokens_per_step: int,
        flops_per_step: float | None = None,
        peak_flops: float | None = None,
        enabled: bool = True,
        *,
        log_every: int = 1,
        step: int = 0,
        seconds: float = 0.0,
        tokens: int | None = None,
        unit: str = "tok",
        console: Console | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.total, self.log_every, self.unit = total_steps, log_every, unit
        self._usual = Work(tokens_per_step, flops_per_step or 0.0)
        self._peak = peak_flops if flops_per_step else None
        self._tokens = step * tokens_per_step if tokens is None else tokens
        self._since = Work(0, 0.0)  # the last logged step
        self._enabled, self._clock = enabled, clock
        self._console = console or Screen(highlight=False)
        self._step = self._first = step
        self._seconds, self._paused = seconds, 0.0
        self._began = self._last = clock()
        self._parts: list[str] = []
        self._live: Live | None = None

    def update(self, step: int, metrics: Mapping[str, Any], work: Work | None = None) -> dict[str, Any] | None:
        """At a logged step: show these metrics, and return them with what was measured: tokens and seconds since the
        run began, tokens a second since the last logged step, model FLOPs utilisation, bytes on the fullest device.
        `work`: of the steps since the last update, where it is not the usual."""
        steps = step - self._step
        tokens, flops = work or (steps * self._usual.tokens, steps * self._usual.flops)
        self._tokens += tokens
        self._since = Work(self._since.tokens + tokens, self._since.flops + flops)
        self._step = step
        if step % self.log_every and step != self.total:
            return None
        now = self._clock()
        working = max(now - self._last - self._paused, 1e-9)
        rate = self._since.tokens / working
        mfu = self._since.flops / working / self._peak if self._peak else None
        self._seconds += now - self._last
        self._since, self._last, self._paused = Work(0, 0.0), now, 0.0
        row: dict[str, Any] = {
            "step": step,
            **metrics,
            "tokens": self._tokens,
            "seconds": round(self._seconds, 3),
            "tokens_per_second": rate,
        }
        if mfu is not None:
            row["mfu"] = mfu
        row |= device_memory()
        self._parts = self._told(row, now)
        if self._live is None:
            self._plain()
        return row

    def back_to(self, step: int) -> None:
        """Go on from an earlier step. What was done since counts as time and tokens all the same."""
        self._step = self._first = step
        self._began = self._clock()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What happens in here (evaluating, waiting for a save) is not counted in tokens a second."""
        before = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - max(before, self._last)  # an update in here has counted what was before it

    def say(self, text: str | None) -> None:
        """One line, above the bar, if there is one to say."""
        if self._enabled and text is not None:
            self._print(text)

    def __enter__(self) -> Self:
        self._began = self._last = self._clock()
        if self._enabled and self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(get_renderable=self._bar, console=self._console, refresh_per_second=4)
            self._live.start()
            self._console.show_cursor()  # a killed process would leave the terminal without one
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            with suppress(OSError):  # a terminal that has gone
                self._live.stop()
            self._live = None

    # -------------------------------------------------------------- inside

    def _told(self, row: Mapping[str, Any], now: float) -> list[str]:
        """What there is to say, the most important first."""
        parts = []
        if "loss" in row:
            parts.append(f"loss {short_loss(float(row['loss']))}")
        parts.append(f"{short_count(row['tokens_per_second'])} {self.unit}/s")
        done = self._step - self._first
        if done:
            parts.append(f"{short_time(max(self.total - self._step, 0) * (now - self._began) / done)} left")
        if "mfu" in row:
            parts.append(f"{row['mfu']:.0%} MFU")
        if "bytes_in_use" in row:
            parts.append(f"{row['bytes_in_use'] / GIB:.1f} GiB")
        return parts

    def _plain(self) -> None:
        if self._enabled:
            head = f"step {self._step}/{self.total}"
            width = self._console.width if self._console.is_terminal else 1 << 16  # a file's lines may be long
            self._print("  ".join([head, *_fitting(self._parts, width - len(head), gap=2)]))

    def _bar(self) -> Text:
        width = self._console.width - 1  # the last column makes some terminals wrap
        head = f"{self._step}/{self.total}"
        parts = _fitting(self._parts, width - len(head) - (LEAST_BAR + 1 if width >= 60 else 0), gap=1)
        room = min(BAR, width - sum(len(part) + 1 for part in parts) - len(head) - 1)
        full, empty = ("#", "-") if self._console.options.ascii_only else ("\u2501", "\u2500")
        text = Text(head, no_wrap=True, overflow="crop")
        if room >= LEAST_BAR:
            done = min(room, room * self._step // max(self.total, 1))
            text.append(" ").append(full * done, "green").append(empty * (room - done), "dim")
        return text.append("".join(f" {part}" for part in parts))

    def _print(self, text: str) -> None:
        text = text.encode(self._console.encoding, "backslashreplace").decode(self._console.encoding)
        try:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        except OSError:  # the disk of a log file is full: no reason to stop training
            self._enabled = False


class Screen(Console):
    """Rich's own way with an output that nobody reads any more (`| head`) is to end the process; training goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def device_memory() -> dict[str, int]:
    """Bytes in use and their peak on the fullest device of this process; nothing where devices do not tell."""
    stats = [stat for device in jax.local_devices() if (stat := device.memory_stats())]
    keys = ("bytes_in_use", "peak_bytes_in_use")
    return {key: max(stat[key] for stat in stats) for key in keys} if stats else {}


def short_count(number: float) -> str:
    """Three digits and a power of 1000.

    >>> [short_count(x) for x in (0.25, 7.25, 999.4, 12345, 999_999, 2.5e9)]
    ['0.25', '7.25', '999', '12.3k', '1.00M', '2.50G']
    """
    units = ["", "k", "M", "G", "T"]
    while abs(number) >= 999.5 and len(units) > 1:
        number /= 1000
        units.pop(0)
    return f"{number:.{0 if abs(number) >= 99.95 else 1 if abs(number) >= 9.995 else 2}f}{units[0]}"


def short_time(seconds: float) -> str:
    """Hours, minutes, seconds.

    >>> [short_time(x) for x in (5, 65, 3 * 3600 + 62, 100 * 3600)]
    ['0:05', '1:05', '3:01:02', '4d 4h']
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def short_loss(loss: float) -> str:
    """Five digits at most.

    >>> [short_loss(x) for x in (0.00012, 3.14159, 123.4, float("nan"))]
    ['1.2e-04', '3.1416', '123.4', 'nan']
    """
    if loss and abs(loss) < 1e-3:
        return f"{loss:.1e}"
    return f"{loss:.4f}" if abs(loss) < 100 else f"{loss:.5g}"


def _fitting(parts: Sequence[str], room: int, gap: int) -> list[str]:
    """As many from the front as there is room for."""
    chosen: list[str] = []
    for part in parts:
        room -= len(part) + gap
        if room < 0:
            break
        chosen.append(part)
    return chosen
