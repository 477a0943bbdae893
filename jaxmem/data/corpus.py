"""The records of the section `data`: its sources are opened, and their records are ordered."""

import hashlib
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxmem.config.hub import dataset_files, is_dataset
from jaxmem.config.sections import COLUMNS, SOURCES, Config, Data, Source
from jaxmem.data.chat_forms import ANSWERS, LISTS
from jaxmem.data.chat_template import template_for
from jaxmem.data.columns import ColumnRows
from jaxmem.data.files import file_size, find_files
from jaxmem.data.jsonl import read_objects
from jaxmem.data.record_order import RecordOrder, training_order
from jaxmem.data.records import Document, RecordCounts, RecordIndex, RecordSource
from jaxmem.data.tokenizer import Tokenizer, tokenizer_for
from jaxmem.errors import UserError, results_of

CHECKED_RECORDS = 32  # records of a source that `check` reads
MAX_HASHED = 256 << 20  # largest size in bytes of data that a fingerprint reads completely
SAMPLE_BLOCKS = 32  # blocks of a larger file that a fingerprint reads
BLOCK = 4096  # bytes
BATCHES_OF_SCRIPT = "batches of a script"  # their fingerprint

# "all": all records in their own order, for data that is only evaluated.
Split = Literal["train", "held_out", "all"]


class Corpus:
    """All sources of a config, indexed. Several loaders, each in its own thread, can share one corpus."""

    def __init__(self, cfg: Config) -> None:
        self._cfg = cfg
        self._sections: Sequence[Source] = sources_of(cfg.data)
        self.tokenizer = tokenizer_for(cfg.data.tokenizer, getattr(cfg.model, "vocab", None))
        opened = open_stream if cfg.data.streaming else open_source
        calls: list[Callable[[], Any]] = [
            partial(opened, source, cfg.data, self.tokenizer) for source in self._sections
        ]
        if any(source.source == "chat" for source in self._sections):
            calls.append(partial(template_for, self.tokenizer, cfg.data.chat_template))
        self.sources: list[Any] = results_of(calls)[: len(self._sections)]
        if not cfg.reads_text:
            from jaxmem.data.images import check_classes

            check_classes(self.sources[0], cfg)
        self.references: np.ndarray | None = None  # reference log-probability of each answer, [pairs, 2]

    def documents(self, source: int, record: RecordIndex) -> Sequence[Document]:
        return self.sources[source].documents(record)

    @contextmanager
    def without_counting(self) -> Iterator[None]:
        """A context after which the counts of the sources are what they were before."""
        before = [replace(source.counts) for source in self.sources]
        try:
            yield
        finally:
            for source, counts in zip(self.sources, before, strict=True):
                vars(source.counts).update(vars(counts))  # in place: opened files of a stream share the object

    def check(self) -> float:
        """Reads the first records of each source, since most errors in a file are in all of its records. Returns the
        mean number of tokens of a document."""
        lengths = []
        with self.without_counting():
            for source in self.sources if self._cfg.reads_text else ():
                for record in source.head(CHECKED_RECORDS):
                    lengths += [len(document.tokens) for document in source.documents(record)]
        return float(np.mean(lengths or [0]))

    def reference(self, record: int) -> np.ndarray:
        """The reference model's log-probability of each answer of a pair."""
        if self.references is None:
            raise UserError("data.reference_logprobs: the file does not exist; run jaxmem train to write it")
        return np.asarray(self.references[record])

    def summary(self, rows: Sequence[int] = (), gather: Callable[[Any], list[Any]] = lambda mine: [mine]) -> list[str]:
        """One line for each source with records that were cut, dropped or skipped. `gather` returns the values of all
        processes, whose counts are added up; `rows`: those of this process, since processes with the same rows read the
        same records."""
        counts = [astuple(source.counts)[1:] for source in self.sources]
        by_rows = {tuple(rows_read): counts_read for rows_read, counts_read in gather([list(rows), counts])}
        totals = np.sum(list(by_rows.values()), axis=0)  # [source, count]
        kinds = [source.counts.kind for source in self.sources]
        lines = [str(RecordCounts(kind, *total)) for kind, total in zip(kinds, totals, strict=True)]
        return [line for line in lines if line]

    def order(self, split: Split) -> RecordOrder:
        """The split's records in their order."""
        data = self._cfg.data
        if data.streaming:
            from jaxmem.data.streaming import held_out_records

            return held_out_records(self.sources, data.held_out)
        counts = [len(source) for source in self.sources]
        if min(counts) < 2:
            self.check()  # a file with a single record is often one of another form
        weights = [source.weight for source in self._sections]
        if split == "held_out":
            return RecordOrder.of_held_out(counts, weights, data.held_out)
        is_training = split == "train"
        return training_order(
            counts,
            weights,
            [source.blocks for source in self.sources],
            held_out=data.held_out if is_training else 0.0,
            seed=self._cfg.seed,
            shuffle=data.shuffle and is_training,
        )

    def close(self) -> None:
        for source in self.sources:
            source.close()


def fingerprint(cfg: Config) -> str:
    """A hash of the data files and the tokenizer, which shows whether they have changed between runs.

    For files of up to 256 MiB together it includes names (below their common directory) and contents, so that a copy of
    the data elsewhere is the same data. For larger data: names, sizes, and blocks of 4 KiB at fixed places. For a
    streamed dataset of the hub: its commit and the names of its files.
    """
    if cfg.user.data is not None:
        return BATCHES_OF_SCRIPT
    digest = hashlib.blake2b(digest_size=16)
    if cfg.reads_text:
        tokenizer = tokenizer_for(cfg.data.tokenizer)
        digest.update(tokenizer.identity.encode())
        contents = {source.kind.contents for source in sources_of(cfg.data)}
        has_template = cfg.data.chat_template or cfg.data.tokenizer != "bytes"  # pairs of texts need no template
        if "chat" in contents or ("pairs" in contents and has_template):
            digest.update(template_for(tokenizer, cfg.data.chat_template).identity.encode())
    for source in sources_of(cfg.data):
        if cfg.data.streaming and source.path is not None and is_dataset(source.path):
            files = dataset_files(source.path, source.kind.suffixes)
            digest.update(repr((files.repository, files.commit, files.names, source.field)).encode())
            continue
        paths = source_files(source)
        sizes = [file_size(path) for path in paths]
        root = os.path.commonpath([path.absolute().parent for path in paths])
        digest.update(f"\0{source.source}\0{source.field}\0{len(paths)}".encode())
        for path, size in zip(paths, sizes, strict=True):
            digest.update(os.fsencode(path.absolute().relative_to(root)) + f"\0{size}\0".encode())
            _update(digest, path, size, completely=sum(sizes) <= MAX_HASHED or size <= SAMPLE_BLOCKS * BLOCK)
    return digest.hexdigest()


def _update(digest: hashlib.blake2b, path: Path, size: int, *, completely: bool) -> None:
    try:
        with path.open("rb") as file:
            if completely:
                while part := file.read(1 << 20):
                    digest.update(part)
                return
            for number in range(SAMPLE_BLOCKS):  # the first, the last, and others between them
                file.seek((size - BLOCK) * number // (SAMPLE_BLOCKS - 1))
                digest.update(file.read(BLOCK))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error


def sources_of(data: Data) -> Sequence[Source]:
    return data.mixture or (data,)


def open_source(source: Source, data: Data, tokenizer: Tokenizer) -> RecordSource:
    return _reader(source)(source_files(source), source, data, tokenizer)


def open_stream(source: Source, data: Data, tokenizer: Tokenizer) -> RecordSource:
    from jaxmem.data.streaming import StreamedFiles

    assert source.path is not None
    is_hub = is_dataset(source.path)
    files = dataset_files(source.path, source.kind.suffixes) if is_hub else source_files(source)
    return StreamedFiles(_reader(source), files, source, data, tokenizer)


def source_files(source: Source) -> list[Path]:
    if source.kind.needs_path:
        return find_files(source.path, source.source, source.kind.suffixes)
    return _reader(source).default_files()


def source_of(path: str) -> str:
    """The `data.source` of files: by the first suffix that a source has and, for JSONL and columns, by the keys of the
    first record of that file."""
    by_suffix = {suffix: name for name, kind in reversed(SOURCES.items()) for suffix in kind.suffixes}
    file = next((file for file in find_files(path, "text") if file.suffix.lower() in by_suffix), None)
    if file is None:
        return "text"
    source = by_suffix[file.suffix.lower()]
    if source == "jsonl":
        keys = {*next(read_objects(file, "JSON object"))[1]}
    elif file.suffix.lower() in COLUMNS:
        keys = {*ColumnRows([file], None).names()}
    else:
        return source
    if {"chosen", "rejected"} & keys:
        return "preference"
    return "chat" if {*LISTS, *ANSWERS} & keys else source


def _reader(source: Source) -> type[RecordSource]:
    """The class that reads a source. Its module is imported when it is used."""
    module, _, name = source.kind.reader.partition(":")
    return getattr(importlib.import_module(f"jaxmem.data.{module}"), name)
