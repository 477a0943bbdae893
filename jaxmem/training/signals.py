"""Signals that ask a run to stop: it finishes the step, saves, and exits.

SIGTERM comes from schedulers and `kill`, SIGINT from Ctrl-C, SIGUSR1 from a scheduler whose time limit is near. The
first signal only sets a flag that the loop reads after each step. The exit code is 0 after SIGTERM (the run stopped as
its sender asked; a printed line says that it is not finished), 130 after Ctrl-C, as shells expect, and 75 (EX_TEMPFAIL)
after SIGUSR1: the same command should be queued again. A second signal has its default effect: it kills the process at
once, even in compiled code; checkpoints on disk are complete at any moment.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Self

from jaxmem.distributed.join import end_all
from jaxmem.errors import TemporaryError

EXIT_CODES = {signal.SIGTERM: 0, signal.SIGINT: 128 + signal.SIGINT, signal.SIGUSR1: TemporaryError.exit_code}


@contextmanager
def _handling(handler: Callable[[int], None], *numbers: signal.Signals) -> Iterator[None]:
    """A context in which these signals call a handler. Python allows handlers only in the main thread; in other threads
    this does nothing."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, lambda n, _: handler(n)) for number in numbers if is_main}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)  # None: the old handler was not set in Python


def requeued_before_training() -> AbstractContextManager[None]:
    """A context for everything before and after the loop, in which SIGUSR1 ends the process with the exit code that it
    has during the loop. The handler exits instead of raising, since a library may catch an exception that is raised
    anywhere."""

    def end(_: int) -> None:
        error = TemporaryError("SIGUSR1 before the first or after the last step; run the same command again")
        end_all(error)  # with several processes, all of them
        os.write(2, f"error: {error}\n".encode())
        os._exit(error.exit_code)

    return _handling(end, signal.SIGUSR1)


class StopSignal:
    """A context for the loop, which reads `requested` after each step. Compilation is outside of it: before there is a
    state to save, Ctrl-C ends the process."""

    def __init__(self) -> None:
        self.requested: signal.Signals | None = None
        self._handlers = _handling(self._handle, *EXIT_CODES)

    def from_any_process(self, number: int) -> bool:
        """Whether any process was asked to stop. `number`: the largest signal number of all processes; all use it."""
        if number:
            self.requested = signal.Signals(number)
        return number != 0

    @property
    def exit_code(self) -> int:
        return 0 if self.requested is None else EXIT_CODES[self.requested]

    def __enter__(self) -> Self:
        self._handlers.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._handlers.__exit__(None, None, None)

    def _handle(self, number: int) -> None:
        self.requested = signal.Signals(number)
        for signal_number in EXIT_CODES:
            signal.signal(signal_number, signal.SIG_DFL)
        # print() is not reentrant, and the signal may interrupt one.
        os.write(2, f"\n{self.requested.name}: finishing this step and saving; again to stop at once\n".encode())
