"""The records that a config's `data` names: their sources opened, tokenized and put in order."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxmem.config.sections import Config, Source
from jaxmem.data import order
from jaxmem.data.cache import TokenCache, not_utf8, write_cache
from jaxmem.data.chat import NOTHING, Conversations, Seen
from jaxmem.data.digits import Digits, digits_file
from jaxmem.data.files import file_size, find_files
from jaxmem.data.jsonl import JsonLines
from jaxmem.data.packing import Document
from jaxmem.data.parquet import ParquetRows
from jaxmem.data.preference import Preferences
from jaxmem.data.template import template_for
from jaxmem.data.text import BrokenRecordError, Records, TextFiles, piece_bytes, stdlib_files
from jaxmem.data.tokenizer import Tokenizer, document_tokens, tokenizer_for
from jaxmem.errors import UserError

WHOLE = 256 << 20  # bytes of data up to which a fingerprint reads all of it
LINES = (".jsonl", ".ndjson")
SUFFIXES = {"jsonl": LINES, "chat": LINES, "preference": LINES, "parquet": (".parquet",)}


def source_files(source: Source) -> list[Path]:
    match source.source:
        case "stdlib":
            return stdlib_files()
        case "digits":
            return [digits_file()]
        case kind:
            return find_files(source.path, kind, SUFFIXES.get(kind, ()))


def _open_text(source: Source, limit: int, *, skip: bool) -> Records:
    paths = source_files(source)
    match source.source:
        case "jsonl":
            return JsonLines(paths, source.field, limit, skip=skip)
        case "parquet":
            return ParquetRows(paths, source.field)
        case _:
            return TextFiles(paths, limit)


def _sources(cfg: Config) -> Sequence[Source]:
    return cfg.data.mixture or (cfg.data,)


# All: of data that is there to be evaluated on, in its own order.
Split = Literal["train", "held_out", "all"]


class Corpus:
    """All sources of a config, indexed. One corpus serves several loaders, in threads of their own."""

    def __init__(self, cfg: Config) -> None:
        self._cfg, self._seen = cfg, Seen("documents")
        kinds = [source.source for source in _sources(cfg)]
        images = not cfg.objective.reads_text
        if images != ("digits" in kinds) or (images and len(kinds) > 1):
            raise UserError(
                f"objective {cfg.objective.name} trains on {'digits alone' if images else 'text'}; "
                f"data.source is {' + '.join(kinds)}"
            )
        self.sources: list[Records | TokenCache | Digits | Conversations | Preferences] = []
        self.references: np.ndarray | None = None  # of preferences: each answer's log-probability, [pairs, 2]
        if images:
            self.sources.append(Digits())
            return
        self.tokenizer = tokenizer_for(cfg.data.tokenizer)
        vocab = getattr(cfg.model, "vocab", 0)
        if self.tokenizer.vocab_size > vocab:
            raise UserError(
                f"data.tokenizer {cfg.data.tokenizer} has {self.tokenizer.vocab_size} tokens, but model.vocab is "
                f"{vocab}; set model.vocab to {self.tokenizer.vocab_size} or more"
            )
        limit = piece_bytes(cfg.data.sequence_length)
        for source in _sources(cfg):
            self.sources.append(self._open(source, limit))

    def _open(self, source: Source, limit: int) -> Records | TokenCache | Conversations | Preferences:
        match source.source:
            case "tokens":
                return TokenCache(source.path, self.tokenizer)
            case "chat":
                template = template_for(self.tokenizer, self._cfg.data.chat_template)
                return Conversations(source_files(source), self._cfg.data, self.tokenizer, template)
            case "preference":
                asked = cache(lambda: template_for(self.tokenizer, self._cfg.data.chat_template))
                return Preferences(source_files(source), self._cfg.data, self.tokenizer, asked)
            case _:
                return _open_text(source, limit, skip=self._cfg.data.on_invalid == "skip")

    def document(self, source: int, record: int) -> Document:
        """One record, as rows are made of it."""
        records = self.sources[source]
        return records.document(record) if isinstance(records, Conversations) else Document(self.tokens(source, record))

    def length(self, source: int, record: int) -> int | None:
        """How many tokens a record has, where that is known without reading it."""
        records = self.sources[source]
        return records.length(record) if isinstance(records, TokenCache) else None

    def reference(self, record: int) -> np.ndarray:
        """Of a pair, each answer's log-probability."""
        if self.references is None:
            raise UserError("data.reference_logprobs: the file does not exist; `jaxmem train` computes it")
        return np.asarray(self.references[record])

    def said(self) -> list[str]:
        """What there is to say of what was read."""
        counted = [source.seen for source in self.sources if isinstance(source, Conversations | Preferences)]
        return [line for line in map(str, [self._seen, *counted]) if line]

    def tokens(self, source: int, record: int) -> np.ndarray:
        """The token ids of one record, int32."""
        records = self.sources[source]
        if isinstance(records, TokenCache):
            return records.tokens(record)
        if isinstance(records, Conversations):
            return records.document(record).tokens
        if isinstance(records, Digits | Preferences):
            raise TypeError("records of more than tokens")
        self._seen.read += 1
        try:
            piece = records[record]
        except BrokenRecordError as error:
            if self._cfg.data.on_invalid == "stop":
                raise UserError(f"{error} (data.on_invalid=skip passes over such records)") from error
            self._seen.broken += 1
            return NOTHING.tokens
        try:
            return document_tokens(self.tokenizer, [piece])[0]
        except UnicodeDecodeError as error:
            raise not_utf8(records, record, [piece]) from error

    def order(self, split: Split) -> Any:
        """The split's records in their order: a grain MapDataset of (source, record), an epoch long."""
        data = self._cfg.data
        counts = [len(source) for source in self.sources]
        weights = [source.weight for source in _sources(self._cfg)]
        if split == "all":
            return order.training_order(counts, weights, [None] * len(counts), held_out=0.0, seed=0, shuffle=False)
        if split == "held_out":
            return order.held_out_order(counts, weights, held_out=data.held_out)
        blocks = [source.blocks for source in self.sources]
        return order.training_order(
            counts, weights, blocks, held_out=data.held_out, seed=self._cfg.seed, shuffle=data.shuffle
        )

    def close(self) -> None:
        for source in self.sources:
            source.close()


def tokenize(
    cfg: Config, directory: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None
) -> dict[str, Any]:
    """Writes the token cache of a config's data. `progress` is told (records done, records)."""
    if len(_sources(cfg)) > 1:
        raise UserError("data.mixture cannot be tokenized as a whole; tokenize each source, then mix the caches")
    source = _sources(cfg)[0]
    if source.source in ("chat", "preference"):
        kind = source.source
        raise UserError(f"data.source {kind} is tokenized as it is read: a cache has no place for what is learnt")
    if source.source in ("digits", "tokens"):
        raise UserError(f"data.source {source.source} has no text to tokenize")
    tokenizer: Tokenizer = tokenizer_for(cfg.data.tokenizer)
    skip = cfg.data.on_invalid == "skip"
    records = _open_text(source, piece_bytes(cfg.data.sequence_length), skip=skip)
    try:
        return write_cache(directory, records, tokenizer, cfg.data.tokenizer, progress, skip=skip)
    finally:
        records.close()


def fingerprint(cfg: Config) -> str:
    """A hash of the data's files and its tokenizer, to notice when they have changed between runs.

    Up to 256 MiB of files: names (below their common directory) and contents, so that a copy of the
    data elsewhere is the same data. Above: names, sizes, times of change, first and last 4 KiB.
    """
    digest = hashlib.blake2b(digest_size=16)
    if cfg.objective.reads_text:
        tokenizer = tokenizer_for(cfg.data.tokenizer)
        digest.update(tokenizer.identity.encode())
        asked = cfg.data.chat_template or cfg.data.tokenizer != "bytes"  # texts of preference need none
        if any(source.source == "chat" or (source.source == "preference" and asked) for source in _sources(cfg)):
            digest.update(template_for(tokenizer, cfg.data.chat_template).source.encode())
    for source in _sources(cfg):
        paths = source_files(source)
        sizes = [file_size(path) for path in paths]
        root = os.path.commonpath([path.absolute().parent for path in paths])
        digest.update(f"\0{source.source}\0{source.field}\0{len(paths)}".encode())
        for path, size in zip(paths, sizes, strict=True):
            digest.update(os.fsencode(path.absolute().relative_to(root)) + f"\0{size}\0".encode())
            _update(digest, path, size, whole=sum(sizes) <= WHOLE)
    return digest.hexdigest()


def _update(digest: Any, path: Path, size: int, *, whole: bool) -> None:
    try:
        with path.open("rb") as file:
            if whole:
                while part := file.read(1 << 20):
                    digest.update(part)
                return
            digest.update(f"{os.fstat(file.fileno()).st_mtime_ns}\0".encode() + file.read(4096))
            file.seek(max(0, size - 4096))
            digest.update(file.read(4096))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
