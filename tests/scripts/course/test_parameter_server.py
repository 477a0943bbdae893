"""The server: synchronous updates are those of the mean gradient, stale ones are bounded, workers come and go."""

import os
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import numpy as np
import pytest

from jaxmem.errors import UserError
from scripts.course import parameter_server
from scripts.course.parameter_server import (
    KEY,
    SHAPES,
    Processes,
    Server,
    adam,
    all_reduce,
    batch_of,
    busiest_link,
    initial_weights,
    loss_and_gradients,
    run,
    run_with_changes,
)

LAST = len(SHAPES) - 1
SIZE = 4 * sum(int(np.prod(shape)) for shape in SHAPES)


def push_all(server: Server, worker: int, seed: int = 0) -> list[np.ndarray]:
    gradients = [
        np.random.default_rng((seed, n)).standard_normal(shape).astype(np.float32) for n, shape in enumerate(SHAPES)
    ]
    for index, gradient in enumerate(gradients):
        server.push(index, gradient, worker)
    return gradients


def test_a_step_is_that_of_the_mean_gradient_in_any_order() -> None:
    server, expected = Server(initial_weights(), 2), initial_weights()
    workers = [server.join(), server.join()]
    second, first = push_all(server, workers[1], 1), push_all(server, workers[0], 2)
    for weight, a, b in zip(expected, first, second, strict=True):
        adam(weight, (a + b) / 2, np.zeros_like(weight), np.zeros_like(weight), 1)
    for index, weight in enumerate(expected):
        np.testing.assert_allclose(server.pull(index, workers[0]), weight, rtol=1e-6)
    assert server.received == 2 * SIZE
    assert server.sent == SIZE


def test_a_worker_waits_for_all_gradients_of_its_step() -> None:
    server = Server(initial_weights(), 2)
    first, second = server.join(), server.join()
    push_all(server, first)
    waiting = threading.Thread(target=server.pull, args=(0, first))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    push_all(server, second)
    waiting.join(5)
    assert not waiting.is_alive()


def test_the_others_do_not_wait_for_a_worker_that_left_and_wait_for_one_that_joined() -> None:
    server = Server(initial_weights(), 2)
    first, second = server.join(), server.join()
    push_all(server, first)
    server.leave(second)
    assert server.versions == [1] * len(SHAPES)
    third = server.join()
    assert server.clocks[third] == 2  # the first worker is in step 1
    push_all(server, first)
    assert server.versions == [2] * len(SHAPES)
    push_all(server, first)
    assert server.versions == [2] * len(SHAPES)  # the new worker has not pushed
    push_all(server, third)
    assert server.versions == [3] * len(SHAPES)


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_worker_is_further_ahead_than_allowed(staleness: int) -> None:
    server = Server(initial_weights(), 2, staleness)
    first, _ = server.join(), server.join()
    for _ in range(staleness + 1):
        server.pull(0, first)
        push_all(server, first)
    assert server.versions == [staleness + 1] * len(SHAPES)
    assert server.worst_lead == staleness
    waiting = threading.Thread(target=server.pull, args=(0, first), daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()


def test_gradients_are_right() -> None:
    weights, batch = initial_weights(), batch_of(0, 0)
    loss, gradients = loss_and_gradients(weights, batch)
    for index, place in ((0, (3, 5)), (1, (7,)), (2, (9, 2)), (3, (4,))):
        moved = [w.copy() for w in weights]
        moved[index][place] += 1e-2
        found = (loss_and_gradients(moved, batch)[0] - loss) / 1e-2
        assert found == pytest.approx(gradients[index][place], rel=0.1, abs=1e-3)


def test_a_key_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(UserError, match=f"{KEY} is not set"):
        parameter_server.serve("127.0.0.1", 0, 1, None)


@pytest.mark.exhaustive
def test_processes_train_as_an_all_reduce_does() -> None:
    found = run(2, 8)
    np.testing.assert_allclose(found.losses, all_reduce(2, 8), rtol=1e-5)
    assert found.counts["received"] == found.counts["sent"] == 8 * busiest_link(SIZE, 2)[0]
    assert found.counts["updates"] == 8


@pytest.mark.exhaustive
def test_a_worker_is_killed_and_one_added_while_it_trains() -> None:
    found = run_with_changes(2, 24)
    assert found.counts["joined"] == 3
    assert found.counts["updates"] == 24
    assert found.losses[-1] < 0.9 * found.losses[0]


@pytest.mark.exhaustive
def test_a_caller_without_the_key_is_refused_and_the_server_goes_on() -> None:
    processes = Processes(1, None)
    with pytest.raises(AuthenticationError):
        Client(("127.0.0.1", int(processes.port)), authkey=os.urandom(16))
    processes.add(2)
    assert processes.finish().counts["updates"] == 2
