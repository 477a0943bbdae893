"""What lies in a device's memory while a step runs: each moment of the schedule, placed in the step's time.

Time is what `timeline` estimates. A loop's body stands in the schedule once and is shown once, over all the time that
the loop takes. Arguments and results are there from the first moment to the last, a temporary from where it is made
to its last use. What packing leaves free at the fullest moment belongs to nobody all along, so that the fullest
moment adds up to what the plan says, to the byte.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jaxmem.machine.gpus import Gpu
from jaxmem.planning.breakdown import (
    COPIES,
    GATHERED,
    LOGITS,
    SAVED,
    Breakdown,
    NamedBuffer,
    is_of_loss,
    maker_of,
    pass_of,
)  # fmt: skip
from jaxmem.planning.buffers import snapshot
from jaxmem.planning.hlo import Computation, Instruction
from jaxmem.planning.sources import source_of
from jaxmem.planning.targets import Target
from jaxmem.planning.timeline import Timeline, timeline

PASSES = ("forward", "loss", "backward", "update")
# From the ground up: what stays, then what comes and goes.
BANDS = (
    "weights", "optimizer", "other", "gradients", "saved for the backward pass", "weights, gathered or cast", "logits",
    "activations in passing",
)  # fmt: skip
COLUMNS = 480
LARGEST = 10
# Nothing is known of a CPU's speed: only the proportions of a common one place its moments.
_CPU = Gpu(
    "cpu", "", memory_gib=64, bandwidth_gb_s=40, bf16_tflops=0.4, link_gb_s=10, network_gb_s=10, host_link_gb_s=10,
    host_memory_gib=64, compute_capability="", cores=8, clock_ghz=3, l2_mib=16,
)  # fmt: skip
_OF_PART = {
    "parameters": "weights", "quantization": "weights", "master": "optimizer", "optimizer": "optimizer",
    "gradients": "gradients", "batch": "other", "other": "other",
}  # fmt: skip
_OF_KIND = {
    SAVED: "saved for the backward pass",
    GATHERED: "weights, gathered or cast",
    COPIES: "weights, gathered or cast",
    LOGITS: "logits",
}


@dataclass(frozen=True)
class Column:
    """What is held from `at` (a share of the step's time) to the next column, at the fullest moment in between."""

    at: float
    held: Mapping[str, int]  # bytes of each band

    @property
    def total(self) -> int:
        return sum(self.held.values())


@dataclass(frozen=True)
class Pass:
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Large:
    """A buffer that is there when memory is fullest."""

    size: int
    band: str
    kind: str
    what: str  # its shape
    where: str
    inside: str
    layers: str


@dataclass(frozen=True)
class History:
    """The memory of one device over one step."""

    seconds: float | None  # of a step, estimated
    passes: Sequence[Pass]
    columns: Sequence[Column]
    peak: Column
    largest: Sequence[Large]  # at the peak
    largest_made: Sequence[Large]  # of those, what the step makes itself

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "passes": [asdict(one) for one in self.passes],
            "bands": list(BANDS),
            "columns": [_row(one) for one in self.columns],
            "peak": _row(self.peak),
            "largest": [asdict(one) for one in self.largest],
            "largest_made": [asdict(one) for one in self.largest_made],
        }


def history(breakdown: Breakdown, total: int, target: Target, timed: Timeline) -> History:
    """Of a step whose plan says `total` bytes a device; `timed` is its timeline on the target."""
    if target.gpu is None:
        timed = timeline(breakdown.module, _CPU, target.count, target.per_host)
    edges = _edges(breakdown, timed.seconds_in)
    lasting = Counter[str]()
    for item in breakdown.permanent():
        lasting[band(item)] += item.size
    fullest = max(breakdown.peaks, key=lambda one: one[0].size, default=None)
    spans = [[(breakdown.lifetimes.of(b), b) for b in place.buffers if b.size] for place, _ in breakdown.peaks]
    bands: dict[tuple[int, ...], str] = {}

    def state(moment: int) -> Counter[str]:
        found = Counter(lasting)
        for (allocation, _), lives in zip(breakdown.peaks, spans, strict=True):
            for held in snapshot(allocation, lives, moment).regions:
                key = tuple(map(id, held.buffers))
                if key not in bands:
                    bands[key] = band(breakdown.classify(held))
                found[bands[key]] += held.size
        return found

    at = fullest[1].time if fullest else 0
    lasting["other"] += total - state(at).total()  # what packing leaves
    changes = sorted({0, *(edge for lives in spans for (first, last), _ in lives for edge in (first, last + 1))})
    changes = [edge for edge in changes if edge < len(edges) - 1]
    steps = zip(changes, [*changes[1:], len(edges) - 1], strict=True)
    columns = _columns((edges[begin], edges[end], state(begin)) for begin, end in steps)
    return History(
        timed.seconds if target.gpu else None,
        _passes([_pass(one) for one in breakdown.lifetimes.schedule], edges),
        columns,
        Column((edges[at] + edges[at + 1]) / 2, state(at)),
        [_large(item, breakdown) for item in breakdown.buffers[:LARGEST]],
        [_large(item, breakdown) for item in breakdown.buffers if item.region][:LARGEST],
    )


def band(item: NamedBuffer) -> str:
    if item.part == "activations":
        return _OF_KIND.get(item.kind, "activations in passing")
    return _OF_PART[item.part]


def _row(column: Column) -> list[float]:
    return [round(column.at, 5), *(column.held.get(name, 0) for name in BANDS)]


def _large(item: NamedBuffer, breakdown: Breakdown) -> Large:
    source = source_of(item, breakdown.known.layers)
    return Large(item.size, band(item), item.kind, str(item.shape), source.where, source.inside, source.layers)


def _edges(breakdown: Breakdown, spent: Mapping[Instruction, float]) -> list[float]:
    """When each moment of the schedule begins, as a share of the step, and when the last one ends."""
    order = breakdown.lifetimes.schedule
    lasts = dict.fromkeys(order, 0.0)
    placed: set[Computation] = set()

    def place(computation: Computation, scale: float) -> None:
        placed.add(computation)
        for one in computation.instructions:
            own = scale * spent.get(one, 0.0)
            inside = [] if one.is_fusion else [called for called in one.called if called not in placed]
            within = sum(spent.get(inner, 0.0) for called in inside for inner in called.instructions)
            if within:
                for called in inside:
                    place(called, own / within)
            else:
                lasts[one] = own

    place(breakdown.module.entry, 1.0)
    edges, now = [0.0], 0.0
    for one in order:
        now += lasts[one]
        edges.append(now)
    return [edge / now for edge in edges] if now else [n / len(order) for n in range(len(order) + 1)]


def _columns(steps: Iterator[tuple[float, float, Counter[str]]]) -> list[Column]:
    """From (begin, end, what is held) to columns of equal width; neighbours that hold the same are one."""
    best: list[Counter[str]] = [Counter() for _ in range(COLUMNS)]
    for begin, end, held in steps:
        first = min(int(begin * COLUMNS), COLUMNS - 1)
        last = min(max(first, math.ceil(end * COLUMNS) - 1), COLUMNS - 1)
        for n in range(first, last + 1):
            if held.total() > best[n].total():
                best[n] = held
    return [Column(n / COLUMNS, held) for n, held in enumerate(best) if n == 0 or held != best[n - 1]]


def _pass(one: Instruction) -> str | None:
    maker = maker_of(one, ())
    if not maker.op_name.startswith("jit("):
        return None
    return "loss" if is_of_loss(maker.frames) else pass_of(maker.op_name)


def _passes(labels: Sequence[str | None], edges: Sequence[float]) -> list[Pass]:
    """The step cut into its passes, in their order, so that as much time as possible lies in the pass it belongs to:
    a schedule mixes them a little, and micro-batches go through them in a loop."""
    count = len(PASSES)
    # Of the cuts that end in each pass: how much time agrees, and where each pass begins.
    cuts: list[tuple[float, tuple[int, ...]]] = [(0.0, (0,) * count)] * count
    for moment, label in enumerate(labels):
        for n in range(1, count):
            if cuts[n - 1][0] >= cuts[n][0]:
                cuts[n] = cuts[n - 1][0], cuts[n - 1][1][:n] + (moment,) * (count - n)
        if label is not None:
            n = PASSES.index(label)
            cuts[n] = cuts[n][0] + edges[moment + 1] - edges[moment], cuts[n][1]
    latest = max(range(count), key=lambda n: cuts[n][0])
    begins = [edges[n] for n in cuts[latest][1][: latest + 1]] + [1.0]
    found = zip(PASSES, begins, begins[1:], strict=False)
    return [Pass(name, begin, end) for name, begin, end in found if end > begin]
