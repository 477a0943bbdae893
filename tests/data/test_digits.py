"""Real images in the shapes that each objective takes."""

import importlib.util
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest

from jaxmem.config.sections import Config
from jaxmem.data.digits import Digits, another_view
from jaxmem.data.loader import Loader, merge_states
from jaxmem.errors import UserError
from jaxmem.step.batches import batch_spec

Make = Callable[..., Config]
Batch = dict[str, np.ndarray]


def digits(config: Make, objective: str = "classify", inputs: str = "numbers", **options: Any) -> Config:
    return config(objective=objective, model={"family": "mlp", "inputs": inputs}, source="digits", **options)


def take(cfg: Config, count: int | None = None, **options: Any) -> list[Batch]:
    with Loader(cfg, **options) as loader:
        return list(islice(loader, count))


@pytest.mark.exhaustive
def test_the_images_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits  # 3 s, which every process that collects the tests would spend

    found, reference = Digits(), load_digits()
    np.testing.assert_array_equal(found.images, reference.images)
    np.testing.assert_array_equal(found.labels, reference.target)


@pytest.mark.parametrize("inputs", ["numbers", "one_hot"])
@pytest.mark.parametrize("objective", ["classify", "binary", "regress_l1", "regress_l2", "contrastive"])
def test_batches_are_what_the_spec_says_and_hold_real_pairs(config: Make, objective: str, inputs: str) -> None:
    cfg = digits(config, objective, inputs, global_size=6, accumulate=2)
    spec = batch_spec(cfg)
    [batch] = take(cfg, 1)
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
        name: (shape, np.dtype(dtype)) for name, (shape, dtype, _) in spec.items()
    }
    assert spec["inputs"][0] == (2, 3, 8, 8, 1)
    assert spec["inputs"][2] == ("accumulate", "batch", "height", "width", "channels")
    assert np.all(batch["mask"] == 1)
    pixels = batch["inputs"] * (16 if inputs == "numbers" else 1)
    label_of = {image.tobytes(): label for image, label in zip(Digits().images, Digits().labels, strict=True)}
    labels = np.array([label_of[x.astype(np.uint8).tobytes()] for x in pixels.reshape(6, 64)]).reshape(2, 3)
    if objective == "contrastive":
        assert not np.array_equal(batch["pairs"], batch["inputs"])
        assert batch["pairs"].min() >= 0
        assert batch["pairs"].max() <= (1 if inputs == "numbers" else 16)
    else:
        expected = labels % 2 if objective == "binary" else labels
        np.testing.assert_array_equal(batch["targets"], expected)


def test_a_second_view_is_the_image_moved_by_a_pixel_with_small_noise() -> None:
    images, places = Digits().images[:300], np.arange(300)
    views = another_view(images, places, 0).astype(int)
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1))).astype(int)
    shifts = [padded[:, y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
    distances = np.stack([np.abs(views - shift).max(axis=(1, 2)) for shift in shifts])
    assert distances.min(axis=0).max() <= 2
    assert set(distances.argmin(axis=0).tolist()) == set(range(9))
    np.testing.assert_array_equal(another_view(images, places, 0), views)
    assert not np.array_equal(another_view(images, places + 1797, 0), views)  # another epoch
    assert not np.array_equal(another_view(images, places, 1), views)


def test_an_epoch_has_each_image_once_and_pads_the_end(config: Make) -> None:
    cfg = digits(config, epochs=1, global_size=100, held_out=0.1)
    trained, held = take(cfg), take(cfg, split="held_out")
    for batches in (trained, held):
        assert all(np.all(batch["mask"] == 1) for batch in batches[:-1])
        assert 0 < batches[-1]["mask"].sum() < 100

    def images(batches: list[Batch]) -> list[bytes]:
        return [x.tobytes() for batch in batches for x in batch["inputs"][batch["mask"] == 1]]

    everything = sorted(images(trained) + images(held))
    assert everything == sorted((x / np.float32(16)).astype(np.float32).tobytes() for x in Digits().images)
    assert 130 < len(images(held)) < 230


def test_digits_resume_and_divide_among_processes(config: Make) -> None:
    cfg = digits(config, "contrastive", global_size=8, accumulate=2, epochs=1)
    whole = take(cfg, 6)
    with Loader(cfg, rows=[2, 3]) as loader:
        list(islice(loader, 3))
        merged = merge_states([loader.state(), take_state(cfg, [0, 1], 3)])
    with Loader(cfg, rows=[1]) as loader:
        loader.restore(merged)
        for batch, expected in zip(islice(loader, 3), whole[3:], strict=True):
            for name in batch:
                np.testing.assert_array_equal(batch[name], expected[name][:, [1]])


def take_state(cfg: Config, rows: list[int], count: int) -> dict[str, Any]:
    with Loader(cfg, rows=rows) as loader:
        list(islice(loader, count))
        return loader.state()


def test_without_scikit_learn_its_extra_is_named(config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"requires scikit-learn.*jaxmem\[digits\]"):
        Loader(digits(config))
