"""A parameter server and its workers as processes, over TCP: workers pull arrays and push gradients by index.

    python scripts/course/parameter_server.py              # starts all of it on this machine, and compares
    export PARAMETER_SERVER_KEY=a-secret                   # or each process by hand, also on several machines
    python scripts/course/parameter_server.py serve HOST PORT WORKERS STALENESS   # STALENESS: a number or sync
    python scripts/course/parameter_server.py work HOST PORT FIRST_BATCH STEPS

A message is a line of JSON and the bytes of an array; nothing is pickled. Both sides prove that they have the key
(HMAC). The server has the weights and the optimizer state; each array is updated on its own. Synchronous: an array
is updated when all workers have pushed its gradient, with the mean. Asynchronous: at each push; a worker that is more
than `staleness` steps ahead of the slowest one waits (Ho et al., 2013).
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import numpy as np

from jaxmem.errors import UserError
from scripts.course import Findings, main
from scripts.course.panels import LinePlot
from scripts.course.table import Row, Table

KEY = "PARAMETER_SERVER_KEY"  # the environment variable of the key
SHAPES = ((64, 128), (128,), (128, 10), (10,))  # an MLP that classifies points
ROWS = 64  # points per worker and step
LEARNING_RATE, BETA1, BETA2, EPSILON = 3e-3, 0.9, 0.95, 1e-8
Arrays = list[np.ndarray]
Batch = tuple[np.ndarray, np.ndarray]


@dataclass
class Server:
    """The weights, Adam's moments, and the clocks of the workers. `staleness` None: synchronous."""

    weights: Arrays
    workers: int  # the number of workers that the first step waits for
    staleness: int | None = None
    received: int = 0  # bytes of gradients
    sent: int = 0  # bytes of weights
    worst_lead: int = 0  # the most steps that a worker was ahead of the slowest one
    joined: int = 0
    clocks: dict[int, int] = field(default_factory=dict)  # worker -> its step, for the workers that are connected
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.first = [np.zeros_like(w) for w in self.weights]
        self.second = [np.zeros_like(w) for w in self.weights]
        self.versions = [0] * len(self.weights)  # updates of each array
        self.pushed: list[dict[int, np.ndarray]] = [{} for _ in self.weights]

    def join(self) -> int:
        """A new worker, which begins with the step after the one that the others are in."""
        with self.changed:
            worker = self.joined
            begun = self.joined >= self.workers and self.clocks
            self.clocks[worker] = max(self.clocks.values()) + 1 if begun else 0
            self.joined += 1
            self.changed.notify_all()
            return worker

    def leave(self, worker: int) -> None:
        """The others wait for this worker no longer."""
        with self.changed:
            self.clocks.pop(worker, None)
            for index in range(len(self.weights)):
                self._update_if_complete(index)
            self.changed.notify_all()

    def pull(self, index: int, worker: int) -> np.ndarray:
        """The array, when the worker may begin its step."""
        with self.changed:
            self.changed.wait_for(lambda: self.joined >= self.workers and self._may_begin(index, worker))
            self.worst_lead = max(self.worst_lead, self.clocks[worker] - min(self.clocks.values()))
            self.sent += self.weights[index].nbytes
            return self.weights[index].copy()

    def push(self, index: int, gradient: np.ndarray, worker: int) -> None:
        """Takes a gradient; the last array of a step ends the step of this worker."""
        with self.changed:
            self.received += gradient.nbytes
            self.pushed[index][worker] = gradient
            if index == len(self.weights) - 1:
                self.clocks[worker] += 1
            self._update_if_complete(index)
            self.changed.notify_all()

    def _may_begin(self, index: int, worker: int) -> bool:
        if self.staleness is None:
            return self.versions[index] >= self.clocks[worker]
        return self.clocks[worker] - min(self.clocks.values()) <= self.staleness

    def _update_if_complete(self, index: int) -> None:
        pushed = self.pushed[index]
        version = self.versions[index]
        # A worker that is new begins with a later step.
        awaited = [w for w, clock in self.clocks.items() if clock <= version and w not in pushed]
        if not pushed or (self.staleness is None and awaited):
            return
        gradient = sum(pushed[worker] for worker in sorted(pushed)) / np.float32(len(pushed))
        pushed.clear()
        self.versions[index] += 1
        adam(self.weights[index], gradient, self.first[index], self.second[index], self.versions[index])


def adam(weight: np.ndarray, gradient: np.ndarray, first: np.ndarray, second: np.ndarray, step: int) -> None:
    """Updates all arrays but the gradient in place."""
    first += np.float32(1 - BETA1) * (gradient - first)
    second += np.float32(1 - BETA2) * (gradient**2 - second)
    size = np.float32(LEARNING_RATE / (1 - BETA1**step))
    weight -= size * first / (np.sqrt(second / np.float32(1 - BETA2**step)) + np.float32(EPSILON))


def serve(host: str, port: int, workers: int, staleness: int | None) -> None:
    """Prints its port, and answers until a message says stop; the reply to that has the counts."""
    server = Server(initial_weights(), workers, staleness)
    with Listener((host, port), authkey=_key()) as listener:
        print(listener.address[1], flush=True)
        while True:
            with suppress(OSError, EOFError, AuthenticationError):  # a caller without the key
                threading.Thread(target=_answer, args=(server, listener.accept()), daemon=True).start()


def _answer(server: Server, connection: Connection) -> None:
    """Answers one connection until it ends: a worker, or the caller that stops the server."""
    worker = None
    try:
        while True:
            head = json.loads(connection.recv_bytes())
            if head["do"] == "stop":
                counts = {name: getattr(server, name) for name in ("received", "sent", "worst_lead", "joined")}
                connection.send_bytes(json.dumps(counts | {"updates": max(server.versions)}).encode())
                os._exit(0)
            if head["do"] == "join":
                worker = server.join()
                connection.send_bytes(json.dumps({"worker": worker, "step": server.clocks[worker]}).encode())
            elif head["do"] == "pull" and worker is not None:
                connection.send_bytes(server.pull(head["index"], worker).tobytes())
            elif head["do"] == "push" and worker is not None:
                gradient = np.frombuffer(connection.recv_bytes(), np.float32)
                server.push(head["index"], gradient.reshape(server.weights[head["index"]].shape), worker)
    except (EOFError, OSError):  # the worker has ended, or was killed
        pass
    finally:
        if worker is not None:
            server.leave(worker)


@dataclass
class Remote:
    """What a worker asks the server for."""

    connection: Connection

    def pull(self, index: int) -> np.ndarray:
        self._send({"do": "pull", "index": index})
        return np.frombuffer(self.connection.recv_bytes(), np.float32).reshape(SHAPES[index])

    def push(self, index: int, gradient: np.ndarray) -> None:
        self._send({"do": "push", "index": index})
        self.connection.send_bytes(np.ascontiguousarray(gradient, np.float32).tobytes())

    def ask(self, what: str) -> dict[str, int]:
        """The reply to join or stop."""
        self._send({"do": what})
        return json.loads(self.connection.recv_bytes())

    def _send(self, head: Mapping[str, Any]) -> None:
        self.connection.send_bytes(json.dumps(head).encode())


def work(host: str, port: int, first_batch: int, steps: int, pause: float = 0.0) -> None:
    """Trains on every batch of one worker, and prints a line of JSON for each step."""
    with Client((host, port), authkey=_key()) as connection:
        remote = Remote(connection)
        begin = remote.ask("join")["step"]
        for step in range(begin, steps):
            weights = [remote.pull(index) for index in range(len(SHAPES))]
            loss, gradients = loss_and_gradients(weights, batch_of(first_batch, step))
            time.sleep(pause)
            for index, gradient in enumerate(gradients):
                remote.push(index, gradient)
            print(json.dumps({"step": step, "loss": loss}), flush=True)


def _key() -> bytes:
    key = os.environ.get(KEY)
    if not key:
        raise UserError(f"{KEY} is not set; set it to the same secret for the server and its workers")
    return key.encode()


# ------------------------------------------------------------ the model: an MLP in numpy, so that workers start at once


def initial_weights() -> Arrays:
    draws = np.random.default_rng(0)
    return [
        (draws.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
        if len(shape) == 2
        else np.zeros(shape, np.float32)
        for shape in SHAPES
    ]


def batch_of(worker: int, step: int) -> Batch:
    """Random points, labelled by a random network that all workers know."""
    points = np.random.default_rng((worker, step)).standard_normal((ROWS, SHAPES[0][0])).astype(np.float32)
    teacher = np.random.default_rng(1).standard_normal((SHAPES[0][0], SHAPES[-1][0])).astype(np.float32)
    return points, (points @ teacher).argmax(axis=1)


def loss_and_gradients(weights: Sequence[np.ndarray], batch: Batch) -> tuple[float, Arrays]:
    """The mean cross-entropy of a batch, and its gradients."""
    w1, b1, w2, b2 = weights
    x, labels = batch
    hidden = np.maximum(x @ w1 + b1, 0)
    logits = hidden @ w2 + b2
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    rows = np.arange(len(labels))
    loss = -float(log_probabilities[rows, labels].mean())
    error = np.exp(log_probabilities)
    error[rows, labels] -= 1
    error /= np.float32(len(labels))
    back = (error @ w2.T) * (hidden > 0)
    return loss, [x.T @ back, back.sum(0), hidden.T @ error, error.sum(0)]


# ---------------------------------------------------------------- all of it on this machine


@dataclass
class Run:
    """The mean loss of the workers in each step, and the counts of the server."""

    losses: list[float]
    counts: dict[str, int]


class Processes:
    """A server and workers as processes of this machine."""

    def __init__(self, workers: int, staleness: int | None) -> None:
        self.environment = {**os.environ, KEY: os.urandom(16).hex()}
        arguments = ["serve", "127.0.0.1", "0", str(workers), "sync" if staleness is None else str(staleness)]
        self.server = self._start(arguments)
        assert self.server.stdout is not None
        self.port = self.server.stdout.readline().strip()
        self.workers: list[subprocess.Popen[str]] = []

    def add(self, steps: int, pause: float = 0.0) -> subprocess.Popen[str]:
        arguments = ["work", "127.0.0.1", self.port, str(len(self.workers)), str(steps), str(pause)]
        self.workers.append(self._start(arguments))
        return self.workers[-1]

    def finish(self) -> Run:
        outputs = [worker.communicate()[0] for worker in self.workers]
        with Client(("127.0.0.1", int(self.port)), authkey=self.environment[KEY].encode()) as connection:
            counts = Remote(connection).ask("stop")
        self.server.communicate()
        by_step: dict[int, list[float]] = {}
        for line in "".join(outputs).splitlines():
            row = json.loads(line)
            by_step.setdefault(row["step"], []).append(row["loss"])
        return Run([float(np.mean(by_step[step])) for step in sorted(by_step)], counts)

    def _start(self, arguments: Sequence[str]) -> subprocess.Popen[str]:
        command = [sys.executable, __file__, *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self.environment)


def run(workers: int, steps: int, staleness: int | None = None, slow: float = 0.0) -> Run:
    """`slow`: seconds that the first worker pauses in each step."""
    processes = Processes(workers, staleness)
    for number in range(workers):
        processes.add(steps, slow if number == 0 else 0.0)
    return processes.finish()


def run_with_changes(workers: int, steps: int) -> Run:
    """One worker is killed and another one is added while the others train."""
    processes = Processes(workers, None)
    for _ in range(workers):
        processes.add(steps, 0.05)
    victim = processes.workers[-1]
    assert victim.stdout is not None
    while json.loads(victim.stdout.readline())["step"] < steps // 4:
        pass
    victim.kill()
    processes.add(steps, 0.05)
    return processes.finish()


def all_reduce(workers: int, steps: int) -> list[float]:
    """The losses of the same training by an all-reduce over simulated devices: jax computes the gradients."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:workers]), ("worker",))

    def loss_of(weights: list[jax.Array], x: jax.Array, labels: jax.Array) -> jax.Array:
        w1, b1, w2, b2 = weights
        logits = jax.nn.relu(x @ w1 + b1) @ w2 + b2
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(ROWS), labels])

    def step(weights: list[jax.Array], x: jax.Array, labels: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        return jax.lax.pmean(jax.value_and_grad(loss_of)(weights, x, labels), "worker")

    specs = (P(), P("worker"), P("worker"))
    reduced = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))
    server = Server(initial_weights(), 1)  # for its optimizer
    losses = []
    for number in range(steps):
        batches = [batch_of(worker, number) for worker in range(workers)]
        x, y = (np.concatenate(parts) for parts in zip(*batches, strict=True))
        loss, gradients = reduced(server.weights, x, y.astype(np.int32))
        losses.append(float(loss))
        for index, gradient in enumerate(gradients):
            state = server.first[index], server.second[index]
            adam(server.weights[index], np.asarray(gradient), *state, number + 1)
    return losses


def busiest_link(parameter_bytes: int, workers: int) -> tuple[int, float]:
    """Bytes per step in one direction over the busiest link: with a server, and with a ring all-reduce.

    >>> busiest_link(1000, 4)
    (4000, 1500.0)
    """
    return workers * parameter_bytes, 2 * parameter_bytes * (workers - 1) / workers


def measure(workers: int, steps: int) -> Findings:
    if min(workers, steps // 4) < 1:
        raise UserError(
            f"parameter_server does not support --workers {workers} --steps {steps}; use 1 or more, 4 or more"
        )
    runs: dict[str, Callable[[], Run]] = {
        "synchronous": lambda: run(workers, steps),
        "asynchronous, at most 2 steps apart, one slow worker": lambda: run(workers, steps, 2, slow=0.02),
        "synchronous, a worker killed, one added": lambda: run_with_changes(workers, steps),
    }
    reduced = Run(all_reduce(workers, steps), {})
    results = {"all-reduce": reduced, **{name: start() for name, start in runs.items()}}
    size = 4 * sum(int(np.prod(shape)) for shape in SHAPES)
    rows = [_row(name, result, reduced.losses) for name, result in results.items()]
    counts = range(2, 17)
    traffic = {
        "server": [(n, busiest_link(size, n)[0] / 1e6) for n in counts],
        "ring all-reduce": [(n, busiest_link(size, n)[1] / 1e6) for n in counts],
        "counted here": [(workers, results["synchronous"].counts["received"] / steps / 1e6)],
    }
    curves = {name: list(enumerate(result.losses)) for name, result in results.items()}
    facts = {
        "workers": workers,
        "difference": rows[1]["largest difference"],
        "times": workers**2 / (2 * max(1, workers - 1)),
        "lead": rows[2]["lead, steps"],
    }
    return Findings(
        [Table(f"{workers} workers, {steps} steps, {size / 1e3:.0f} kB of weights", rows)],
        facts,
        [
            LinePlot("Loss", "step", "loss, nats", curves, "y"),
            LinePlot("The busiest link, one direction", "workers", "MB per step", traffic),
        ],
    )


def _row(name: str, result: Run, reduced: Sequence[float]) -> Row:
    difference = max(abs(a - b) for a, b in zip(result.losses, reduced, strict=False))
    received = result.counts.get("received")  # None: without a server
    return {
        "training": name,
        "first loss": result.losses[0],
        "last loss": result.losses[-1],
        "largest difference": difference,
        "updates": result.counts.get("updates"),
        "MB to the server": received and received / 1e6,
        "lead, steps": result.counts.get("worst_lead"),
    }


if __name__ == "__main__":
    command, *arguments = sys.argv[1:] or [""]
    if command == "serve":
        serve(arguments[0], int(arguments[1]), int(arguments[2]), None if arguments[3] == "sync" else int(arguments[3]))
    elif command == "work":
        work(arguments[0], *map(int, arguments[1:4]), *map(float, arguments[4:]))
    else:
        main(__file__)
