"""Contestants that take turns: medians of bursts of calls, so that what else the device does meanwhile slows all."""

from __future__ import annotations

import contextlib
import importlib.metadata
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

Call = Callable[[], Any]  # starts work on the device and gives what it will come to
BURST = 0.02  # s of calls between two looks at the clock
FEWEST = 5  # bursts of each, however little time there is
RIGHT = 8.0  # steps of error beyond which nobody wins
REFUSALS = (ValueError, TypeError, RuntimeError, NotImplementedError)  # what one cannot do is a result too


@dataclass
class Contestant:
    name: str
    calls: dict[str, Call]  # by the name of the pass
    wait: Callable[[Any], Any] = jax.block_until_ready
    seconds: dict[str, list[float]] = field(init=False)

    def __post_init__(self) -> None:
        self.seconds = {name: [] for name in self.calls}


def take_turns(contestants: Sequence[Contestant], seconds: float) -> None:
    """Bursts of calls, as many as take `BURST`, until the time is over; at least `FEWEST` of each."""
    bursts: dict[tuple[str, str], int] = {}
    for one in contestants:
        for name in one.calls:
            _burst(one, name, 1)  # warm
            bursts[one.name, name] = max(1, round(BURST / _burst(one, name, 3)))
    end, turn = time.perf_counter() + seconds, 0
    while turn < FEWEST or time.perf_counter() < end:
        for one in contestants:
            for name, taken in one.seconds.items():
                taken.append(_burst(one, name, bursts[one.name, name]))
        turn += 1


def rates(work: float, taken: Sequence[float]) -> dict[str, Any]:
    """Of so much work each time: the median a second, the least and the most."""
    found = [work / seconds for seconds in taken]
    return {"rate": statistics.median(found), "spread": [min(found), max(found)]}


def _burst(one: Contestant, name: str, calls: int) -> float:
    """Seconds a call."""
    call = one.calls[name]
    start = time.perf_counter()
    for _ in range(calls - 1):
        call()
    one.wait(call())
    return (time.perf_counter() - start) / calls


def ceilings(size: int) -> dict[str, float]:
    """TFLOP/s of a bfloat16 matrix product of this size, GB/s of a copy."""
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    wide = jnp.zeros((size, 4 * size), jnp.float32)
    product = jax.jit(jnp.matmul).lower(a, a).compile()
    copy = jax.jit(lambda x: x + 1.0).lower(wide).compile()
    one = Contestant("ceiling", {"product": lambda: product(a, a), "copy": lambda: copy(wide)})
    take_turns([one], 1.0)
    best = {name: min(taken) for name, taken in one.seconds.items()}
    return {
        "matmul_tflops": 2 * size**3 / best["product"] / 1e12,
        "copy_gb_s": 2 * wide.nbytes / best["copy"] / 1e9,
    }


def version(package: str) -> dict[str, str]:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return {package: importlib.metadata.version(package)}
    return {}


def largest_error(found: Any, wanted: Any, step: float) -> float:
    """The largest distance of all arrays, in units of the largest value of each times a step of its dtype. NaN counts
    as infinitely far."""

    def one(x: jax.Array, y: jax.Array) -> float:
        far = jnp.max(jnp.abs(jnp.asarray(x, jnp.float64) - y)) / (jnp.max(jnp.abs(y)) * step)
        return float(jnp.where(jnp.isnan(far), jnp.inf, far))

    return max(map(one, jax.tree.leaves(found), jax.tree.leaves(wanted)))
