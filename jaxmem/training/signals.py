"""Being asked to stop: finish the step, save, leave.

SIGTERM is how schedulers and `kill` ask, SIGINT is Ctrl-C, SIGUSR1 is how a scheduler tells that the time it gave is
nearly over. The first only sets a flag that the loop looks at after each step. A clean stop is success for who sent
SIGTERM (exit code 0, and a printed line says that the run is not finished), 130 after Ctrl-C, as shells expect, and 75
(EX_TEMPFAIL) after SIGUSR1: queue the same command again. The second signal has the system's own effect: it kills at
once, also inside compiled code, where no Python runs; what is on disk is whole at any moment.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from jaxmem.errors import TemporaryError

EXIT_CODES = {signal.SIGTERM: 0, signal.SIGINT: 128 + signal.SIGINT, signal.SIGUSR1: TemporaryError.exit_code}


@contextmanager
def nothing_to_save() -> Iterator[None]:
    """Around what comes before the loop: there SIGUSR1 ends the run with the same code as it does later."""

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise TemporaryError("SIGUSR1 came before the first step; the same command goes on")

    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGUSR1, end) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL if before is None else before)


class Stop:
    """with Stop() as stop:
        for step in ...:
            ...
            if stop.requested:
                save; break
    sys.exit(stop.exit_code)

    Put it around the loop, not around compiling: before there is something to save, Ctrl-C should just end. Python
    lets only the main thread handle signals; elsewhere this does nothing, and whoever owns the main thread decides.
    """

    def __init__(self, say: bool = True) -> None:
        self.requested: signal.Signals | None = None
        self._say = say
        self._before: dict[signal.Signals, Any] = {}

    def agreed(self, number: int) -> bool:
        """Whether any process was asked; `number` is the largest of their signals, and counts for all."""
        if number:
            self.requested = signal.Signals(number)
        return number != 0

    @property
    def exit_code(self) -> int:
        return 0 if self.requested is None else EXIT_CODES[self.requested]

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in EXIT_CODES}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: what was there was not set from Python, and cannot be put back from it
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.requested = signal.Signals(number)
        for each in EXIT_CODES:
            signal.signal(each, signal.SIG_DFL)
        if self._say:  # print() is not safe here: the signal may have come in the middle of one
            os.write(2, f"\n{self.requested.name}: finishing this step and saving; once more stops at once\n".encode())
