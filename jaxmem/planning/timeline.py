"""How long a compiled step takes, estimated: its instructions in the order of the schedule, beside its messages.

Each kernel takes the longer of its arithmetic and its memory traffic (Williams et al., 2009), at rates that large
kernels attain. A message that begins before it is needed moves while kernels run; what is left when the program
waits for it is exposed: max(0, its seconds - those of the kernels between its start and its done), loops executed, and
as messages share one link and follow each other, what it waits for those before it too. Copies to the host and from
there have a link of their own each way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from jaxmem.machine.gpus import ATTAINED_BANDWIDTH, ATTAINED_FLOPS, Gpu
from jaxmem.planning.collectives import Collective, collective
from jaxmem.planning.hlo import Computation, Instruction, Module, dot_flops, runs, total_flops
from jaxmem.planning.transfers import Transfer, transfer

Bound = Literal["arithmetic", "memory", "network"]
LAUNCH = 2e-6  # seconds from one kernel to the next
_FREE = {
    "after-all", "bitcast", "constant", "get-tuple-element", "optimization-barrier", "parameter", "partition-id",
    "replica-id", "tuple",
}  # fmt: skip
# Relative to bf16: tensor cores take float32 as TF32 at half the rate, narrow formats at twice.
RATES = {"float64": 1 / 32, "float32": 0.5, "int8": 2.0, "uint8": 2.0, "float8_e4m3fn": 2.0, "float8_e5m2": 2.0}


@dataclass
class Sent:
    """A message, each time that it is sent: from when to when it has the link."""

    instruction: Instruction
    message: Collective | Transfer
    begins: float
    ends: float
    executed: float  # in the mean, where it is not in every run
    kernels: int = 0  # and loops, between its start and its done
    exposed: float = 0.0  # seconds

    @property
    def share(self) -> float:
        """Of its time, exposed; of a device of which nothing is known, all."""
        return self.exposed / (self.ends - self.begins) if self.ends > self.begins else 1.0

    @property
    def exposed_bytes(self) -> int:
        return round(self.executed * self.message.wire_bytes * self.share)

    @property
    def wire_bytes(self) -> int:
        return round(self.executed * self.message.wire_bytes)


@dataclass
class Traffic:
    """All messages of one kind."""

    executed: float = 0  # in the mean, where it is not in every run
    wire_bytes: int = 0
    exposed_bytes: int = 0
    seconds: float = 0.0
    exposed_seconds: float = 0.0


@dataclass
class Timeline:
    """One run of a program on one device; seconds are 0 where nothing is known of the device."""

    seconds: float = 0.0
    arithmetic: float = 0.0  # seconds in kernels that arithmetic bounds
    memory: float = 0.0  # seconds in kernels that memory bounds
    flops: int = 0
    moved: int = 0  # bytes that kernels read and write
    sent: list[Sent] = field(default_factory=list)
    copied: list[Sent] = field(default_factory=list)  # to the host's memory and from there
    # Seconds that pass in an instruction, in a loop all its runs together, while what it stands in runs once.
    spent: dict[Instruction, float] = field(default_factory=dict)

    @property
    def traffic(self) -> dict[str, Traffic]:
        """Messages by kind."""
        return self._added_up(self.sent)

    @property
    def transfers(self) -> dict[str, Traffic]:
        """To the host and from there."""
        return self._added_up(self.copied)

    @property
    def hidden(self) -> float | None:
        """The share of the transfers' time in which kernels run; None: there are none."""
        found = self.transfers.values()
        seconds = sum(one.seconds for one in found)
        return 1.0 - sum(one.exposed_seconds for one in found) / seconds if seconds else None

    @staticmethod
    def _added_up(sent: list[Sent]) -> dict[str, Traffic]:
        kinds: dict[str, Traffic] = defaultdict(Traffic)
        for one in sent:
            total = kinds[one.message.kind]
            total.executed += one.executed
            total.wire_bytes += one.wire_bytes
            total.exposed_bytes += one.exposed_bytes
            total.seconds += one.executed * (one.ends - one.begins)
            total.exposed_seconds += one.executed * one.exposed
        return dict(kinds)

    @property
    def network(self) -> float:
        return sum(one.seconds for one in self.traffic.values())

    @property
    def exposed(self) -> float:
        """The share of the messages' time in which the program waits for them."""
        return sum(one.exposed_seconds for one in self.traffic.values()) / self.network if self.network else 0.0

    @property
    def roofline(self) -> float:
        """Seconds if messages and kernels overlapped perfectly: no schedule is faster."""
        return max(self.arithmetic + self.memory, self.network)

    @property
    def bound(self) -> Bound:
        exposed = sum(one.exposed_seconds for one in self.traffic.values())
        seconds: dict[Bound, float] = {"arithmetic": self.arithmetic, "memory": self.memory, "network": exposed}
        return max(seconds, key=lambda bound: (seconds[bound], bound))


def timeline(module: Module, gpu: Gpu | None, devices: int, per_host: int) -> Timeline:
    """`gpu` None: bytes and executions are counted, and every message is taken for exposed."""
    return _Simulation(module, gpu, devices, per_host).result()


@dataclass
class _Clock:
    """A device and its links, from the begin of a computation."""

    now: float = 0.0
    link_free: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    under_way: dict[Instruction, Sent] = field(default_factory=dict)

    def work(self, seconds: float) -> None:
        self.now += seconds
        for one in self.under_way.values():
            one.kernels += seconds > 0

    def send(self, instruction: Instruction, message: Collective | Transfer, seconds: float, executed: float) -> Sent:
        link = message.kind if isinstance(message, Transfer) else "network"
        begins = max(self.now, self.link_free[link])
        self.link_free[link] = ends = begins + seconds
        one = self.under_way[instruction] = Sent(instruction, message, begins, ends, executed)
        return one

    def wait_for(self, instruction: Instruction) -> None:
        """What is exposed is whatever has the link meanwhile."""
        until = max(self.now, self.under_way[instruction].ends)
        for one in self.under_way.values():
            one.exposed += max(0.0, min(one.ends, until) - max(one.begins, self.now))
        del self.under_way[instruction]
        self.now = until


class _Simulation:
    def __init__(self, module: Module, gpu: Gpu | None, devices: int, per_host: int) -> None:
        self._module, self._gpu, self._devices, self._per_host = module, gpu, devices, per_host
        self._times = module.executions
        self._done = Timeline()
        self._lasted: dict[Computation, float] = {}

    def result(self) -> Timeline:
        self._done.seconds = self._run(self._module.entry)
        self._done.flops = total_flops(self._module)
        return self._done

    def _run(self, computation: Computation) -> float:
        """Seconds of one run. A loop's body is simulated once and counts as often as it runs."""
        if computation in self._lasted:
            return self._lasted[computation]
        clock, times = _Clock(), self._times[computation]
        executed = float(times) if times % 1 else int(times)
        for one in computation.instructions:
            before = clock.now
            if one.opcode in ("while", "call", "conditional"):
                often = runs(one)
                lasted = [float(share) * self._run(called) for share, called in zip(often, one.called, strict=True)]
                # Of a conditional that does not say how often it holds, the dearer branch.
                clock.work(max(lasted) if one.opcode == "conditional" and sum(often) > 1 else sum(lasted, 0.0))
            elif message := collective(one, self._devices, self._per_host):
                seconds = message.seconds(self._gpu) if self._gpu else 0.0
                self._done.sent.append(clock.send(one, message, seconds, executed))
                if not message.asynchronous:
                    clock.wait_for(one)
            elif copy := transfer(one):
                seconds = copy.seconds(self._gpu) if self._gpu else 0.0
                self._done.copied.append(clock.send(one, copy, seconds, executed))
                if not copy.asynchronous:
                    clock.wait_for(one)
            elif one.opcode == "async-start":  # a kernel on a stream of its own
                clock.work(self._run(one.called[0]))
            elif one.opcode.endswith("-done") and one.operands[0] in clock.under_way:
                clock.wait_for(one.operands[0])
            else:
                clock.work(self._kernel(one, times))
            if clock.now > before:
                self._done.spent[one] = clock.now - before
        self._lasted[computation] = clock.now
        return clock.now

    def _kernel(self, one: Instruction, times: int | Fraction) -> float:
        gpu = self._gpu
        if gpu is None or one.opcode in _FREE or one.opcode.endswith(("-start", "-done")):
            return 0.0
        arithmetic = sum(
            dot_flops(part) / (gpu.flops * ATTAINED_FLOPS * RATES.get(part.operands[0].shape.dtype, 1.0))
            for part in (one, *fused(one)) if dot_flops(part)
        )  # fmt: skip
        memory = moved_bytes(one) / (gpu.bandwidth_gb_s * 1e9 * ATTAINED_BANDWIDTH)
        self._done.moved += round(times * moved_bytes(one))
        seconds = LAUNCH + max(arithmetic, memory)
        if arithmetic > memory:
            self._done.arithmetic += times * seconds
        else:
            self._done.memory += times * seconds
        return seconds


def fused(one: Instruction) -> Iterator[Instruction]:
    """The instructions of a fusion, fusions within it included."""
    if one.is_fusion:
        for inner in one.called[0].instructions:
            yield inner
            yield from fused(inner)


def moved_bytes(one: Instruction) -> int:
    """Bytes that a kernel reads and writes. Of an array that it takes a slice of, or writes a slice of in place,
    only the slice counts."""
    if not one.is_fusion:
        if one.opcode in ("dynamic-slice", "slice", "gather"):
            return 2 * one.shape.bytes
        if one.opcode in ("dynamic-update-slice", "scatter"):
            return 2 * one.operands[-1 if one.opcode == "scatter" else 1].shape.bytes
        return one.shape.bytes + sum(operand.shape.bytes for operand in one.operands)
    body = one.called[0]
    roots = body.root.operands if body.root.opcode == "tuple" else [body.root]
    written = sum(_written(root) for root in roots)
    read = sum(_read(part) for part in body.instructions if part.opcode == "parameter")
    return written + read


def _written(root: Instruction) -> int:
    while root.opcode == "bitcast":
        root = root.operands[0]
    return root.operands[1].shape.bytes if root.opcode == "dynamic-update-slice" else root.shape.bytes


def _read(parameter: Instruction) -> int:
    """Bytes of a fusion's parameter that it looks at."""
    total, waiting = 0, list(parameter.users)
    sources = {parameter}
    while waiting:
        user = waiting.pop()
        if user.opcode == "bitcast":
            sources.add(user)
            waiting += user.users
        elif user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] in sources:
            total += user.shape.bytes
        elif user.opcode != "dynamic-update-slice" or user.operands[0] not in sources:
            return parameter.shape.bytes
    return min(total, parameter.shape.bytes)
