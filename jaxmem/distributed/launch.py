"""Several processes of one command on a host without a scheduler: `jaxmem launch -n 2 -- jaxmem train ...`.

Each process gets JAX's variables and its share of the GPUs, or simulated devices. Their output is forwarded line by
line with the number of the process; signals are forwarded. If a process fails, the others are stopped, and the launcher
returns the exit code of the failed process, 128 + N if signal N killed it. No process keeps running. With `restarts`,
fewer processes are started again after some were killed.
"""

import asyncio
import ctypes
import os
import signal
import socket
import sys
import uuid
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TextIO

from jaxmem.distributed.cluster import LAUNCH, visible_gpus
from jaxmem.errors import UserError
from jaxmem.machine.devices import simulation_environment

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
GRACE_SECONDS = 3.0  # seconds in which the other processes may end by themselves after one has failed
TERM_TIMEOUT = 2.0  # seconds from SIGTERM to SIGKILL, after which a frozen process ends too
MAX_LINE = 1 << 26  # longest line of output in bytes
CONNECTED = "[Gloo] Rank "  # a line that gloo prints in each process for each group of processes; it is not forwarded
_LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def launch(command: Sequence[str], processes: int, devices: int | None = None, restarts: int = 0) -> int:
    """Runs the processes of a command on this machine.

    Args:
        command: The program and its arguments.
        processes: How many run at the same time.
        devices: Simulated CPU devices per process, instead of GPUs.
        restarts: How often the command is started again after processes were killed, in the largest number of processes
            that are left and divides `processes`.

    Returns:
        The exit code.
    """
    if not command:
        raise UserError("launch: the command is missing; use jaxmem launch -n 2 -- jaxmem train configs/demo.yaml")
    variables = environments(processes, devices)
    launch_id = {LAUNCH: uuid.uuid4().hex}
    while True:
        code, killed = asyncio.run(_run(command, [environment | launch_id for environment in variables]))
        left = len(variables) - killed
        if not killed or not left or not restarts:
            return code
        fewer = max(n for n in range(1, left + 1) if processes % n == 0)
        restarts = restarts - 1
        _write(sys.stderr, f"launch: starting again with {fewer} of {processes} processes\n")
        variables = environments(processes, devices, fewer)


def environments(processes: int, devices: int | None, started: int | None = None) -> list[dict[str, str]]:
    """The environment variables of each process, in addition to the inherited variables. `started`: the number of
    processes, if the GPUs are divided among more of them."""
    gpus = 0 if devices else visible_gpus()
    if gpus % processes:
        raise UserError(
            f"launch: {processes} processes cannot share {gpus} GPUs equally; "
            f"use -n {' or '.join(str(n) for n in range(1, gpus + 1) if gpus % n == 0)}, or --devices to simulate some"
        )
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    processes_of = []
    for process in range(started or processes):
        environment = {
            "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
            "JAX_NUM_PROCESSES": str(started or processes),
            "JAX_PROCESS_ID": str(process),
            "PYTHONUNBUFFERED": "1",
        }
        if devices:
            environment |= simulation_environment(devices)
        elif gpus:
            gpus_per_process = gpus // processes
            environment["JAX_LOCAL_DEVICE_IDS"] = ",".join(
                str(process * gpus_per_process + n) for n in range(gpus_per_process)
            )
        processes_of.append(environment)
    return processes_of


async def _run(command: Sequence[str], variables: Sequence[Mapping[str, str]]) -> tuple[int, int]:
    """The exit code, and how many processes were killed, unless the launcher received a signal too."""
    children: list[Process] = []
    copies = []
    received: list[signal.Signals] = []

    def forward(number: signal.Signals) -> None:
        received.append(number)
        _send(children, number)

    for number in FORWARDED:
        asyncio.get_running_loop().add_signal_handler(number, forward, number)
    try:
        for index, environment in enumerate(variables):
            child = await _start(command, os.environ | environment)
            children.append(child)
            for source, target in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
                copies.append(asyncio.create_task(_copy(source, target, f"[{index}] ")))
        code, killed = await _wait(children)
        return code, 0 if received else killed
    finally:
        _send(children, signal.SIGKILL)
        for child in children:
            await child.wait()
        if copies:
            await asyncio.wait(copies, timeout=1.0)  # a grandchild may hold the pipe


async def _start(command: Sequence[str], environment: Mapping[str, str]) -> Process:
    try:
        return await asyncio.create_subprocess_exec(
            *command,
            env=environment,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            limit=MAX_LINE,
            start_new_session=True,  # Ctrl-C reaches only the launcher, which forwards it once
            preexec_fn=_end_with_parent,
        )
    except OSError as error:
        raise UserError(f"launch: cannot start {command[0]}: {error.strerror}") from error


async def _wait(children: Sequence[Process]) -> tuple[int, int]:
    """Waits for all processes; returns 0, or the exit code of the first process that failed, and how many were killed
    before the others were stopped."""
    code = 0
    killed = 0
    stops = [(GRACE_SECONDS, signal.SIGTERM), (TERM_TIMEOUT, signal.SIGKILL)]
    ends = {asyncio.create_task(child.wait()): index for index, child in enumerate(children)}
    running = set(ends)
    while running:
        timeout = stops[0][0] if code and stops else None
        done, running = await asyncio.wait(running, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            _send(children, stops.pop(0)[1])
        for end in done:
            killed += end.result() < 0 and len(stops) == 2
            status = end.result()
            if status and not code:
                code = status if status > 0 else 128 - status
                how = f"exited with {status}" if status > 0 else f"was killed by {signal.Signals(-status).name}"
                others = "; stopping the others" if running else ""
                _write(sys.stderr, f"launch: process {ends[end]} of {len(children)} {how}{others}\n")
    return code, killed


def _send(children: Sequence[Process], number: signal.Signals) -> None:
    """Sends a signal to the processes that still run; SIGKILL reaches their own children too."""
    for child in children:
        if child.returncode is None:
            with suppress(ProcessLookupError):
                (os.killpg if number == signal.SIGKILL else os.kill)(child.pid, number)


async def _copy(source: asyncio.StreamReader | None, target: TextIO, prefix: str) -> None:
    assert source is not None
    while not source.at_eof():
        try:
            text = (await source.readline()).decode(errors="replace")
        except ValueError:  # `readline` has dropped it
            text = "(a line that is too long)"
        if text and not text.startswith(CONNECTED):
            _write(target, prefix + text + ("" if text.endswith("\n") else "\n"))


def _write(target: TextIO, line: str) -> None:
    """Writes one complete line. A closed output is ignored."""
    with suppress(OSError, ValueError):
        target.write(line)
        target.flush()


def _end_with_parent() -> None:
    """Lets the kernel send SIGTERM to this process if the launcher is killed."""
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
