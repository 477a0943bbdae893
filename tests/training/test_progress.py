"""Numbers that are right by a clock of our own, and lines that any terminal can show."""

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from jaxmem.training import progress as module
from jaxmem.training.progress import PipeSafeConsole, Progress, RunSpec, Work

WORK = Work(1000, 6e9)
ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def console(width: int, terminal: bool, encoding: str = "utf-8") -> tuple[PipeSafeConsole, Callable[[], str]]:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    made = PipeSafeConsole(
        file=file, width=width, force_terminal=terminal, legacy_windows=False, _environ={"TERM": "xterm"}
    )
    return made, lambda: raw.getvalue().decode(encoding)


def test_rates_by_a_clock() -> None:
    clock = Clock()
    screen, shown = console(200, terminal=False)
    with Progress(RunSpec(20, 2.4e10, log_every=2), console=screen, clock=clock) as progress:
        clock.now += 1.0
        assert progress.update(1, {"loss": 5.0}, WORK) is None
        clock.now += 1.0
        row = progress.update(2, {"loss": 4.0}, WORK)
        assert row == {
            "step": 2, "loss": 4.0, "tokens": 2000, "seconds": 2.0, "tokens_per_second": 1000.0, "mfu": 0.25
        }  # fmt: skip
        with progress.paused():
            clock.now += 6.0
        clock.now += 1.0
        row = progress.update(4, {"loss": 3.0}, Work(2000, 12e9))
        assert row is not None
        assert row["tokens_per_second"] == 2000.0  # the pause is not in it
        assert row["seconds"] == 9.0  # here it is
    assert shown().splitlines() == [
        "step 2/20  loss 4  1 k tok/s  0:00:18 left  25% MFU",
        "step 4/20  loss 3  2 k tok/s  0:00:36 left  50% MFU",
    ]


def test_a_resumed_run_counts_from_where_it_stands() -> None:
    clock = Clock()
    screen, shown = console(200, terminal=False)
    with Progress(
        RunSpec(110, unit="row", step=100, seconds=500.0, tokens=1000), console=screen, clock=clock
    ) as progress:
        clock.now += 2.0
        row = progress.update(101, {}, Work(10))
    assert row == {"step": 101, "tokens": 1010, "seconds": 502.0, "tokens_per_second": 5.0}
    assert shown() == "step 101/110  5 row/s  0:00:18 left\n"


def test_steps_of_unequal_work_are_counted_as_they_are() -> None:
    clock = Clock()
    spec = RunSpec(110, 2.4e10, log_every=2, step=100, tokens=70)
    with Progress(spec, enabled=False, clock=clock) as progress:
        clock.now += 1.0
        assert progress.update(101, {}, Work(10, 1e9)) is None
        clock.now += 1.0
        row = progress.update(102, {}, Work(30, 5e9))
    assert row == {"step": 102, "tokens": 110, "seconds": 2.0, "tokens_per_second": 20.0, "mfu": 0.125}


def test_memory_is_that_of_the_device_with_the_most(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device:
        def __init__(self, used: int) -> None:
            self.used = used

        def memory_stats(self) -> dict[str, int]:
            return {"bytes_in_use": self.used, "peak_bytes_in_use": 3 * self.used, "bytes_limit": 1 << 40}

    assert module.device_memory() == {}  # CPUs do not
    monkeypatch.setattr(module.jax, "local_devices", lambda: [Device(1 << 30), Device(5 << 29)])
    screen, shown = console(200, terminal=False)
    row = Progress(RunSpec(9), console=screen, clock=Clock()).update(1, {"loss": 1.0}, WORK)
    assert row is not None
    assert (row["bytes_in_use"], row["peak_bytes_in_use"]) == (5 << 29, 15 << 29)
    assert shown().endswith("  2.5 GiB\n")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_a_bar_fits_its_terminal(width: int, encoding: str) -> None:
    clock = Clock()
    screen, shown = console(width, terminal=True, encoding=encoding)
    with Progress(RunSpec(100_000, 1e12), console=screen, clock=clock) as progress:
        for step in (1, 50_000, 99_999):
            clock.now += 3600.0
            progress.update(step, {"loss": 3.14159}, WORK)
            screen.print(progress._live)  # as the drawing thread does, now
    lines = [line for line in re.split(r"[\r\n]+", ANSI.sub("", shown())) if line.strip()]
    assert max(map(len, lines)) < width
    last = lines[-1]
    assert last.startswith("99999/100000")
    assert ("loss 3.1416" in last) == (width >= 40)
    assert ("MFU" in last) == (width >= 80)
    assert (("----" if encoding == "ascii" else "━━━━") in last) == (width >= 80)


def test_silent_where_it_is_not_the_first_process() -> None:
    screen, shown = console(80, terminal=True)
    with Progress(RunSpec(9), enabled=False, console=screen, clock=Clock()) as progress:
        row = progress.update(1, {"loss": 1.0}, Work(10))
        progress.say("hello")
    assert row is not None
    assert row["tokens"] == 10
    assert shown() == ""


def test_a_closed_output_does_not_stop_training() -> None:
    class Broken(io.StringIO):
        error: OSError | None = None

        def write(self, text: str) -> int:
            if self.error:
                raise self.error
            return len(text)

    for error, terminal in ((BrokenPipeError(), False), (BrokenPipeError(), True), (OSError(28, "full"), False)):
        file = Broken()
        with Progress(
            RunSpec(9), console=PipeSafeConsole(file=file, force_terminal=terminal), clock=Clock()
        ) as progress:
            file.error = error
            for step in (1, 2):
                assert progress.update(step, {"loss": 1.0}, WORK) is not None
                progress.say("still here")


RUN = """
from jaxmem.training.progress import Progress, RunSpec, Work
with Progress(RunSpec(300)) as progress:
    progress.say("Läufe: runs/é")
    for step in (100, 200, 300):
        progress.update(step, {"loss": 2.5}, Work(2048))
"""


@pytest.mark.parametrize("kind", ["pipe", "dumb", "xterm"])
def test_on_real_outputs_without_a_locale(kind: str) -> None:
    """A pipe and a dumb terminal get lines, a terminal a bar; 40 columns, and nothing but ASCII."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTEST"))}
    environment |= {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "COLUMNS": "40", "LINES": "24"}
    environment["TERM"] = "xterm" if kind == "pipe" else kind
    command = [sys.executable, "-c", RUN]
    if kind == "pipe":
        done = subprocess.run(command, env=environment, capture_output=True, check=True)
        text, errors = done.stdout.decode("ascii"), done.stderr
    else:
        ours, theirs = pty.openpty()
        process = subprocess.Popen(command, env=environment, stdout=theirs, stderr=subprocess.PIPE)
        os.close(theirs)
        text = read_all(ours).decode("ascii")
        errors = process.communicate()[1]
        assert process.returncode == 0
    assert errors == b""
    lines = [line for line in re.split(r"[\r\n]+", ANSI.sub("", text)) if line.strip()]
    assert lines[0] == "L\\xe4ufe: runs/\\xe9"
    assert ("\x1b" in text) == (kind == "xterm")
    if kind == "xterm":
        assert "300/300" in lines[-1]
    else:
        assert [line.split()[1] for line in lines[1:]] == ["100/300", "200/300", "300/300"]
    if kind == "xterm":
        assert max(map(len, lines)) <= 40
        assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back


def read_all(terminal: int) -> bytes:
    found: list[Any] = []
    while True:
        try:
            found.append(os.read(terminal, 1 << 16))
        except OSError:  # how Linux says that the other side has closed
            found.append(b"")
        if not found[-1]:
            os.close(terminal)
            return b"".join(found)
