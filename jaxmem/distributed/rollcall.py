"""Who is here, before JAX starts: its own start waits for a process that never comes, then aborts without a name.

Process 0 listens on the coordinator's port, where JAX's own service will be a moment later, and every other process
says its number and its host. When all are there, or time is up, each is told who is missing. One short message each
way for each process; on a healthy cluster it takes as long as the slowest start.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from jaxmem.distributed.cluster import Cluster
from jaxmem.errors import TemporaryError, UserError

PATIENCE = 5.0  # s for one message of a process that has connected; a stranger at the door may say nothing
LINE = 1 << 20  # bytes, at most, of one message


def roll_call(cluster: Cluster, seconds: float, name: Callable[[], str] = socket.gethostname) -> list[str]:
    """The host of each process; an error that names whoever is missing after so many seconds."""
    end = time.monotonic() + seconds
    answer = _called(cluster, end, name()) if cluster.process == 0 else _answered(cluster, end, seconds, name())
    hosts: list[str | None] = answer["hosts"]
    if twice := answer["twice"]:
        raise UserError(f"{twice}; give each another JAX_PROCESS_ID, 0 to {cluster.processes - 1}")
    if None in hosts:
        missing = [str(number) for number, host in enumerate(hosts) if host is None]
        here = ", ".join(f"{number} on {host}" for number, host in enumerate(hosts) if host is not None)
        raise TemporaryError(
            f"process{'es' if len(missing) > 1 else ''} {', '.join(missing)} of {cluster.processes} did not come "
            f"within {seconds:g} s (cluster.start_timeout); here are {here}"
        )
    return [host for host in hosts if host is not None]


def _called(cluster: Cluster, end: float, host: str) -> dict[str, Any]:
    """At process 0: wait for the others, then tell them all."""
    hosts: list[str | None] = [host] + [None] * (cluster.processes - 1)
    twice = None
    with ExitStack() as opened:
        door = opened.enter_context(_door(cluster.port))
        callers = []
        while None in hosts and not twice and (left := end - time.monotonic()) > 0:
            door.settimeout(left)
            try:
                caller = opened.enter_context(door.accept()[0])
                process, count, its_host = _read(caller)
            except (OSError, ValueError, TypeError):
                continue  # nobody came, or no process of ours
            callers.append(caller)
            if count != cluster.processes:
                twice = f"process {process} on {its_host} was told of {count} processes, process 0 of {len(hosts)}"
            elif hosts[process] is not None:
                twice = f"two processes are number {process}, on {hosts[process]} and on {its_host}"
            else:
                hosts[process] = its_host
        answer = {"hosts": hosts, "twice": twice}
        for caller in callers:
            with suppress(OSError):  # it has gone since; the watch will say so
                caller.sendall(json.dumps(answer).encode() + b"\n")
    return answer


def _answered(cluster: Cluster, end: float, seconds: float, host: str) -> dict[str, Any]:
    """At any other process: say who we are, and hear who is missing."""
    message = json.dumps([cluster.process, cluster.processes, host]).encode() + b"\n"
    reason = ""
    while (left := end - time.monotonic()) > 0:
        try:
            with socket.create_connection((cluster.host, cluster.port), timeout=min(left, PATIENCE)) as line:
                line.sendall(message)
                line.settimeout(max(end + PATIENCE - time.monotonic(), 1.0))  # process 0 may have begun later
                answer: dict[str, Any] = _read(line)
                return answer
        except (OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
            time.sleep(min(0.2, left))
    raise TemporaryError(
        f"process 0 did not answer at {cluster.address} within {seconds:g} s (cluster.start_timeout): {reason}; "
        f"this is process {cluster.process} on {host}"
    )


def _door(port: int) -> socket.socket:
    """Listening on every address of this host."""
    six = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if six else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=six)
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen on port {port}: {error.strerror}; give another JAX_COORDINATOR_PORT, or wait "
            "until what uses it has ended"
        ) from error


def _read(line: socket.socket) -> Any:
    """One line of JSON."""
    if line.gettimeout() is None:
        line.settimeout(PATIENCE)
    text = b""
    while not text.endswith(b"\n"):
        part = line.recv(4096)
        if not part or len(text) > LINE:
            raise ValueError("no whole message")
        text += part
    return json.loads(text)
