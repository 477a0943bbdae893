"""Contestants that take turns: medians of bursts of calls, so that what else the device does meanwhile slows all. One
that fails, for memory say, is out, and the others go on."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

Call = Callable[[], Any]  # starts work on the device and gives what it will come to
Say = Callable[[str], None]  # whose turn begins, for who watches over it
Row = dict[str, Any]
BURST = 0.02  # s of calls between two looks at the clock
FEWEST = 5  # bursts of each, however little time there is
RIGHT = 8.0  # steps of error beyond which nobody wins


@dataclass
class Contestant:
    name: str
    of: str  # which pass
    call: Call
    wait: Callable[[Any], Any] = jax.block_until_ready
    amount: float = 1.0  # of work per call, TFLOP or GB
    unit: str = ""  # of amount per second
    seconds: list[float] = field(default_factory=list)  # of a call, in each turn
    enqueued: list[float] = field(default_factory=list)  # until a call gave control back
    failed: str | None = None

    def burst(self, calls: int) -> tuple[float, float]:
        """Seconds a call, and until the first one was on its way: the device has nothing to do then, and later only
        takes so many ahead."""
        start = time.perf_counter()
        made = self.call()
        away = time.perf_counter()
        for _ in range(calls - 1):
            made = self.call()
        self.wait(made)
        return (time.perf_counter() - start) / calls, away - start


def take_turns(contestants: Sequence[Contestant], seconds: float, say: Say) -> None:
    """Bursts of calls, as many as take `BURST`, until the time is over; at least `FEWEST` of each."""
    bursts: dict[int, int] = {}
    for one in contestants:
        with _record_failure(one, say):
            one.burst(1)  # warm
            bursts[id(one)] = max(1, round(BURST / one.burst(3)[0]))
    end, turn = time.perf_counter() + seconds, 0
    while turn < FEWEST or time.perf_counter() < end:
        left = [one for one in contestants if one.failed is None]
        if not left:
            return
        for one in left:
            with _record_failure(one, say):
                taken, away = one.burst(bursts[id(one)])
                one.seconds.append(taken)
                one.enqueued.append(away)
        turn += 1


@contextlib.contextmanager
def _record_failure(one: Contestant, say: Say) -> Iterator[None]:
    """What fails in here is one contestant's own."""
    say(f"{one.name} {one.of}")
    try:
        yield
    except Exception as error:  # noqa: BLE001 (each compiler has errors of its own)
        one.failed = error_line(error)


def error_line(error: BaseException) -> str:
    """In a line."""
    return (str(error).splitlines() or [type(error).__name__])[0] or type(error).__name__


def rate(one: Contestant) -> float:
    return one.amount / statistics.median(one.seconds)


def times(one: Contestant) -> Row:
    """The median of work per second, the least and the most, and what was measured. Where more than half of the time
    passes before the device has its work, it is the host that is measured."""
    rates = [one.amount / taken for taken in one.seconds]
    return {
        "unit": one.unit,
        "rate": rate(one),
        "spread": [min(rates), max(rates)],
        "milliseconds": 1e3 * statistics.median(one.seconds),
        "by_host": statistics.median(one.enqueued) > 0.5 * statistics.median(one.seconds),
        "enqueue_milliseconds": 1e3 * statistics.median(one.enqueued),
        "seconds": [float(f"{taken:.4g}") for taken in one.seconds],
    }


CEILING = "this device"  # as a contestant: what everything can be held against


def ceilings(size: int) -> Iterator[Contestant]:
    """A bfloat16 matmul of this size, and a copy."""
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    wide = jnp.zeros((size, 4 * size), jnp.float32)
    matmul = jax.jit(jnp.matmul).lower(a, a).compile()
    copy = jax.jit(lambda x: x + 1.0).lower(wide).compile()
    yield Contestant(CEILING, "product", lambda: matmul(a, a), amount=2 * size**3 / 1e12, unit="TFLOP/s")
    yield Contestant(CEILING, "copy", lambda: copy(wide), amount=2 * wide.nbytes / 1e9, unit="GB/s")


def largest_error(found: Any, wanted: Any, step: float) -> float:
    """The largest distance of all arrays, in units of the largest value of each times a step of its dtype. NaN counts
    as infinitely far."""

    @jax.jit
    def one(x: jax.Array, y: jax.Array) -> jax.Array:
        apart = jnp.abs(x.astype(jnp.float64) - y)
        far = jnp.max(apart) / (jnp.max(jnp.abs(y)) * step)
        known = jnp.all(jnp.isfinite(apart)) & jnp.isfinite(far)  # a maximum may pass NaN by, on a CPU
        return jnp.where(known, far, jnp.inf)

    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(float(one(x, y)) for x, y in pairs)
