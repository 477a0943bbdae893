"""Tokens on disk: tokenize once, then train from a memory map at the speed of the disk.

A cache is a directory: `tokens.bin` (2 bytes a token, 4 where the vocabulary is above 65,536),
`ends.bin` (8 bytes a record: where its tokens end) and `meta.json`. Records are those of the source,
piece by piece, so training from the cache sees the very batches that the source itself would give. It
is written beside its place and renamed when it is whole: there is no half-written cache.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxmem.data.text import BrokenRecordError, Piece, Records
from jaxmem.data.tokenizer import Tokenizer, document_tokens
from jaxmem.errors import UserError
from jaxmem.machine.atomic_directory import written_whole

FORMAT = 1
TOGETHER = 1 << 20  # characters tokenized at a time


class TokenCache:
    """The records of a cache, as token ids."""

    blocks = None

    def __init__(self, path: str | None, tokenizer: Tokenizer) -> None:
        if not path:
            raise UserError("data.source tokens needs data.path: a directory that `jaxmem tokenize` wrote")
        self.path = Path(path).expanduser()
        meta = _read_meta(self.path)
        if meta["tokenizer"] != tokenizer.identity:
            raise UserError(
                f"{path}: these tokens were made with {meta['made_with']} of {meta['vocab_size']} tokens, "
                f"which data.tokenizer is not ({tokenizer.vocab_size} tokens); set it or tokenize anew"
            )
        dtype = np.dtype(np.uint16 if meta["vocab_size"] <= 2**16 else np.uint32)
        self._ends = self._map("ends.bin", np.dtype(np.int64), meta["records"])
        self._tokens = self._map("tokens.bin", dtype, meta["tokens"])
        if self._ends[-1] != meta["tokens"]:
            raise UserError(f"{self.path}: damaged: ends.bin does not fit tokens.bin; tokenize anew")

    def _map(self, name: str, dtype: np.dtype[Any], count: int) -> np.ndarray:
        file = self.path / name
        found = file.stat().st_size if file.is_file() else 0
        if not found or found != count * dtype.itemsize:
            raise UserError(f"{file}: damaged: {found} bytes instead of {count * dtype.itemsize}; tokenize anew")
        return np.memmap(file, dtype, "r")

    def __len__(self) -> int:
        return len(self._ends)

    def _span(self, index: int) -> tuple[int, int]:
        return int(self._ends[index - 1]) if index else 0, int(self._ends[index])

    def length(self, index: int) -> int:
        start, end = self._span(index)
        return end - start

    def tokens(self, index: int) -> np.ndarray:
        start, end = self._span(index)
        return np.asarray(self._tokens[start:end], np.int32)

    def close(self) -> None:
        pass


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads((path / "meta.json").read_bytes())
        kinds = {"format": int, "tokenizer": str, "made_with": str, "vocab_size": int, "records": int, "tokens": int}
        if wrong := [key for key, kind in kinds.items() if not isinstance(meta[key], kind)]:
            raise ValueError(f"wrong {', '.join(wrong)}")
    except OSError as error:
        raise UserError(f"data.path {path}: no token cache (`jaxmem tokenize` writes one): {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{path}/meta.json: damaged: {error}; tokenize anew") from error
    if meta["format"] != FORMAT:
        raise UserError(f"{path}: a token cache of format {meta['format']}; this version reads {FORMAT}; tokenize anew")
    return dict(meta)


def write_cache(
    directory: str | os.PathLike[str],
    records: Records,
    tokenizer: Tokenizer,
    made_with: str,
    progress: Callable[[int, int], None] | None = None,
    *,
    skip: bool = False,
) -> dict[str, Any]:
    """Tokenizes all records in their order; returns what meta.json says. `skip`: those that are broken are left out."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    with written_whole(directory) as place:
        written = kept = 0
        with (place / "tokens.bin").open("wb") as tokens, (place / "ends.bin").open("wb") as ends:
            for done, pieces in _together(records, skip):
                try:
                    found = document_tokens(tokenizer, pieces)
                except UnicodeDecodeError as error:
                    raise not_utf8(records, done - len(pieces), pieces) from error
                lengths = np.cumsum([len(ids) for ids in found], dtype=np.int64)
                tokens.write(np.concatenate(found).astype(dtype).tobytes())
                ends.write((lengths + written).tobytes())
                written, kept = written + int(lengths[-1]), kept + len(pieces)
                if progress:
                    progress(done, len(records))
        if not kept:
            raise UserError("every record is broken; data.on_invalid=stop says why")
        meta = {
            "format": FORMAT,
            "tokenizer": tokenizer.identity,
            "made_with": made_with,
            "vocab_size": tokenizer.vocab_size,
            "records": kept,
            "tokens": written,
        }
        (place / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    return meta


def _together(records: Records, skip: bool) -> Any:
    """Runs of records of about a megabyte: (records done, pieces)."""
    pieces: list[Piece] = []
    size = 0
    for index in range(len(records)):
        try:
            pieces.append(records[index])
            size += len(pieces[-1].text)
        except BrokenRecordError:
            if not skip:
                raise
        if pieces and (size >= TOGETHER or index == len(records) - 1):
            yield index + 1, pieces
            pieces, size = [], 0


def not_utf8(records: Records, start: int, pieces: list[Piece]) -> UserError:
    """The message for text that is not UTF-8, naming the first such record."""
    for index, piece in enumerate(pieces, start):
        try:
            piece.text.decode() if isinstance(piece.text, bytes) else piece.text.encode()
        except UnicodeError as error:
            return UserError(f"{records.where(index)}: not UTF-8: {error} (data.tokenizer=bytes takes any bytes)")
    raise AssertionError("all of these records are UTF-8")
