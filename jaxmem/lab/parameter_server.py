"""Data parallelism with a parameter server: workers push gradients to it and pull weights from it (Li et al., 2014).

The server stores the weights and the optimizer state on a device of its own or in host memory; a worker stores weights,
gradients and activations, and no optimizer state. With n workers and B bytes of weights, n B of gradients enter the
server's link in each step and n B of weights leave it; in a ring all-reduce every link carries 2 B (n-1)/n. The
server's link is the bottleneck, by n^2 / (2 (n-1)), so `train` does not use a server. In return, workers need not wait:

- synchronous (`staleness=None`): weights change when all workers have pushed, by the mean of their gradients. This is
  the ordinary step; the slowest worker sets the pace.
- asynchronous (`staleness=s`): weights change at each push, by gradients of weights that may be stale. A worker may be
  at most s steps ahead of the slowest (stale synchronous parallel: Ho et al., 2013), so with n workers at most
  (n-1)(2s+1) updates of others fall between a pull and its push.

Workers are threads of one process, each with a device. Gradients and weights move between devices, and are counted.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxmem import optim
from jaxmem.step import Program
from jaxmem.step.objective import means, objective

Gradient = Callable[[Any, Any], tuple[jax.Array, Any]]  # (weights, batch) -> loss, gradients


@dataclass
class LinkTraffic:
    """Bytes over the server's link."""

    received: int = 0  # bytes of gradients
    sent: int = 0  # bytes of weights


class ParameterServer:
    """server = ParameterServer(params, optax.adam(1e-3), workers=4, device=jax.devices()[4])
    losses = train(server, gradient, batches, jax.devices()[:4])

    Weights have the indices of `jax.tree.leaves`. In a step a worker pulls and pushes every index once.
    """

    def __init__(
        self,
        params: Any,
        tx: optax.GradientTransformation,
        workers: int,
        device: jax.Device,
        staleness: int | None = None,
    ) -> None:
        self.device, self.workers, self.staleness = device, workers, staleness
        self.traffic = LinkTraffic()
        self.worst_lead = 0  # the most steps that a worker was ahead of the slowest
        self.worst_staleness = 0  # the most updates between a worker's pull and its push
        leaves = jax.tree.leaves(jax.device_put(params, device))
        self.structure: Any = jax.tree.structure(params)
        self._leaves = [jnp.copy(leaf) for leaf in leaves]  # a copy, because updates are in place
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes on purpose
            self._state = tx.init(jax.tree.unflatten(self.structure, self._leaves))
        self._update = jax.jit(partial(_update_weights, tx), donate_argnums=(0, 1))
        self._version = 0  # number of updates
        self._changed = threading.Condition()
        self._stopped = False
        self._clocks = [0] * workers  # complete steps of each worker
        self._left = [len(leaves)] * workers  # pushes until the end of each worker's step
        self._based_on = [0] * workers  # the version that each worker pulled for its current step
        rows = 1 if staleness is None else workers  # synchronous: summed in one buffer, in worker order
        self._pushed: list[list[jax.Array | None]] = [[None] * len(leaves) for _ in range(rows)]
        self._turn = [0] * len(leaves)

    @property
    def params(self) -> Any:
        """A copy of the current weights."""
        with self._changed:
            return self.structure.unflatten([jnp.copy(leaf) for leaf in self._leaves])

    @property
    def updates(self) -> int:
        return self._version

    def pull(self, index: int, worker: int, to: jax.Device) -> jax.Array:
        """One weight, copied to device `to`. Waits until the other workers have come far enough."""
        with self._changed:
            clock = self._clocks[worker]
            self._wait(
                lambda: self._version == clock if self.staleness is None else clock - self._slowest <= self.staleness
            )
            if index == 0:
                self._based_on[worker] = self._version
                self.worst_lead = max(self.worst_lead, clock - self._slowest)
            leaf = self._leaves[index]
            self.traffic.sent += leaf.nbytes
            # Copied before an update may donate it.
            return jax.block_until_ready(jax.device_put(jnp.copy(leaf), to))

    def push(self, index: int, gradient: jax.Array, worker: int) -> None:
        """Sends one gradient; the last one of a step updates the weights."""
        gradient = jax.device_put(gradient, self.device)
        with self._changed:
            self.traffic.received += gradient.nbytes
            if self.staleness is None:
                self._wait(lambda: self._turn[index] == worker)
                pushed, total = self._pushed[0], self._pushed[0][index]
                pushed[index] = gradient if total is None else total + gradient
                self._turn[index] += 1
                if all(turn == self.workers for turn in self._turn):
                    self._turn = [0] * len(self._turn)
                    self._apply(pushed, self.workers)
            else:
                pushed = self._pushed[worker]
                pushed[index] = gradient
                if None not in pushed:
                    self.worst_staleness = max(self.worst_staleness, self._version - self._based_on[worker])
                    self._apply(pushed, 1)
            self._left[worker] -= 1
            if not self._left[worker]:
                self._left[worker] = len(self._leaves)
                self._clocks[worker] += 1
            self._changed.notify_all()

    def leave(self, worker: int) -> None:
        """This worker has ended: the others do not wait for it."""
        with self._changed:
            self._clocks[worker] = 1 << 60
            self._changed.notify_all()

    @contextmanager
    def working(self, worker: int) -> Iterator[None]:
        """Encloses the work of a worker. If it fails, the others stop waiting and fail too."""
        try:
            yield
        except BaseException:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            raise
        if self.staleness is not None:
            self.leave(worker)

    @property
    def _slowest(self) -> int:
        return min(self._clocks)

    def _wait(self, ready: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: ready() or self._stopped)
        if self._stopped:
            raise RuntimeError("another worker has failed")

    def _apply(self, pushed: list[jax.Array | None], count: int) -> None:
        gradients = self.structure.unflatten(pushed)
        params = self.structure.unflatten(self._leaves)
        params, self._state = jax.block_until_ready(self._update(params, self._state, gradients, count))
        self._leaves = jax.tree.leaves(params)
        self._version += 1
        pushed[:] = [None] * len(pushed)


def train(
    server: ParameterServer, gradient: Gradient, batches: Sequence[Sequence[Any]], devices: Sequence[jax.Device]
) -> list[list[float]]:
    """Trains each worker on its batches on its device. Returns the losses [worker][step]."""
    with ThreadPoolExecutor(server.workers, "worker") as pool:
        workers = range(server.workers)
        return list(pool.map(lambda n: _work(server, gradient, n, batches[n], devices[n]), workers))


def gradient_of(program: Program) -> Gradient:
    """Loss and gradients of a program's network and objective: means over a batch, as in its training step."""
    of_batch = objective(program.cfg.objective, program.cfg.memory)

    def mean(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        one = jax.tree.map(lambda x: x[0], batch)
        return means(of_batch(nnx.merge(program.model.graphdef, params), one, None))["loss"]

    return jax.jit(jax.value_and_grad(mean))


def busiest_link(parameter_bytes: int, workers: int) -> tuple[int, float]:
    """Bytes per step in one direction over the busiest link: of a server, and of a ring all-reduce.

    >>> busiest_link(1000, 4)
    (4000, 1500.0)
    """
    return workers * parameter_bytes, 2 * parameter_bytes * (workers - 1) / workers


def _work(
    server: ParameterServer, gradient: Gradient, worker: int, batches: Sequence[Any], device: jax.Device
) -> list[float]:
    losses = []
    with server.working(worker):
        for batch in batches:
            count = server.structure.num_leaves
            params = server.structure.unflatten([server.pull(index, worker, device) for index in range(count)])
            loss, gradients = gradient(params, jax.device_put(batch, device))
            for index, leaf in enumerate(jax.tree.leaves(gradients)):
                server.push(index, leaf, worker)
            losses.append(float(np.asarray(loss)))
    return losses


def _update_weights(
    tx: optax.GradientTransformation, params: Any, state: Any, gradients: Any, count: int
) -> tuple[Any, Any]:
    gradients = jax.tree.map(lambda g: g / jnp.asarray(count, g.dtype), gradients)
    with jax.numpy_dtype_promotion("standard"):
        updates, state = tx.update(gradients, state, params)
    return optim.apply_updates(params, updates), state
