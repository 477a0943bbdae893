"""Batches of images with their texts, for the argument `data` of a script.

A directory contains images, and `metadata.jsonl` or `metadata.csv` with the columns `file_name` and `text`, the form
that `datasets` calls an image folder.
"""

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxmem.data.images import ImageForm, read_image
from jaxmem.data.jsonl import read_objects
from jaxmem.data.tokenizer import tokenizer_for
from jaxmem.errors import UserError, nearest

FILES = ("metadata.jsonl", "metadata.csv")


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
        self._pairs = list(_pairs(Path(path)))
        if len(self._pairs) < rows or rows % share[1]:
            raise UserError(
                f"{path} has {len(self._pairs)} pairs; rows={rows} must be at most as many, and divisible by the "
                f"{share[1]} processes"
            )
        self._form, self._length = ImageForm(image_size, channels, np.float32), text_length
        self._tokenizer, self._seed, self._rows, self._share = tokenizer_for(tokenizer), seed, rows, share

    def __iter__(self) -> "_Batches":
        return _Batches(self)

    def batch(self, number: int) -> dict[str, np.ndarray]:
        """The batch with this number, from 0."""
        turn, place = divmod(number, len(self._pairs) // self._rows)
        order = np.random.default_rng((self._seed, turn)).permutation(len(self._pairs))
        process, processes = self._share
        each = self._rows // processes
        start = place * self._rows + process * each
        pairs = [self._pairs[i] for i in order[start : start + each]]
        end = self._tokenizer.end
        ids = [
            [*tokens[: self._length - 1], end] for tokens in self._tokenizer.encode_many([text for _, text in pairs])
        ]
        return {
            "image": np.stack([read_image(file, self._form) for file, _ in pairs]),
            "text": np.array([row + [end] * (self._length - len(row)) for row in ids], np.int32),
            "length": np.array([len(row) for row in ids], np.int32),
        }


class _Batches(Iterator[dict[str, np.ndarray]]):
    def __init__(self, data: ImageTexts) -> None:
        self._data, self._number = data, 0

    def __next__(self) -> dict[str, np.ndarray]:
        self._number += 1
        return self._data.batch(self._number - 1)

    def get_state(self) -> dict[str, int]:
        return {"batch": self._number}

    def set_state(self, state: Mapping[str, int]) -> None:
        self._number = state["batch"]


def _pairs(path: Path) -> Iterator[tuple[Path, str]]:
    file = next((path / name for name in FILES if (path / name).is_file()), None)
    if file is None:
        raise UserError(f"{path} has neither {' nor '.join(FILES)}; write one with the columns file_name and text")
    for number, row in _rows(file):
        for key in ("file_name", "text"):
            if not isinstance(row.get(key), str):
                raise UserError(f"{file}, line {number}: {key} must be a string{nearest(key, list(map(str, row)))}")
        if not (path / row["file_name"]).is_file():
            raise UserError(f"{file}, line {number}: file_name={row['file_name']} does not exist in {path}")
        yield path / row["file_name"], row["text"]


def _rows(file: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    if file.suffix == ".jsonl":
        yield from read_objects(file, "JSON object")
        return
    try:
        with file.open(newline="", encoding="utf-8-sig") as opened:
            yield from enumerate(csv.DictReader(opened), 2)
    except (OSError, csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from error
