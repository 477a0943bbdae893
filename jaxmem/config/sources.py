"""The sources of documents, one line each; the function `open_source` of `jaxmem/data/MODULE.py` opens one."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias


@dataclass(frozen=True)
class SourceKind:
    module: str  # name in jaxmem.data
    contents: Literal["text", "chat", "pairs", "tokens", "images"]
    needs_path: bool = True
    has_field: bool = False  # `field` names the key or column of the document
    suffixes: tuple[str, ...] = ()  # suffixes of the files to read in a directory; empty: all files


_LINES = (".jsonl", ".ndjson")

SOURCES = {
    "stdlib": SourceKind("text", "text", needs_path=False),
    "text": SourceKind("text", "text"),
    "jsonl": SourceKind("jsonl", "text", has_field=True, suffixes=_LINES),
    "parquet": SourceKind("parquet", "text", has_field=True, suffixes=(".parquet",)),
    "chat": SourceKind("chat", "chat", suffixes=_LINES),
    "preference": SourceKind("preference", "pairs", suffixes=_LINES),
    "digits": SourceKind("digits", "images", needs_path=False),
    "tokens": SourceKind("cache", "tokens"),
}

if TYPE_CHECKING:
    SourceName: TypeAlias = str
else:
    SourceName = Literal[tuple(SOURCES)]
