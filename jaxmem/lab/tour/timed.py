"""How long a function takes here: of a processor on a CPU, which others use as well, of the clock on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def seconds(run: Callable[..., Any], *given: Any, times: int = 3) -> float:
    """The shortest of some calls, after one that compiles."""
    import jax

    clock = time.process_time if jax.default_backend() == "cpu" else time.perf_counter
    jax.block_until_ready(run(*given))
    taken = []
    for _ in range(times):
        started = clock()
        jax.block_until_ready(run(*given))
        taken.append(clock() - started)
    return min(taken)


def where() -> str:
    """What is timed, for a table's title."""
    import jax

    return "of a processor" if jax.default_backend() == "cpu" else f"on {jax.devices()[0].device_kind}"
