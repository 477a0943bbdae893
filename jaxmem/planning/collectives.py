"""The messages between devices that a compiled program sends: what kind, how often, how many bytes, between whom.

Bytes are those that cross one device's links with ring algorithms (Thakur et al., 2005). For n devices and an array
of B bytes: all-gather (B: the gathered array), reduce-scatter and all-to-all (n - 1) / n B, all-reduce twice that,
a permutation B.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from jaxmem.machine.gpus import ATTAINED_LINK, Gpu
from jaxmem.planning import wire
from jaxmem.planning.hlo import Instruction

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
LATENCY = 10e-6  # seconds until a message moves at full rate


@dataclass(frozen=True)
class Collective:
    """One message, each time that its instruction runs."""

    kind: str
    group: int  # devices that take part together
    neighbours: int  # how many of them share a host
    wire_bytes: int
    asynchronous: bool
    members: tuple[int, ...] = ()  # of one group

    def seconds(self, gpu: Gpu, *, one_host: bool = False) -> float:
        """Over the links within a host, and between hosts over the networks of all that take part in each.
        `one_host`: as if all that take part shared one."""
        rate = gpu.link_gb_s
        if self.neighbours < self.group and not one_host:
            rate = min(rate, gpu.network_gb_s * self.neighbours)
        return LATENCY + self.wire_bytes / (rate * 1e9 * ATTAINED_LINK)


def collective(one: Instruction, devices: int, per_host: int) -> Collective | None:
    """What an instruction sends, if it begins to send anything."""
    kind = one.opcode.removesuffix("-start")
    inner = one
    if one.opcode == "async-start":
        inner = one.called[0].root
        kind = inner.opcode
    if kind not in KINDS:
        return None
    groups = _groups(inner, devices)
    group, neighbours = groups.shape[1], _neighbours(groups, per_host)
    if group < 2:
        return None
    given = sum(operand.shape.bytes for operand in inner.operands)
    size = given * group if kind == "all-gather" else given
    share = 1.0 if kind in ("collective-permute", "collective-broadcast") else (group - 1) / group
    config = one.config.get("collective_backend_config", {})
    return Collective(
        kind,
        group,
        neighbours,
        round(size * share * (2 if kind == "all-reduce" else 1)),
        asynchronous=one.opcode.endswith("-start") and not config.get("is_sync", False),
        members=tuple(groups[0].tolist()),
    )


def _neighbours(groups: np.ndarray, per_host: int) -> int:
    """How many devices of a group share a host; of unequal hosts, the fewest, which is where it is slowest."""
    hosts = groups[0] // per_host
    return int(np.unique(hosts, return_counts=True)[1].min())


def _groups(one: Instruction, devices: int) -> np.ndarray:
    """Which devices talk to each other, [groups, members]. XLA writes it in several ways."""
    if pairs := wire.messages(one.raw, 52):  # from, to
        return np.array([[wire.number(pair, 1), wire.number(pair, 2)] for pair in pairs])
    if 93 in one.raw:
        return _of_mesh(wire.read(wire.data(one.raw, 93)))
    listed = wire.read(wire.data(one.raw, 87))
    if iota := wire.data(one.raw, 92) or wire.data(listed, 2):
        return _of_iota(wire.read(iota))
    rows = wire.messages(listed, 1) or wire.messages(one.raw, 49)
    return np.array([wire.numbers(row, 1) for row in rows]) if rows else np.arange(devices)[None]


def _of_iota(proto: wire.Message) -> np.ndarray:
    """All devices in order, as a grid whose axes are permuted and which is then cut into groups."""
    grid = np.arange(wire.number(proto, 1) * wire.number(proto, 2)).reshape(wire.numbers(proto, 3))
    return grid.transpose(wire.numbers(proto, 4) or None).reshape(wire.number(proto, 1), -1)


def _of_mesh(proto: wire.Message) -> np.ndarray:
    """A mesh with named axes, of which those listed lie within a group: an axis whole, or only a middle part of it. Its
    devices are listed, or in order, or in that of another grid whose axes are permuted."""
    mesh = wire.read(wire.data(proto, 1))
    sizes = [wire.number(axis, 2, 1) for axis in wire.messages(mesh, 1)]
    turned = wire.read(wire.data(mesh, 3))
    grid = np.arange(math.prod(sizes)).reshape(wire.numbers(turned, 1) or -1)
    ids = wire.numbers(mesh, 2) or grid.transpose(wire.numbers(turned, 2) or None).reshape(-1)
    parts: dict[int, list[tuple[int, int]]] = {}  # of an axis: from where to where, as products of sizes
    for ref in wire.messages(proto, 2):
        axis, part = wire.number(ref, 1), wire.read(wire.data(ref, 2))
        first = wire.number(part, 1, 1)
        parts.setdefault(axis, []).append((first, first * wire.number(part, 2, sizes[axis])))
    dims: list[int] = []
    within: list[int] = []
    for axis, size in enumerate(sizes):
        cuts = sorted({1, size, *(cut for part in parts.get(axis, ()) for cut in part)})
        for before, after in itertools.pairwise(cuts):
            if any(first <= before and after <= last for first, last in parts.get(axis, ())):
                within.append(len(dims))
            dims.append(after // before)
    across = [dim for dim in range(len(dims)) if dim not in within]
    grid = np.array(ids).reshape(dims).transpose(across + within)
    return grid.reshape(-1, math.prod(dims[dim] for dim in within))
