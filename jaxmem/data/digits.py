"""scikit-learn's handwritten digits: 1,797 real images of 8 x 8 pixels, each 0 to 16.

The file of the installed package is read directly, since importing scikit-learn takes a second and imports scipy. Each
image is one record and one row of a batch; `mask` is 0 for rows without an image at the end of a split.

Alpaydin, Kaynak 1998, Optical Recognition of Handwritten Digits (UCI).
"""

from __future__ import annotations

import gzip
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from jaxmem.config.sections import Config, Data, Source
from jaxmem.data.packing import Batch, Position, Rows
from jaxmem.data.record_order import mix64
from jaxmem.data.records import RecordSource
from jaxmem.data.tokenizer import Bytes
from jaxmem.errors import UserError
from jaxmem.step.batches import image_dtype

SIZE = 8  # height and width in pixels
BRIGHTEST = 16


class Digits(RecordSource):
    """All images, uint8 [image, 8, 8], and their labels."""

    noun = "images"

    def __init__(self, *_: object) -> None:
        [path] = self.default_files()
        super().__init__([path], Source(), Data(), Bytes())
        try:
            with gzip.open(path, "rt", encoding="ascii") as file:
                table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
        except (OSError, EOFError, ValueError) as error:
            raise UserError(f"{path}: cannot be read: {error}") from error
        self.images, self.labels = table[:, :-1].reshape(-1, SIZE, SIZE), table[:, -1]

    @staticmethod
    def default_files() -> list[Path]:
        found = importlib.util.find_spec("sklearn")
        for folder in (found.submodule_search_locations or []) if found else []:
            file = Path(folder, "datasets", "data", "digits.csv.gz")
            if file.is_file():
                return [file]
        raise UserError("data.source=digits requires scikit-learn; run pip install 'jaxmem[digits]'")

    def __len__(self) -> int:
        return len(self.images)


class DigitRows(Rows):
    """Rows of images [accumulate, columns, 8, 8, 1] and targets."""

    def __init__(self, cfg: Config, data: Digits, order: Any, rows: np.ndarray, total: int) -> None:
        self._cfg, self._data, self._order, self._rows, self._total = cfg, data, order, rows, total

    def _places(self) -> np.ndarray:
        return self._rows + self.step * self._cfg.batch.global_size

    @property
    def has_ended(self) -> bool:
        return bool(self._places().min() >= self._total)

    def batch(self) -> Batch:
        places = self._places()
        real = places < self._total
        records = np.zeros(places.shape, np.int64)
        records[real] = [self._order[int(place)][1] for place in places[real]]
        images, labels = self._data.images[records], self._data.labels[records]
        batch = {"inputs": self._pixels(images)}
        match self._cfg.objective.name:
            case "classify" | "own":
                batch["targets"] = labels.astype(np.int32)
            case "binary":
                batch["targets"] = (labels % 2).astype(np.float32)
            case "contrastive":
                batch["pairs"] = self._pixels(another_view(images, places, self._cfg.seed))
            case _:
                batch["targets"] = labels.astype(np.float32)
        return batch | {"mask": real.astype(np.float32)}

    def _pixels(self, images: np.ndarray) -> np.ndarray:
        dtype = image_dtype(self._cfg)
        values = images[..., None].astype(dtype)
        return values if dtype is np.int32 else values / np.float32(BRIGHTEST)

    @property
    def position(self) -> Position:
        return {"rows": [[row, self.step, 0] for row in self._rows.ravel().tolist()]}

    @position.setter
    def position(self, position: Position) -> None:
        self.step = position["rows"][0][1]


def another_view(images: np.ndarray, places: np.ndarray, seed: int) -> np.ndarray:
    """The images shifted by at most one pixel, with noise of at most 2 of 16. Shift and noise depend on `places`."""
    shape, images, places = images.shape, images.reshape(-1, SIZE, SIZE), places.reshape(-1)
    bits = mix64(mix64(places) ^ np.uint64(seed))
    down, right = (bits % np.uint64(3)).astype(int), (bits // np.uint64(3) % np.uint64(3)).astype(int)
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1))).astype(np.int64)
    side = np.arange(SIZE)
    rows, columns = (down[:, None] + side)[:, :, None], (right[:, None] + side)[:, None, :]
    moved = padded[np.arange(len(images))[:, None, None], rows, columns]
    noise = mix64(bits[:, None] + np.arange(SIZE * SIZE, dtype=np.uint64)) % np.uint64(5)
    noisy = moved + noise.astype(np.int64).reshape(moved.shape) - 2
    return noisy.clip(0, BRIGHTEST).astype(np.uint8).reshape(shape)
