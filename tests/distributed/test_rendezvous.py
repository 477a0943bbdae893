"""Missing processes are named before JAX starts. Threads stand for processes: only sockets are involved."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from jaxmem.distributed.cluster import Cluster
from jaxmem.distributed.rendezvous import rendezvous
from jaxmem.errors import TemporaryError, UserError


@pytest.fixture
def port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def answers(port: int, count: int, numbers: list[int], seconds: float, counts: dict[int, int] | None = None) -> list:
    """What each of these processes gets: the hosts, or an error."""

    def one(place: int, number: int) -> object:
        given = (counts or {}).get(place, count)
        try:
            return rendezvous(Cluster(f"localhost:{port}", given, number), seconds, lambda: f"host{place}")
        except UserError as error:
            return error

    with ThreadPoolExecutor(len(numbers)) as pool:
        return list(pool.map(one, range(len(numbers)), numbers))


def test_all_are_there(port: int) -> None:
    assert answers(port, 3, [2, 0, 1], 20) == [["host1", "host2", "host0"]] * 3


def test_missing_processes_are_named_to_all(port: int) -> None:
    found = answers(port, 4, [0, 2], 1)
    said = "processes 1, 3 of 4 did not start within 1 s (started: 0 on host0, 2 on host1); "
    assert all(str(error).startswith(said) for error in found)
    assert {type(error).exit_code for error in found} == {75}


def test_process_0_is_missing(port: int) -> None:
    (error,) = answers(port, 2, [1], 0.5)
    assert isinstance(error, TemporaryError)
    assert f"at localhost:{port} within 0.5 s" in str(error)


def test_duplicate_process_numbers(port: int) -> None:
    found = answers(port, 3, [0, 1, 1], 20)
    assert all("have JAX_PROCESS_ID=1; number them 0 to 2" in str(error) for error in found)


def test_different_process_counts(port: int) -> None:
    found = answers(port, 2, [0, 1], 20, counts={1: 3})
    assert all("JAX_NUM_PROCESSES is 2 in process 0 and 3 in process 1 on host1" in str(error) for error in found)


@pytest.mark.parametrize("message", [b"GET / HTTP/1.1\r\n\r\n", b'[7, 2, "x"]\n', b'["a", 2, "x"]\n'])
def test_a_foreign_client_is_ignored(port: int, message: bytes) -> None:
    has_ended = threading.Event()

    def foreign_client() -> None:
        while not has_ended.wait(0.01):
            with suppress(OSError), socket.create_connection(("localhost", port), timeout=5) as connection:
                connection.sendall(message)
                return

    client = threading.Thread(target=foreign_client)
    client.start()
    assert answers(port, 2, [0, 1], 20) == [["host0", "host1"]] * 2
    has_ended.set()
    client.join()


def test_a_port_in_use_is_reported(port: int) -> None:
    with socket.create_server(("", port)), pytest.raises(UserError, match=f"cannot listen on port {port}"):
        rendezvous(Cluster(f"localhost:{port}", 2, 0), 1)
