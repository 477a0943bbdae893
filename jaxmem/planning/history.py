"""The memory of a device over one step: every moment of the schedule, at its estimated time.

The body of a loop is in the schedule once, and is shown once, over the entire time of the loop. Arguments and results
are in memory during the entire step, a temporary from where it is computed to its last use. Gaps between buffers
at the peak count as `other` during the entire step, so the peak equals the total of the plan exactly.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxmem.kernels.scopes import purpose_of
from jaxmem.machine import gpus
from jaxmem.planning.breakdown import LOGITS, Breakdown, NamedBuffer, maker_of, maker_rank
from jaxmem.planning.hlo import Computation, Frame, Instruction
from jaxmem.planning.origins import pass_of
from jaxmem.planning.targets import Target
from jaxmem.planning.timeline import Timeline, timeline
from jaxmem.step.categories import COPIES, GATHERED, SAVED
from jaxmem.typing import JsonDict

PASSES = ("forward", "loss", "backward", "update")
# The bands of the chart, from the bottom up: permanent bands, then bands that vary.
BANDS = (
    "weights", "optimizer", "other", "gradients", "saved for backward", "weights, gathered or cast", "logits",
    "other activations",
)  # fmt: skip
COLUMNS = 480  # moments of the history, about the pixels of the page's chart
LARGEST = 10  # buffers that are listed
# The band of a buffer: for activations by kind, for other buffers by category.
_BANDS = {
    SAVED: "saved for backward", GATHERED: "weights, gathered or cast", COPIES: "weights, gathered or cast",
    LOGITS: "logits", "parameters": "weights", "quantization": "weights", "master": "optimizer",
    "optimizer": "optimizer", "gradients": "gradients", "activations": "other activations", "batch": "other",
    "other": "other",
}  # fmt: skip
MODELS, STACK = "jaxmem/models/", "jaxmem/stack/"
_STEPS = 64  # largest number of operations between a buffer and the operation that computed its values
# Operations that return their operand, possibly in another order or dtype.
_FORWARDING = {"bitcast", "convert", "copy", "optimization-barrier", "reshape", "transpose"}


def history(breakdown: Breakdown, total: int, target: Target, timed: Timeline) -> JsonDict:
    """The memory of a step that needs `total` bytes per device, as memory.json has it; `timed` is its timeline.

    `columns` are lists [begin, bytes of each band]: the peak between this begin and the next. Times are shares of the
    step, which takes `seconds`. If the speed of the device is unknown, `seconds` is null, and times are in the
    proportions of a typical CPU. `largest`: the largest buffers at the peak; `largest_made`: the largest temporaries.
    """
    if target.gpu is None:
        timed = timeline(breakdown.module, gpus.CPU, target.count, target.per_host)
    edges = _edges(breakdown, timed.seconds_in)
    permanent = Counter[str]()
    for buffer in breakdown.permanent():
        permanent[band(buffer)] += buffer.size
    temporaries = breakdown.temporaries
    bands: dict[tuple[int, ...], str] = {}

    def bytes_at(moment: int) -> Counter[str]:
        bytes_of = Counter(permanent)
        for region in temporaries.at(moment).regions:
            key = tuple(map(id, region.buffers))
            if key not in bands:
                bands[key] = band(breakdown.classify(region))
            bytes_of[bands[key]] += region.size
        return bytes_of

    peak_time = temporaries.peak.time
    permanent["other"] += total - bytes_at(peak_time).total()  # gaps between buffers
    moments = _busiest_moments(list(temporaries.in_use()), edges)
    bytes_of_moment = {moment: bytes_at(moment) for moment in set(moments)}
    return {
        "seconds": timed.seconds if target.gpu else None,
        "passes": _passes([_pass(item) for item in breakdown.lifetimes.schedule], edges),
        "bands": list(BANDS),
        "columns": _columns([bytes_of_moment[moment] for moment in moments]),
        "peak": _row((edges[peak_time] + edges[peak_time + 1]) / 2, bytes_at(peak_time)),
        "largest": [_described(item, breakdown) for item in breakdown.buffers[:LARGEST]],
        "largest_made": [_described(item, breakdown) for item in breakdown.buffers if item.region][:LARGEST],
    }


def band(buffer: NamedBuffer) -> str:
    return _BANDS[buffer.kind if buffer.category == "activations" and buffer.kind in _BANDS else buffer.category]


def _row(time: float, sizes: Mapping[str, int]) -> list[float]:
    return [round(time, 5), *(sizes.get(name, 0) for name in BANDS)]


def _described(buffer: NamedBuffer, breakdown: Breakdown) -> JsonDict:
    about = {"size": buffer.size, "band": band(buffer), "kind": buffer.kind, "what": str(buffer.shape)}
    return about | source_of(buffer, breakdown.known.layers)


def _edges(breakdown: Breakdown, seconds_in: Mapping[Instruction, float]) -> list[float]:
    """The begin of each moment of the schedule as a share of the step, and the end of the last moment."""
    order = breakdown.lifetimes.schedule
    durations = dict.fromkeys(order, 0.0)
    placed: set[Computation] = set()

    def place(computation: Computation, scale: float) -> None:
        placed.add(computation)
        for instruction in computation.instructions:
            duration = scale * seconds_in.get(instruction, 0.0)
            inside = [] if instruction.is_fusion else [called for called in instruction.called if called not in placed]
            within = sum(seconds_in.get(inner, 0.0) for called in inside for inner in called.instructions)
            if within:
                for called in inside:
                    place(called, duration / within)
            else:
                durations[instruction] = duration

    place(breakdown.module.entry, 1.0)
    edges = [0.0]
    now = 0.0
    for instruction in order:
        now += durations[instruction]
        edges.append(now)
    return [edge / now for edge in edges] if now else [n / len(order) for n in range(len(order) + 1)]


def _busiest_moments(used: Sequence[tuple[int, int]], edges: Sequence[float]) -> list[int]:
    """For each column, the moment with the most bytes in use."""
    most = [(-1, 0)] * COLUMNS  # (bytes, moment)
    ends = [*(moment for moment, _ in used[1:]), len(edges) - 1]
    for (moment, size), end in zip(used, ends, strict=True):
        if moment >= end:
            continue
        first = min(int(edges[moment] * COLUMNS), COLUMNS - 1)
        last = min(max(first, math.ceil(edges[end] * COLUMNS) - 1), COLUMNS - 1)
        for n in range(first, last + 1):
            if size > most[n][0]:
                most[n] = (size, moment)
    return [moment for _, moment in most]


def _columns(columns: Sequence[Counter[str]]) -> list[list[float]]:
    """The bytes of the bands in columns of equal width; equal neighbours are merged."""
    return [_row(n / COLUMNS, bands) for n, bands in enumerate(columns) if n == 0 or bands != columns[n - 1]]


def _pass(instruction: Instruction) -> str | None:
    maker = maker_of(instruction, ())
    if not maker.op_name.startswith("jit("):
        return None
    return "loss" if purpose_of(maker.op_name) == "logits" else pass_of(maker.op_name)


class _Cuts(NamedTuple):
    """A division of the moments so far into passes."""

    seconds: float  # of operations that are inside the interval of their own pass
    begins: tuple[int, ...]  # the moment at which each pass begins


def _passes(labels: Sequence[str | None], edges: Sequence[float]) -> list[JsonDict]:
    """The passes of the step, in order, one interval per pass. A schedule mixes the passes a little, and micro-batches
    repeat them in a loop. So the intervals are chosen such that operations with the largest total time are inside the
    interval of their own pass."""
    count = len(PASSES)
    best = [_Cuts(0.0, (0,) * count)] * count  # for each pass, the best division that ends in it
    for moment, label in enumerate(labels):
        for n in range(1, count):
            before = best[n - 1]
            if before.seconds >= best[n].seconds:
                best[n] = _Cuts(before.seconds, before.begins[:n] + (moment,) * (count - n))
        if label is not None:
            n = PASSES.index(label)
            best[n] = best[n]._replace(seconds=best[n].seconds + edges[moment + 1] - edges[moment])
    latest = max(range(count), key=lambda n: best[n].seconds)
    begins = [edges[moment] for moment in best[latest].begins[: latest + 1]] + [1.0]
    ranges = zip(PASSES, begins, begins[1:], strict=False)
    return [{"name": name, "begin": begin, "end": end} for name, begin, end in ranges if end > begin]


def source_of(buffer: NamedBuffer, layers: int) -> dict[str, str]:
    """The origin of a buffer in the source code.

    `where`: a source line, or the path of an argument. `inside`: the modules around it, Decoder > Block > GatedMlp.
    `layers`: "all 32 layers", "one layer" or "". The argument `layers`: the number of layers of a stack on one device.
    """
    every = f"all {layers} layers" if layers > 1 and layers in buffer.shape.dims else ""
    if buffer.region is None:
        where = path(buffer.what) if buffer.kind == "argument" else buffer.made_by
        return {"where": where, "inside": "", "layers": every}
    filled = [_filled_by(maker, index) for alias in buffer.region.buffers for maker, index in alias.aliases]
    source = max(
        (maker_of(maker, ()) for maker in filled),
        key=lambda maker: (any(MODELS in frame.file for frame in maker.frames), maker_rank(maker)),
    )
    if not source.frames:
        return {"where": path(source.op_name), "inside": "", "layers": every}
    classes = (frame.function.partition(".")[0] for frame in reversed(source.frames) if MODELS in frame.file)
    inside = " > ".join(dict.fromkeys(name for name in classes if name[:1].isupper()))
    if not every and layers > 1 and any(STACK in frame.file for frame in source.frames):
        every = "one layer"
    # The innermost line in a model, otherwise the innermost line that does not apply the stack of layers.
    outside_stack = [frame for frame in source.frames if STACK not in frame.file]
    frame = next((frame for frame in outside_stack if MODELS in frame.file), (outside_stack or source.frames)[0])
    return {"where": line(frame), "inside": inside, "layers": every}


def line(frame: Frame) -> str:
    """A source line, with its path inside of the package.

    >>> line(Frame("/somewhere/site-packages/jaxmem/models/linear.py", "Linear.__call__", 87))
    'jaxmem/models/linear.py:87'
    """
    known = re.search(r"(?:.*/)?((?:jaxmem|kernels)/.*)", frame.file)
    return f"{known[1] if known else '/'.join(frame.file.rsplit('/', 2)[-2:])}:{frame.line}"


def path(name: str) -> str:
    """The path of an argument with dots.

    >>> path("state.opt_state[0].mu['blocks']['mlp']['up']['weight']")
    'opt_state.0.mu.blocks.mlp.up.weight'
    """
    return re.sub(r"\[(?:'([^']*)'|(\d+))\]", r".\1\2", name).removeprefix("state.")


def _filled_by(instruction: Instruction, index: tuple[int, ...]) -> Instruction:
    """The operation that computed a value, before operations that only store, cast or transpose it. For a stack that a
    loop fills, it is an operation in the body of the loop."""
    fusions: list[Instruction] = []
    for _ in range(_STEPS):
        if instruction.is_fusion:
            fusions.append(instruction)
            instruction = instruction.called[0].root
        elif instruction.opcode == "tuple" and index:
            instruction = instruction.operands[index[0]]
            index = index[1:]
        elif instruction.opcode == "get-tuple-element":
            index = (instruction.number, *index)
            instruction = instruction.operands[0]
        elif instruction.opcode == "dynamic-update-slice":
            instruction = instruction.operands[1]
        elif instruction.opcode in _FORWARDING or instruction.opcode.endswith("-done"):
            instruction = instruction.operands[0]
        elif instruction.opcode == "parameter" and fusions:
            instruction = fusions.pop().operands[instruction.number]
        else:
            break
    return instruction
