"""Figures as PNG files. Only this module imports matplotlib, which is optional."""

from __future__ import annotations

import hashlib
import importlib.util
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxmem.errors import UserError
from jaxmem.planning.units import byte_unit, format_bytes, format_seconds
from jaxmem.report.charts import COLOURS, SHADES
from jaxmem.typing import JsonView

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MISSING = "figures require matplotlib; run pip install 'jaxmem[figures]'"


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def figure(path: str | Path, width: float = 8, height: float = 5) -> Iterator[Figure]:
    """A figure of this size in inches to draw on. It is written on exit, in 128 colours, which makes the file small,
    with the digest of what is drawn."""
    if not can_draw():
        raise UserError(f"{path}: {MISSING}")
    from matplotlib.figure import Figure
    from PIL import Image, PngImagePlugin  # which matplotlib needs

    drawn = Figure(figsize=(width, height), layout="constrained")
    yield drawn
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    pixels = io.BytesIO()
    about = PngImagePlugin.PngInfo()
    drawn.savefig(pixels, format="png", dpi=150)
    about.add_text("Digest", digest(drawn))
    Image.open(pixels).convert("RGB").quantize(128).save(path, format="png", optimize=True, pnginfo=about)


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
        unit, name = byte_unit(sum(memory["peak"][1:]))
        seconds = memory["seconds"]
        scale = seconds or 100.0
        axes, strip, words = drawn.subplots(3, height_ratios=(3, 0.12, 1.3))
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
        at = scale * memory["peak"][0]
        axes.axvline(at, color="black", ls="--", lw=1)
        is_late = at > scale / 2  # the text is on the side with more space
        axes.annotate(
            f"peak {format_bytes(peak * unit)}",
            (at, peak),
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
        if limit < 1.6 * peak:
            axes.axhline(limit, color="#c25400", ls="--", lw=1)
        axes.set(
            xlim=(0, scale), ylim=(0, 1.1 * max(peak, limit if limit < 1.6 * peak else 0)), ylabel=f"{name} per device"
        )
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=8)
        target = plan["target"]
        time = f", {format_seconds(seconds)} per step" if seconds else ""
        axes.set_title(
            f"{plan['model']['name']} on {target['devices']} x {target['name'].partition(':')[0]}: "
            f"{plan['bytes_per_parameter']:.2f} bytes per parameter{time}",
            loc="left",
            fontsize=10,
        )
        axes.spines[["top", "right"]].set_visible(False)
        words.axis("off")
        rows = [
            (format_bytes(item["size"]), item["band"], item["what"], item["where"], item["layers"])
            for item in memory["largest"]
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)) for row in rows]
        words.text(0, 1, "The ten largest buffers at the peak", fontsize=9, fontweight="bold", va="top")
        words.text(0, 0.88, "\n".join(lines), fontsize=6.5, family="monospace", va="top")
