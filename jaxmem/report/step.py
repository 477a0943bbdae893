"""Memory over the time of a step, and the largest buffers at its peak, in HTML."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any

from jaxmem.machine.gpus import GIB
from jaxmem.planning.units import format_bytes, format_seconds
from jaxmem.report import charts
from jaxmem.report.charts import Readout
from jaxmem.report.palette import COLOURS, SHADES

FAR = 1.6  # times the peak: a higher limit is not drawn
WIDE_ENOUGH = 0.06  # of a step: a pass whose name is shown
UNITS = ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))

Json = Mapping[str, Any]


def over_a_step(plan: Json, memory: Json) -> str:
    """A chart of memory by band, stacked, with its peak."""
    columns, seconds = memory["columns"], memory["seconds"]
    most, limit = sum(memory["peak"][1:]), plan["target"]["limit_bytes"]
    drawn = limit if limit <= FAR * most else None
    top = 1.04 * max(most, drawn or 0)
    held = {band: [column[n] for column in columns] for n, band in enumerate(memory["bands"], 1)}
    present = {band: n for n, band in enumerate(memory["bands"], 1) if any(held[band])}
    body = charts.stacked([column[0] for column in columns], {COLOURS[band]: held[band] for band in present}, top)
    readouts, at_peak = _readouts(memory, present.values())
    label = f"Memory of one device over a step, {format_bytes(most)} at its peak; arrow keys move the cursor"
    how = (
        "Time is estimated from the compiled schedule."
        if seconds is not None
        else "This device's speed is unknown: operations are placed by their arithmetic and memory traffic."
    )
    end = "one step" if seconds is None else format_seconds(seconds)
    lasts = ", ".join(f"{one['name']} {_time(one['end'] - one['begin'], memory)}" for one in memory["passes"])
    marks, outs = _marks(memory["peak"][0], most, drawn, top), _key(present, at_peak)
    return (
        f"<h2>Memory over a step</h2>\n<p>{how} A loop's body is drawn once, over the loop's entire time.</p>\n"
        f"{charts.chart(body, marks, readouts, at_peak, label=label, outs=outs)}"
        f'<div class="passes">{"".join(_passes(memory))}</div>'
        f'<div class="ends"><span>0</span><span>{end}</span></div>\n<p>{lasts}</p>'
    )


def _marks(at: float, most: int, limit: int | None, top: float) -> str:
    unit, name = next((size, name) for size, name in UNITS if top >= size)
    marks = charts.ticks(top, unit, f" {name}") + (
        f'<div class="mark peak" style="left:{100 * at:.2f}%">'
        f'<b style="--at:{100 * at:.0f}">peak {format_bytes(most)}</b></div>'
    )
    if limit is not None:
        at_limit = f'style="bottom:{100 * limit / top:.2f}%"'
        marks += f'<div class="mark limit" {at_limit}><b>limit {format_bytes(limit)}</b></div>'
    return marks


def _readouts(memory: Json, bands: Iterable[int]) -> tuple[list[Readout], Readout]:
    """The readouts of each column and of the peak: the moment, the total, each band."""
    bands = list(bands)

    def texts(head: str, column: Sequence[float]) -> list[str]:
        return [f"{head}:", format_bytes(sum(column[1:])), *(format_bytes(column[n]) for n in bands)]

    columns, peak = memory["columns"], memory["peak"]
    ends = [*(column[0] for column in columns[1:]), 1.0]
    readouts = []
    for column, end in zip(columns, ends, strict=True):
        middle = (column[0] + end) / 2
        readouts.append(Readout(column[0], middle, texts(_when(middle, memory).capitalize(), column)))
    return readouts, Readout(peak[0], peak[0], texts(f"At the peak, {_when(peak[0], memory)}", peak))


def _key(bands: Iterable[str], peak: Readout) -> str:
    when, total, *each = (f'data-out="{n}">{text}' for n, text in enumerate(peak.texts))
    entries = [
        f'<div><i class="swatch" style="background:{COLOURS[band]}"></i><span>{band}</span><b {text}</b></div>'
        for band, text in zip(bands, each, strict=True)
    ]
    return f'<div class="when"><span {when}</span> <b {total}</b></div>{"".join(reversed(entries))}'


def _passes(memory: Json) -> Iterator[str]:
    for one in memory["passes"]:
        share = one["end"] - one["begin"]
        name = one["name"] if share > WIDE_ENOUGH else ""
        thin = "" if name else ' class="thin"'
        yield f'<span{thin} style="flex:{share:.5f} 1 0;background:{SHADES[one["name"]]}">{name}</span>'


def _when(share: float, memory: Json) -> str:
    inside = next((one["name"] for one in memory["passes"] if one["begin"] <= share < one["end"]), "")
    return f"at {_time(share, memory)}{f', {inside}' if inside else ''}"


def _time(share: float, memory: Json) -> str:
    return f"{share:.1%}" if memory["seconds"] is None else format_seconds(share * memory["seconds"])


def largest_buffers(memory: Json) -> str:
    """Tables of the ten largest buffers at the peak, and of the ten largest that the step allocates."""
    found = "<h2>The ten largest buffers at the peak</h2>\n" + _buffers(memory["largest"])
    if memory["largest_made"] != memory["largest"]:
        made = _buffers(memory["largest_made"])
        found += f"<details><summary>The largest that the step allocates</summary>{made}</details>"
    return found


def _buffers(buffers: Iterable[Json]) -> str:
    rows = []
    for one in buffers:
        band = one["band"]
        kind = one["kind"].removeprefix("weights: ")  # the name of the band
        kind = band if kind == "argument" or band.endswith(kind) else f"{band}: {kind}"
        inside = ", ".join(filter(None, (one["inside"].replace(" > ", " › "), one["layers"])))
        rows.append(
            f'<tr><td><i class="swatch" style="background:{COLOURS[band]}"></i></td>'
            f'<td class="size">{format_bytes(one["size"])}</td>'
            f"<td>{escape(kind)}<small><code>{escape(one['what'])}</code></small></td>"
            f"<td><code>{escape(one['where'])}</code><small>{escape(inside)}</small></td></tr>"
        )
    head = '<tr><th></th><th class="size">bytes</th><th>what</th><th>source, module</th></tr>'
    return f'<div class="wide"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'
