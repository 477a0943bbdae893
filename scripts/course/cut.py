"""A network with two branches, cut into parts on devices: what is sent, the schedule, and equality with one device.

Pipeline stages of training are groups of equal layers. This file places any graph of functions: each part runs on its
device, and arrays are sent where an edge crosses a cut.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scripts.course import Findings, main
from scripts.course.panels import DARK, PALE, Cells
from scripts.course.table import Row, Table

KEY = {"F": ("forward", DARK), "B": ("backward", "#e69f00"), ".": ("idle", PALE)}
IMAGES, SIDE, CHANNELS = 32, 16, 8
TICKS = {"F": 1, "B": 2}  # a backward pass takes twice the time of a forward pass
Weights = Mapping[str, jax.Array]


class Part(NamedTuple):
    """A part of the graph: the parts whose results it reads (or "input"), its device, and its function."""

    reads: Sequence[str]
    device: int
    run: Callable[..., jax.Array]
    shapes: Mapping[str, tuple[int, ...]]


def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


# A stem, a tower with small kernels, a tower with large ones, and a head that reads both: no stack of equal layers.
C = CHANNELS
GRAPH = {
    "stem": Part(["input"], 0, lambda w, x: jax.nn.relu(convolve(x, w["k"])), {"k": (3, 3, 1, C)}),
    "small": Part(["stem"], 1, lambda w, x: jax.nn.relu(convolve(x, w["k"], 2)), {"k": (3, 3, C, 2 * C)}),
    "large": Part(["stem"], 2, lambda w, x: jnp.tanh(convolve(x, w["k"], 2)), {"k": (7, 7, C, 2 * C)}),
    "head": Part(
        ["small", "large"],
        3,
        lambda w, a, b: jnp.concatenate([a.mean((1, 2)), b.mean((1, 2))], 1) @ w["w"],
        {"w": (4 * C, 10)},
    ),
}


@dataclass
class Traffic:
    """Bytes and number of the arrays that were sent over cuts."""

    sizes: dict[str, int] = field(default_factory=dict)

    def send(self, x: jax.Array, source: str, target: str, device: jax.Device) -> jax.Array:
        """The array on another device; the edge is counted if it crosses a cut."""
        if x.devices() != {device}:
            edge = f"{source} to {target}"
            self.sizes[edge] = self.sizes.get(edge, 0) + x.nbytes
        return jax.device_put(x, device)


def initial() -> dict[str, dict[str, jax.Array]]:
    draws = np.random.default_rng(0)

    def weight(shape: tuple[int, ...]) -> jax.Array:
        return jnp.asarray(draws.standard_normal(shape) / np.sqrt(np.prod(shape[:-1])), jnp.float32)

    return {name: {key: weight(shape) for key, shape in part.shapes.items()} for name, part in GRAPH.items()}


def loss_of(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The sum over the images."""
    return -jnp.sum(jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels])


def whole(weights: Mapping[str, Weights], x: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss on one device."""
    results = {"input": x}
    for name, part in GRAPH.items():
        results[name] = part.run(weights[name], *(results[source] for source in part.reads))
    return loss_of(results["head"], labels)


def in_parts(
    weights: Mapping[str, Weights], batches: Sequence[tuple[jax.Array, jax.Array]], devices: Sequence[jax.Device]
) -> tuple[jax.Array, dict[str, Any], Traffic]:
    """The loss and the gradients, each on the device of its part: sums over the micro-batches."""
    placed = {name: jax.device_put(weights[name], devices[part.device]) for name, part in GRAPH.items()}
    total = jnp.float32(0)
    gradients = {}
    traffic = Traffic()
    for x, labels in batches:
        results = {"input": x}
        backward = {}
        for name, part in GRAPH.items():
            device = devices[part.device]
            received = [traffic.send(results[source], source, name, device) for source in part.reads]
            results[name], backward[name] = jax.vjp(part.run, placed[name], *received)
        loss, from_loss = jax.value_and_grad(loss_of)(
            results["head"], jax.device_put(labels, devices[GRAPH["head"].device])
        )
        total += jax.device_put(loss, devices[0])
        errors = {"head": from_loss}
        for name in reversed(GRAPH):
            gradient, *to_sources = backward[name](errors[name])
            gradients[name] = jax.tree.map(jnp.add, gradients[name], gradient) if name in gradients else gradient
            for source, error in zip(GRAPH[name].reads, to_sources, strict=True):
                if source == "input":
                    continue
                sent = traffic.send(error, name, source, devices[GRAPH[source].device])
                errors[source] = errors[source] + sent if source in errors else sent
    return total, gradients, traffic


def schedule(micro_batches: int, graph: Mapping[str, Part] = GRAPH) -> dict[str, str]:
    """What each device does in each tick, a letter of KEY: of the operations whose operands are there, a device runs
    the backward pass of the earliest micro-batch, or else the earliest forward pass."""
    readers = {name: [other for other, part in graph.items() if name in part.reads] for name in graph}
    done: dict[tuple[str, str, int], int] = {}  # (operation, part, micro-batch) -> the tick at which it ends
    free = dict.fromkeys({part.device for part in graph.values()}, 0)
    rows = dict.fromkeys(sorted(free), "")
    waiting = [(kind, name, m) for kind in "BF" for m in range(micro_batches) for name in graph]
    tick = 0
    while waiting:
        for device in rows:
            if free[device] > tick:
                continue
            ready = next(
                (
                    candidate
                    for candidate in waiting
                    if graph[candidate[1]].device == device and _can_run(candidate, tick, done, graph, readers)
                ),
                None,
            )
            if ready is None:
                rows[device] += "."
                free[device] = tick + 1
            else:
                waiting.remove(ready)
                free[device] = done[ready] = tick + TICKS[ready[0]]
                rows[device] += ready[0] * TICKS[ready[0]]
        tick += 1
    end = max(map(len, rows.values()))
    names = {device: " + ".join(name for name, part in graph.items() if part.device == device) for device in rows}
    return {f"{device}: {names[device]}": row.ljust(end, ".") for device, row in rows.items()}


def _can_run(
    operation: tuple[str, str, int], tick: int, done: Mapping[tuple[str, str, int], int], graph: Mapping[str, Part],
    readers: Mapping[str, Sequence[str]],
) -> bool:  # fmt: skip
    """Whether all operands have been computed before this tick."""
    kind, name, micro = operation
    if kind == "F":
        needed = [("F", source, micro) for source in graph[name].reads if source != "input"]
    else:
        needed = [("F", name, micro), *(("B", reader, micro) for reader in readers[name])]
    return all(done.get(step, tick + 1) <= tick for step in needed)


def measure(micro_batches: int) -> Findings:
    devices = jax.devices()[:4]
    draws = np.random.default_rng(1)
    x = jnp.asarray(draws.standard_normal((IMAGES, SIDE, SIDE, 1)), jnp.float32)
    labels = jnp.asarray(draws.integers(0, 10, IMAGES), jnp.int32)
    weights = initial()
    loss, gradients = jax.value_and_grad(whole)(weights, x, labels)
    batches = list(zip(np.array_split(x, micro_batches), np.array_split(labels, micro_batches), strict=True))
    cut_loss, parts, traffic = in_parts(weights, batches, devices)
    difference = max(
        float(np.abs(a - b).max() / np.abs(a).max())
        for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(parts), strict=True)
    )
    places: list[Row] = [
        {
            "part": name,
            "reads": ", ".join(part.reads),
            "device": str(part.device),
            "weights, kB": sum(w.nbytes for w in weights[name].values()) / 1e3,
            "gradients are on": ", ".join(str(d.id) for d in parts[name][next(iter(part.shapes))].devices()),
        }
        for name, part in GRAPH.items()
    ]
    edges: list[Row] = [{"cut": edge, "sent, kB": size / 1e3} for edge, size in traffic.sizes.items()]
    rows = {count: schedule(count) for count in (1, micro_batches)}
    idle = {
        count: sum(row.count(".") for row in rows[count].values()) / sum(map(len, rows[count].values()))
        for count in rows
    }
    panels = [
        Cells(f"{count} micro-batch{'es' if count > 1 else ''}: idle {idle[count]:.0%}", rows[count], KEY, y="device")
        for count in rows
    ]
    return Findings(
        [Table("Parts of the network", places), Table("Arrays sent over the cuts, forward and backward", edges)],
        {
            "loss": float(loss),
            "parts": float(cut_loss),
            "difference": difference,
            "one": idle[1],
            "many": idle[micro_batches],
            "micro": micro_batches,
        },
        panels,
        (10,),
    )


if __name__ == "__main__":
    main(__file__)
