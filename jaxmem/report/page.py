"""The page: one self-contained HTML file, made from the output of `plan --json` and the files of a run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from jaxmem import __version__
from jaxmem.planning.breakdown import LABELS, PARTS
from jaxmem.planning.units import format_bytes, format_seconds
from jaxmem.report.curves import curves
from jaxmem.report.step import largest_buffers, over_a_step

Json = Mapping[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """A run so far."""

    steps: int  # in total
    rows: Sequence[Json]  # of metrics.jsonl
    config: str  # as YAML


def page(plan: Json, memory: Json, record: RunRecord | None = None) -> str:
    """`plan` and `memory`: the contents of plan.json and memory.json."""
    parts = [
        _heading(plan, memory, record),
        over_a_step(plan, memory),
        largest_buffers(memory),
        _bytes_per_parameter(plan),
        _phases(plan),
        curves(record.rows) if record else "",
        _footer(record),
    ]
    style, script = (files(__package__).joinpath(name).read_text() for name in ("page.css", "page.js"))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(plan['model']['name'])}: memory</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + f"\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _heading(plan: Json, memory: Json, record: RunRecord | None) -> str:
    target, model = plan["target"], plan["model"]
    peak, limit = max(size for size in plan["phases"].values() if size is not None), target["limit_bytes"]
    if limit >= peak:
        verdict = f"{format_bytes(limit - peak)} free" if plan["fits"] else "too little host memory"
    else:
        verdict = f"{format_bytes(peak - limit)} {'spilled' if plan['fits'] else 'too much'}"
    tiles = [
        (format_bytes(plan["bytes_per_device"]["total"]), "per device at the peak of a step"),
        (f"{plan['bytes_per_parameter']:.2f}", "bytes per parameter"),
        (verdict, f"of {format_bytes(limit)} usable"),
    ]
    if memory["seconds"] is not None:
        tiles.append((format_seconds(memory["seconds"]), f"per step, estimated; bound by {plan['bound_by']}"))
    if record and record.rows:
        last = record.rows[-1]
        tiles.append((f"{last['step']:,} of {record.steps:,}", "updates"))
    shown = "".join(f'<div class="tile"><b>{value}</b><span>{what}</span></div>' for value, what in tiles)
    devices = f"{target['devices']} x {target['name'].partition(':')[0]}"
    chosen = plan.get("attention") if plan["backend"] == "cuda" else None  # plans of earlier versions do not say
    attention = escape("; attention: {implementation} ({why})".format(**chosen)) if chosen else ""
    if plan.get("remat_why"):
        remat = plan["remat"]["save"] if isinstance(plan["remat"], dict) else [plan["remat"]]
        attention += escape(f"; recompute: {', '.join(remat)} ({plan['remat_why']})")
    return (
        f"<h1>{escape(model['name'])}</h1>\n<p>{model['parameters']:,} parameters on {escape(devices)}{attention}</p>\n"
        f'<div class="tiles">{shown}</div>'
    )


def _bytes_per_parameter(plan: Json) -> str:
    share = plan["target"]["devices"] / plan["model"]["parameters"]
    bars = []
    for part in (*PARTS, "total"):
        sizes = {"predicted": plan["predicted"].get(part), "compiled": plan["bytes_per_device"][part]}
        if part == "total" and "measured" in plan:
            sizes["measured"] = plan["measured"]["peak_bytes"]
        sizes = {name: size for name, size in sizes.items() if size is not None}
        if any(sizes.values()):
            bars.append((LABELS.get(part, part), sizes))
    most = max(size for _, sizes in bars for size in sizes.values())
    rows = "".join(_bar(name, sizes, most, lambda size: f"{size * share:.2f}") for name, sizes in bars)
    names = dict.fromkeys(name for _, sizes in bars for name in sizes)
    about = {"predicted": "predicted by arithmetic", "compiled": "compiled", "measured": "measured peak of a device"}
    return (
        f'<h2>Bytes per parameter</h2>\n{_key({name: about[name] for name in names})}\n<div class="bars">{rows}</div>'
    )


def _phases(plan: Json) -> str:
    sizes = {phase: size for phase, size in plan["phases"].items() if size is not None}
    most = max(*sizes.values(), 1)
    rows = "".join(_bar(phase, {"compiled": size}, most, format_bytes) for phase, size in sizes.items())
    return f'<h2>Phases of a run</h2>\n<p>The largest decides whether it fits.</p>\n<div class="bars">{rows}</div>'


def _bar(name: str, sizes: Mapping[str, int], most: int, text: Callable[[int], str]) -> str:
    drawn = "".join(f'<i class="{kind}" style="width:{100 * size / most:.2f}%"></i>' for kind, size in sizes.items())
    last = list(sizes)[-1]
    others = " / ".join(text(size) for kind, size in sizes.items() if kind != last)
    value = (f"<span>{others} / </span>" if others else "") + text(sizes[last])
    return f'<span>{escape(name)}</span><span class="bar">{drawn}</span><span class="value">{value}</span>'


def _key(names: Mapping[str, str]) -> str:
    entries = "".join(f'<span><i class="swatch {kind}"></i>{text}</span>' for kind, text in names.items())
    return f'<div class="key">{entries}</div>'


def _footer(record: RunRecord | None) -> str:
    config = ""
    if record:
        config = f"<details><summary>config.yaml</summary><pre>{escape(record.config)}</pre></details>\n"
    return f"{config}<footer>jaxmem {__version__}</footer>"
