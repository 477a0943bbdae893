"""A network with two branches, cut into parts on devices: what is sent, the schedule, and equality with one device.

Pipeline stages of training are groups of equal layers. This file places any graph of functions: each part runs on its
device, and arrays are sent where an edge crosses a cut.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from scripts.course import Findings, main
from scripts.course.panels import DARK, PALE, Cells
from scripts.course.table import Row, Table

KEY = {"F": ("forward", DARK), "B": ("backward", "#e69f00"), ".": ("idle", PALE)}
IMAGES, SIDE, C = 32, 16, 8  # images, their height and width, and channels of the stem
TICKS = {"F": 1, "B": 2}  # a backward pass takes twice the time of a forward pass
Weights = Mapping[str, jax.Array]


class Part(NamedTuple):
    """A part of the graph: the parts whose results it reads (or "input"), its device, and its function."""

    reads: Sequence[str]
    device: int
    run: Callable[..., jax.Array]
    shapes: Mapping[str, tuple[int, ...]]


class Operation(NamedTuple):
    """A pass of a part on a micro-batch."""

    kind: str  # a key of TICKS
    part: str
    micro_batch: int


def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


# A stem, a tower with small kernels, a tower with large ones, and a head that reads both: no stack of equal layers.
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
) -> tuple[jax.Array, dict[str, Any], Counter[str]]:
    """The loss and the gradients, each on the device of its part: sums over the micro-batches. Also the bytes that are
    sent over each cut."""
    traffic: Counter[str] = Counter()

    def send(x: jax.Array, source: str, target: str) -> jax.Array:
        """The result or the error of a part on the device of another; the edge is counted if it crosses a cut."""
        device = devices[GRAPH[target].device]
        if x.devices() != {device}:
            traffic[f"{source} to {target}"] += x.nbytes
        return jax.device_put(x, device)

    placed = {name: jax.device_put(weights[name], devices[part.device]) for name, part in GRAPH.items()}
    total = jnp.float32(0)
    gradients = {}
    for x, labels in batches:
        results = {"input": x}
        backward = {}
        for name, part in GRAPH.items():
            received = [send(results[source], source, name) for source in part.reads]
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
                sent = send(error, name, source)
                errors[source] = errors[source] + sent if source in errors else sent
    return total, gradients, traffic


def schedule(micro_batches: int) -> dict[str, str]:
    """What each device does in each tick, a letter of KEY: of the operations whose operands are there, a device runs
    the backward pass of the earliest micro-batch, or else the earliest forward pass."""
    readers = {name: [reader for reader, part in GRAPH.items() if name in part.reads] for name in GRAPH}
    free = dict.fromkeys({part.device for part in GRAPH.values()}, 0)
    rows = dict.fromkeys(sorted(free), "")
    waiting = [Operation(kind, name, m) for kind in "BF" for m in range(micro_batches) for name in GRAPH]

    def can_run(operation: Operation, device: int, tick: int, done: Mapping[Operation, int]) -> bool:
        """Whether it is of this device, and all operands have been computed before this tick.
        `done`: the tick at which each operation ends."""
        kind, name, micro = operation
        if kind == "F":
            needed = [Operation("F", source, micro) for source in GRAPH[name].reads if source != "input"]
        else:
            needed = [Operation("F", name, micro), *(Operation("B", reader, micro) for reader in readers[name])]
        return GRAPH[name].device == device and all(done.get(step, tick + 1) <= tick for step in needed)

    tick = 0
    done: dict[Operation, int] = {}
    while waiting:
        for device in rows:
            if free[device] > tick:
                continue
            ready = next((operation for operation in waiting if can_run(operation, device, tick, done)), None)
            if ready is None:
                rows[device] += "."
                free[device] = tick + 1
            else:
                waiting.remove(ready)
                free[device] = done[ready] = tick + TICKS[ready.kind]
                rows[device] += ready.kind * TICKS[ready.kind]
        tick += 1
    end = max(map(len, rows.values()))
    names = {device: " + ".join(name for name, part in GRAPH.items() if part.device == device) for device in rows}
    return {f"{device}: {names[device]}": row.ljust(end, ".") for device, row in rows.items()}


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
    edges: list[Row] = [{"cut": edge, "sent, kB": size / 1e3} for edge, size in traffic.items()]
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
