"""Two towers for images and texts, with batches from a directory of images and their texts."""

import csv
import json

import jax
import numpy as np
import pytest
from PIL import Image

from jaxmem.data import ImageTexts
from jaxmem.errors import UserError

COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "gray": (128, 128, 128)}


def write(path, copies, seed=0):
    """Halves of images in one of four colors, left or right, and texts such as `red, left`."""
    path.mkdir()
    draw, rows = np.random.default_rng(seed), []
    for number in range(copies):
        for color, value in COLORS.items():
            for x, side in enumerate(("left", "right")):
                pixels = draw.integers(0, 90, (8, 8, 3), np.uint8)
                pixels[:, 4 * x : 4 * x + 4] = value
                rows.append({"file_name": f"{color} {side} {number}.png", "text": f"{color}, {side}"})
                Image.fromarray(pixels).save(path / rows[-1]["file_name"])
    with (path / "metadata.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["file_name", "text"])
        writer.writeheader()
        writer.writerows(rows)
    return rows


def pairs(path, **options):
    return ImageTexts(path, **{"rows": 8, "image_size": 8, "text_length": 16} | options)


def test_batches_of_processes_and_of_a_position(tmp_path):
    rows = write(tmp_path / "pairs", 2)
    every = iter(pairs(tmp_path / "pairs"))
    first, second, third = (next(every) for _ in range(3))
    assert first["image"].shape == (8, 8, 8, 3)
    assert first["image"].max() <= 1
    texts = {bytes(row[: n - 1].tolist()).decode() for row, n in zip(first["text"], first["length"], strict=True)}
    assert texts <= {row["text"] for row in rows}
    halves = [next(iter(pairs(tmp_path / "pairs", share=(i, 2)))) for i in range(2)]
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(lambda *x: np.concatenate(x), *halves), first)
    again = iter(pairs(tmp_path / "pairs"))
    next(again)
    resumed = iter(pairs(tmp_path / "pairs"))
    resumed.set_state(again.get_state())
    for batch in (second, third):
        jax.tree.map(np.testing.assert_array_equal, next(resumed), batch)
    assert next(iter(pairs(tmp_path / "pairs", text_length=4)))["text"][0, -1] == 256


@pytest.mark.parametrize(
    ("line", "options", "named"),
    [
        ({"file_name": "red left 0.png"}, {}, "line 1: text must be a string"),
        ({"file_name": "absent.png", "text": "red"}, {}, "line 1: file_name=absent.png"),
        ({"file_name": "red left 0.png", "text": "red"}, {}, "1 pairs; rows=8"),
        (None, {"rows": 6, "share": (0, 4)}, "divisible by the 4 processes"),
    ],
)
def test_refuses_pairs(tmp_path, line, options, named):
    write(tmp_path / "pairs", 1)
    if line is not None:
        (tmp_path / "pairs/metadata.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(UserError, match=named):
        pairs(tmp_path / "pairs", **options)
    with pytest.raises(UserError, match=r"metadata.jsonl nor metadata.csv"):
        pairs(tmp_path)
