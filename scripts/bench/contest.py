"""Measures implementations (contestants) alternately: each runs a short burst of calls, then the next one does, and the
result is the median over its bursts. So other load on the device slows all of them. A contestant that fails, e.g. for
lack of memory, is left out, and the others continue."""

import contextlib
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

Call = Callable[[], Any]  # starts work on the device; returns its future result
Say = Callable[[str], None]  # tells the parent process which contestant's turn begins
Row = dict[str, Any]
BURST_SECONDS = 0.02  # seconds of a burst
MIN_BURSTS = 5  # least number of bursts of each contestant
MAX_ERROR = 8.0  # largest error of a correct result, in steps (`BenchPass.step`)


@dataclass
class Contestant:
    """An implementation of one pass. Each `call` does `amount` of work, in TFLOP or GB.

    `seconds` and `enqueued` have one element per burst: the seconds per call, and the seconds until the first call
    returned.
    """

    name: str
    of: str  # the name of the measured pass
    call: Call
    amount: float = 1.0
    unit: str = ""  # the unit of amount per second
    seconds: list[float] = field(default_factory=list)
    enqueued: list[float] = field(default_factory=list)
    failed: str | None = None

    def burst(self, calls: int) -> tuple[float, float]:
        """Seconds per call, and seconds until the first call was enqueued, starting with an idle device."""
        start = time.perf_counter()
        result = self.call()
        enqueued = time.perf_counter() - start
        for _ in range(calls - 1):
            result = self.call()
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / calls, enqueued

    @property
    def rate(self) -> float:
        return self.amount / statistics.median(self.seconds)

    def times(self) -> Row:
        """The median, minimum and maximum of work per second, and the times. `by_host`: whether enqueuing took more
        than half of the time, so that the host limits the speed."""
        rates = [self.amount / seconds for seconds in self.seconds]
        seconds = statistics.median(self.seconds)
        enqueued = statistics.median(self.enqueued)
        return {
            "unit": self.unit,
            "rate": self.rate,
            "spread": [min(rates), max(rates)],
            "milliseconds": 1e3 * seconds,
            "by_host": enqueued > 0.5 * seconds,
            "enqueue_milliseconds": 1e3 * enqueued,
            "seconds": [float(f"{duration:.4g}") for duration in self.seconds],
        }


def take_turns(contestants: Sequence[Contestant], seconds: float, say: Say) -> None:
    """Runs alternating bursts of `BURST_SECONDS` for `seconds`, but at least `MIN_BURSTS` bursts of each contestant."""
    bursts: dict[int, int] = {}
    for contestant in contestants:
        with _record_failure(contestant, say):
            contestant.burst(1)  # warms up
            bursts[id(contestant)] = max(1, round(BURST_SECONDS / contestant.burst(3)[0]))
    end = time.perf_counter() + seconds
    turn = 0
    while turn < MIN_BURSTS or time.perf_counter() < end:
        left = [contestant for contestant in contestants if contestant.failed is None]
        if not left:
            return
        for contestant in left:
            with _record_failure(contestant, say):
                duration, enqueued = contestant.burst(bursts[id(contestant)])
                contestant.seconds.append(duration)
                contestant.enqueued.append(enqueued)
        turn += 1


@contextlib.contextmanager
def _record_failure(contestant: Contestant, say: Say) -> Iterator[None]:
    """A context in which an error excludes this contestant, but does not end the measurement."""
    say(f"{contestant.name} {contestant.of}")
    try:
        yield
    except Exception as error:  # noqa: BLE001 (each compiler has errors of its own)
        contestant.failed = error_line(error)


def error_line(error: BaseException) -> str:
    """The first line of an error, or the name of its class."""
    lines = [line for line in str(error).splitlines() if line] or [type(error).__name__]
    return lines[-1 if "Traceback" in lines[0] else 0]  # the error of a callback ends with its message


CEILING = "this device"  # the contestant that measures the limits of the device


def ceilings(size: int) -> Iterator[Contestant]:
    """A bfloat16 matmul of this size, and a copy."""
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    wide = jnp.zeros((size, 4 * size), jnp.float32)
    matmul = jax.jit(jnp.matmul).lower(a, a).compile()
    copy = jax.jit(lambda x: x + 1.0).lower(wide).compile()
    yield Contestant(CEILING, "matmul", lambda: matmul(a, a), amount=2 * size**3 / 1e12, unit="TFLOP/s")
    yield Contestant(CEILING, "copy", lambda: copy(wide), amount=2 * wide.nbytes / 1e9, unit="GB/s")


MAX_TURN_SECONDS = 100.0  # limit of a turn in seconds, most of which are for compilation

# ---------------------------------------------------------------- in separate processes
# A call that hangs, or makes the device unusable for its process, is skipped: the other calls continue in a new
# process, which takes about ten seconds to start on a GPU.

# work(job, done=known rows, without=names left out, say=function that reports whose turn begins) yields rows.
RowSource = Callable[..., Iterator[Row]]


def isolated_rows(work: RowSource, job: Any, *, without: list[str], limit: float | None) -> Iterator[Row]:
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
                seconds = MAX_TURN_SECONDS if turn is None else limit  # the start of the process is nobody's turn
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
def _started(work: RowSource, job: Any, done: Sequence[Row], without: Sequence[str]) -> Iterator[tuple[Any, Any]]:
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


def _run(parent: Any, work: RowSource, job: Any, done: list[Row], without: tuple[str, ...]) -> None:
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
