"""P processes of one command on a host without a scheduler: `jaxmem launch -n 2 -- jaxmem train ...`.

Each process gets JAX's variables and its share of the GPUs, or simulated devices. Their output is forwarded line by
line with the number of the process; signals are forwarded. The first process that fails stops the others, and its exit
code is that of the launcher: 128 + N if signal N killed it. No process keeps running.
"""

import ctypes
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, Any, Self

from jaxmem.distributed.cluster import visible_gpus
from jaxmem.errors import UserError
from jaxmem.machine.devices import simulation_environment

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
GRACE = 3.0  # seconds in which the others may end by themselves after one has failed
TERM_TIMEOUT = 15.0  # s from SIGTERM to SIGKILL
_LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def launch(command: Sequence[str], processes: int, devices: int | None = None) -> int:
    """Runs the processes and returns the exit code. `devices`: simulated CPU devices per process, instead of GPUs."""
    if not command:
        raise UserError("launch: the command is missing; use jaxmem launch -n 2 -- jaxmem train configs/demo.yaml")
    with _Children() as children, _forwarding_signals(children):
        for environment in environments(processes, devices):
            children.start(command, os.environ | environment)
        return children.wait()


def environments(processes: int, devices: int | None) -> list[dict[str, str]]:
    """The environment variables of each process, in addition to the inherited ones."""
    gpus = 0 if devices else visible_gpus()
    if gpus % processes:
        raise UserError(
            f"launch: {processes} processes cannot share {gpus} GPUs equally; "
            f"use -n {' or '.join(str(n) for n in range(1, gpus + 1) if gpus % n == 0)}, or --devices to simulate some"
        )
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    found = []
    for process in range(processes):
        one = {
            "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
            "JAX_NUM_PROCESSES": str(processes),
            "JAX_PROCESS_ID": str(process),
            "PYTHONUNBUFFERED": "1",
        }
        if devices:
            one |= simulation_environment(devices)
        elif gpus:
            each = gpus // processes
            one["JAX_LOCAL_DEVICE_IDS"] = ",".join(str(process * each + n) for n in range(each))
        found.append(one)
    return found


class _Children:
    """Processes that start and end together."""

    def __init__(self) -> None:
        self._all: list[subprocess.Popen[bytes]] = []
        self._copying: list[threading.Thread] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._all:
            if child.poll() is None:
                _kill_group(child)
            child.wait()
        for thread in self._copying:
            thread.join(timeout=1.0)  # a grandchild may hold the pipe

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        try:
            child = subprocess.Popen(  # noqa: S603, the command is the user's own
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C reaches only the launcher, which forwards it once
                preexec_fn=_end_with_parent,  # noqa: PLW1509, one system call
            )
        except OSError as error:
            raise UserError(f"launch: {command[0]}: {error.strerror}") from error
        self._all.append(child)

    def send(self, number: int) -> None:
        for child in self._all:
            if child.poll() is None:
                child.send_signal(number)

    def wait(self) -> int:
        """Wait for all; returns 0, or the exit code of the first that failed."""
        ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        for index, child in enumerate(self._all):  # threads start only after the last fork
            for source, target in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
                copy = threading.Thread(target=self._copy, args=(source, target, f"[{index}] ".encode()), daemon=True)
                copy.start()
                self._copying.append(copy)
            threading.Thread(target=lambda i=index, c=child: ended.put((i, c.wait())), daemon=True).start()
        code, plan = 0, [(GRACE, self._terminate), (TERM_TIMEOUT, self._kill)]
        deadline: float | None = None
        left = len(self._all)
        while left:
            try:
                index, status = ended.get(timeout=0.2)
            except queue.Empty:
                if deadline is not None and time.monotonic() > deadline and plan:
                    plan.pop(0)[1]()
                    deadline = time.monotonic() + (plan[0][0] if plan else 0.0)
                continue
            left -= 1
            if status and not code:
                code = status if status > 0 else 128 - status
                how = f"exited with {status}" if status > 0 else f"was killed by {signal.Signals(-status).name}"
                others = "; stopping the others" if left else ""
                self._write(sys.stderr, f"launch: process {index} of {len(self._all)} {how}{others}\n".encode())
                deadline = time.monotonic() + plan[0][0]
        return code

    def _terminate(self) -> None:
        self.send(signal.SIGTERM)

    def _kill(self) -> None:
        for child in self._all:
            if child.poll() is None:
                _kill_group(child)

    def _copy(self, source: IO[bytes], target: Any, prefix: bytes) -> None:
        with source:
            for line in source:
                self._write(target, prefix + line + (b"" if line.endswith(b"\n") else b"\n"))

    def _write(self, target: Any, line: bytes) -> None:
        """Writes one complete line. A closed output is ignored."""
        with self._lock, suppress(OSError, ValueError):
            target.write(line.decode(errors="replace"))
            target.flush()


@contextmanager
def _forwarding_signals(children: _Children) -> Iterator[None]:
    def send(number: int, frame: FrameType | None) -> None:
        del frame
        children.send(number)

    before = {number: signal.signal(number, send) for number in FORWARDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _end_with_parent() -> None:
    """Lets the kernel send SIGTERM to this process if the launcher is killed."""
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
