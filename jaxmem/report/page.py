"""The page: one self-contained HTML file, made from the output of `plan --json` and the files of a run.

This module computes what the page shows; `page.html` is its template.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files

from jinja2 import Environment, StrictUndefined

from jaxmem import __version__
from jaxmem.planning.breakdown import LABELS
from jaxmem.planning.units import format_bytes, format_seconds
from jaxmem.report.figure import COLOURS, MISSING, draw_curves, draw_step, embedded
from jaxmem.step.categories import CATEGORIES
from jaxmem.typing import JsonView

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
        "bytes": format_bytes, "seconds": format_seconds, "time": time, "kind": _kind
    }  # fmt: skip
    html, style = (files(__package__).joinpath(f"page.{kind}").read_text() for kind in ("html", "css"))
    categories = _categories(plan)
    phases = {phase: size for phase, size in plan["phases"].items() if size is not None}
    return environment.from_string(html).render(
        plan=plan,
        memory=memory,
        record=record,
        version=__version__,
        style=style,
        colours=COLOURS,
        tiles=_tiles(plan, memory, record),
        step=embedded(partial(draw_step, plan=plan, memory=memory), 10, 4.5),
        missing=MISSING,
        categories=categories,
        most_of_categories=max(size for _, sizes, _ in categories for size in sizes.values()),
        legend={kind: text for kind, text in LEGEND.items() if any(kind in sizes for _, sizes, _ in categories)},
        phases=[(phase, {"compiled": size}, [format_bytes(size)]) for phase, size in phases.items()],
        most_of_phases=max(*phases.values(), 1),
        curves=embedded(partial(draw_curves, rows=record.rows), 10, 3) if record and record.rows else None,
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


def _kind(buffer: JsonView) -> str:
    """The band of a buffer, and its kind if it differs from the band."""
    band = buffer["band"]
    kind = buffer["kind"].removeprefix("weights: ")
    return band if kind == "argument" or band.endswith(kind) else f"{band}: {kind}"


def _categories(plan: JsonView) -> list[tuple[str, dict[str, int], list[str]]]:
    """Name, bytes by origin (predicted, compiled, measured), and bytes per parameter, by category and in total."""
    share = plan["target"]["devices"] / plan["model"]["parameters"]
    rows = []
    for category in (*CATEGORIES, "total"):
        sizes = {"predicted": plan["predicted"].get(category), "compiled": plan["bytes_per_device"][category]}
        if category == "total" and "measured" in plan:
            sizes["measured"] = plan["measured"]["peak_bytes"]
        sizes = {origin: size for origin, size in sizes.items() if size is not None}
        if any(sizes.values()):
            rows.append((LABELS.get(category, category), sizes, [f"{size * share:.2f}" for size in sizes.values()]))
    return rows
