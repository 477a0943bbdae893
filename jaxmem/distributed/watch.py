"""Names a process that is lost during a run, and stops the others, which would wait for it forever.

JAX's coordination service, in process 0, receives a heartbeat from every process. A thread in each process asks the
service which processes are alive; it answers when all live processes have asked, or when a heartbeat has been missing
for `heartbeat` seconds. A process that stops because of an error writes the reason and its exit code to the key-value
store of the service, and the others report both. If process 0 is lost, the service is lost too, and JAX's client calls
abort() in one of its threads; a signal handler then reports that process 0 is lost, and exits with the same code.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

from jaxmem.distributed.cluster import Cluster
from jaxmem.errors import TemporaryError, escaped

STOPPED = "jaxmem/stopped/"  # prefix of the key of a stopped process; the value is its exit code and reason
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"  # with empty settings (RFC 9113)
ANSWER_TIMEOUT = 5.0  # seconds
ADVICE = "checkpoints are complete; run the same command again to resume"


class Watch:
    """Watches the other processes, from `start` to `end`."""

    def __init__(self, cluster: Cluster, hosts: list[str], heartbeat: float) -> None:
        from jax._src import distributed  # the client is not public; Orbax imports it from there too

        self.cluster = cluster
        self.hosts = hosts
        self.heartbeat = heartbeat
        self._client: Any = distributed.global_state.client
        self._every = min(max(heartbeat / 8, 0.5), 5.0)
        self._ended = threading.Event()
        self._failed = False
        self._abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._on_abort)  # referenced here: C has only its address
        self._thread = threading.Thread(target=self._run, name="jaxmem-watch", daemon=True)

    def start(self) -> None:
        if self.cluster.process != 0:
            ctypes.CDLL(None).signal(signal.SIGABRT, self._abort)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        signal.signal(signal.SIGABRT, signal.SIG_DFL)
        self._thread.join()

    def name(self, process: int) -> str:
        return f"process {process} of {self.cluster.processes} ({self.hosts[process]})"

    def fail(self, error: BaseException) -> bool:
        """Tells the other processes why this process stops. Returns whether all of them stop because of their own
        errors, so that they can clean up together; otherwise they end now, and this process must not wait for them.

        If a collective failed, another process is probably lost, and the watch ends this process.
        """
        if lost_process_error(error) is error:
            time.sleep(self.heartbeat + 2 * self._every)
        self._publish(error)
        until = time.monotonic() + 4 * self._every
        while time.monotonic() < until:
            if len(self._stopped()) == self.cluster.processes:
                return True
            time.sleep(0.1)
        return False

    def end_all(self, error: BaseException) -> None:
        """Ends all processes with this error. It works in any thread, because the main thread may wait for processes
        that wait for this process."""
        self._publish(error)
        self._exit(f"{self.name(self.cluster.process)}: {error}", exit_code(error))

    def _publish(self, error: BaseException) -> None:
        self._failed = True
        text = " ".join(str(error).split()) or type(error).__name__
        value = json.dumps([exit_code(error), text[:1000]])
        self._client.key_value_set(f"{STOPPED}{self.cluster.process}", value, allow_overwrite=True)

    def _stopped(self) -> dict[int, tuple[int, str]]:
        """Exit code and reason of each process that has stopped."""
        entries = self._client.key_value_dir_get(STOPPED)
        return {int(key.rpartition("/")[2]): tuple(json.loads(text)) for key, text in entries}

    def _run(self) -> None:
        everyone = list(range(self.cluster.processes))
        while not self._ended.wait(self._every):
            try:
                self._check_stopped(self._stopped())
                live = self._client.get_live_nodes(everyone)
                lost = [process for process in everyone if process not in live]
                if lost and not self._ended.is_set():
                    self._check_stopped(self._stopped())
                    names = " and ".join(self.name(process) for process in lost)
                    self._exit(f"{names} lost: no heartbeat for {self.heartbeat:g} s; {ADVICE}")
            except Exception:  # noqa: BLE001, the service has ended: JAX's client reports it by abort()
                if self._ended.is_set():
                    return

    def _check_stopped(self, stopped: dict[int, tuple[int, str]]) -> None:
        """Ends this process if others have stopped, unless it is stopping because of its own error."""
        if stopped and self.cluster.process not in stopped:
            self._ended.wait(2 * self._every)  # this process may be about to publish the same error
        if stopped and not self._failed and not self._ended.is_set():
            process, (code, text) = min(stopped.items())
            self._exit(f"{self.name(process)} stopped: {text}", code)

    def _on_abort(self, _: int) -> None:
        """A C signal handler in the thread that called abort(). An abort for another reason continues."""
        if self._coordinator_answers():
            signal.signal(signal.SIGABRT, signal.SIG_DFL)
            return
        self._exit(f"{self.name(0)} lost: no answer at {self.cluster.address}; {ADVICE}")

    def _coordinator_answers(self) -> bool:
        """Whether process 0 answers. A connection is not sufficient, since the kernel accepts it for a stopped process
        too; a gRPC server sends data as soon as it receives the preface."""
        try:
            address = self.cluster.host, self.cluster.port
            with socket.create_connection(address, timeout=ANSWER_TIMEOUT) as connection:
                connection.sendall(HTTP2_PREFACE)
                return bool(connection.recv(1))
        except OSError:
            return False

    def _exit(self, reason: str, code: int = TemporaryError.exit_code) -> None:
        """Ends this process from any thread, since the main thread may be in a collective that never ends."""
        os.write(2, f"error: {escaped(reason)}\n".encode())
        if self.cluster.process == 0:
            time.sleep(4 * self._every)  # the others read the reason from the service, which ends with this process
        sys.stdout.flush()
        os._exit(code)


def lost_process_error(error: BaseException | None) -> BaseException | None:
    """The failed collective or wait between processes that caused an error, or None. JAX raises it when a result is
    read; if a program runs synchronously, as it may on CPUs, it has another type."""
    while error is not None:
        if type(error).__name__ == "JaxRuntimeError" or (isinstance(error, ValueError) and "Gloo" in str(error)):
            return error
        error = error.__cause__
    return None


def exit_code(error: BaseException) -> int:
    return 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
