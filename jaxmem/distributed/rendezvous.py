"""Waits for all processes before JAX starts, because JAX would abort without naming the process that is missing.

Process 0 listens on the port of the coordinator, which JAX's service uses afterwards; every other process sends its
number and host. When all have connected, or after a timeout, each process reports which processes are missing. Each
process sends and receives one short message; if none is missing, this takes as long as the slowest start.
"""

import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

from jaxmem.distributed.cluster import Cluster
from jaxmem.errors import TemporaryError, UserError
from jaxmem.typing import JsonDict

MESSAGE_TIMEOUT = 5.0  # seconds to wait for the message of a connected client, which may be another program
MESSAGE_BYTES = 1 << 20  # limit of the size of a message


def rendezvous(cluster: Cluster, seconds: float, hostname: Callable[[], str] = socket.gethostname) -> list[str]:
    """The host of each process. After `seconds`, an error names the missing processes."""
    end = time.monotonic() + seconds
    host = hostname()
    answer = _collect(cluster, end, host) if cluster.process == 0 else _report(cluster, end, seconds, host)
    hosts: list[str | None] = answer["hosts"]
    if conflict := answer["conflict"]:
        raise UserError(conflict)
    if None in hosts:
        missing = [str(number) for number, host in enumerate(hosts) if host is None]
        here = ", ".join(f"{number} on {host}" for number, host in enumerate(hosts) if host is not None)
        raise TemporaryError(
            f"process{'es' if len(missing) > 1 else ''} {', '.join(missing)} of {cluster.processes} did not start "
            f"within {seconds:g} s (started: {here}); start them, or increase cluster.start_timeout"
        )
    return [host for host in hosts if host is not None]


def _collect(cluster: Cluster, end: float, host: str) -> JsonDict:
    """Process 0 waits for the others, then answers all."""
    hosts: list[str | None] = [host] + [None] * (cluster.processes - 1)
    conflict = None
    with ExitStack() as stack:
        server = stack.enter_context(_listen(cluster.port))
        connections = []
        while None in hosts and not conflict and (left := end - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                connection = stack.enter_context(server.accept()[0])
                process, count, other = _receive(connection)
                conflict = _conflict(hosts, process, count, other)
            except (OSError, ValueError, TypeError, IndexError):
                continue  # no connection, or a foreign client
            connections.append(connection)
            if not conflict:
                hosts[process] = other
        answer = {"hosts": hosts, "conflict": conflict}
        for connection in connections:
            with suppress(OSError):  # the process was lost; the watch will report it
                connection.sendall(json.dumps(answer).encode() + b"\n")
    return answer


def _conflict(hosts: list[str | None], process: int, count: int, host: str) -> str | None:
    """An error if this process has other variables than the processes on `hosts`."""
    if count != len(hosts):
        counts = f"{len(hosts)} in process 0 and {count} in process {process} on {host}"
        return f"JAX_NUM_PROCESSES is {counts}; set the same number in all processes"
    if hosts[process] is not None:
        numbers = f"JAX_PROCESS_ID={process}; number them 0 to {count - 1}"
        return f"two processes, on {hosts[process]} and on {host}, have {numbers}"
    return None


def _report(cluster: Cluster, end: float, seconds: float, host: str) -> JsonDict:
    """A process other than process 0 sends its message to process 0, and reads the answer."""
    message = json.dumps([cluster.process, cluster.processes, host]).encode() + b"\n"
    reason = ""
    while (left := end - time.monotonic()) > 0:
        try:
            timeout = min(left, MESSAGE_TIMEOUT)
            with socket.create_connection((cluster.host, cluster.port), timeout=timeout) as connection:
                connection.sendall(message)
                # process 0 may have started later
                connection.settimeout(max(end + MESSAGE_TIMEOUT - time.monotonic(), 1.0))
                return _receive(connection)
        except (OSError, ValueError) as error:
            reason = str(error) or type(error).__name__
            time.sleep(min(0.2, left))
    raise TemporaryError(
        f"process 0 did not answer process {cluster.process} on {host} at {cluster.address} within {seconds:g} s "
        f"({reason}); start it, check this address, or increase cluster.start_timeout"
    )


def _listen(port: int) -> socket.socket:
    """A socket that listens on every address of this host."""
    ipv6 = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if ipv6 else socket.AF_INET
    try:
        return socket.create_server(("", port), family=family, dualstack_ipv6=ipv6)
    except OSError as error:
        raise UserError(
            f"process 0 cannot listen on port {port}: {error.strerror}; set another JAX_COORDINATOR_PORT, or wait "
            "until the program that uses it has ended"
        ) from error


def _receive(connection: socket.socket) -> Any:
    """Receives one line of JSON."""
    if connection.gettimeout() is None:
        connection.settimeout(MESSAGE_TIMEOUT)
    with connection.makefile("rb") as file:
        line = file.readline(MESSAGE_BYTES)
    if not line.endswith(b"\n"):
        raise ValueError("incomplete message")
    return json.loads(line)
