"""A JAX profile of some steps, for TensorBoard or Perfetto."""

from pathlib import Path
from typing import Any, Self

import jax


class Profile:
    """`train.profile: [first, last]` records those steps, both included, into `directory`."""

    def __init__(self, directory: Path, steps: tuple[int, int] | None) -> None:
        self._directory, self._running = directory, False
        self._first, self._last = steps or (0, 0)

    def before(self, step: int) -> None:
        if step == self._first:
            jax.profiler.start_trace(self._directory)
            self._running = True

    def after(self, step: int, results: Any) -> None:
        """Waits for the last profiled step, so that all of it is recorded."""
        if self._running and step == self._last:
            jax.block_until_ready(results)
            self.__exit__()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
