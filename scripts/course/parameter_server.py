"""Data parallelism with a parameter server: workers push gradients to it and pull weights from it (Li et al., 2014).

The server stores the weights and the optimizer state on a separate device or in host memory; a worker stores weights,
gradients and activations, but no optimizer state. With n workers and B bytes of weights, the server's link receives n B
of gradients and sends n B of weights per step; in a ring all-reduce every link carries 2 B (n-1)/n. The server's link
is the bottleneck, by a factor of n^2 / (2 (n-1)), so `train` does not use a server. In return, workers need not wait:

- synchronous (`staleness=None`): weights are updated when all workers have pushed, by the mean of their gradients. This
  is the ordinary step; all workers wait for the slowest.
- asynchronous (`staleness=s`): weights are updated at each push, by gradients of weights that may be stale. A worker
  may be at most s steps ahead of the slowest (stale synchronous parallel: Ho et al., 2013), so with n workers at most
  (n-1)(2s+1) updates of other workers are between a pull and its push.

Workers are threads of one process, each with a device. The bytes that move between devices are counted.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmem import optim
from jaxmem.step import Program
from jaxmem.step.objective import means, objective
from jaxmem.typing import Tree

Gradient = Callable[[Any, Any], tuple[jax.Array, Any]]  # (weights, batch) -> loss, gradients


class ParameterServer:
    """server = ParameterServer(params, optax.adam(1e-3), workers=4, device=jax.devices()[4])
    losses = train(server, gradient, batches, jax.devices()[:4])

    `received` and `sent`: bytes of gradients and of weights over the server's link.
    """

    def __init__(
        self,
        params: Tree,
        tx: optax.GradientTransformation,
        workers: int,
        device: jax.Device,
        staleness: int | None = None,
    ) -> None:
        self.device, self.workers, self.staleness = device, workers, staleness
        self.received = self.sent = self.updates = 0
        self.worst_lead = 0  # largest number of steps that a worker was ahead of the slowest
        self.worst_staleness = 0  # largest number of updates between a worker's pull and its push
        self._params = jax.tree.map(jnp.copy, jax.device_put(params, device))  # a copy, because updates are in place
        with jax.numpy_dtype_promotion("standard"):  # optax mixes dtypes on purpose
            self._state = tx.init(self._params)
        self._update = jax.jit(partial(_update_weights, tx), donate_argnums=(0, 1))
        self._changed = threading.Condition()
        self._stopped = False
        self._clocks = [0] * workers  # complete steps of each worker
        self._pulled = [0] * workers  # the number of updates at each worker's last pull
        self._sum: Any = None  # synchronous: the gradients of the workers that have pushed, in their order
        self._turn = 0  # synchronous: the worker whose push is next

    @property
    def params(self) -> Tree:
        """A copy of the current weights."""
        with self._changed:
            return jax.tree.map(jnp.copy, self._params)

    def pull(self, worker: int, to: jax.Device) -> Tree:
        """The weights, copied to device `to`. Waits until this worker is at most `staleness` steps ahead."""
        with self._changed:
            clock = self._clocks[worker]
            staleness = self.staleness
            self._wait(lambda: self.updates == clock if staleness is None else clock - min(self._clocks) <= staleness)
            self._pulled[worker] = self.updates
            self.worst_lead = max(self.worst_lead, clock - min(self._clocks))
            self.sent += _bytes(self._params)
            # The weights are copied before an update may donate them.
            return jax.block_until_ready(jax.device_put(jax.tree.map(jnp.copy, self._params), to))

    def push(self, gradients: Tree, worker: int) -> None:
        """Sends a worker's gradients; they update the weights, in synchronous mode with those of all workers."""
        gradients = jax.device_put(gradients, self.device)
        with self._changed:
            self.received += _bytes(gradients)
            if self.staleness is None:
                self._wait(lambda: self._turn == worker)
                self._sum = gradients if self._sum is None else jax.tree.map(jnp.add, self._sum, gradients)
                self._turn = (worker + 1) % self.workers
                if self._turn == 0:
                    self._apply(self._sum, self.workers)
                    self._sum = None
            else:
                self.worst_staleness = max(self.worst_staleness, self.updates - self._pulled[worker])
                self._apply(gradients, 1)
            self._clocks[worker] += 1
            self._changed.notify_all()

    @contextmanager
    def working(self, worker: int) -> Iterator[None]:
        """A context for the work of a worker. If it fails, the other workers stop waiting and fail too."""
        try:
            yield
        except BaseException:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            raise
        if self.staleness is not None:  # other workers do not wait for a worker that has finished
            with self._changed:
                self._clocks[worker] = 1 << 60
                self._changed.notify_all()

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: is_ready() or self._stopped)
        if self._stopped:
            raise RuntimeError("another worker has failed")

    def _apply(self, gradients: Tree, count: int) -> None:
        updated = self._update(self._params, self._state, gradients, count)
        self._params, self._state = jax.block_until_ready(updated)
        self.updates += 1


def train(
    server: ParameterServer, gradient: Gradient, batches: Sequence[Sequence[Any]], devices: Sequence[jax.Device]
) -> list[list[float]]:
    """Trains each worker on its batches on its device. Returns the losses [worker][step]."""

    def work(worker: int) -> list[float]:
        losses = []
        with server.working(worker):
            for batch in batches[worker]:
                params = server.pull(worker, devices[worker])
                loss, gradients = gradient(params, jax.device_put(batch, devices[worker]))
                server.push(gradients, worker)
                losses.append(float(np.asarray(loss)))
        return losses

    with ThreadPoolExecutor(server.workers, "worker") as pool:
        return list(pool.map(work, range(server.workers)))


def gradient_of(program: Program) -> Gradient:
    """Loss and gradients of a program's network and objective: means over a batch, as in its training step."""
    of_batch = objective(program.cfg)

    def mean(params: Tree, batch: dict[str, jax.Array]) -> jax.Array:
        worker_batch = jax.tree.map(lambda x: x[0], batch)
        return means(of_batch(program.model.network(params), worker_batch, None))["loss"]

    return jax.jit(jax.value_and_grad(mean))


def busiest_link(parameter_bytes: int, workers: int) -> tuple[int, float]:
    """Bytes per step in one direction over the busiest link: with a server, and with a ring all-reduce.

    >>> busiest_link(1000, 4)
    (4000, 1500.0)
    """
    return workers * parameter_bytes, 2 * parameter_bytes * (workers - 1) / workers


def _bytes(tree: Tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _update_weights(
    tx: optax.GradientTransformation, params: Tree, state: Tree, gradients: Tree, count: int
) -> tuple[Tree, Tree]:
    gradients = jax.tree.map(lambda g: g / jnp.asarray(count, g.dtype), gradients)
    with jax.numpy_dtype_promotion("standard"):
        updates, state = tx.update(gradients, state, params)
    return optim.apply_updates(params, updates), state


def main() -> None:
    """Trains a small decoder with a server for four workers: synchronous, then asynchronous."""
    import jaxmem
    from jaxmem.data import Loader
    from jaxmem.step import program

    workers, steps = 4, 10
    jaxmem.simulate(workers + 1)
    model = {"preset": "tiny", "layers": 1, "embed": 32, "mlp": 64, "heads": 2, "kv_heads": 2, "head_dim": 16}
    data = {"source": "stdlib", "sequence_length": 64}
    cfg = jaxmem.load_config(
        {"name": "server", "model": model, "data": data, "batch": {"global_size": workers}, "train": {"steps": steps}}
    )
    built = program(cfg, jax.devices()[:1])
    with Loader(built.cfg) as loader:
        rows = [next(loader) for _ in range(steps)]
    batches = [[{k: x[:, w : w + 1] for k, x in batch.items()} for batch in rows] for w in range(workers)]
    for staleness in (None, 2):
        params = built.initialise().params
        server = ParameterServer(params, optax.adam(1e-3), workers, jax.devices()[workers], staleness)
        losses = np.mean(train(server, gradient_of(built), batches, jax.devices()[:workers]), axis=0)
        name = "synchronous" if staleness is None else f"at most {staleness} steps apart"
        print(f"{name}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, {server.received:,} bytes received")
    served, ring = busiest_link(_bytes(params), workers)
    print(f"bytes per step over the busiest link: {served:,} with a server, {ring:,.0f} with a ring all-reduce")


if __name__ == "__main__":
    main()
