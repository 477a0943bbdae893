"""The page: one HTML file that needs nothing beside it. It is made from what `plan --json` prints and a run leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from jaxmem import __version__
from jaxmem.planning.breakdown import PARTS
from jaxmem.planning.units import format_bytes, format_seconds
from jaxmem.report.curves import curves
from jaxmem.report.step import largest_buffers, over_a_step

NAMES = {"parameters": "weights"}  # of parts of a plan, as its table has them
Json = Mapping[str, Any]


@dataclass(frozen=True)
class Trained:
    """What a run has left so far."""

    steps: int  # that it is to do
    rows: Sequence[Json]  # of metrics.jsonl
    config: str  # as YAML


def page(plan: Json, memory: Json, trained: Trained | None = None) -> str:
    """`plan` and `memory` as plan.json and memory.json have them."""
    parts = [
        _heading(plan, memory, trained),
        over_a_step(plan, memory),
        largest_buffers(memory),
        _each(plan),
        _phases(plan),
        curves(trained.rows) if trained else "",
        _footer(trained),
    ]
    style, script = (files(__package__).joinpath(name).read_text() for name in ("page.css", "page.js"))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(plan['model']['name'])}: memory</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in parts if part)
        + f"\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _heading(plan: Json, memory: Json, trained: Trained | None) -> str:
    target, model = plan["target"], plan["model"]
    held, limit = max(size for size in plan["phases"].values() if size is not None), target["limit_bytes"]
    if limit >= held:
        verdict = f"{format_bytes(limit - held)} left" if plan["fits"] else "too little host memory"
    else:
        verdict = f"{format_bytes(held - limit)} {'spilled' if plan['fits'] else 'too much'}"
    tiles = [
        (format_bytes(plan["bytes_per_device"]["total"]), "of each device at the step's fullest moment"),
        (f"{plan['bytes_per_parameter']:.2f}", "bytes a parameter"),
        (verdict, f"of {format_bytes(limit)} that a run may take"),
    ]
    if memory["seconds"] is not None:
        tiles.append((format_seconds(memory["seconds"]), f"a step, estimated; bound by {plan['bound_by']}"))
    if trained and trained.rows:
        last = trained.rows[-1]
        tiles.append((f"{last['step']:,} of {trained.steps:,}", "updates done"))
    shown = "".join(f'<div class="tile"><b>{value}</b><span>{what}</span></div>' for value, what in tiles)
    devices = f"{target['devices']} x {target['name'].partition(':')[0]}"
    return (
        f"<h1>{escape(model['name'])}</h1>\n<p>{model['parameters']:,} parameters on {escape(devices)}</p>\n"
        f'<div class="tiles">{shown}</div>'
    )


def _each(plan: Json) -> str:
    share = plan["target"]["devices"] / plan["model"]["parameters"]
    bars = []
    for part in (*PARTS, "total"):
        sizes = {"predicted": plan["predicted"].get(part), "compiled": plan["bytes_per_device"][part]}
        if part == "total" and "measured" in plan:
            sizes["measured"] = plan["measured"]["peak_bytes"]
        sizes = {name: size for name, size in sizes.items() if size is not None}
        if any(sizes.values()):
            bars.append((NAMES.get(part, part), sizes))
    most = max(size for _, sizes in bars for size in sizes.values())
    rows = "".join(_bar(name, sizes, most, lambda size: f"{size * share:.2f}") for name, sizes in bars)
    names = dict.fromkeys(name for _, sizes in bars for name in sizes)
    about = {"predicted": "predicted by arithmetic", "compiled": "compiled", "measured": "measured: the device's peak"}
    return f'<h2>Bytes a parameter</h2>\n{_key({name: about[name] for name in names})}\n<div class="bars">{rows}</div>'


def _phases(plan: Json) -> str:
    sizes = {phase: size for phase, size in plan["phases"].items() if size is not None}
    most = max(*sizes.values(), 1)
    rows = "".join(_bar(phase, {"compiled": size}, most, format_bytes) for phase, size in sizes.items())
    return f'<h2>Every phase of a run</h2>\n<p>The largest decides whether it fits.</p>\n<div class="bars">{rows}</div>'


def _bar(name: str, sizes: Mapping[str, int], most: int, said: Callable[[int], str]) -> str:
    drawn = "".join(f'<i class="{kind}" style="width:{100 * size / most:.2f}%"></i>' for kind, size in sizes.items())
    last = list(sizes)[-1]
    others = " / ".join(said(size) for kind, size in sizes.items() if kind != last)
    value = (f"<span>{others} / </span>" if others else "") + said(sizes[last])
    return f'<span>{escape(name)}</span><span class="bar">{drawn}</span><span class="value">{value}</span>'


def _key(names: Mapping[str, str]) -> str:
    entries = "".join(f'<span><i class="swatch {kind}"></i>{text}</span>' for kind, text in names.items())
    return f'<div class="key">{entries}</div>'


def _footer(trained: Trained | None) -> str:
    config = ""
    if trained:
        config = f"<details><summary>config.yaml</summary><pre>{escape(trained.config)}</pre></details>\n"
    return f"{config}<footer>jaxmem {__version__}</footer>"
