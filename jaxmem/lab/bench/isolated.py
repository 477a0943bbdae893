"""Measurements in separate processes. A call that hangs, or makes the device unusable for its process, is skipped: the
other calls continue in a new process, which takes about ten seconds to start on a GPU."""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxmem.lab.bench.contest import Row, error_line

LIMIT = 100.0  # limit of a turn in seconds, most of which are for compilation

# work(job, done=known rows, without=names left out, say=function that reports whose turn begins) yields rows.
Work = Callable[..., Iterator[Row]]


def rows(work: Work, job: Any, *, without: list[str], limit: float | None) -> Iterator[Row]:
    """All rows of a work. A contestant whose turn exceeds the limit or ends the process is added to `without`, and a
    row states the reason. `limit=None`: measures in this process."""
    if limit is None:
        try:
            yield from work(job, done=[], without=without, say=lambda _: None)
        except Exception as error:  # noqa: BLE001 (as in a child)
            yield {"why_not": error_line(error)}
        return
    done: list[Row] = []
    while True:
        turn, why = None, None
        with _started(work, job, done, without) as (child, messages):
            while True:
                seconds = LIMIT if turn is None else limit  # the start of the process is nobody's turn
                if not messages.poll(seconds):
                    why = f"no end within {seconds:.0f} s"
                    break
                try:
                    kind, content = messages.recv()
                except EOFError:
                    child.join()
                    why = f"its process ended with code {child.exitcode}"
                    break
                if kind == "end":
                    turn, why = None, content
                    break
                if kind == "turn":
                    turn = content
                else:
                    done.append(content)
                    yield content
        if why is None:
            return
        if turn is None or turn in without:
            yield {"why_not": why}
            return
        without.append(turn)
        yield {"contestant": turn, "why_not": why}


@contextlib.contextmanager
def _started(work: Work, job: Any, done: Sequence[Row], without: Sequence[str]) -> Iterator[tuple[Any, Any]]:
    """A child process, and the pipe from it; it is killed at the end."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(theirs, work, job, list(done), tuple(without)), daemon=True)
    child.start()
    theirs.close()
    try:
        yield child, ours
    finally:
        child.kill()
        child.join()


def _run(parent: Any, work: Work, job: Any, done: list[Row], without: tuple[str, ...]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the parent has stopped reading
        why = None
        try:
            for row in work(job, done=done, without=without, say=lambda name: parent.send(("turn", name))):
                parent.send(("row", row))
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001 (the other contestants continue)
            why = error_line(error)
        parent.send(("end", why))
