"""The first signal sets a flag; the second kills."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from jaxmem.training.signals import StopSignal, requeued_before_training


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130), (signal.SIGUSR1, 75)])
def test_the_first_is_recorded_and_handlers_come_back(
    number: signal.Signals, code: int, capfd: pytest.CaptureFixture
) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
    with StopSignal() as stop:
        assert stop.requested is None
        assert stop.exit_code == 0
        os.kill(os.getpid(), number)
        assert stop.requested is number
        assert stop.exit_code == code
        assert signal.getsignal(number) is signal.SIG_DFL
    assert {each: signal.getsignal(each) for each in before} == before
    assert capfd.readouterr().err.strip() == f"{number.name}: finishing this step and saving; again to stop at once"


def test_what_another_process_was_asked_counts_here() -> None:
    with StopSignal() as stop:
        assert not stop.from_any_process(0)
        assert stop.exit_code == 0
        assert stop.from_any_process(signal.SIGUSR1)
        assert stop.exit_code == 75


BEFORE = """
import os, signal
from jaxmem.training.signals import StopSignal, requeued_before_training
with requeued_before_training():
    with StopSignal() as stop:  # the loop has begun, and ended
        os.kill(os.getpid(), signal.SIGUSR1)
    print(stop.exit_code, flush=True)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        print("an exception")
"""


def test_before_there_is_something_to_save() -> None:
    done = subprocess.run([sys.executable, "-c", BEFORE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (75, "75\n")
    assert "error: SIGUSR1 before the first or after the last step" in done.stderr
    before = signal.getsignal(signal.SIGUSR1)
    with requeued_before_training():
        assert signal.getsignal(signal.SIGUSR1) != before
    assert signal.getsignal(signal.SIGUSR1) == before


def test_other_threads_leave_the_handlers_alone() -> None:
    seen = []

    def run() -> None:
        with StopSignal() as stop:
            seen.append((signal.getsignal(signal.SIGTERM), stop.requested))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(signal.getsignal(signal.SIGTERM), None)]


LOOP = """
import sys, time
from jaxmem.training.signals import StopSignal
with StopSignal() as stop:
    print("ready", flush=True)
    while not stop.requested or sys.argv[1] == "deaf":
        time.sleep(0.01)
print("saved")
sys.exit(stop.exit_code)
"""


@pytest.mark.parametrize(("ears", "times", "code", "said"), [("open", 1, 0, "saved"), ("deaf", 2, -signal.SIGTERM, "")])
def test_the_second_kills(ears: str, times: int, code: int, said: str) -> None:
    loop = subprocess.Popen(
        [sys.executable, "-c", LOOP, ears], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert loop.stdout is not None
    assert loop.stderr is not None
    assert loop.stdout.readline() == "ready\n"
    for time in range(times):
        loop.send_signal(signal.SIGTERM)
        if time == 0:
            assert loop.stderr.readline() == "\n"
            assert loop.stderr.readline().startswith("SIGTERM: finishing this step")
    out, _ = loop.communicate(timeout=20)
    assert loop.returncode == code
    assert out.strip() == said
