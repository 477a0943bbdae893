"""Who is missing is named before JAX starts. Threads stand for processes: only sockets are involved."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from jaxmem.distributed.cluster import Cluster
from jaxmem.distributed.rollcall import roll_call
from jaxmem.errors import TemporaryError, UserError


@pytest.fixture
def port() -> int:
    with socket.create_server(("localhost", 0)) as door:
        return door.getsockname()[1]


def called(port: int, count: int, numbers: list[int], seconds: float, counts: dict[int, int] | None = None) -> list:
    """What each of these processes hears: the hosts, or an error."""

    def one(place: int, number: int) -> object:
        told = (counts or {}).get(place, count)
        try:
            return roll_call(Cluster(f"localhost:{port}", told, number), seconds, lambda: f"host{place}")
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(one, range(len(numbers)), numbers))


def test_all_are_there(port: int) -> None:
    assert called(port, 3, [2, 0, 1], 20) == [["host1", "host2", "host0"]] * 3


def test_who_is_missing_is_named_to_all(port: int) -> None:
    heard = called(port, 4, [0, 2], 1)
    said = "processes 1, 3 of 4 did not come within 1 s (cluster.start_timeout); here are 0 on host0, 2 on host1"
    assert [str(error) for error in heard] == [said] * 2
    assert {type(error).exit_code for error in heard} == {75}


def test_process_0_is_missing(port: int) -> None:
    (error,) = called(port, 2, [1], 0.5)
    assert isinstance(error, TemporaryError)
    assert f"process 0 did not answer at localhost:{port} within 0.5 s" in str(error)


def test_two_of_one_number(port: int) -> None:
    heard = called(port, 3, [0, 1, 1], 20)
    assert all("two processes are number 1, on host" in str(error) for error in heard)


def test_processes_that_were_told_of_different_numbers(port: int) -> None:
    heard = called(port, 2, [0, 1], 20, counts={1: 3})
    assert all("process 1 on host1 was told of 3 processes, process 0 of 2" in str(error) for error in heard)


def test_a_stranger_at_the_door(port: int) -> None:
    def stranger() -> None:
        heard = False
        while not heard:
            with suppress(OSError), socket.create_connection(("localhost", port), timeout=5) as line:
                line.sendall(b"GET / HTTP/1.1\r\n\r\n")
                heard = True

    threading.Thread(target=stranger, daemon=True).start()
    assert called(port, 2, [0, 1], 20) == [["host0", "host1"]] * 2


def test_a_port_in_use_is_said(port: int) -> None:
    with socket.create_server(("", port)), pytest.raises(UserError, match=f"cannot listen on port {port}"):
        roll_call(Cluster(f"localhost:{port}", 2, 0), 1)
