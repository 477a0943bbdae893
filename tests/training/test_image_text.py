"""Two towers for images and texts, with batches from a directory of images and their texts."""

import csv
import json

import jax
import numpy as np
import pytest
from PIL import Image

import jaxmem
from jaxmem.config import load_config
from jaxmem.data import ImageTexts, Loader
from jaxmem.errors import UserError
from jaxmem.step.batches import batch_spec

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


def config(path, **settings):
    text = {"vocab": 264, "layers": 1, "embed": 16, "mlp": 32, "heads": 2, "kv_heads": 2, "head_dim": 8}
    image = {"image_size": 8, "channels": 3, "patch": 4, "layers": 1, "embed": 16, "mlp": 32, "heads": 2, "outputs": 16}
    return {
        "name": "matching",
        "output": str(path),
        "model": {"family": "image_text", **image, "text": text},
        "objective": "contrastive",
        "data": {"source": "image_texts", "path": str(path / "pairs"), "sequence_length": 16, "held_out": 0.1},
        "batch": {"global_size": 8},
        "mesh": {"fsdp": 8},
        "memory": {"update": "during", "remat": "full"},
        "optimizer": {"learning_rate": 5e-3},
        "train": {"steps": 150, "evaluate_every": 150, "log_every": 150},
        **settings,
    }


@pytest.mark.exhaustive
def test_learns_which_text_belongs_to_an_image(tmp_path):
    write(tmp_path / "pairs", 8)
    run = jaxmem.train(config(tmp_path))
    assert min(run.held_out["image_recall"], run.held_out["text_recall"]) >= 0.5  # by chance 0.125
    assert run.state.params["image"]["blocks"]["mlp"]["up"]["weight"].ndim == 3
    found = jaxmem.evaluate(run.directory)
    assert found["loss"] == pytest.approx(run.held_out["loss"], rel=1e-5)


def test_batches_of_a_config(tmp_path):
    write(tmp_path / "pairs", 2)
    data = config(tmp_path)["data"] | {"shuffle": False, "held_out": 0.0}
    cfg = load_config(config(tmp_path, data=data, train={"steps": 1}))
    with Loader(cfg) as loader:
        batch = next(loader)
    spec = batch_spec(cfg)
    assert {name: x.shape for name, x in batch.items()} == {name: shape for name, (shape, _, _) in spec.items()}
    rows = list(csv.DictReader((tmp_path / "pairs/metadata.csv").read_text().splitlines()))
    texts, lengths = batch["texts"][0], batch["lengths"][0]
    assert [bytes(text[: n - 1].tolist()).decode() for text, n in zip(texts, lengths, strict=True)] == [
        row["text"] for row in rows[:8]
    ]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"objective": "classify"}, "objective.name=contrastive"),
        ({"mesh": {"stage": 2}}, "mesh.stage=1"),
        ({"data": {"source": "digits"}}, "data.source=image_texts"),
        ({"batch": {"global_size": 8, "accumulate": 2}}, "batch.accumulate=1"),
        ({"adapter": {"kind": "head"}}, "adapter.kind=patterns"),
        ({"train": {"steps": 1}, "data": {"source": "image_texts"}}, "requires data.path"),
    ],
)
def test_refuses_settings(tmp_path, settings, named):
    with pytest.raises(UserError, match=named):
        load_config(config(tmp_path, **settings))


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
