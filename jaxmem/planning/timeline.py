"""The estimated time of a compiled step: instructions run in the order of the schedule, communication overlaps.

The time of a kernel is the time of its arithmetic or of its memory traffic, whichever is longer (roofline model;
Williams et al., 2009), at rates that large kernels attain. An asynchronous collective is overlapped with kernels. The
seconds for which the program waits for it are exposed: max(0, seconds of the collective - seconds of the kernels
between its start and its done). Collectives share one link and run one after the other. Copies to host memory have
another link, and copies from host memory a third. A kernel beside a collective is slower: the collective occupies
multiprocessors, and moves bytes in memory.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from jaxmem.machine.gpus import LAUNCH_SECONDS, MATMUL_SECONDS, Gpu, keys_per_query
from jaxmem.machine.links import slowdown
from jaxmem.planning.communication import COLLECTIVES, Transfer, collective, host_copy
from jaxmem.planning.hlo import Computation, Instruction, Module, dot_flops, is_kernel, runs_of_called, total_flops

NETWORK, COMPUTE = "network", "compute"  # rows of a timeline
KERNEL, WAIT = "kernel", "wait"
_FREE_OPERATIONS = {
    "after-all", "bitcast", "constant", "get-tuple-element", "optimization-barrier", "parameter", "partition-id",
    "replica-id", "tuple",
}  # fmt: skip


class Traffic(NamedTuple):
    """Totals of several transmissions, over all of their executions."""

    executed: float  # number of executions; a mean if it differs between runs
    wire_bytes: int
    exposed_bytes: int
    seconds: float
    exposed_seconds: float

    @property
    def exposed_share(self) -> float:
        """The exposed seconds as a fraction of all seconds."""
        return self.exposed_seconds / self.seconds if self.seconds else 0.0


@dataclass
class Transmission:
    """A transfer in the schedule, and the seconds at which it begins and ends on its link."""

    instruction: Instruction
    message: Transfer
    executed: float  # number of executions; a mean if it differs between runs
    begins: float = 0.0
    ends: float = 0.0
    exposed: float = 0.0  # seconds for which the program waits for one execution

    @property
    def traffic(self) -> Traffic:
        seconds = self.ends - self.begins
        sent = self.executed * self.message.wire_bytes
        exposed_share = self.exposed / seconds if seconds else 1.0  # the speed of the device may be unknown
        exposed = round(sent * exposed_share)
        return Traffic(self.executed, round(sent), exposed, self.executed * seconds, self.executed * self.exposed)


def traffic_of(transmissions: Iterable[Transmission]) -> Traffic:
    traffics = [transmission.traffic for transmission in transmissions]
    return Traffic(*map(sum, zip(*traffics, strict=True))) if traffics else Traffic(0, 0, 0, 0.0, 0.0)


class Span(NamedTuple):
    """An interval of a run: a kernel, a wait for a transfer, or a transfer. `row`: `compute` or the transfer's link."""

    row: str
    kind: str  # KERNEL, WAIT, or the kind of the transfer
    begin: float  # seconds
    end: float


@dataclass
class Timeline:
    """One run of a program on one device. Seconds are 0 if the speed of the device is unknown."""

    seconds: float = 0.0
    arithmetic: float = 0.0  # seconds of compute-bound kernels
    memory: float = 0.0  # seconds of memory-bound kernels
    flops: int = 0
    kernel_bytes: int = 0  # bytes that kernels read and write
    transmissions: list[Transmission] = field(default_factory=list)
    # Seconds of an instruction in one run of its computation; for a loop, of all iterations together.
    seconds_in: dict[Instruction, float] = field(default_factory=dict)
    # In the order of their begin. The body of a loop is there once, stretched over the entire time of the loop.
    spans: list[Span] = field(default_factory=list)

    def rows(self, resolution: float = 1 / 2000) -> dict[str, list[tuple[float, float, str]]]:
        """(begin, end, kind) of the spans of each row, as shares of the run. Spans of one kind are joined if the gap
        between them is below the resolution, which makes the rows short."""
        rows: dict[str, list[tuple[float, float, str]]] = {}
        for span in self.spans if self.seconds else ():
            row = rows.setdefault(span.row, [])
            begin = span.begin / self.seconds
            end = span.end / self.seconds
            if row and row[-1][2] == span.kind and begin - row[-1][1] < resolution:
                row[-1] = (row[-1][0], max(row[-1][1], end), span.kind)
            else:
                row.append((begin, end, span.kind))
        return rows

    @property
    def collectives(self) -> list[Transmission]:
        return [transmission for transmission in self.transmissions if transmission.message.kind in COLLECTIVES]

    @property
    def network(self) -> Traffic:
        """All collectives."""
        return traffic_of(self.collectives)

    @property
    def host_copies(self) -> Traffic:
        """All copies between the device and host memory."""
        return traffic_of(
            transmission for transmission in self.transmissions if transmission.message.kind not in COLLECTIVES
        )

    @property
    def traffic(self) -> dict[str, Traffic]:
        """The transmissions of each kind: collectives, and copies by direction."""
        kinds = sorted({transmission.message.kind for transmission in self.transmissions})
        return {
            kind: traffic_of(transmission for transmission in self.transmissions if transmission.message.kind == kind)
            for kind in kinds
        }

    @property
    def roofline(self) -> float:
        """Seconds with perfect overlap of kernels, collectives and copies in each direction; no schedule is faster."""
        copies = (traffic.seconds for kind, traffic in self.traffic.items() if kind not in COLLECTIVES)
        return max(self.arithmetic + self.memory, self.network.seconds, *copies)

    @property
    def bound(self) -> str:
        """What takes the most seconds: "arithmetic", "memory", or waiting for "network" or "host copies"."""
        seconds = {
            "arithmetic": self.arithmetic,
            "memory": self.memory,
            "network": self.network.exposed_seconds,
            "host copies": self.host_copies.exposed_seconds,
        }
        return max(seconds, key=lambda bound: (seconds[bound], bound))


def timeline(module: Module, gpu: Gpu | None, devices: int, per_host: int) -> Timeline:
    """Simulates a module on one device.

    Args:
        module: The compiled module.
        gpu: Its speeds; without one, only bytes and executions are counted, and all communication is exposed.
        devices: The number of all devices.
        per_host: The devices of each host.
    """
    simulation = _Simulation(module, gpu, devices, per_host)
    result = simulation.timeline
    result.seconds = simulation.run(module.entry).now
    result.flops = total_flops(module)
    result.spans = sorted(simulation.spans_of(module.entry, 0.0, 1.0), key=lambda span: span.begin)
    return result


@dataclass(frozen=True)
class Kernel:
    """The seconds of a kernel without communication beside it."""

    arithmetic: float
    memory: float
    overhead: float = 0.0

    @property
    def seconds(self) -> float:
        return self.overhead + max(self.arithmetic, self.memory)

    def beside(self, rate: float, gpu: Gpu) -> float:
        """Seconds while a collective sends `rate` bytes per second."""
        arithmetic, memory = slowdown(gpu, rate)
        return self.overhead + max(arithmetic * self.arithmetic, memory * self.memory)


@dataclass
class _Run:
    """One run of a computation on a device and its links."""

    now: float = 0.0  # seconds since its begin; in the end, the seconds that it takes
    link_free: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    pending: dict[Instruction, Transmission] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)  # without those of `calls`
    calls: list[tuple[Computation, float, float]] = field(default_factory=list)  # (computation, begin, end)

    def span(self, row: str, kind: str, begin: float, end: float) -> None:
        if end > begin:
            self.spans.append(Span(row, kind, begin, end))

    def work(self, kernel: "Kernel", gpu: Gpu | None = None) -> None:
        """Runs a kernel, or a computation without a `gpu`. Collectives that are transferred at the same time slow a
        kernel down."""
        left = 1.0  # the part of the kernel that has not run
        for transmission in self.pending.values():  # in the order in which they are transferred
            if gpu is None or transmission.message.link != "network" or transmission.ends <= self.now:
                continue
            alone = max(0.0, transmission.begins - self.now)
            if alone >= left * kernel.seconds:
                break
            left -= alone / kernel.seconds
            self.now += alone
            slowed = kernel.beside(transmission.message.rate(gpu), gpu)
            together = min(left * slowed, transmission.ends - self.now)
            left -= together / slowed
            self.now += together
        self.now += left * kernel.seconds

    def start(self, transmission: Transmission, seconds: float) -> None:
        """Starts a transfer on its link as soon as the link is free."""
        message = transmission.message
        transmission.begins = max(self.now, self.link_free[message.link])
        self.link_free[message.link] = transmission.ends = transmission.begins + seconds
        self.pending[transmission.instruction] = transmission
        self.span(message.link, message.kind, transmission.begins, transmission.ends)
        if not message.is_asynchronous:
            self.wait_for(transmission.instruction)

    def wait_for(self, instruction: Instruction) -> None:
        """Waits until a transfer ends. All transfers that run during the wait are exposed."""
        until = max(self.now, self.pending[instruction].ends)
        for transmission in self.pending.values():
            transmission.exposed += max(0.0, min(transmission.ends, until) - max(transmission.begins, self.now))
        del self.pending[instruction]
        self.span(COMPUTE, WAIT, self.now, until)
        self.now = until


@dataclass
class _Simulation:
    module: Module
    gpu: Gpu | None
    devices: int
    per_host: int
    timeline: Timeline = field(default_factory=Timeline)
    runs: dict[Computation, _Run] = field(default_factory=dict)

    def spans_of(self, computation: Computation, begin: float, scale: float) -> Iterator[Span]:
        """The spans of a computation that begins at this time and takes `scale` times the time of one run."""
        run = self.runs[computation]
        for row, kind, first, last in run.spans:
            yield Span(row, kind, begin + scale * first, begin + scale * last)
        for called, first, last in run.calls:
            if seconds := self.runs[called].now:
                yield from self.spans_of(called, begin + scale * first, scale * (last - first) / seconds)

    def run(self, computation: Computation) -> _Run:
        """One run. The body of a loop is simulated once, and its seconds are multiplied by its runs."""
        if computation in self.runs:
            return self.runs[computation]
        run = _Run()
        for instruction in computation.instructions:
            before = run.now
            self._execute(instruction, run)
            if run.now > before:
                self.timeline.seconds_in[instruction] = run.now - before
        self.runs[computation] = run
        return run

    def _execute(self, instruction: Instruction, run: _Run) -> None:
        before = run.now
        times = self.module.executions[instruction.computation]
        if instruction.opcode in ("while", "call", "conditional"):
            self._call(instruction, run)
        elif message := collective(instruction, self.devices, self.per_host) or host_copy(instruction):
            transmission = Transmission(instruction, message, float(times) if times % 1 else int(times))
            self.timeline.transmissions.append(transmission)
            run.start(transmission, message.seconds(self.gpu) if self.gpu else 0.0)
        elif instruction.opcode == "async-start":  # a kernel on another stream
            run.work(Kernel(self.run(instruction.called[0]).now, 0.0))
            run.span(COMPUTE, KERNEL, before, run.now)
        elif instruction.opcode.endswith("-done") and instruction.operands[0] in run.pending:
            run.wait_for(instruction.operands[0])
        elif self.gpu:
            run.work(self._kernel(instruction, self.gpu, times), self.gpu)
            run.span(COMPUTE, KERNEL, before, run.now)

    def _call(self, instruction: Instruction, run: _Run) -> None:
        before = run.now
        counts = runs_of_called(instruction, time=True)
        durations = [
            float(count) * self.run(called).now for count, called in zip(counts, instruction.called, strict=True)
        ]
        # If it is unknown how often each branch runs, the conditional takes as long as its slowest branch.
        is_unknown = instruction.opcode == "conditional" and sum(counts) > 1
        run.work(Kernel(max(durations) if is_unknown else sum(durations, 0.0), 0.0))
        ends = itertools.accumulate(durations, initial=before)
        for called, (first, last) in zip(instruction.called, itertools.pairwise(ends), strict=True):
            if first < run.now:
                run.calls.append((called, first, min(last, run.now)))

    def _kernel(self, instruction: Instruction, gpu: Gpu, times: int | Fraction) -> Kernel:
        if instruction.opcode in _FREE_OPERATIONS or instruction.opcode.endswith(("-start", "-done")):
            return Kernel(0.0, 0.0)
        matmuls = [
            part for part in (instruction, *(instruction.inner() if instruction.is_fusion else ())) if dot_flops(part)
        ]
        arithmetic = sum(dot_flops(part) / _rate(part, gpu) for part in matmuls)
        moved = moved_bytes(instruction)
        memory = moved / (gpu.reduction_rate if _reduces(instruction) else gpu.memory_rate)
        self.timeline.kernel_bytes += round(times * moved)
        kernel = Kernel(arithmetic, memory, LAUNCH_SECONDS + (MATMUL_SECONDS if matmuls else 0.0))
        if arithmetic > memory:
            self.timeline.arithmetic += times * kernel.seconds
        else:
            self.timeline.memory += times * kernel.seconds
        return kernel


def _reduces(instruction: Instruction) -> bool:
    return any(part.opcode == "reduce" for part in (instruction, *instruction.inner()))


def _rate(matmul: Instruction, gpu: Gpu) -> float:
    """Attained FLOP/s of a matmul, or of a fused kernel of several matmuls."""
    dtype = matmul.operands[0].shape.dtype
    if not is_kernel(matmul):
        return gpu.matmul_rate(dtype)
    result = matmul.shape.parts[0] if matmul.shape.parts else matmul.shape
    backward = matmul.proto.custom_call_target.endswith("Backward")
    keys = keys_per_query(dot_flops(matmul) / max(result.elements, 1), backward=backward)
    return gpu.attention_rate(dtype, keys, result.dims[-1], backward=backward)


def moved_bytes(instruction: Instruction) -> int:
    """Bytes that a kernel reads and writes. If it reads or writes (in place) a slice of an array, only the slice
    counts."""
    if not instruction.is_fusion:
        if instruction.opcode in ("dynamic-slice", "slice", "gather"):
            return 2 * instruction.shape.bytes
        if instruction.opcode in ("dynamic-update-slice", "scatter"):
            return 2 * instruction.operands[-1 if instruction.opcode == "scatter" else 1].shape.bytes
        written = instruction.shape.bytes
        if (
            instruction.opcode == "custom-call"
            and instruction.shape.parts
            and instruction.shape.parts[-1].dtype == "uint8"
        ):
            written -= instruction.shape.parts[-1].bytes  # the workspace, most of which the library does not use
        return written + sum(operand.shape.bytes for operand in instruction.operands)
    body = instruction.called[0]
    roots = body.root.operands if body.root.opcode == "tuple" else [body.root]
    written = sum(_written_bytes(root) for root in roots)
    read = sum(_read(part) for part in body.instructions if part.opcode == "parameter")
    return written + read


def _written_bytes(root: Instruction) -> int:
    while root.opcode == "bitcast":
        root = root.operands[0]
    return root.operands[1].shape.bytes if root.opcode == "dynamic-update-slice" else root.shape.bytes


def _read(parameter: Instruction) -> int:
    """Bytes that a fusion reads of a parameter."""
    total = 0
    waiting = list(parameter.users)
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
