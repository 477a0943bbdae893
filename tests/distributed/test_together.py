"""Real processes: they agree, and when one of them goes the others say who and why, and end."""

import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from jax._src.lib import _jax

from jaxmem.checkpoint.manager import Checkpoints
from jaxmem.distributed import join, watch
from jaxmem.distributed.cluster import Cluster

# What each process runs, beside the others: what is in place of END.
PROGRAM = """
import sys, time
from jaxmem.machine import devices
devices.use_cpu_without_gpu()
from jaxmem.distributed.join import hosts, join, joined
from jaxmem.errors import UserError

with joined(heartbeat=3, start_timeout=60) as cluster:
    import jax
    import numpy as np

    me = jax.process_index()
    assert (jax.process_count(), jax.device_count(), len(hosts())) == (2, 4, 2)
    assert join() is cluster
    print(f"process {me} is ready", file=sys.stderr, flush=True)
    END
print(f"process {me} has left", file=sys.stderr, flush=True)
"""

# In place of END: all that they say to each other.
AGREE = """
    from jaxmem.distributed.agree import DelayedMax, any_process, gather_objects, maximum
    from jaxmem.distributed.communicator import Communicator
    from jaxmem.distributed.preflight import preflight

    gathered = gather_objects({"I am": me, "text": "x" * 100 * me})
    assert gathered == [{"I am": 0, "text": ""}, {"I am": 1, "text": "x" * 100}]
    assert (maximum(10 * me), any_process(me == 1), any_process(False)) == (10, True, False)
    largest = DelayedMax()
    assert [largest.of(7 if step == 2 and me == 1 else 0) for step in range(5)] == [0, 0, 0, 7, 0]

    comm = Communicator()
    values = np.arange(32, dtype=np.float32).reshape(4, 8)
    placed = comm.put(values[2 * me : 2 * me + 2])
    assert (np.asarray(comm.allreduce(placed)) == values.sum(0)).all()
    assert (np.asarray(comm.allreduce(placed, "max")) == values[3]).all()
    assert (np.asarray(comm.all_gather(placed)) == values).all()

    assert preflight()[0].startswith("2 processes on 1 host: all-reduce ")
"""


def both_ready(processes: Any) -> bool:
    return all(f"process {number} is ready" in processes.said(number) for number in range(2))


@pytest.mark.exhaustive
def test_they_agree_and_leave_together(started: Any, program: Any) -> None:
    processes = started(program(PROGRAM.replace("    END", AGREE)), 2, 2)
    assert processes.codes() == [0, 0], processes.said(0) + processes.said(1)
    assert all(f"process {number} has left" in processes.said(number) for number in range(2))


@pytest.mark.exhaustive
def test_an_error_in_one_process_ends_all_with_its_reason(started: Any, program: Any) -> None:
    end = "if me == 1: raise UserError('the disk is full')\n    time.sleep(60)"
    processes = started(program(PROGRAM.replace("END", end)), 2, 2)
    assert processes.codes() == [2, 2], processes.said(0) + processes.said(1)
    assert processes.said(0).rstrip().endswith("stopped: the disk is full")
    assert processes.said(1).rstrip().endswith("): the disk is full")


@pytest.mark.exhaustive
def test_an_error_that_all_have_is_each_ones_own(started: Any, program: Any) -> None:
    """They unwind as a lone process does, and part without being taken for lost."""
    end = "if me == 0: time.sleep(0.5)\n    raise UserError(f'the same to {me}')"
    processes = started(program(PROGRAM.replace("END", end)), 2, 2)
    assert processes.codes() == [1, 1], processes.said(0) + processes.said(1)
    for number in range(2):
        assert processes.said(number).rstrip().endswith(f"jaxmem.errors.UserError: the same to {number}")


# In place of END: a checkpoint of which only one process cannot write its part. The others wait for that part.
FULL = """
    import resource, signal
    from jax.sharding import Mesh
    from jaxmem.checkpoint.manager import Checkpoints
    from jaxmem.sharding.layout import first_dim_sharding

    place = first_dim_sharding(Mesh(np.asarray(jax.devices()), ("all",)), "all")
    draw = np.random.default_rng(0).random((4, 2**16), np.float32)
    state = {"x": jax.make_array_from_callback(draw.shape, place, lambda index: draw[index])}
    with Checkpoints(sys.argv[1]) as checkpoints:
        checkpoints.save(1, state, {}, {}, force=True)
        checkpoints.wait()
        if me == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, 2**17))
        checkpoints.save(2, state, {}, {}, force=True)
        checkpoints.wait()
"""


@pytest.mark.exhaustive
def test_a_write_that_fails_in_one_process_ends_all(started: Any, program: Any, tmp_path: Path) -> None:
    processes = started([*program(PROGRAM.replace("    END", FULL)), str(tmp_path / "checkpoints")], 2, 2)
    processes.until(lambda: both_ready(processes))
    assert processes.codes(seconds=60) == [2, 2], processes.said(0) + processes.said(1)
    why = f"checkpoint {tmp_path}/checkpoints/2 could not be written "
    assert f"stopped: {why}" in processes.said(0)
    assert f"): {why}" in processes.said(1)
    assert all("(last complete checkpoint: step 1): " in processes.said(number) for number in range(2))
    with Checkpoints(tmp_path / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps() == [1]


def test_the_first_process_is_killed(started: Any, program: Any) -> None:
    """With it goes JAX's own service, by which the others would be aborted without a word of who."""
    processes = started(program(PROGRAM.replace("END", "time.sleep(60)")), 2, 2)
    processes.until(lambda: both_ready(processes))
    processes.all[0].send_signal(signal.SIGKILL)
    assert processes.codes(seconds=50) == [-signal.SIGKILL, 75]
    assert "error: process 0 of 2 (" in processes.said(1)
    assert "lost: no answer at localhost:" in processes.said(1)


# In place of END: one is killed, and what they do together fails in the other, at once or when its result is read.
KILLED = """
    import os, signal
    from jaxmem.checkpoint.manager import Checkpoints
    from jaxmem.distributed.agree import gather_objects
    from jaxmem.sharding.layout import first_dim_sharding

    whole = first_dim_sharding(jax.make_mesh((4,), ("all",)), None)
    state = {"x": jax.make_array_from_callback((8,), whole, lambda index: np.zeros(8, np.float32)[index])}
    with Checkpoints(sys.argv[1]) as checkpoints:
        checkpoints.save(1, state, {}, {}, force=True)
        checkpoints.wait()
        gather_objects("here")
        if me == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)
        ALONE
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "alone",
    [
        "gather_objects('alone')",
        "checkpoints.save(2, state, {}, {}, force=True)",
        "checkpoints.restore_latest(state)",
    ],
)
def test_one_that_is_killed_is_named_by_whoever_goes_on(alone: str, started: Any, program: Any, tmp_path: Path) -> None:
    """And it is no fault of a checkpoint's."""
    text = PROGRAM.replace("    END", KILLED.replace("ALONE", alone))
    processes = started([*program(text), str(tmp_path / "checkpoints")], 2, 2)
    assert processes.codes(seconds=50) == [75, -signal.SIGKILL], processes.said(0)
    assert "error: process 1 of 2 (" in processes.said(0)
    assert "lost: no heartbeat for 3 s" in processes.said(0)
    assert "Traceback" not in processes.said(0)
    with Checkpoints(tmp_path / "checkpoints", read_only=True) as checkpoints:
        assert 1 in checkpoints.steps()


def test_whoever_is_done_waits_for_a_process_that_writes_for_hours(monkeypatch: Any) -> None:
    waited = []
    client = SimpleNamespace(wait_at_barrier=lambda _, milliseconds: waited.append(milliseconds))
    monkeypatch.setattr(jax._src.distributed.global_state, "client", client)
    monkeypatch.setattr(jax.distributed, "shutdown", lambda: None)
    alone = SimpleNamespace(end=lambda: None, cluster=Cluster("node1:1234", processes=2, process=1))
    monkeypatch.setattr(join, "_watch", alone)
    join.leave()
    assert waited[0] > 12 * 3600 * 1000


def test_a_first_process_that_is_frozen_does_not_answer(monkeypatch: Any) -> None:
    """Though its kernel goes on taking connections for it."""
    monkeypatch.setattr(watch, "ANSWER_TIMEOUT", 0.2)
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
        one = watch.Watch(Cluster(address, processes=2, process=1), ["here", "there"], heartbeat=3)
        assert not one._coordinator_answers()
    service = _jax.get_distributed_runtime_service(address, 2)
    try:
        monkeypatch.setattr(watch, "ANSWER_TIMEOUT", 20.0)
        assert one._coordinator_answers()
    finally:
        service.shutdown()
    assert not one._coordinator_answers()
