"""The memory of a GPU over a training step, compiled, under several policies; and what its peak consists of."""

from jaxmem.report.figure import COLOURS
from jaxmem.typing import JsonView
from scripts.course import Findings, common, main
from scripts.course.panels import Areas
from scripts.course.table import Row, Table, gib

BASE = common.CONFIGS["peak"]["base"]
POLICIES = common.rows_of("peak", "policies")


def measure(target: str) -> Findings:
    kind = common.require_gpus("peak", target, 1)
    plans = common.plans(f"{kind}:1", BASE, POLICIES)
    memories = {name: plans[name]["memory"] for name in POLICIES}
    rows = {name: _row(name, memory) for name, memory in memories.items()}
    top = 1.1 * max(row["peak, GiB"] for row in rows.values())
    panels = [_areas(name, memory, top) for name, memory in memories.items()]
    first, *_, last = rows.values()
    facts = {
        "first": first["peak, GiB"],
        "smallest": min(rows.values(), key=lambda row: row["peak, GiB"]),
        "last": last,
    }
    table = Table(f"{common.title(BASE)} on one {kind}: GiB at the peak", list(rows.values()))
    return Findings([table], facts, panels, (5, 5, 5))


def _row(name: str, memory: JsonView) -> Row:
    at, *sizes = memory["peak"]
    bands = {f"{band}, GiB": gib(size) for band, size in zip(memory["bands"], sizes, strict=True)}
    inside = next(part["name"] for part in memory["passes"] if part["begin"] <= at <= part["end"])
    largest = memory["largest_made"][0]
    return {
        "policy": name,
        "peak, GiB": gib(sum(sizes)),
        "in the pass": inside,
        **{band: size or None for band, size in bands.items()},
        "largest temporary": f"{largest['what']} ({largest['band']})",
    }


def _areas(name: str, memory: JsonView, top: float) -> Areas:
    seconds = memory["seconds"]
    columns = memory["columns"]
    areas = {
        band: [column[n] / 2**30 for column in columns]
        for n, band in enumerate(memory["bands"], 1)
        if any(column[n] for column in columns)
    }
    return Areas(name, [seconds * column[0] for column in columns], seconds, areas, COLOURS, top)


if __name__ == "__main__":
    main(__file__)
