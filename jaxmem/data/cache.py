"""Tokens on disk: tokenize once, then train from a memory map at the speed of the disk.

A cache is a directory: `tokens.bin` (2 bytes per token, 4 if the vocabulary is above 65,536), `ends.bin` (8 bytes per
record: where its tokens end) and `meta.json`. Its records are the valid records of the source in their order. So
training from the cache has the same batches as training from the source, except that a source has numbers for invalid
records that are skipped, and shuffles several row groups of Parquet or Arrow as blocks. It is written under another
name and renamed when it is complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from jaxmem.config.hf_values import UnsupportedError, read, read_json
from jaxmem.config.sections import SOURCES, Config
from jaxmem.data.corpus import open_source, sources_of
from jaxmem.data.records import Document, RecordSource, TokenizedText
from jaxmem.data.tokenizer import tokenizer_for
from jaxmem.errors import UserError, one_of
from jaxmem.machine.files import atomic_directory
from jaxmem.typing import JsonDict

FORMAT = 1  # version of the files of a token cache
META = {"tokenizer": str, "made_with": str, "vocab_size": int, "records": int, "tokens": int}  # keys of meta.json
BATCH_CHARACTERS = 1 << 20  # characters that are tokenized together


class TokenCache(RecordSource):
    """The records of a cache."""

    noun = "records"

    def open_files(self) -> None:
        assert self.source.path is not None
        self.path = Path(self.source.path).expanduser()
        meta = _read_meta(self.path)
        if meta["tokenizer"] != self.tokenizer.identity:
            raise UserError(
                f"{self.path}: these tokens were made with data.tokenizer={meta['made_with']} ({meta['vocab_size']} "
                f"tokens), not with the current tokenizer ({self.tokenizer.vocab_size} tokens); set data.tokenizer to"
                " the former, or run jaxmem tokenize again"
            )
        self._ends = self._map("ends.bin", np.dtype(np.int64), meta["records"])
        self._tokens = self._map("tokens.bin", _dtype(meta["vocab_size"]), meta["tokens"])
        if self._ends[-1] != meta["tokens"]:
            raise UserError(f"{self.path}: damaged: ends.bin does not match tokens.bin; run jaxmem tokenize again")

    def _map(self, name: str, dtype: np.dtype, count: int) -> np.ndarray:
        file = self.path / name
        size = file.stat().st_size if file.is_file() else 0
        if not size or size != count * dtype.itemsize:
            raise UserError(
                f"{file}: damaged: {size} bytes instead of {count * dtype.itemsize}; run jaxmem tokenize again"
            )
        return np.memmap(file, dtype, "r")

    def __len__(self) -> int:
        return len(self._ends)

    def documents(self, index: int) -> Sequence[Document]:
        start = self._ends[index - 1] if index else 0
        end = self._ends[index]
        return [Document(np.asarray(self._tokens[start:end], np.int32))]


def _dtype(vocab_size: int) -> np.dtype:
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def _read_meta(path: Path) -> JsonDict:
    file = path / "meta.json"
    if not file.exists():
        raise UserError(f"data.path={path}: not a token cache; write one with jaxmem tokenize")
    settings = read_json(file)
    try:
        if (version := read(settings, "format", int)) != FORMAT:
            raise UnsupportedError(f"format={version} is not supported; expected {FORMAT}")
        return {key: read(settings, key, kind) for key, kind in META.items()}
    except UnsupportedError as error:
        raise UserError(f"{file}: {error}; run jaxmem tokenize again") from None


def tokenize(
    cfg: Config, directory: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None
) -> JsonDict:
    """Writes the token cache of a config's data; returns its meta.json. `progress` is called with (records done,
    all records)."""
    if len(sources_of(cfg.data)) > 1:
        raise UserError("jaxmem tokenize does not support data.mixture; tokenize each source, and mix the caches")
    [source] = sources_of(cfg.data)
    if source.kind.contents != "text":
        texts = one_of(name for name, kind in SOURCES.items() if kind.contents == "text")
        raise UserError(f"jaxmem tokenize does not support data.source={source.source}; use {texts}")
    tokenizer = tokenizer_for(cfg.data.tokenizer)
    records = open_source(source, cfg.data, tokenizer)
    assert isinstance(records, TokenizedText)
    try:
        with atomic_directory(directory) as place:
            count = _write(records, place, _dtype(tokenizer.vocab_size), progress)
            meta = {
                "format": FORMAT,
                "tokenizer": tokenizer.identity,
                "made_with": cfg.data.tokenizer,
                "vocab_size": tokenizer.vocab_size,
                **count,
            }
            (place / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    finally:
        records.close()
    return meta


def _write(
    records: TokenizedText, place: Path, dtype: np.dtype, progress: Callable[[int, int], None] | None
) -> dict[str, int]:
    """Writes the tokens of all records, and returns the numbers of records and tokens."""
    count = {"records": 0, "tokens": 0}
    with (place / "tokens.bin").open("wb") as tokens, (place / "ends.bin").open("wb") as ends:
        for done, batch in records.token_batches(BATCH_CHARACTERS):
            lengths = np.cumsum([len(ids) for ids in batch], dtype=np.int64)
            tokens.write(np.concatenate(batch).astype(dtype).tobytes())
            ends.write((lengths + count["tokens"]).tobytes())
            count["tokens"] += int(lengths[-1])
            count["records"] += len(batch)
            if progress:
                progress(done, len(records))
    if not count["records"]:
        raise UserError("every record is invalid; use data.on_invalid=stop to see the reason")
    return count
