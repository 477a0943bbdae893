"""The page: one self-contained HTML file, made from the output of `plan --json` and the files of a run.

This module computes what the page shows; `page.html` is its template.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from jaxmem import __version__
from jaxmem.estimate.parts import PARTS
from jaxmem.planning.breakdown import LABELS
from jaxmem.planning.units import byte_unit, format_bytes, format_seconds
from jaxmem.report.charts import COLOURS, SHADES, Chart, Readout, polyline, stacked, thinned, ticks
from jaxmem.typing import JsonDict, JsonView

MAX_LIMIT_RATIO = 1.6  # a limit above this multiple of the peak is not drawn
CURVES = {
    "loss": "loss", "held_out_loss": "held-out loss", "learning_rate": "learning rate",
    "tokens_per_second": "tokens per second",
}  # fmt: skip
# The letters of a pipeline schedule: names and colours.
OPERATIONS = {
    "F": ("forward", "#0072b2"), "B": ("backward", "#e69f00")
}  # fmt: skip
# The rows of a timeline, and the names and colours of its spans.
ROWS = {"compute": "compute", "network": "communication", "to host": "to host", "from host": "from host"}
KINDS = {
    "kernel": ("kernels", "#0072b2"), "transfer": ("transfers", "#9aa0a6"),
    "wait": ("exposed: kernels wait for a transfer", "#d55e00"),
}  # fmt: skip
LEGEND = {"predicted": "predicted by arithmetic", "compiled": "compiled", "measured": "measured peak of a device"}


@dataclass(frozen=True)
class RunRecord:
    """A run so far."""

    steps: int  # number of updates of the complete run
    rows: Sequence[JsonView]  # the rows of metrics.jsonl
    config: str  # the config as YAML


def page(plan: JsonView, memory: JsonView, record: RunRecord | None = None) -> str:
    """The page as HTML. `plan` and `memory`: the contents of plan.json and memory.json."""

    def time(share: float) -> str:
        return f"{share:.1%}" if memory["seconds"] is None else format_seconds(share * memory["seconds"])

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters |= {
        "bytes": format_bytes, "seconds": format_seconds, "time": time, "kind": _kind, "numbered": enumerate
    }  # fmt: skip
    html, style, script = (files(__package__).joinpath(f"page.{kind}").read_text() for kind in ("html", "css", "js"))
    parts = _parts(plan)
    phases = {phase: size for phase, size in plan["phases"].items() if size is not None}
    return environment.from_string(html).render(
        # Plans of earlier versions lack these four keys.
        plan={"kernels": {}, "remat_why": None, "schedule": None, "timeline": {}} | dict(plan),
        memory=memory,
        record=record,
        version=__version__,
        style=style,
        script=script,
        colours=COLOURS,
        shades=SHADES,
        tiles=_tiles(plan, memory, record),
        step=_step(plan, memory, time),
        parts=parts,
        most_of_parts=max(size for _, sizes, _ in parts for size in sizes.values()),
        legend={kind: text for kind, text in LEGEND.items() if any(kind in sizes for _, sizes, _ in parts)},
        phases=[(phase, {"compiled": size}, [format_bytes(size)]) for phase, size in phases.items()],
        most_of_phases=max(*phases.values(), 1),
        curves=_curves(record.rows) if record else [],
        operations=_operations(plan),
        rows=_rows(plan),
        kinds=KINDS,
    )


def _rows(plan: JsonView) -> list[tuple[str, list[tuple[str, str]]]]:
    """(name, [(colour, SVG path)]) for each row of the timeline; a drawing is 1,000 wide and 1 high. Empty if nothing
    is transferred."""
    rows = plan.get("timeline") or {}
    drawn = []
    for row in (name for name in ROWS if name in rows and len(rows) > 1):
        paths: dict[str, str] = {}
        for begin, end, kind in rows[row]:
            colour = KINDS.get(kind, KINDS["transfer"])[1]
            paths[colour] = (
                paths.get(colour, "") + f"M{1000 * begin:g} 0h{1000 * (end - begin):.2f}v1h{1000 * (begin - end):.2f}z"
            )
        drawn.append((ROWS[row], list(paths.items())))
    return drawn


def _operations(plan: JsonView) -> list[tuple[str, str, str]]:
    """(operation, colour, SVG path) for each operation of the pipeline schedule; a unit of the drawing is a tick wide
    and a stage high."""
    stages = (plan.get("schedule") or {}).get("stages", [])
    paths = dict.fromkeys(OPERATIONS, "")
    for row, letters in enumerate(stages):
        for tick, kind in enumerate(letters):
            if kind in paths:
                paths[kind] += f"M{tick} {row + 0.05:g}h.94v.9h-.94z"
    return [(*OPERATIONS[kind], path) for kind, path in paths.items() if path]


def _tiles(plan: JsonView, memory: JsonView, record: RunRecord | None) -> list[tuple[str, str]]:
    peak = max(size for size in plan["phases"].values() if size is not None)
    limit = plan["target"]["limit_bytes"]
    if limit >= peak:
        verdict = f"{format_bytes(limit - peak)} free" if plan["fits"] else "too little host memory"
    else:
        verdict = f"{format_bytes(peak - limit)} too much"
    tiles = [
        (format_bytes(plan["bytes_per_device"]["total"]), "per device at the peak of a step"),
        (f"{plan['bytes_per_parameter']:.2f}", "bytes per parameter"),
        (verdict, f"of {format_bytes(limit)} usable"),
    ]
    if memory["seconds"] is not None:
        tiles.append((format_seconds(memory["seconds"]), f"per step, estimated; bound by {plan['bound_by']}"))
    if record and record.rows:
        tiles.append((f"{record.rows[-1]['step']:,} of {record.steps:,}", "updates"))
    return tiles


def _step(plan: JsonView, memory: JsonView, time: Callable[[float], str]) -> JsonDict:
    """A chart of memory over a step by band, stacked, with its peak, and the limit if it is near."""
    columns = memory["columns"]
    at_peak, *peak = memory["peak"]
    limit = plan["target"]["limit_bytes"]
    drawn = limit if limit <= MAX_LIMIT_RATIO * sum(peak) else None
    top = 1.04 * max(sum(peak), drawn or 0)
    bands = {band: n for n, band in enumerate(memory["bands"], 1) if any(column[n] for column in columns)}

    def readout(begin: float, at: float, head: str, column: Sequence[float]) -> Readout:
        inside = next((phase["name"] for phase in memory["passes"] if phase["begin"] <= at < phase["end"]), "")
        when = f"{head} {time(at)}{f', {inside}' if inside else ''}:"
        sizes = [column[n] for n in reversed(bands.values())]
        return Readout(begin, at, [when, format_bytes(sum(column[1:])), *map(format_bytes, sizes)])

    ends = [*(column[0] for column in columns[1:]), 1.0]
    unit, name = byte_unit(top)
    chart = Chart(
        label=f"Memory of one device over a step, {format_bytes(sum(peak))} at its peak; arrow keys move the cursor",
        areas=stacked(
            [column[0] for column in columns],
            {COLOURS[band]: [column[n] for column in columns] for band, n in bands.items()},
            top,
        ),
        lines={},
        ticks=ticks(top, unit, f" {name}"),
        entries=[(COLOURS[band], band) for band in reversed(bands)],
        readouts=[
            readout(column[0], (column[0] + end) / 2, "At", column) for column, end in zip(columns, ends, strict=True)
        ],
        default=readout(at_peak, at_peak, "At the peak, at", memory["peak"]),
    )
    return {"chart": chart, "peak": sum(peak), "limit": drawn, "top": top}


def _kind(buffer: JsonView) -> str:
    """The band of a buffer, and its kind if it differs from the band."""
    band = buffer["band"]
    kind = buffer["kind"].removeprefix("weights: ")
    return band if kind == "argument" or band.endswith(kind) else f"{band}: {kind}"


def _parts(plan: JsonView) -> list[tuple[str, dict[str, int], list[str]]]:
    """Name, bytes by origin (predicted, compiled, measured), and bytes per parameter of each part and of the total."""
    share = plan["target"]["devices"] / plan["model"]["parameters"]
    rows = []
    for part in (*PARTS, "total"):
        sizes = {"predicted": plan["predicted"].get(part), "compiled": plan["bytes_per_device"][part]}
        if part == "total" and "measured" in plan:
            sizes["measured"] = plan["measured"]["peak_bytes"]
        sizes = {origin: size for origin, size in sizes.items() if size is not None}
        if any(sizes.values()):
            rows.append((LABELS.get(part, part), sizes, [f"{size * share:.2f}" for size in sizes.values()]))
    return rows


def _curves(rows: Sequence[JsonView]) -> list[tuple[Chart, str, str]]:
    """Charts of the rows of metrics.jsonl, each with its first and last step."""
    charts = []
    for keys in (("loss", "held_out_loss"), ("learning_rate",), ("tokens_per_second",)):
        points = {key: [(row["step"], row[key]) for row in rows if row.get(key) is not None] for key in keys}
        if series := {key: thinned(line) for key, line in points.items() if line}:
            charts.append(_curve(series))
    return charts


def _curve(series: Mapping[str, Sequence[tuple[float, float]]]) -> tuple[Chart, str, str]:
    everything = [point for points in series.values() for point in points]
    first = min(x for x, _ in everything)
    last = max(x for x, _ in everything)
    top = 1.05 * max(y for _, y in everything) or 1.0

    def at(step: float) -> float:
        return (step - first) / ((last - first) or 1)

    (key, points), *others = series.items()
    readouts = []
    for n, (step, value) in enumerate(points):
        begin = 0.0 if n == 0 else (at(points[n - 1][0]) + at(step)) / 2
        near = [min(line, key=lambda point: abs(point[0] - step))[1] for _, line in others]
        texts = [f"{y:,.0f}" if abs(y) >= 1000 else f"{y:.4g}" for y in (value, *near)]
        readouts.append(Readout(begin, at(step), [f"step {step:,.0f}", *texts]))
    colours = dict(zip(series, ("var(--accent)", "var(--second)"), strict=False))
    chart = Chart(
        label=f"{CURVES[key]} from step {first:,.0f} to {last:,.0f}; arrow keys move the cursor",
        areas={},
        lines={colours[name]: polyline([(at(x), y / top) for x, y in line]) for name, line in series.items()},
        ticks=ticks(top, 1, "", 4),
        entries=[(colours[name] if others else None, CURVES[name]) for name in series],
        readouts=readouts,
        default=readouts[-1],
    )
    return chart, f"{first:,.0f}", f"{last:,.0f}"
