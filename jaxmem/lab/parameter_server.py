"""Data parallelism by a server: workers push gradients to it and pull weights from it (Li et al., 2014).

The server holds the weights and the optimizer's state on a device of its own, or in host memory (a CPU device);
a worker holds weights, gradients and activations, and no optimizer state. With n workers and B bytes of weights,
n B of gradients enter the server's one link in a step and n B of weights leave it; in a ring all-reduce every link
carries 2 B (n-1)/n. So the server is the narrow place, by n^2 / (2 (n-1)), and `train` does not use it. What it gives
in return is that workers need not wait for each other:

- synchronous (`ahead=None`): weights change when all have pushed, by the mean of their gradients. That is the ordinary
  step, number for number; the slowest worker sets the pace.
- asynchronous (`ahead=s`): weights change at each worker's push, by what it found at weights that may be old since.
  A worker may be at most s steps ahead of the slowest (Ho et al., 2013), so in n workers at most (n-1)(2s+1) updates
  of others fall between what one pulled and what it pushes.

Here workers are threads of one process, each with a device; gradients and weights really travel between devices, and
are counted.
"""

from __future__ import annotations

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
class Traffic:
    """What went through the server's link."""

    received: int = 0  # bytes of gradients
    sent: int = 0  # bytes of weights


class ParameterServer:
    """server = ParameterServer(params, optax.adam(1e-3), workers=4, device=jax.devices()[4])
    losses = train(server, gradient, batches, jax.devices()[:4])

    Weights are numbered as `jax.tree.leaves` orders them. A step of a worker is a pull and a push of every number.
    """

    def __init__(
        self,
        params: Any,
        tx: optax.GradientTransformation,
        workers: int,
        device: jax.Device,
        ahead: int | None = None,
    ) -> None:
        self.device, self.workers, self.ahead = device, workers, ahead
        self.traffic = Traffic()
        self.worst_lead = 0  # steps that a worker was ahead of the slowest
        self.worst_staleness = 0  # updates between what a worker pulled and what it pushed
        leaves = jax.tree.leaves(jax.device_put(params, device))
        self.structure: Any = jax.tree.structure(params)
        self._leaves = [jnp.copy(leaf) for leaf in leaves]  # updated in place: the caller keeps its own
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes on purpose
            self._state = tx.init(jax.tree.unflatten(self.structure, self._leaves))
        self._update = jax.jit(partial(_updated, tx), donate_argnums=(0, 1))
        self._version = 0  # updates done
        self._changed = threading.Condition()
        self._stopped = False
        self._clocks = [0] * workers  # steps that each has pushed whole
        self._left = [len(leaves)] * workers  # pushes to the end of each one's step
        self._based_on = [0] * workers  # the version that each pulled for its present step
        rows = workers if ahead is not None else 1  # synchronous pushes add up in one buffer, in the workers' order
        self._pushed: list[list[jax.Array | None]] = [[None] * len(leaves) for _ in range(rows)]
        self._turn = [0] * len(leaves)

    @property
    def params(self) -> Any:
        """A copy of the weights as they are."""
        with self._changed:
            return self.structure.unflatten([jnp.copy(leaf) for leaf in self._leaves])

    @property
    def updates(self) -> int:
        return self._version

    def pull(self, index: int, worker: int, to: jax.Device) -> jax.Array:
        """One weight, as new as this worker may have it: waits for the other workers if it must."""
        with self._changed:
            clock = self._clocks[worker]
            self._until(lambda: self._version == clock if self.ahead is None else clock - self._slowest <= self.ahead)
            if index == 0:
                self._based_on[worker] = self._version
                self.worst_lead = max(self.worst_lead, clock - self._slowest)
            leaf = self._leaves[index]
            self.traffic.sent += leaf.nbytes
            # Read before anybody may donate it to an update.
            return jax.block_until_ready(jax.device_put(jnp.copy(leaf), to))

    def push(self, index: int, gradient: jax.Array, worker: int) -> None:
        """One gradient; with the last one of a step, the weights change."""
        gradient = jax.device_put(gradient, self.device)
        with self._changed:
            self.traffic.received += gradient.nbytes
            if self.ahead is None:
                self._until(lambda: self._turn[index] == worker)
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
        """This worker pushes no more: nobody waits for it."""
        with self._changed:
            self._clocks[worker] = 1 << 60
            self._changed.notify_all()

    @contextmanager
    def working(self, worker: int) -> Iterator[None]:
        """Around all that a worker does. If it fails, the others do not wait for it forever."""
        try:
            yield
        except BaseException:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            raise
        if self.ahead is not None:
            self.leave(worker)

    # -------------------------------------------------------------- inside

    @property
    def _slowest(self) -> int:
        return min(self._clocks)

    def _until(self, ready: Callable[[], bool]) -> None:
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
    """Each worker, on a device of its own, takes its batches one after another; the losses that each saw."""
    with ThreadPoolExecutor(server.workers, "worker") as pool:
        numbers = range(server.workers)
        return list(pool.map(lambda n: _work(server, gradient, n, batches[n], devices[n]), numbers))


def gradient_of(program: Program) -> Gradient:
    """Of a config's own network and objective: the mean over a batch's rows, as in its training step."""
    of_batch = objective(program.cfg.objective, program.cfg.memory)

    def mean(params: Any, batch: dict[str, jax.Array]) -> jax.Array:
        one = jax.tree.map(lambda x: x[0], batch)
        return means(of_batch(nnx.merge(program.model.graphdef, params), one, None))["loss"]

    return jax.jit(jax.value_and_grad(mean))


def busiest_link(parameter_bytes: int, workers: int) -> tuple[int, float]:
    """Bytes a step, one way, through the busiest link: of a server, and of a ring all-reduce.

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
            loss, found = gradient(params, jax.device_put(batch, device))
            for index, leaf in enumerate(jax.tree.leaves(found)):
                server.push(index, leaf, worker)
            losses.append(float(np.asarray(loss)))
    return losses


def _updated(tx: optax.GradientTransformation, params: Any, state: Any, gradients: Any, count: int) -> tuple[Any, Any]:
    gradients = jax.tree.map(lambda g: g / jnp.asarray(count, g.dtype), gradients)
    with jax.numpy_dtype_promotion("standard"):
        updates, state = tx.update(gradients, state, params)
    return optim.apply(params, updates), state
