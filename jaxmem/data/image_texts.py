"""Images with their texts: `data.source: image_texts`, and batches for the argument `data` of a script.

A directory contains images, and `metadata.jsonl` or `metadata.csv` with the columns `file_name` and `text`, the form
that `datasets` calls an image folder.
"""

import csv
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from jaxmem.config.sections import Data, Source
from jaxmem.data.images import ImageForm, ImageSource, read_image
from jaxmem.data.jsonl import MAX_LINE_BYTES, read_objects
from jaxmem.data.packing import Batch
from jaxmem.data.tokenizer import Tokenizer, tokenizer_for
from jaxmem.errors import UserError, nearest
from jaxmem.typing import JsonDict

FILES = ("metadata.jsonl", "metadata.csv")


class ImageTextFolder(ImageSource):
    """The images that the files of `data.path` name, with their texts, of at most `data.sequence_length` tokens."""

    noun = "images"

    def __init__(self, paths: Sequence[Path], source: Source, data: Data, tokenizer: Tokenizer) -> None:
        super().__init__(paths, source, data, tokenizer)
        self._pairs = [pair for path in paths for pair in _pairs(path)]
        self.labels = np.zeros(len(self._pairs), np.int32)

    def __len__(self) -> int:
        return len(self._pairs)

    def pixels(self, records: np.ndarray, form: ImageForm) -> np.ndarray:
        images = [read_image(self._pairs[record][0], form) for record in records.ravel()]
        return np.stack(images).reshape(*records.shape, form.size, form.size, form.channels)

    def texts(self, records: np.ndarray) -> Batch:
        texts = [self._pairs[record][1] for record in records.ravel()]
        tokens, lengths = _tokens(self.tokenizer, texts, self.data.sequence_length)
        return {"texts": tokens.reshape(*records.shape, -1), "lengths": lengths.reshape(records.shape)}


class ImageTexts:
    """An iterable of batches: `image` [rows, size, size, channels] from 0 to 1, `text` [rows, text_length] token ids,
    which end with the end-of-document token, and `length` [rows].

    Each pass over the data has another order, which follows from `seed`; rows that do not fill a batch are left out.
    `share=(i, n)`: the rows of process i of n, where `rows` is the number over all processes. Iterators save their
    position.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        rows: int,
        image_size: int,
        channels: int = 3,
        text_length: int = 64,
        tokenizer: str = "bytes",
        seed: int = 0,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        import grain

        file = next((file for name in FILES if (file := Path(path, name)).is_file()), None)
        if file is None:
            raise UserError(f"{path} has neither {' nor '.join(FILES)}; write one with the columns file_name and text")
        pairs = list(_pairs(file))
        process, processes = share
        if len(pairs) < rows or rows % processes:
            raise UserError(
                f"{path} has {len(pairs)} pairs; rows={rows} must be at most as many, and divisible by the "
                f"{processes} processes"
            )
        form = ImageForm(image_size, channels, np.float32)
        reader = tokenizer_for(tokenizer)
        rows_per_process = rows // processes

        def batch(pairs: Sequence[tuple[Path, str]]) -> Batch:
            files, texts = zip(*pairs[process * rows_per_process : (process + 1) * rows_per_process], strict=True)
            tokens, lengths = _tokens(reader, texts, text_length)
            return {"image": np.stack([read_image(file, form) for file in files]), "text": tokens, "length": lengths}

        order = grain.MapDataset.source(pairs).shuffle(seed).batch(rows, drop_remainder=True, batch_fn=batch)
        self._batches = order.repeat().to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


def _tokens(tokenizer: Tokenizer, texts: Sequence[str], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [texts, length], which end with the end-of-document token, and their numbers."""
    ids = [[*tokens[: length - 1], tokenizer.end] for tokens in tokenizer.encode_many(texts)]
    rows = [row + [tokenizer.end] * (length - len(row)) for row in ids]
    return np.array(rows, np.int32), np.array([len(row) for row in ids], np.int32)


def _pairs(file: Path) -> Iterator[tuple[Path, str]]:
    """The images that a file names, and their texts."""
    path = file.parent
    for number, row in _rows(file):
        for key in ("file_name", "text"):
            if not isinstance(row.get(key), str):
                raise UserError(f"{file}, line {number}: {key} must be a string{nearest(key, list(map(str, row)))}")
        if not (path / row["file_name"]).is_file():
            raise UserError(f"{file}, line {number}: file_name={row['file_name']} does not exist in {path}")
        yield path / row["file_name"], row["text"]


def _rows(file: Path) -> Iterator[tuple[int, JsonDict]]:
    if file.suffix == ".jsonl":
        yield from read_objects(file, "JSON object")
        return
    try:
        with file.open(newline="", encoding="utf-8-sig") as opened:
            lines = iter(partial(opened.readline, MAX_LINE_BYTES), "")
            yield from enumerate(csv.DictReader(lines), 2)
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from error
