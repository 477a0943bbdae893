"""Batches of images, and images in a directory of classes: PATH/CLASS/*.png. Each image is one record and one row of a
batch; `mask` is 0 for rows without an image at the end of a split."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jax.typing import DTypeLike

from jaxmem.config.sections import Config
from jaxmem.data.packing import Batch, Position, Rows
from jaxmem.data.record_order import RecordOrder
from jaxmem.data.records import RecordSource
from jaxmem.errors import UserError, abridge, one_of
from jaxmem.step.batches import batch_spec


@dataclass(frozen=True)
class ImageForm:
    """The arrays that a model reads: [rows, size, size, channels], float32 from 0 to 1 or int32 categories."""

    size: int
    channels: int
    dtype: DTypeLike


class ImageSource(RecordSource):
    """Images and their labels."""

    noun = "images"
    labels: np.ndarray

    def pixels(self, records: np.ndarray, form: ImageForm) -> np.ndarray:
        """The images with these numbers, [*records, size, size, channels]."""
        raise NotImplementedError

    def views(self, records: np.ndarray, places: np.ndarray, seed: int, form: ImageForm) -> np.ndarray:
        """Random other views of the images, which follow from their places in the stream."""
        raise NotImplementedError


class ImageFolder(ImageSource):
    """Image files below `data.path`. The class of an image is the name of its directory; classes are in the order of
    their names. Images are scaled to the shorter side and cropped at the center."""

    def open_files(self) -> None:
        names = [path.parent.name for path in self.paths]
        self.classes = sorted(set(names))
        self.labels = np.searchsorted(self.classes, names)

    def __len__(self) -> int:
        return len(self.labels)

    def pixels(self, records: np.ndarray, form: ImageForm) -> np.ndarray:
        with ThreadPoolExecutor() as pool:
            images = list(pool.map(lambda record: read_image(self.paths[record], form), records.ravel()))
        return np.stack(images).reshape(*records.shape, form.size, form.size, form.channels)


# For some others Pillow starts a program, whatever the name of the file (Ghostscript for PostScript).
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP")


def read_image(path: Path, form: ImageForm) -> np.ndarray:
    """An image, scaled to the shorter side and cropped at the center."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise UserError("images require Pillow; run pip install 'jaxmem[images]'") from None
    try:
        with Image.open(path, formats=IMAGE_FORMATS) as opened:
            is_16_bit = opened.mode.startswith("I")  # of gray images, which `convert` would clip to 255
            image = Image.fromarray((np.asarray(opened) >> 8).astype(np.uint8)) if is_16_bit else opened
            fitted = ImageOps.fit(image.convert("L" if form.channels == 1 else "RGB"), (form.size, form.size))
    except Exception as error:  # Pillow raises errors of many types for damaged files
        use = f"remove the file, or convert it to {one_of(IMAGE_FORMATS)}"
        raise UserError(f"{path}: cannot be read as an image: {error}; {use}") from error
    return np.asarray(fitted, np.float32).reshape(form.size, form.size, form.channels) / 255


def check_classes(source: RecordSource, cfg: Config) -> None:
    """Refuses a directory whose number of classes is not the number of outputs of the model."""
    if not isinstance(source, ImageFolder):
        return
    objective = cfg.objective.name
    outputs = getattr(cfg.model, "outputs", None)
    count = len(source.classes)
    wanted = 2 if objective == "binary" else outputs
    if wanted is not None and count != wanted:
        use = "two directories" if objective == "binary" else f"model.outputs={count}"
        raise UserError(
            f"data.path={cfg.data.path}: {count} classes ({abridge(source.classes)}), but {objective} with "
            f"model.outputs={outputs or 1} requires {wanted}; use {use}"
        )


class ImageRows(Rows):
    """Rows of images [accumulate, columns, size, size, channels] and targets."""

    def __init__(self, cfg: Config, data: ImageSource, order: RecordOrder, rows: np.ndarray, total: int) -> None:
        self._cfg = cfg
        self._data = data
        self._order = order
        self._rows = rows
        self._total = total
        shape, dtype, _ = batch_spec(cfg)["inputs"]
        self._form = ImageForm(shape[-2], shape[-1], dtype)

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
        batch = {"inputs": self._data.pixels(records, self._form)}
        labels = self._data.labels[records]
        match self._cfg.objective.name:
            case "classify" | "own":
                batch["targets"] = labels.astype(np.int32)
            case "binary":
                batch["targets"] = (labels % 2).astype(np.float32)
            case "contrastive":
                batch["pairs"] = self._data.views(records, places, self._cfg.seed, self._form)
            case _:
                batch["targets"] = labels.astype(np.float32)
        return batch | {"mask": real.astype(np.float32)}

    @property
    def position(self) -> Position:
        return {"rows": [[row, self.step, 0] for row in self._rows.ravel().tolist()]}

    @position.setter
    def position(self, position: Position) -> None:
        self.step = position["rows"][0][1]
