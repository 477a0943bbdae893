"""The communication of a compiled program: collectives between devices, copies between a device and host memory.

Bytes are those that cross one device's links with ring algorithms (Thakur et al., 2005). For n devices and an array
of B bytes: all-gather (B: the gathered array), reduce-scatter and all-to-all (n - 1) / n B, all-reduce twice that,
a permutation B.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxmem.machine.gpus import ATTAINED_LINK, Gpu
from jaxmem.planning.hlo import Instruction

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
LATENCY = 10e-6  # seconds until a message moves at full rate


@dataclass(frozen=True)
class Collective:
    """One execution of a collective."""

    kind: str
    group: int  # devices that take part together
    neighbours: int  # how many of them share a host
    wire_bytes: int
    asynchronous: bool
    members: tuple[int, ...] = ()  # of the first group

    def seconds(self, gpu: Gpu, *, one_host: bool = False) -> float:
        """Within a host over its links; between hosts over the networks of all members on a host together.
        `one_host`: as if the whole group shared one host."""
        rate = gpu.link_gb_s
        if self.neighbours < self.group and not one_host:
            rate = min(rate, gpu.network_gb_s * self.neighbours)
        return LATENCY + self.wire_bytes / (rate * 1e9 * ATTAINED_LINK)


@dataclass(frozen=True)
class HostCopy:
    """One execution of a copy. The link to the host carries as many bytes each way at the same time."""

    kind: Literal["to host", "from host"]
    wire_bytes: int
    asynchronous: bool
    group: int = 1  # devices that take part

    def seconds(self, gpu: Gpu) -> float:
        return LATENCY + self.wire_bytes / (gpu.host_link_gb_s * 1e9 * ATTAINED_LINK)


def collective(one: Instruction, devices: int, per_host: int) -> Collective | None:
    """The collective that an instruction is or starts, among `devices` of which `per_host` share a host."""
    inner = one.called[0].root if one.opcode == "async-start" else one
    kind = inner.opcode.removesuffix("-start")
    if kind not in KINDS:
        return None
    groups = _groups(inner.proto, devices)
    group = groups.shape[1]
    if group < 2:
        return None
    size = sum(operand.shape.bytes for operand in inner.operands) * (group if kind == "all-gather" else 1)
    share = 1.0 if kind in ("collective-permute", "collective-broadcast") else (group - 1) / group
    backend = one.config.get("collective_backend_config", {})
    return Collective(
        kind,
        group,
        _neighbours(groups, per_host),
        round(size * share * (2 if kind == "all-reduce" else 1)),
        asynchronous=one.opcode.endswith("-start") and not backend.get("is_sync", False),
        members=tuple(groups[0].tolist()),
    )


def host_copy(one: Instruction) -> HostCopy | None:
    """The copy that an instruction is or starts: of an array, of a slice of one, or into a slice of one."""
    if one.opcode == "copy-start":
        target = one.shape.parts[0]
        return _between(one.operands[0], target.on_host, target.bytes, asynchronous=True)
    inner = one
    while inner.opcode in ("async-start", "fusion", "bitcast"):
        inner = inner.operands[0] if inner.opcode == "bitcast" else inner.called[0].root
    while inner.opcode == "copy" and inner.operands[0].opcode in ("bitcast", "copy", "dynamic-slice"):
        inner = inner.operands[0]  # a slice that is transposed on the way
    if inner.opcode not in ("copy", "dynamic-slice", "dynamic-update-slice"):
        return None
    source = inner.operands[1 if inner.opcode == "dynamic-update-slice" else 0]
    moved = source if inner.opcode == "dynamic-update-slice" else inner
    return _between(source, inner.shape.on_host, moved.shape.bytes, asynchronous=one.opcode == "async-start")


def _between(source: Instruction, to_host: bool, size: int, *, asynchronous: bool) -> HostCopy | None:
    if source.shape.on_host == to_host:
        return None
    return HostCopy("to host" if to_host else "from host", size, asynchronous)


def _neighbours(groups: np.ndarray, per_host: int) -> int:
    """Devices of a group that share a host; where hosts differ the fewest, since there it is slowest."""
    hosts = groups[0] // per_host
    return int(np.unique(hosts, return_counts=True)[1].min())


def _groups(proto: Any, devices: int) -> np.ndarray:
    """Devices that communicate with each other, [groups, members], in any of the forms that XLA writes."""
    if pairs := proto.source_target_pairs:
        return np.array([[pair.source, pair.target] for pair in pairs])
    if proto.HasField("mesh_axes_replica_group_list"):
        return _groups_of_mesh(proto.mesh_axes_replica_group_list)
    listed = proto.collective_device_list
    for iota in (proto.iota_collective_device_list, listed.iota_replica_group_list):
        if iota.num_replica_groups:
            # All devices in order, as a grid whose axes are permuted and which is then cut into groups.
            grid = np.arange(iota.num_replica_groups * iota.num_devices_per_group).reshape(iota.iota_reshape_dims)
            return grid.transpose(iota.iota_transpose_perm or None).reshape(iota.num_replica_groups, -1)
    rows = listed.replica_groups or proto.replica_groups
    return np.array([list(row.replica_ids) for row in rows]) if rows else np.arange(devices)[None]


def _groups_of_mesh(proto: Any) -> np.ndarray:
    """A mesh with named axes, of which those listed lie within a group, either a whole axis or a factor of it. Device
    ids are listed, or in order, or in the order of a grid whose axes are permuted."""
    mesh = proto.mesh
    sizes = [axis.size or 1 for axis in mesh.axes]
    grid = np.arange(math.prod(sizes)).reshape(mesh.iota.dims or -1)
    ids = list(mesh.device_ids) or grid.transpose(mesh.iota.transpose_perm or None).reshape(-1)
    parts: dict[int, list[tuple[int, int]]] = {}  # of an axis: from where to where, as cumulative sizes
    for ref in proto.axes:
        first = ref.sub_axis_info.pre_size or 1
        last = first * (ref.sub_axis_info.size or sizes[ref.mesh_axis_index])
        parts.setdefault(ref.mesh_axis_index, []).append((first, last))
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
