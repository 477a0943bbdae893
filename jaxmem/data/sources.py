"""Opens the sources of a config. `config.sources` lists them; a source is a module here with `open_source`."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxmem.config.sections import Config, Data, Source
from jaxmem.config.sources import SOURCES
from jaxmem.data.chat_forms import ANSWERS, LISTS
from jaxmem.data.files import find_files
from jaxmem.data.jsonl import read_objects
from jaxmem.data.records import RecordSource
from jaxmem.data.tokenizer import Tokenizer


def sources_of(cfg: Config) -> Sequence[Source]:
    return cfg.data.mixture or (cfg.data,)


def open_source(source: Source, data: Data, tokenizer: Tokenizer) -> RecordSource:
    opened: RecordSource = _module(source).open_source(source_files(source), source, data, tokenizer)
    return opened


def source_files(source: Source) -> list[Path]:
    if source.kind.needs_path:
        return find_files(source.path, source.source, source.kind.suffixes)
    files: list[Path] = _module(source).default_files()
    return files


def source_of(path: str) -> str:
    """The `data.source` for files, by the name of the first and, of JSONL, the keys of its first line."""
    file = find_files(path, "text")[0]
    named = [name for name, kind in SOURCES.items() if file.suffix.lower() in kind.suffixes]
    if "jsonl" not in named:
        return named[0] if named else "text"
    keys = next(read_objects(file, "JSON object"))[1].keys()
    if {"chosen", "rejected"} & keys:
        return "preference"
    return "chat" if {*LISTS, *ANSWERS} & keys else "jsonl"


def _module(source: Source) -> Any:
    """Imported when it is used."""
    return importlib.import_module(f"jaxmem.data.{source.kind.module}")
