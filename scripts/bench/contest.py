"""Measures implementations (contestants) alternately: each runs a short burst of calls, then the next one does, and the
result is the median over its bursts. So other load on the device slows all of them. A contestant that fails, e.g. for
lack of memory, is left out, and the others continue. What may hang or end its process is a program of its own with a
limit of time (`program_rows`)."""

import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxmem.typing import JsonDict, Tree

Call = Callable[[], Tree]  # starts work on the device; returns its future result
Row = JsonDict
ROOT = Path(__file__).parents[2]
BURST_SECONDS = 0.02  # seconds of a burst
MIN_BURSTS = 5  # least number of bursts of each contestant
MAX_ERROR = 8.0  # largest error of a correct result, in steps (`BenchPass.step`)


@dataclass
class Contestant:
    """An implementation of one pass. Each `call` does `amount` of work, in TFLOP or GB.

    `seconds` and `enqueued` have one element per burst: the seconds per call, and the seconds until the first call
    returned.
    """

    name: str
    of: str  # the name of the measured pass
    call: Call
    amount: float = 1.0
    unit: str = ""  # the unit of amount per second
    calls: int = 1  # of a burst
    seconds: list[float] = field(default_factory=list)
    enqueued: list[float] = field(default_factory=list)
    failed: str | None = None

    def burst(self, calls: int) -> tuple[float, float]:
        """Seconds per call, and seconds until the first call was enqueued, starting with an idle device."""
        start = time.perf_counter()
        result = self.call()
        enqueued = time.perf_counter() - start
        for _ in range(calls - 1):
            result = self.call()
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / calls, enqueued

    @property
    def rate(self) -> float:
        return self.amount / statistics.median(self.seconds)

    def times(self) -> Row:
        """The median, minimum and maximum of work per second, and the times. `by_host`: whether enqueuing took more
        than half of the time, so that the host limits the speed."""
        rates = [self.amount / seconds for seconds in self.seconds]
        seconds = statistics.median(self.seconds)
        enqueued = statistics.median(self.enqueued)
        return {
            "unit": self.unit,
            "rate": self.rate,
            "spread": [min(rates), max(rates)],
            "milliseconds": 1e3 * seconds,
            "by_host": enqueued > 0.5 * seconds,
            "enqueue_milliseconds": 1e3 * enqueued,
            "seconds": [float(f"{duration:.4g}") for duration in self.seconds],
        }


def take_turns(contestants: Sequence[Contestant], seconds: float) -> None:
    """Runs alternating bursts of `BURST_SECONDS` for `seconds`, but at least `MIN_BURSTS` bursts of each contestant."""
    for contestant in contestants:
        with _record_failure(contestant):
            contestant.burst(1)  # warms up
            contestant.calls = max(1, round(BURST_SECONDS / contestant.burst(3)[0]))
    end = time.perf_counter() + seconds
    turn = 0
    while turn < MIN_BURSTS or time.perf_counter() < end:
        left = [contestant for contestant in contestants if contestant.failed is None]
        if not left:
            return
        for contestant in left:
            with _record_failure(contestant):
                duration, enqueued = contestant.burst(contestant.calls)
                contestant.seconds.append(duration)
                contestant.enqueued.append(enqueued)
        turn += 1


@contextlib.contextmanager
def _record_failure(contestant: Contestant) -> Iterator[None]:
    """A context in which an error excludes this contestant, but does not end the measurement."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 (each compiler has errors of its own)
        contestant.failed = error_line(error)


def error_line(error: BaseException) -> str:
    """The first line of an error, or the name of its class."""
    lines = [line for line in str(error).splitlines() if line] or [type(error).__name__]
    return lines[-1 if "Traceback" in lines[0] else 0]  # the error of a callback ends with its message


CEILING = "this device"  # the contestant that measures the limits of the device


def ceilings(size: int) -> Iterator[Contestant]:
    """A bfloat16 matmul of this size, and a copy."""
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    wide = jnp.zeros((size, 4 * size), jnp.float32)
    matmul = jax.jit(jnp.matmul).lower(a, a).compile()
    copy = jax.jit(lambda x: x + 1.0).lower(wide).compile()
    yield Contestant(CEILING, "matmul", lambda: matmul(a, a), amount=2 * size**3 / 1e12, unit="TFLOP/s")
    yield Contestant(CEILING, "copy", lambda: copy(wide), amount=2 * wide.nbytes / 1e9, unit="GB/s")


def program_rows(program: str, *arguments: str, text: str = "") -> Callable[[float], list[Row]]:
    """The rows that a program of this folder writes to its `--rows`, one line of JSON each; with `error` in the last
    one if it fails, or is stopped at the limit of its seconds.

    Args:
        program: The name of its module.
        arguments: Its arguments.
        text: Its standard input.
    """

    def run(seconds: float) -> list[Row]:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "rows.jsonl")
            command = [sys.executable, "-m", f"scripts.bench.{program}", *arguments, "--rows", str(file)]
            try:
                ended = subprocess.run(
                    command, cwd=ROOT, input=text, check=False, timeout=seconds, capture_output=True, text=True
                )
                why = (ended.stderr.strip().splitlines() or ["no output"])[-1] if ended.returncode else None
            except subprocess.TimeoutExpired:
                why = f"not ended within {seconds:.0f} s"
            rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [*rows, {"error": why}] if why else rows

    return run


def write_row(file: Path | None, row: Row) -> None:
    """Adds a row to a file for `program_rows`."""
    if file is not None:
        with file.open("a", encoding="utf-8") as opened:
            opened.write(json.dumps(row) + "\n")
