"""P processes of one command on this host, for those without a scheduler: `jaxmem launch -n 2 -- jaxmem train ...`.

Each process is told of the others by JAX's own variables, and gets its part of the GPUs, or simulated devices. What
they print is passed on line by line with the process's number in front. Signals are passed on. The first to fail
stops the others, and its exit code is the launcher's: 128 + N where signal N killed it. None is left behind.
"""

from __future__ import annotations

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
from jaxmem.machine.devices import simulated

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
TO_END = 3.0  # s that the others have to end by themselves, once one has failed
TO_STOP = 15.0  # s from SIGTERM to SIGKILL
_LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def launch(command: Sequence[str], processes: int, devices: int | None = None) -> int:
    """Run them; the exit code. `devices`: simulated CPU devices of each, in place of this machine's."""
    if not command:
        raise UserError("launch: no command; jaxmem launch -n 2 -- jaxmem train configs/demo.yaml")
    with _Children() as children, _passing_on(children):
        for environment in environments(processes, devices):
            children.start(command, os.environ | environment)
        return children.wait()


def environments(processes: int, devices: int | None) -> list[dict[str, str]]:
    """What each process is told, over what all inherit."""
    gpus = 0 if devices else visible_gpus()
    if gpus % processes:
        raise UserError(
            f"launch: {processes} processes cannot share {gpus} GPUs equally; "
            f"use -n {' or '.join(str(n) for n in range(1, gpus + 1) if gpus % n == 0)}, or --devices to simulate some"
        )
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    told = []
    for process in range(processes):
        one = {
            "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
            "JAX_NUM_PROCESSES": str(processes),
            "JAX_PROCESS_ID": str(process),
            "PYTHONUNBUFFERED": "1",
        }
        if devices:
            one |= simulated(devices)
        elif gpus:
            each = gpus // processes
            one["JAX_LOCAL_DEVICE_IDS"] = ",".join(str(process * each + n) for n in range(each))
        told.append(one)
    return told


class _Children:
    """Processes that are started together and end together."""

    def __init__(self) -> None:
        self._all: list[subprocess.Popen[bytes]] = []
        self._printing: list[threading.Thread] = []
        self._print = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._all:
            if child.poll() is None:
                _kill_group(child)
            child.wait()
        for thread in self._printing:
            thread.join(timeout=1.0)  # a grandchild may hold the pipe

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        try:
            child = subprocess.Popen(  # noqa: S603, the command is the user's own
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C comes here alone, and is passed on once
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
        """Until all have ended: 0, or the exit code of the first that failed."""
        ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        for index, child in enumerate(self._all):  # no thread before the last fork
            for source, target in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
                copy = threading.Thread(target=self._copy, args=(source, target, f"[{index}] ".encode()), daemon=True)
                copy.start()
                self._printing.append(copy)
            threading.Thread(target=lambda i=index, c=child: ended.put((i, c.wait())), daemon=True).start()
        code, plan = 0, [(TO_END, self._terminate), (TO_STOP, self._kill)]
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
                how = f"ended with {status}" if status > 0 else f"was killed by {signal.Signals(-status).name}"
                others = "; stopping the others" if left else ""
                self._say(sys.stderr, f"launch: process {index} of {len(self._all)} {how}{others}\n".encode())
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
                self._say(target, prefix + line + (b"" if line.endswith(b"\n") else b"\n"))

    def _say(self, target: Any, line: bytes) -> None:
        """One whole line at a time; nobody reading is no reason to stop."""
        with self._print, suppress(OSError, ValueError):
            target.write(line.decode(errors="replace"))
            target.flush()


@contextmanager
def _passing_on(children: _Children) -> Iterator[None]:
    def send(number: int, frame: FrameType | None) -> None:
        del frame
        children.send(number)

    before = {number: signal.signal(number, send) for number in PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _end_with_parent() -> None:
    """Also where the launcher is killed so that it can tell nobody: the kernel asks its children to stop."""
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
