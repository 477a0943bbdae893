"""Training curves: loss, learning rate and speed over updates."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxmem.report import charts
from jaxmem.report.charts import Readout

NAMES = {
    "loss": "loss",
    "held_out_loss": "held-out loss",
    "learning_rate": "learning rate",
    "tokens_per_second": "tokens per second",
}

Json = Mapping[str, Any]


def curves(rows: Sequence[Json]) -> str:
    """The curves of the rows of metrics.jsonl, in HTML; empty if nothing is logged yet."""
    together = (("loss", "held_out_loss"), ("learning_rate",), ("tokens_per_second",))
    drawn = "".join(_curve({key: _points(rows, key) for key in keys}) for keys in together)
    return f'<h2>Training</h2>\n<div class="small">{drawn}</div>' if drawn else ""


def _points(rows: Sequence[Json], key: str) -> list[tuple[float, float]]:
    return [(row["step"], row[key]) for row in rows if row.get(key) is not None]


def _curve(series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    series = {key: charts.thinned(points) for key, points in series.items() if points}
    if not series:
        return ""
    colours = dict(zip(series, ("var(--accent)", "var(--second)"), strict=False))
    everything = [point for points in series.values() for point in points]
    first, last = min(x for x, _ in everything), max(x for x, _ in everything)
    top = 1.05 * max(y for _, y in everything) or 1.0
    width = (last - first) or 1

    def at(step: float) -> float:
        return (step - first) / width

    main, *others = series.items()
    key, points = main
    readouts = []
    for n, (step, value) in enumerate(points):
        begin = 0.0 if n == 0 else (at(points[n - 1][0]) + at(step)) / 2
        texts = [f"step {step:,.0f}", _short(value)]
        texts += [_short(min(line, key=lambda point: abs(point[0] - step))[1]) for _, line in others]
        readouts.append(Readout(begin, at(step), texts))
    outs = f'<div class="when"><span data-out="0">{readouts[-1].texts[0]}</span></div>'
    for n, name in enumerate(series):
        swatch = f'<i class="swatch" style="background:{colours[name]}"></i>' if others else ""
        outs += f'<div>{swatch}<span>{NAMES[name]}</span><b data-out="{n + 1}">{readouts[-1].texts[n + 1]}</b></div>'
    body = charts.lines({colours[name]: [(at(x), y / top) for x, y in line] for name, line in series.items()})
    label = f"{NAMES[key]} from step {first:,.0f} to {last:,.0f}; arrow keys move the cursor"
    drawn = charts.chart(body, charts.ticks(top, 1, "", 4), readouts, readouts[-1], label=label, outs=outs)
    ends = f'<div class="ends"><span>{first:,.0f}</span><span>{last:,.0f}</span></div>'
    return f"<div>{drawn}{ends}</div>"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
