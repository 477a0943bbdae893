"""Signals that ask a run to stop: it finishes the step, saves, and exits.

SIGTERM comes from schedulers and `kill`, SIGINT from Ctrl-C, SIGUSR1 from a scheduler whose time limit is near. The
first signal only sets a flag that the loop reads after each step. The exit code is 0 after SIGTERM (a clean stop is a
success for its sender, and a printed line says that the run is not finished), 130 after Ctrl-C, as shells expect, and
75 (EX_TEMPFAIL) after SIGUSR1: the same command should be queued again. A second signal has its default effect: it
kills the process at once, even in compiled code; checkpoints on disk are complete at any moment.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from jaxmem.distributed.join import end_all
from jaxmem.errors import TemporaryError

EXIT_CODES = {signal.SIGTERM: 0, signal.SIGINT: 128 + signal.SIGINT, signal.SIGUSR1: TemporaryError.exit_code}


@contextmanager
def requeued_before_training() -> Iterator[None]:
    """A context for everything before the loop, in which SIGUSR1 ends the process with the same exit code as later. The
    handler exits instead of raising, since a library may catch or print an exception that is raised anywhere."""

    def end(number: int, frame: FrameType | None) -> None:
        del number, frame
        error = TemporaryError("SIGUSR1 before the first step, nothing was trained; run the same command again")
        end_all(error)  # with several processes, all of them
        os.write(2, f"error: {error}\n".encode())
        os._exit(error.exit_code)

    in_main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGUSR1, end) if in_main_thread else None
    try:
        yield
    finally:
        if in_main_thread:
            _restore(signal.SIGUSR1, before)


class StopSignal:
    """A context for the loop, not for compilation: before there is a state to save, Ctrl-C should end the process. The
    loop reads `requested` after each step. Python allows signal handlers only in the main thread; in other threads this
    does nothing.
    """

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def from_any_process(self, number: int) -> bool:
        """Whether any process was asked to stop. `number`: the largest signal of all processes, which all use."""
        if number:
            self.requested = signal.Signals(number)
        return number != 0

    @property
    def exit_code(self) -> int:
        return 0 if self.requested is None else EXIT_CODES[self.requested]

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in EXIT_CODES}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            _restore(number, handler)
        self._before = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.requested = signal.Signals(number)
        for each in EXIT_CODES:
            signal.signal(each, signal.SIG_DFL)
        # print() is not reentrant, and the signal may interrupt one.
        os.write(2, f"\n{self.requested.name}: finishing this step and saving; again to stop at once\n".encode())


def _restore(number: signal.Signals, handler: Any) -> None:
    """Restores a handler. `None`: it was not set in Python and cannot be restored."""
    signal.signal(number, signal.SIG_DFL if handler is None else handler)
