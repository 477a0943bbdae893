"""The communication of a compiled program: collectives between devices, copies between a device and host memory.

Bytes are counted on the links of one device, with ring algorithms (Thakur et al., 2005). For n devices and an array of
B bytes (for an all-gather: the gathered array), all-gather, reduce-scatter and all-to-all send (n - 1) / n B bytes, an
all-reduce sends 2 (n - 1) / n B, and a permutation B. A ragged all-to-all sends a number of rows that only the run
knows: the plan counts the rows that experts with uniform routing receive (`models.dispatch`).
"""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxmem.machine.gpus import Gpu
from jaxmem.machine.links import collective_seconds, link_rate
from jaxmem.models.dispatch import share_of_devices
from jaxmem.planning.hlo import Instruction

COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
TO_HOST, FROM_HOST = "to host", "from host"
COPY_LATENCY = 10e-6  # seconds until a copy to or from the host reaches its full rate


@dataclass(frozen=True)
class Transfer:
    """One execution of a collective, or of a copy between a device and host memory."""

    kind: str  # one of COLLECTIVES, TO_HOST or FROM_HOST
    wire_bytes: int
    is_asynchronous: bool
    group: int = 1  # devices that communicate with each other
    neighbours: int = 1  # devices of a group that share a host, in the group and on the host with the fewest
    members: tuple[int, ...] = ()  # the devices of the first group

    @property
    def link(self) -> str:
        """The link of the transfer. Collectives share one link; copies to the host have a link, and copies from it."""
        return "network" if self.kind in COLLECTIVES else self.kind

    def seconds(self, gpu: Gpu, *, one_host: bool = False) -> float:
        """Seconds on these GPUs. `one_host`: the seconds if all devices of the group shared one host."""
        if self.kind not in COLLECTIVES:
            return COPY_LATENCY + self.wire_bytes / gpu.host_rate
        neighbours = self.group if one_host else self.neighbours
        return collective_seconds(gpu, self.kind, self.wire_bytes, self.group, neighbours)

    def rate(self, gpu: Gpu) -> float:
        """Bytes per second of a large transfer on its link."""
        if self.kind not in COLLECTIVES:
            return gpu.host_rate
        return link_rate(gpu, self.kind, self.group, self.neighbours)


def collective(instruction: Instruction, devices: int, per_host: int) -> Transfer | None:
    """The collective that an instruction runs or starts; None if it is not a collective. There are `devices` in total,
    `per_host` on each host."""
    inner = instruction.called[0].root if instruction.opcode == "async-start" else instruction
    kind = inner.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return None
    groups = _groups(inner.proto, devices)
    group = groups.shape[1]
    if group < 2:
        return None
    if kind == "ragged-all-to-all":
        size = _dispatched_bytes(inner, group)
    else:
        size = sum(operand.shape.bytes for operand in inner.operands) * (group if kind == "all-gather" else 1)
    share = 1.0 if kind in ("collective-permute", "collective-broadcast") else (group - 1) / group
    backend = instruction.config.get("collective_backend_config", {})
    return Transfer(
        kind,
        round(size * share * (2 if kind == "all-reduce" else 1)),
        instruction.opcode.endswith("-start") and not backend.get("is_sync", False),
        group,
        _fewest_on_a_host(groups, per_host),
        tuple(groups[0].tolist()),
    )


def _fewest_on_a_host(groups: np.ndarray, per_host: int) -> int:
    """The least number of devices of a group on a host. All groups wait for the slowest, of which a host has the
    fewest devices: of the pairs of a ring, only some cross hosts."""
    hosts = groups // per_host
    of_group = np.arange(len(groups))[:, None] * (hosts.max() + 1)  # makes the hosts of each group distinct
    return int(np.unique(of_group + hosts, return_counts=True)[1].min())


def _dispatched_bytes(instruction: Instruction, devices: int) -> int:
    """Bytes of the tokens that chose experts of one of the devices. One array has a row for each token of each device,
    the other one a row for each choice of a token on this device."""
    choices, tokens = sorted(operand.shape.dims[0] for operand in instruction.operands[:2])
    row = instruction.operands[0].shape.bytes // instruction.operands[0].shape.dims[0]
    return round(tokens * share_of_devices(choices * devices // tokens, devices) * row)


def host_copy(instruction: Instruction) -> Transfer | None:
    """The copy between device and host that an instruction runs or starts; None for other instructions. A copy may read
    a slice of an array, or write a slice into one."""
    if instruction.opcode == "copy-start":
        source = instruction.operands[0].shape
        target = instruction.shape.parts[0]
        moved = target
    else:
        inner = instruction
        while inner.opcode in ("async-start", "fusion", "bitcast"):
            inner = inner.operands[0] if inner.opcode == "bitcast" else inner.called[0].root
        while inner.opcode == "copy" and inner.operands[0].opcode in ("bitcast", "copy", "dynamic-slice"):
            inner = inner.operands[0]  # a slice that the copy transposes
        if inner.opcode not in ("copy", "dynamic-slice", "dynamic-update-slice"):
            return None
        is_update = inner.opcode == "dynamic-update-slice"
        source = inner.operands[is_update].shape
        target = inner.shape
        moved = source if is_update else target
    if source.on_host == target.on_host:
        return None
    return Transfer(
        TO_HOST if target.on_host else FROM_HOST, moved.bytes, instruction.opcode in ("copy-start", "async-start")
    )


def _groups(proto: Any, devices: int) -> np.ndarray:
    """Devices that communicate with each other, [groups, members], in any of the forms that XLA writes."""
    if pairs := proto.source_target_pairs:
        return np.array([[pair.source, pair.target] for pair in pairs])
    if proto.HasField("mesh_axes_replica_group_list"):
        return _groups_of_mesh(proto.mesh_axes_replica_group_list)
    listed = proto.collective_device_list
    for iota in (proto.iota_collective_device_list, listed.iota_replica_group_list):
        if iota.num_replica_groups:
            # All devices in order form a grid. Its axes are permuted; then it is cut into groups.
            grid = np.arange(iota.num_replica_groups * iota.num_devices_per_group).reshape(iota.iota_reshape_dims)
            return grid.transpose(iota.iota_transpose_perm or None).reshape(iota.num_replica_groups, -1)
    rows = listed.replica_groups or proto.replica_groups
    return np.array([list(row.replica_ids) for row in rows]) if rows else np.arange(devices)[None]


def _groups_of_mesh(proto: Any) -> np.ndarray:
    """The groups along some axes of a mesh, or along factors of axes. Device ids are ascending, listed, or in the order
    of a grid with permuted axes."""
    mesh = proto.mesh
    sizes = [axis.size or 1 for axis in mesh.axes]
    grid = np.arange(math.prod(sizes)).reshape(mesh.iota.dims or -1)
    ids = list(mesh.device_ids) or grid.transpose(mesh.iota.transpose_perm or None).reshape(-1)
    parts: dict[int, list[tuple[int, int]]] = {}  # for each axis: begin and end of its parts, as cumulative sizes
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
