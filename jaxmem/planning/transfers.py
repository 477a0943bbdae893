"""Copies between a device and its host's memory, as a compiled program makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxmem.machine.gpus import ATTAINED_LINK, Gpu
from jaxmem.planning.collectives import LATENCY
from jaxmem.planning.hlo import Instruction


@dataclass(frozen=True)
class Transfer:
    """One copy, each time that its instruction runs. The host's link moves as many bytes each way at the same time."""

    kind: Literal["to host", "from host"]
    wire_bytes: int
    asynchronous: bool
    group: int = 1  # devices that take part

    def seconds(self, gpu: Gpu) -> float:
        return LATENCY + self.wire_bytes / (gpu.host_link_gb_s * 1e9 * ATTAINED_LINK)


def transfer(one: Instruction) -> Transfer | None:
    """What an instruction copies, if it does: an array, a slice out of one on the host, or one into it."""
    if one.opcode == "copy-start":
        return _between(one.operands[0], one.shape.parts[0].on_host, one.shape.parts[0].bytes, asynchronous=True)
    inner = one
    while inner.opcode in ("async-start", "fusion", "bitcast"):
        inner = inner.operands[0] if inner.opcode == "bitcast" else inner.called[0].root
    while inner.opcode == "copy" and inner.operands[0].opcode in ("bitcast", "copy", "dynamic-slice"):
        inner = inner.operands[0]  # a slice that is turned on its way
    if inner.opcode not in ("copy", "dynamic-slice", "dynamic-update-slice"):
        return None
    if inner.opcode == "dynamic-update-slice":
        piece = inner.operands[1]
        return _between(piece, inner.shape.on_host, piece.shape.bytes, one.opcode == "async-start")
    return _between(inner.operands[0], inner.shape.on_host, inner.shape.bytes, one.opcode == "async-start")


def _between(source: Instruction, to_host: bool, size: int, asynchronous: bool) -> Transfer | None:
    if source.shape.on_host == to_host:
        return None
    return Transfer("to host" if to_host else "from host", size, asynchronous)
