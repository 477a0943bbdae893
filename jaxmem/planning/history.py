"""The memory of a device over one step: every moment of the schedule, at its estimated time.

A loop's body is in the schedule once and is shown once, over the entire time of the loop. Arguments and results are in
memory from beginning to end, a temporary from where it is computed to its last use. Bytes that packing leaves free at
the peak count as `other` during the entire step, so the peak equals the total of the plan to the byte.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from jaxmem.machine import gpus
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
)
from jaxmem.planning.buffers import snapshot
from jaxmem.planning.hlo import Computation, Instruction
from jaxmem.planning.sources import source_of
from jaxmem.planning.targets import Target
from jaxmem.planning.timeline import Timeline, timeline

PASSES = ("forward", "loss", "backward", "update")
# From the bottom up: bands that are permanent, then bands that vary.
BANDS = (
    "weights", "optimizer", "other", "gradients", "saved for the backward pass", "weights, gathered or cast", "logits",
    "other activations",
)  # fmt: skip
COLUMNS = 480
LARGEST = 10
# The band of an activation, by its kind; of other buffers, by their part.
_BANDS = {
    SAVED: "saved for the backward pass", GATHERED: "weights, gathered or cast", COPIES: "weights, gathered or cast",
    LOGITS: "logits", "parameters": "weights", "quantization": "weights", "master": "optimizer",
    "optimizer": "optimizer", "gradients": "gradients", "activations": "other activations", "batch": "other",
    "other": "other",
}  # fmt: skip


@dataclass(frozen=True)
class Column:
    """The peak bytes of each band between `at` (a share of the step's time) and the next column."""

    at: float
    bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


class StepPass(NamedTuple):
    name: str
    begin: float  # a share of the step's time
    end: float


@dataclass(frozen=True)
class History:
    """The memory of one device over one step."""

    seconds: float | None  # estimated time of a step
    passes: Sequence[StepPass]
    columns: Sequence[Column]
    peak: Column
    largest: Sequence[Mapping[str, Any]]  # buffers at the peak: size, band, kind, what, where, inside, layers
    largest_made: Sequence[Mapping[str, Any]]  # the largest temporaries at the peak

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "passes": [one._asdict() for one in self.passes],
            "bands": list(BANDS),
            "columns": [_row(one) for one in self.columns],
            "peak": _row(self.peak),
            "largest": self.largest,
            "largest_made": self.largest_made,
        }


def history(breakdown: Breakdown, total: int, target: Target, timed: Timeline) -> History:
    """The history of a step that needs `total` bytes per device; `timed` is its timeline on the target. For CPUs, the
    columns are placed by the proportions of a typical CPU."""
    if target.gpu is None:
        timed = timeline(breakdown.module, gpus.CPU, target.count, target.per_host)
    edges = _edges(breakdown, timed.seconds_in)
    permanent = Counter[str]()
    for buffer in breakdown.permanent():
        permanent[band(buffer)] += buffer.size
    spans = [[(breakdown.lifetimes.of(b), b) for b in place.buffers if b.size] for place, _ in breakdown.peaks]
    bands: dict[tuple[int, ...], str] = {}

    def bytes_at(moment: int) -> Counter[str]:
        found = Counter(permanent)
        for (allocation, _), lives in zip(breakdown.peaks, spans, strict=True):
            for region in snapshot(allocation, lives, moment).regions:
                key = tuple(map(id, region.buffers))
                if key not in bands:
                    bands[key] = band(breakdown.classify(region))
                found[bands[key]] += region.size
        return found

    peak = max(breakdown.peaks, key=lambda one: one[0].size, default=None)
    at = peak[1].time if peak else 0
    permanent["other"] += total - bytes_at(at).total()  # bytes that packing leaves free
    changes = sorted({0, *(edge for lives in spans for (first, last), _ in lives for edge in (first, last + 1))})
    changes = [edge for edge in changes if edge < len(edges) - 1]
    steps = zip(changes, [*changes[1:], len(edges) - 1], strict=True)
    return History(
        timed.seconds if target.gpu else None,
        _passes([_pass(one) for one in breakdown.lifetimes.schedule], edges),
        _columns((edges[begin], edges[end], bytes_at(begin)) for begin, end in steps),
        Column((edges[at] + edges[at + 1]) / 2, bytes_at(at)),
        [_described(one, breakdown) for one in breakdown.buffers[:LARGEST]],
        [_described(one, breakdown) for one in breakdown.buffers if one.region][:LARGEST],
    )


def band(buffer: NamedBuffer) -> str:
    return _BANDS[buffer.kind if buffer.part == "activations" and buffer.kind in _BANDS else buffer.part]


def _row(column: Column) -> list[float]:
    return [round(column.at, 5), *(column.bytes.get(name, 0) for name in BANDS)]


def _described(buffer: NamedBuffer, breakdown: Breakdown) -> dict[str, Any]:
    about = {"size": buffer.size, "band": band(buffer), "kind": buffer.kind, "what": str(buffer.shape)}
    return about | asdict(source_of(buffer, breakdown.known.layers))


def _edges(breakdown: Breakdown, seconds_in: Mapping[Instruction, float]) -> list[float]:
    """When each moment of the schedule begins, as a share of the step, and when the last one ends."""
    order = breakdown.lifetimes.schedule
    durations = dict.fromkeys(order, 0.0)
    placed: set[Computation] = set()

    def place(computation: Computation, scale: float) -> None:
        placed.add(computation)
        for one in computation.instructions:
            own = scale * seconds_in.get(one, 0.0)
            inside = [] if one.is_fusion else [called for called in one.called if called not in placed]
            within = sum(seconds_in.get(inner, 0.0) for called in inside for inner in called.instructions)
            if within:
                for called in inside:
                    place(called, own / within)
            else:
                durations[one] = own

    place(breakdown.module.entry, 1.0)
    edges, now = [0.0], 0.0
    for one in order:
        now += durations[one]
        edges.append(now)
    return [edge / now for edge in edges] if now else [n / len(order) for n in range(len(order) + 1)]


def _columns(steps: Iterator[tuple[float, float, Counter[str]]]) -> list[Column]:
    """Columns of equal width from steps (begin, end, bytes of each band); equal neighbours are merged."""
    most: list[Counter[str]] = [Counter() for _ in range(COLUMNS)]
    for begin, end, bands in steps:
        first = min(int(begin * COLUMNS), COLUMNS - 1)
        last = min(max(first, math.ceil(end * COLUMNS) - 1), COLUMNS - 1)
        for n in range(first, last + 1):
            if bands.total() > most[n].total():
                most[n] = bands
    return [Column(n / COLUMNS, bands) for n, bands in enumerate(most) if n == 0 or bands != most[n - 1]]


def _pass(one: Instruction) -> str | None:
    maker = maker_of(one, ())
    if not maker.op_name.startswith("jit("):
        return None
    return "loss" if is_of_loss(maker.frames) else pass_of(maker.op_name)


def _passes(labels: Sequence[str | None], edges: Sequence[float]) -> list[StepPass]:
    """The passes of the step, in order. They are cut so that as many seconds as possible are in the pass that they
    belong to, because a schedule mixes the passes a little, and micro-batches repeat them in a loop."""
    count = len(PASSES)
    # For the best cut that ends in each pass: the seconds in their own pass, and the moment at which each pass begins.
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
    return [StepPass(name, begin, end) for name, begin, end in found if end > begin]
