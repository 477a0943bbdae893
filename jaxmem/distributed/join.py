"""Starts JAX's runtime in all processes together, and ends it together."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from jaxmem.distributed.cluster import Cluster, find
from jaxmem.distributed.watch import Watch, exit_code
from jaxmem.errors import UserError
from jaxmem.machine.devices import reserve_gpu_memory
from jaxmem.machine.files import as_user_error
from jaxmem.machine.terminal import filtered_stderr, say

LEAVE_SECONDS = 24 * 3600  # process 0 may write for long; the watch finds a lost process

_watch: Watch | None = None


def join(heartbeat: int = 20, start_timeout: int = 300) -> Cluster | None:
    """Joins the processes that were started together into one JAX program. Does nothing and returns None for a single
    process.

    Call it before the backend of JAX starts. `heartbeat`: seconds without a heartbeat after which a process is lost.
    `start_timeout`: seconds to wait for all processes.
    """
    global _watch  # noqa: PLW0603, one JAX runtime in a process
    if _watch is not None:
        return _watch.cluster
    cluster = find(start_timeout)
    reserve_gpu_memory(1 if cluster is None else cluster.processes)
    if cluster is None:
        return None
    from jaxmem.distributed.rendezvous import rendezvous

    hosts = rendezvous(cluster, start_timeout)
    import jax

    config: Any = jax.config
    config.update("jax_cpu_collectives_implementation", "gloo")
    # By default JAX ends all processes by abort() if one is lost; with this option `Watch` ends them and names it.
    config.update("jax_enable_recoverability", True)
    _reserve_standard_output()
    before = signal.getsignal(signal.SIGTERM)  # JAX treats it as a preemption notice
    with filtered_stderr(_without_recovery_warning) if cluster.process == 0 else nullcontext():
        jax.distributed.initialize(
            cluster.address,
            cluster.processes,
            cluster.process,
            local_device_ids=cluster.devices,
            cluster_detection_method="deactivate",
            initialization_timeout=start_timeout,
            heartbeat_timeout_seconds=heartbeat,
            shutdown_timeout_seconds=start_timeout,
        )
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)
    _watch = Watch(cluster, hosts, heartbeat)
    _watch.start()
    return cluster


def leave() -> None:
    """Waits until all processes are done, then ends JAX's runtime. Does nothing for a single process."""
    global _watch  # noqa: PLW0603
    if _watch is None:
        return
    import jax
    from jax._src import distributed

    client: Any = distributed.global_state.client
    client.wait_at_barrier("jaxmem/done", 1000 * LEAVE_SECONDS)
    _watch.end()
    if _watch.cluster.process == 0:
        time.sleep(0.2)  # the other clients disconnect from the service first
    jax.distributed.shutdown()
    _watch = None


@contextmanager
def joined(heartbeat: int = 20, start_timeout: int = 300) -> Iterator[Cluster | None]:
    """A context in which JAX's runtime is joined: `with joined(): ...`."""
    cluster = join(heartbeat, start_timeout)
    try:
        with failing_together():
            yield cluster
    finally:
        leave()  # also after an error, which gets here only if all processes have an error


def hosts() -> list[str]:
    """The host of each process, in order; empty for a single process."""
    return [] if _watch is None else _watch.hosts


def end_all(error: BaseException) -> None:
    """Ends every process because of an error in a thread of this one, while its main thread waits for the others. Does
    nothing for a single process."""
    if _watch is not None:
        _watch.end_all(error)


@contextmanager
def failing_together() -> Iterator[None]:
    """A context for the work of all processes. An error in one process stops all; the others report which process
    failed.

    Closing the contexts inside may wait for other processes (all close a checkpoint together), so errors are raised
    only if all processes have one; otherwise this process reports its error and exits here.
    """
    try:
        yield
    except BaseException as raised:
        error = as_user_error(raised)
        if _watch is None or _watch.fail(error):
            raise
        if isinstance(error, UserError):
            say(f"error: {_watch.name(_watch.cluster.process)}: {error}", file=sys.stderr)
        else:
            sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(exit_code(error))


def _reserve_standard_output() -> None:
    """Reserves standard output for Python, since it may be JSON; output of gloo and NCCL goes to standard error."""
    sys.stdout.flush()
    real = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(real, "w", buffering=1, encoding=sys.stdout.encoding, errors=sys.stdout.errors)


def _without_recovery_warning(log: bytes) -> bytes:
    """Removes a warning of JAX's service in process 0 that recovery, which jaxmem does not use, is experimental."""
    return b"".join(line for line in log.splitlines(keepends=True) if b"recoverable task feature" not in line)
