"""Images in a directory of classes."""

import jax
import numpy as np
import pytest
from PIL import Image

from jaxmem.config import load_config
from jaxmem.data.images import ImageForm, read_image
from jaxmem.data.loader import Loader
from jaxmem.errors import UserError
from jaxmem.training.run import run

COLORS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Ten images of each color, of different sizes and formats."""
    root = tmp_path_factory.mktemp("images")
    for name, color in COLORS.items():
        (root / name).mkdir()
        for number in range(10):
            suffix = ("png", "bmp")[number % 2]
            Image.new("RGB", (9 + number, 14 - number // 2), color).save(root / name / f"{number}.{suffix}")
    return root


def config(folder, *overrides):
    sizes = {"image_size": 8, "channels": 3, "patch": 4, "layers": 1, "embed": 16, "mlp": 32, "outputs": 3}
    raw = {
        "name": "colors",
        "model": {"family": "vit", **sizes},
        "objective": "classify",
        "data": {"source": "images", "path": str(folder), "held_out": 0.2},
        "batch": {"global_size": 8},
        "optimizer": {"learning_rate": 1e-2},
        "train": {"steps": 20, "evaluate_every": 20},
    }
    return load_config(raw, overrides)


def test_pixels_and_labels(folder):
    with Loader(config(folder)) as loader:
        batch = next(iter(loader))
    assert batch["inputs"].shape == (1, 8, 8, 8, 3)
    assert batch["inputs"].dtype == np.float32
    expected = np.array(list(COLORS.values()), np.float32)[batch["targets"][0]] / 255
    np.testing.assert_array_equal(batch["inputs"][0], np.broadcast_to(expected[:, None, None], (8, 8, 8, 3)))


def test_one_channel_is_brightness(folder):
    with Loader(config(folder, "model.channels=1")) as loader:
        batch = next(iter(loader))
    assert batch["inputs"].shape == (1, 8, 8, 8, 1)
    levels = np.array([29, 150, 76], np.float32) / 255  # ITU-R 601: 0.114, 0.587, 0.299
    np.testing.assert_allclose(batch["inputs"][0, :, 0, 0, 0], levels[batch["targets"][0]], atol=1 / 255)


@pytest.mark.parametrize("channels", [1, 3])
def test_gray_images_of_16_bits_are_not_clipped(tmp_path, channels):
    values = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(values).save(tmp_path / "x.png")
    pixels = read_image(tmp_path / "x.png", ImageForm(8, channels, np.float32))
    np.testing.assert_allclose(pixels, np.broadcast_to(values[..., None] / 65535, (8, 8, channels)), atol=1 / 255)


@pytest.mark.exhaustive
def test_a_classifier_learns_the_colors(folder, tmp_path):
    found = run(config(folder, f"output={tmp_path}"), jax.devices()[:1])
    assert found.held_out["accuracy"] > 0.9


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["model.outputs=4"], "3 classes .*blue.*model.outputs=3"),
        (["objective=binary", "model.outputs=1"], "3 classes.*requires 2"),
        (["objective=regress_l2", "model.outputs=1"], "data.source=images.*regress_l2|regress_l2.*data.source=images"),
        (["objective=contrastive"], "data.source=images.*contrastive|contrastive.*data.source=images"),
        (["data.path=/nowhere/images"], "no such file"),
        (["data.source=digits", "data.path=null"], "model.channels=1"),
    ],
)
def test_refuses(folder, overrides, named):
    with pytest.raises(UserError, match=named):
        Loader(config(folder, *overrides))


def test_names_a_file_that_is_not_an_image(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(8):
            (tmp_path / name / f"{number}.png").write_bytes(b"no image")
    cfg = config(tmp_path, "model.outputs=2", "data.held_out=0", "train.evaluate_every=null")
    with Loader(cfg) as loader, pytest.raises(UserError, match=r"\.png: cannot be read as an image"):
        next(iter(loader))


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def test_an_image_of_another_format_starts_no_program(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(
        "PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: started.append(1) or Image.new("RGB", (8, 8))
    )
    (tmp_path / "x.png").write_bytes(EPS)
    with pytest.raises(
        UserError, match=r"x\.png: cannot be read as an image: .*; remove the file, or convert it to PNG"
    ):
        read_image(tmp_path / "x.png", ImageForm(8, 3, np.float32))
    assert not started
