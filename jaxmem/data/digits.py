"""scikit-learn's handwritten digits: 1,797 real images of 8 x 8 pixels, each 0 to 16.

The file of the installed package is read directly, since importing scikit-learn takes a second and imports scipy. Each
image is one record and one row of a batch.

Alpaydin, Kaynak 1998, Optical Recognition of Handwritten Digits (UCI).
"""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path

import numpy as np

from jaxmem.config.sections import Data, Source
from jaxmem.data.images import ImageForm, ImageSource
from jaxmem.data.record_order import mix64
from jaxmem.data.tokenizer import Bytes
from jaxmem.errors import UserError

IMAGE_SIZE = 8  # height and width in pixels
MAX_BRIGHTNESS = 16


class Digits(ImageSource):
    """All images, uint8 [image, 8, 8], and their labels."""

    def __init__(self, *_: object) -> None:
        [path] = self.default_files()
        super().__init__([path], Source(), Data(), Bytes())
        try:
            with gzip.open(path, "rt", encoding="ascii") as file:
                table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
        except (OSError, EOFError, ValueError) as error:
            raise UserError(f"{path}: cannot be read: {error}") from error
        self.images = table[:, :-1].reshape(-1, IMAGE_SIZE, IMAGE_SIZE)
        self.labels = table[:, -1]

    @staticmethod
    def default_files() -> list[Path]:
        spec = importlib.util.find_spec("sklearn")
        for folder in (spec.submodule_search_locations or []) if spec else []:
            file = Path(folder, "datasets", "data", "digits.csv.gz")
            if file.is_file():
                return [file]
        raise UserError("data.source=digits requires scikit-learn; run pip install 'jaxmem[digits]'")

    def __len__(self) -> int:
        return len(self.images)

    def pixels(self, records: np.ndarray, form: ImageForm) -> np.ndarray:
        return _as_form(self.images[records], form)

    def views(self, records: np.ndarray, places: np.ndarray, seed: int, form: ImageForm) -> np.ndarray:
        return _as_form(another_view(self.images[records], places, seed), form)


def _as_form(images: np.ndarray, form: ImageForm) -> np.ndarray:
    values = images[..., None].astype(form.dtype)
    return values if form.dtype is np.int32 else values / np.float32(MAX_BRIGHTNESS)


def another_view(images: np.ndarray, places: np.ndarray, seed: int) -> np.ndarray:
    """The images shifted by at most one pixel, with noise of at most 2 of 16. Shift and noise depend on `places`."""
    shape = images.shape
    images = images.reshape(-1, IMAGE_SIZE, IMAGE_SIZE)
    places = places.reshape(-1)
    bits = mix64(mix64(places) ^ np.uint64(seed))
    down = (bits % np.uint64(3)).astype(int)
    right = (bits // np.uint64(3) % np.uint64(3)).astype(int)
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1))).astype(np.int64)
    side = np.arange(IMAGE_SIZE)
    rows = (down[:, None] + side)[:, :, None]
    columns = (right[:, None] + side)[:, None, :]
    moved = padded[np.arange(len(images))[:, None, None], rows, columns]
    noise = mix64(bits[:, None] + np.arange(IMAGE_SIZE * IMAGE_SIZE, dtype=np.uint64)) % np.uint64(5)
    noisy = moved + noise.astype(np.int64).reshape(moved.shape) - 2
    return noisy.clip(0, MAX_BRIGHTNESS).astype(np.uint8).reshape(shape)
