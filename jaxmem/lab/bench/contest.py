"""Measures implementations (contestants) alternately: each runs a short burst of calls, then the next one does, and the
result is the median over its bursts. So other load on the device slows all of them. A contestant that fails, e.g. for
lack of memory, is left out, and the others continue."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

Call = Callable[[], Any]  # starts work on the device; returns its future result
Say = Callable[[str], None]  # tells the parent process which contestant's turn begins
Row = dict[str, Any]
BURST = 0.02  # seconds of a burst
FEWEST = 5  # least number of bursts of each contestant
RIGHT = 8.0  # largest error of a correct result, in steps (`BenchPass.step`)


@dataclass
class Contestant:
    """An implementation of one pass. Each `call` does `amount` of work, in TFLOP or GB.

    `seconds` and `enqueued` have one element per burst: the seconds per call, and the seconds until the first call
    returned.
    """

    name: str
    of: str  # the name of the measured pass
    call: Call
    wait: Callable[[Any], Any] = jax.block_until_ready
    amount: float = 1.0
    unit: str = ""  # the unit of amount per second
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
        self.wait(result)
        return (time.perf_counter() - start) / calls, enqueued

    @property
    def rate(self) -> float:
        return self.amount / statistics.median(self.seconds)

    def times(self) -> Row:
        """The median, minimum and maximum of work per second, and the times. `by_host`: whether enqueuing took more
        than half of the time, so that the host limits the speed."""
        rates = [self.amount / seconds for seconds in self.seconds]
        seconds, enqueued = statistics.median(self.seconds), statistics.median(self.enqueued)
        return {
            "unit": self.unit,
            "rate": self.rate,
            "spread": [min(rates), max(rates)],
            "milliseconds": 1e3 * seconds,
            "by_host": enqueued > 0.5 * seconds,
            "enqueue_milliseconds": 1e3 * enqueued,
            "seconds": [float(f"{one:.4g}") for one in self.seconds],
        }


def take_turns(contestants: Sequence[Contestant], seconds: float, say: Say) -> None:
    """Runs alternating bursts of `BURST` seconds for `seconds`, but at least `FEWEST` bursts of each contestant."""
    bursts: dict[int, int] = {}
    for one in contestants:
        with _record_failure(one, say):
            one.burst(1)  # warms up
            bursts[id(one)] = max(1, round(BURST / one.burst(3)[0]))
    end, turn = time.perf_counter() + seconds, 0
    while turn < FEWEST or time.perf_counter() < end:
        left = [one for one in contestants if one.failed is None]
        if not left:
            return
        for one in left:
            with _record_failure(one, say):
                duration, enqueued = one.burst(bursts[id(one)])
                one.seconds.append(duration)
                one.enqueued.append(enqueued)
        turn += 1


@contextlib.contextmanager
def _record_failure(one: Contestant, say: Say) -> Iterator[None]:
    """A context in which an error excludes this contestant, but does not end the measurement."""
    say(f"{one.name} {one.of}")
    try:
        yield
    except Exception as error:  # noqa: BLE001 (each compiler has errors of its own)
        one.failed = error_line(error)


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
