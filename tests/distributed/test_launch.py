"""Processes that are started together: what they are told, how they print, and that none is left behind."""

import asyncio
import io
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxmem.distributed import launch as launching
from jaxmem.distributed.launch import environments, launch
from jaxmem.errors import UserError

WAIT = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(60)"


def launched(text: str, processes: int, restarts: int = 0, **patience: float) -> subprocess.CompletedProcess[str]:
    """The launcher forks, so it is given a process of its own. All processes run the text."""
    code = (
        "import sys; from jaxmem.distributed import launch as launching;"
        f"vars(launching).update({patience}); command = [sys.executable, '-c', sys.argv[1]];"
        f"sys.exit(launching.launch(command, {processes}, devices=2, restarts={restarts}))"
    )
    return subprocess.run([sys.executable, "-c", code, text], capture_output=True, text=True, timeout=50, check=False)


def test_every_process_gets_its_index() -> None:
    text = "import os; print(*(os.environ[f'JAX_{n}'] for n in ('PROCESS_ID', 'NUM_PROCESSES', 'NUM_CPU_DEVICES')))"
    done = launched(text, 3)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[0] 0 3 2", "[1] 1 3 2", "[2] 2 3 2"]


def test_lines_of_gloo_are_not_forwarded() -> None:
    done = launched("print('[Gloo] Rank 0 is connected to 1 peer ranks.'); print('[Gloo] an error')", 1)
    assert done.stdout == "[0] [Gloo] an error\n"


def test_gpus_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "visible_gpus", lambda: 8)
    told = environments(2, None)
    assert [one["JAX_LOCAL_DEVICE_IDS"] for one in told] == ["0,1,2,3", "4,5,6,7"]
    assert len({one["JAX_COORDINATOR_ADDRESS"] for one in told}) == 1
    with pytest.raises(UserError, match=r"3 processes cannot share 8 GPUs equally; use -n 1 or 2 or 4 or 8"):
        environments(3, None)


def test_output_continues_after_a_line_that_is_too_long() -> None:
    async def copied() -> str:
        source = asyncio.StreamReader(limit=8)
        target = io.StringIO()
        copy = asyncio.create_task(launching._copy(source, target, "[0] "))
        for part in (b"before\n", b"x" * 20, b"x" * 20 + b"\n", b"after"):
            source.feed_data(part)
            await asyncio.sleep(0)
        source.feed_eof()
        await copy
        return target.getvalue()

    lines = asyncio.run(copied()).splitlines()
    assert (lines[0], lines[-1]) == ("[0] before", "[0] after")
    assert "[0] (a line that is too long)" in lines


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [("sys.exit(3)", 3, "exited with 3"), ("os.kill(os.getpid(), 9)", 137, "killed by SIGKILL")],
)
def test_the_first_to_fail_stops_the_others(how: str, code: int, said: str) -> None:
    text = f"import os, sys, time\nif os.environ['JAX_PROCESS_ID'] == '1': {how}\ntime.sleep(60)"
    done = launched(text, 2, GRACE_SECONDS=0.2)
    assert done.returncode == code
    assert done.stderr == f"launch: process 1 of 2 {'was ' * (code > 128)}{said}; stopping the others\n"


def test_those_that_are_left_start_again_in_a_number_that_divides_the_first() -> None:
    text = "import os\nif os.environ['JAX_PROCESS_ID'] == '2': os.kill(os.getpid(), 9)\n"
    done = launched(text + "print(os.environ['JAX_NUM_PROCESSES'])", 4, restarts=1)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-2:] in (["[0] 2", "[1] 2"], ["[1] 2", "[0] 2"])
    assert "launch: starting again with 2 of 4 processes\n" in done.stderr


@pytest.mark.exhaustive
def test_one_that_will_not_stop_is_killed() -> None:
    text = (
        "import os, signal, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.environ['JAX_PROCESS_ID'] == '1': time.sleep(1); sys.exit(4)\ntime.sleep(60)"
    )
    assert launched(text, 2, GRACE_SECONDS=0.2, TERM_TIMEOUT=0.5).returncode == 4


@pytest.mark.exhaustive
def test_a_frozen_process_ends_seconds_after_another_has_failed() -> None:
    text = (
        "import os, signal, sys, time\nif os.environ['JAX_PROCESS_ID'] == '0': os.kill(os.getpid(), signal.SIGSTOP)\n"
        "time.sleep(1); print(time.time(), flush=True); sys.exit(75)"
    )
    done = launched(text, 2)
    assert done.returncode == 75
    assert time.time() - float(done.stdout.split()[-1]) < 10


def running(pids: list[int]) -> list[int]:
    """Those that still run; a zombie has a state of its own."""
    found = []
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
            found.append(pid)
    return found


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 138), (signal.SIGKILL, -9)])
def test_signals_are_passed_on_and_nobody_is_left(number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-m", "jaxmem", "launch", "-n", "2", "--devices", "1", "--", sys.executable, "-c", WAIT]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert launcher.stdout is not None
    pids = [int(launcher.stdout.readline().split("] ")[1]) for _ in range(2)]
    launcher.send_signal(number)
    assert launcher.wait(timeout=60) == code
    end = time.monotonic() + 20
    while running(pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not running(pids)
    launcher.stdout.close()


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(UserError, match="launch: the command is missing"):
        launch([], 2)
    command = [sys.executable, "-m", "jaxmem", "launch", "-n", "2", "--devices", "1", "--", "no-such-command"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: launch: cannot start no-such-command: No such file or directory\n"
