"""Builds batches in a thread before they are asked for, and knows the position of what was taken."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

AHEAD = 2  # batches built or being built


class Producer(Protocol):
    def __next__(self) -> Any: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


class Ahead:
    """Takes from a producer that works in one thread; its errors appear here, when their turn comes."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer
        self._state = producer.get_state()
        self._thread = ThreadPoolExecutor(1, "jaxmem-data")
        self._pending: deque[Future[tuple[Any, Any]]] = deque()

    def __next__(self) -> Any:
        while len(self._pending) <= AHEAD:
            self._pending.append(self._thread.submit(self._build))
        item, self._state = self._pending.popleft().result()
        return item

    def _build(self) -> tuple[Any, Any]:
        return next(self._producer), self._producer.get_state()

    def get_state(self) -> Any:
        """Of the producer after the last item taken."""
        return self._state

    def set_state(self, state: Any) -> None:
        self._drop()
        self._producer.set_state(state)
        self._state = state

    def _drop(self) -> None:
        for future in self._pending:
            future.cancel()
        wait(self._pending)
        self._pending.clear()

    def close(self) -> None:
        self._drop()
        self._thread.shutdown()
