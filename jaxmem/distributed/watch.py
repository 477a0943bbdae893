"""While the processes work: whoever goes is named, and the others stop at once instead of waiting forever.

JAX's coordination service, at process 0, hears a heartbeat of every process. A thread in each asks it who is alive;
the service answers when all that live have asked, or when somebody's heartbeat has been out for `heartbeat` seconds.
What a process has to say before it goes (a full disk, a wrong file) it leaves in the service's key-value store, so
that the others can repeat it, with its exit code. Cost: two small messages to process 0 every few seconds.

When process 0 goes, the service goes with it, and JAX's client ends the process by abort() from within a thread of
its own. That is turned into the same one line and the same exit code.
"""

from __future__ import annotations

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
from jaxmem.errors import TemporaryError

STOPPED = "jaxmem/stopped/"  # + process: its exit code and why it stopped
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # and no settings (RFC 9113, 3.4)
GREETED = 5.0  # s for the answer
GOES_ON = "checkpoints are whole, the same command goes on from the last"


class Watch:
    """Of one process over the others, from `start` to `end`."""

    def __init__(self, cluster: Cluster, hosts: list[str], heartbeat: float) -> None:
        from jax._src import distributed  # the client; Orbax takes it from there, too

        self.cluster, self.hosts, self.heartbeat = cluster, hosts, heartbeat
        self._client: Any = distributed.global_state.client
        self._every = min(max(heartbeat / 8, 0.5), 5.0)
        self._ended = threading.Event()
        self._failed = False
        self._abort = ctypes.CFUNCTYPE(None, ctypes.c_int)(self._aborted)  # kept: C only has its address
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

    def failed(self, error: BaseException) -> bool:
        """Tell the others why this process stops. Whether all of them stop for a reason of their own, so that each may
        clean up as usual, together; otherwise the others end now, and this process must without waiting for them.

        Where a collective failed, it is most likely another process that has gone, and the watch ends this one.
        """
        if between_processes(error) is error:
            time.sleep(self.heartbeat + 2 * self._every)
        self._tell(error)
        until = time.monotonic() + 4 * self._every
        while time.monotonic() < until:
            if len(self._said()) == self.cluster.processes:
                return True
            time.sleep(0.1)
        return False

    def end_all(self, error: BaseException) -> None:
        """From any thread: the main one may wait for others that wait for this very process. It ends here, with its
        error, and the others with the same one."""
        self._tell(error)
        self._stop(f"{self.name(self.cluster.process)}: {error}", exit_code(error))

    def _tell(self, error: BaseException) -> None:
        self._failed = True
        text = " ".join(str(error).split()) or type(error).__name__
        said = json.dumps([exit_code(error), text[:1000]])
        self._client.key_value_set(f"{STOPPED}{self.cluster.process}", said, allow_overwrite=True)

    def _said(self) -> dict[int, tuple[int, str]]:
        """Exit code and reason of each process that has stopped."""
        found = self._client.key_value_dir_get(STOPPED)
        return {int(key.rpartition("/")[2]): tuple(json.loads(text)) for key, text in found}

    def _run(self) -> None:
        everyone = list(range(self.cluster.processes))
        while not self._ended.wait(self._every):
            try:
                self._look(self._said())
                live = self._client.get_live_nodes(everyone)
                gone = [process for process in everyone if process not in live]
                if gone and not self._ended.is_set():
                    self._look(self._said())
                    names = " and ".join(self.name(process) for process in gone)
                    verb = "is" if len(gone) == 1 else "are"
                    self._stop(f"{names} {verb} gone: no heartbeat for {self.heartbeat:g} s; {GOES_ON}")
            except Exception:  # noqa: BLE001, the service has ended: JAX's client says so by abort()
                if self._ended.is_set():
                    return

    def _look(self, said: dict[int, tuple[int, str]]) -> None:
        """Others have stopped. A process that is stopping itself decides on its own."""
        if said and self.cluster.process not in said:
            self._ended.wait(2 * self._every)  # this process may be about to say the same
        if said and not self._failed and not self._ended.is_set():
            process, (code, text) = min(said.items())
            self._stop(f"{self.name(process)} stopped: {text}", code)

    def _aborted(self, _: int) -> None:
        """A C signal handler, in the thread that called abort(); any other abort goes on as it would."""
        if self._answers():
            signal.signal(signal.SIGABRT, signal.SIG_DFL)
            return
        self._stop(f"{self.name(0)} is gone: it does not answer at {self.cluster.address}; {GOES_ON}")

    def _answers(self) -> bool:
        """Whether process 0 lives. The kernel takes connections for one that is stopped: it must say something, as
        a server of gRPC does as soon as it is greeted."""
        try:
            with socket.create_connection((self.cluster.host, self.cluster.port), timeout=GREETED) as line:
                line.sendall(GREETING)
                return bool(line.recv(1))
        except OSError:
            return False

    def _stop(self, reason: str, code: int = TemporaryError.exit_code) -> None:
        """From any thread: the main one may be inside a collective that never ends."""
        os.write(2, f"error: {reason}\n".encode())
        if self.cluster.process == 0:
            time.sleep(4 * self._every)  # with it goes the service, from which the others hear the same
        sys.stdout.flush()
        os._exit(code)


def between_processes(error: BaseException | None) -> BaseException | None:
    """The failure of a message or a wait between processes, if that is what the error is or comes of. JAX raises it
    where a result is read; as another kind of error already where a program runs at once, as on CPUs it may."""
    while error is not None:
        if type(error).__name__ == "JaxRuntimeError" or (isinstance(error, ValueError) and "Gloo" in str(error)):
            return error
        error = error.__cause__
    return None


def exit_code(error: BaseException) -> int:
    return 130 if isinstance(error, KeyboardInterrupt) else getattr(error, "exit_code", 1)
