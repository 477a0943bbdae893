"""Work in a process of its own, watched: what hangs, or breaks the device for its process, costs itself and the time to
start another, in which the rest goes on. With a GPU that is about ten seconds."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxmem.lab.bench.contest import Row, error_line

LIMIT = 100.0  # s that a turn may take: its compilation is most of it

# work(job, done=rows of it that there are, without=names left out, say=whose turn begins) gives rows.
Work = Callable[..., Iterator[Row]]


def rows(work: Work, job: Any, *, without: list[str], limit: float | None) -> Iterator[Row]:
    """All rows of a work. Whose turn does not end within the limit, or ends the process, is left out from then on:
    `without` grows, and the row says why. No limit: in this process."""
    if limit is None:
        try:
            yield from work(job, done=[], without=without, say=lambda _: None)
        except Exception as error:  # noqa: BLE001 (as in a child)
            yield {"why_not": error_line(error)}
        return
    done: list[Row] = []
    while True:
        watched = _Watched(work, job, done, without, limit)
        for row in watched:
            done.append(row)
            yield row
        if watched.why is None:
            return
        if watched.who is None or watched.who in without:
            yield {"why_not": watched.why}
            return
        without.append(watched.who)
        yield {"contestant": watched.who, "why_not": watched.why}


class _Watched:
    """A child's rows; afterwards why it did not end well, if so, and whose turn it was."""

    def __init__(self, work: Work, job: Any, done: Sequence[Row], without: Sequence[str], limit: float) -> None:
        self.given = (work, job, list(done), tuple(without))
        self.limit = limit
        self.who: str | None = None
        self.why: str | None = None

    def __iter__(self) -> Iterator[Row]:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(theirs, *self.given), daemon=True)
        child.start()
        theirs.close()
        try:
            while True:
                limit = LIMIT if self.who is None else self.limit  # nobody's turn while it starts
                if not ours.poll(limit):
                    self.why = f"no end within {limit:.0f} s"
                    return
                kind, what = ours.recv()
                if kind == "row":
                    yield what
                elif kind == "turn":
                    self.who = what
                else:
                    self.who, self.why = None, what
                    return
        except EOFError:
            child.join()
            self.why = f"its process ended with {child.exitcode}"
        finally:
            child.kill()
            child.join()


def _child(parent: Any, work: Work, job: Any, done: list[Row], without: tuple[str, ...]) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        why = None
        try:
            for row in work(job, done=done, without=without, say=lambda who: parent.send(("turn", who))):
                parent.send(("row", row))
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001 (whatever it is, the others go on)
            why = error_line(error)
        parent.send(("end", why))
