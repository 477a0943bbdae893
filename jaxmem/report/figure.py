"""Figures as PNG, in files and in the page. Only this module imports matplotlib, which is optional."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxmem.errors import UserError
from jaxmem.planning.history import BANDS, PASSES
from jaxmem.planning.units import byte_unit, format_bytes, format_seconds
from jaxmem.typing import JsonView

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The colours of memory bands, distinct also with colour blindness (Okabe and Ito, "Color Universal Design", 2008).
_OKABE_ITO = ("#0072b2", "#56b4e9", "#9aa0a6", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#e8d84a")
COLOURS = dict(zip(BANDS, _OKABE_ITO, strict=True))
SHADES = dict(zip(PASSES, ("#64798c", "#3d5063", "#4f6477", "#7a8c9c"), strict=True))
# The curves of a run, a chart for each tuple of keys of metrics.jsonl.
CURVES = (("loss", "held_out_loss"), ("learning_rate",), ("tokens_per_second",))
MAX_LIMIT_RATIO = 1.6  # a limit above this multiple of the peak is not drawn
MISSING = "figures require matplotlib; run pip install 'jaxmem[figures]'"


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def figure(path: str | Path, width: float = 8, height: float = 5) -> Iterator[Figure]:
    """A figure of this size in inches to draw on. It is written on exit."""
    if not can_draw():
        raise UserError(f"{path}: {MISSING}")
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(width, height), layout="constrained")
    yield drawn
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(_png(drawn))


def embedded(draw: Callable[[Figure], None], width: float, height: float) -> str | None:
    """What `draw` draws, as the source of an image in a page; None without matplotlib."""
    if not can_draw():
        return None
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(width, height), layout="constrained")
    draw(drawn)
    return f"data:image/png;base64,{base64.b64encode(_png(drawn)).decode()}"


def _png(drawn: Figure) -> bytes:
    """A figure in 128 colours, which makes it small, with the digest of what is drawn."""
    from PIL import Image, PngImagePlugin  # which matplotlib needs

    pixels = io.BytesIO()
    drawn.savefig(pixels, format="png", dpi=150)
    about = PngImagePlugin.PngInfo()
    about.add_text("Digest", digest(drawn))
    small = io.BytesIO()
    Image.open(pixels).convert("RGB").quantize(128).save(small, format="png", optimize=True, pnginfo=about)
    return small.getvalue()


def digest(drawn: Figure) -> str:
    """A short hash of the words and numbers of a figure, but not of its style: its titles and labels, and the places of
    its lines, bars and areas with four digits."""
    from matplotlib.collections import Collection
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.text import Text

    content: list[str] = []
    for axes in drawn.axes:
        for artist in (*axes.get_children(), axes.xaxis.label, axes.yaxis.label):
            if isinstance(artist, Text):
                content.append(artist.get_text())
            elif isinstance(artist, Line2D):
                content += (f"{value:.4g}" for value in np.asarray(artist.get_xydata(), float).flat)
            elif isinstance(artist, Collection):
                content += (f"{x:.4g}" for path in artist.get_paths() for x in np.asarray(path.vertices, float).flat)
            elif isinstance(artist, Patch):
                content += (f"{value:.4g}" for value in np.asarray(artist.get_path().vertices, float).flat)
                content += (f"{value:.4g}" for value in artist.get_patch_transform().get_matrix().flat)
        content += axes.get_legend_handles_labels()[1]
    return hashlib.sha256("\n".join(content).encode()).hexdigest()[:16]


def digest_of(path: str | Path) -> str | None:
    """The digest that a PNG contains; None if it was not written by `figure`."""
    from PIL import Image

    with Image.open(path) as picture:
        return picture.info.get("Digest")


def draw(plan: JsonView, memory: JsonView, path: str | Path) -> None:
    """Draws memory over a step, with the peak and the largest buffers at the peak. `plan` and `memory`: the contents of
    plan.json and memory.json."""
    with figure(path, 10, 7) as drawn:
        axes, strip, words = drawn.subplots(3, height_ratios=(3, 0.12, 1.3))
        _draw_memory(axes, strip, plan, memory)
        target = plan["target"]
        time = f", {format_seconds(memory['seconds'])} per step" if memory["seconds"] else ""
        axes.set_title(
            f"{plan['model']['name']} on {target['devices']} x {target['name'].partition(':')[0]}: "
            f"{plan['bytes_per_parameter']:.2f} bytes per parameter{time}",
            loc="left",
            fontsize=10,
        )
        words.axis("off")
        rows = [
            (format_bytes(item["size"]), item["band"], item["what"], item["where"], item["layers"])
            for item in memory["largest"]
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)) for row in rows]
        words.text(0, 1, "The ten largest buffers at the peak", fontsize=9, fontweight="bold", va="top")
        words.text(0, 0.88, "\n".join(lines), fontsize=6.5, family="monospace", va="top")


def draw_step(drawn: Figure, plan: JsonView, memory: JsonView) -> None:
    """Draws memory over a step."""
    axes, strip = drawn.subplots(2, height_ratios=(3, 0.12))
    _draw_memory(axes, strip, plan, memory)


def draw_curves(drawn: Figure, rows: Sequence[JsonView]) -> None:
    """Draws the rows of metrics.jsonl over the steps."""
    for axes, keys in zip(drawn.subplots(1, len(CURVES)), CURVES, strict=True):
        for key in keys:
            points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
            marker = "." if len(points) == 1 else None
            axes.plot([step for step, _ in points], [y for _, y in points], marker=marker, label=key.replace("_", " "))
        axes.set(xlabel="step")
        if axes.dataLim.y0 >= 0:  # losses of a script may be negative
            axes.set(ylim=(0, None))
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)


def _draw_memory(axes: Axes, strip: Axes, plan: JsonView, memory: JsonView) -> None:
    """The bands of memory, stacked, with the peak and a limit that is near; below them the passes."""
    unit, name = byte_unit(sum(memory["peak"][1:]))
    seconds = memory["seconds"]
    scale = seconds or 100.0
    columns = memory["columns"]
    times = [scale * column[0] for column in columns] + [scale]
    bands = [n for n, _ in enumerate(memory["bands"]) if any(column[1 + n] for column in columns)]
    axes.stackplot(
        times,
        [[column[1 + n] / unit for column in columns] + [columns[-1][1 + n] / unit] for n in bands],
        step="post",
        colors=[COLOURS[memory["bands"][n]] for n in bands],
        labels=[memory["bands"][n] for n in bands],
    )
    peak = sum(memory["peak"][1:]) / unit
    peak_x = scale * memory["peak"][0]
    axes.axvline(peak_x, color="black", ls="--", lw=1)
    is_late = peak_x > scale / 2  # the text is on the side with more space
    axes.annotate(
        f"peak {format_bytes(peak * unit)}",
        (peak_x, peak),
        (-4 if is_late else 4, 4),
        ha="right" if is_late else "left",
        textcoords="offset points",
        fontsize=9,
        fontweight="bold",
    )
    strip.set(xlim=(0, scale), ylim=(0, 1), yticks=[])
    for item in memory["passes"]:
        strip.axvspan(scale * item["begin"], scale * item["end"], color=SHADES[item["name"]], lw=0)
        if item["end"] - item["begin"] > 0.08:
            middle = scale * (item["begin"] + item["end"]) / 2
            strip.text(middle, 0.45, item["name"], ha="center", va="center", fontsize=8, color="white")
    strip.spines[:].set_visible(False)
    strip.set_xlabel("estimated seconds of a step" if seconds else "% of a step, by arithmetic and memory traffic")
    axes.tick_params(labelbottom=False, bottom=False)
    limit = plan["target"]["limit_bytes"] / unit
    is_near = limit < MAX_LIMIT_RATIO * peak
    if is_near:
        axes.axhline(limit, color="#c25400", ls="--", lw=1)
    axes.set(xlim=(0, scale), ylim=(0, 1.1 * max(peak, limit if is_near else 0)), ylabel=f"{name} per device")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
