"""Two towers for images and texts, with batches from a directory of images and their texts."""

import csv
import json

import jax
import numpy as np
import pytest
from PIL import Image

import jaxmem
from jaxmem.config.networks import Decoder, Vit
from jaxmem.data import ImageTexts
from jaxmem.errors import UserError
from jaxmem.models.image_text import ImageText, image_text_loss

COLORS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "gray": (128, 128, 128)}
IMAGE = Vit(image_size=8, channels=3, patch=4, layers=1, embed=16, mlp=32, heads=2, outputs=16)
TEXT = Decoder(vocab=264, layers=1, embed=16, mlp=32, heads=2, kv_heads=2, head_dim=8, tie_embeddings=True)


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


def test_learns_which_text_belongs_to_an_image(tmp_path):
    write(tmp_path / "pairs", 8)
    write(tmp_path / "others", 1, seed=1)
    config = {
        "name": "matching",
        "output": str(tmp_path),
        "batch": {"global_size": 8},
        "mesh": {"fsdp": 8},
        "memory": {"update": "during", "remat": "full"},
        "optimizer": {"learning_rate": 5e-3},
        "train": {"steps": 150, "evaluate_every": 150, "log_every": 150},
    }
    run = jaxmem.train(
        config,
        model=lambda rngs, execution: ImageText(rngs, execution, IMAGE, TEXT),
        loss=image_text_loss,
        data=pairs(tmp_path / "pairs"),
        held_out=[pairs(tmp_path / "others").batch(0)],
    )
    assert run.held_out["found"] >= 0.75  # by chance 0.125
    assert run.state.params["image"]["blocks"]["mlp"]["up"]["weight"].ndim == 3


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
