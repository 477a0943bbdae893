"""Real processes on this machine, told of each other as a user would tell them."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from jaxmem.distributed.launch import environments


@dataclass
class Processes:
    """Each with its output, standard error included, in a file."""

    all: list[subprocess.Popen[bytes]]
    logs: list[Path]

    def said(self, process: int) -> str:
        return self.logs[process].read_text(errors="replace")

    def until(self, done: Callable[[], bool], seconds: float = 240.0) -> None:
        end = time.monotonic() + seconds
        while not done():
            assert time.monotonic() < end, "\n".join(self.said(n)[-2000:] for n in range(len(self.all)))
            for number, process in enumerate(self.all):
                assert process.poll() in (None, 0), self.said(number)[-2000:]
            time.sleep(0.05)

    def codes(self, seconds: float = 240.0) -> list[int]:
        """The exit codes, when all have ended."""
        end = time.monotonic() + seconds
        return [process.wait(timeout=max(end - time.monotonic(), 0.1)) for process in self.all]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Processes]]:
    """started(command, processes, devices of each): some may be left out."""
    running: list[subprocess.Popen[bytes]] = []

    def start(command: Sequence[str], processes: int, devices: int, without: Sequence[int] = ()) -> Processes:
        made, logs = [], []
        for number, environment in enumerate(environments(processes, devices)):
            if number in without:
                continue
            logs.append(tmp_path / f"process-{number}.log")
            with logs[-1].open("wb") as log:
                made.append(subprocess.Popen(command, env=os.environ | environment, stdout=log, stderr=log))
        running.extend(made)
        return Processes(made, logs)

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], list[str]]:
    """The command that runs this text."""

    def write(text: str) -> list[str]:
        file = tmp_path / "program.py"
        file.write_text(text)
        return [sys.executable, str(file)]

    return write
