"""The sources of documents, one line each, with the class in `jaxmem.data` that reads it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias


@dataclass(frozen=True)
class SourceKind:
    reader: str  # module:class in jaxmem.data, a subclass of `records.RecordSource`
    contents: Literal["text", "chat", "pairs", "tokens", "images"]
    needs_path: bool = True
    has_field: bool = False  # `field` names the key or column of the document
    suffixes: tuple[str, ...] = ()  # suffixes of the files to read in a directory; empty: all files


_LINES = (".jsonl", ".ndjson")
COLUMNS = (".parquet", ".arrow")

SOURCES = {
    "stdlib": SourceKind("text:TextFiles", "text", needs_path=False),
    "text": SourceKind("text:TextFiles", "text"),
    "jsonl": SourceKind("jsonl:JsonTexts", "text", has_field=True, suffixes=_LINES),
    "parquet": SourceKind("jsonl:JsonTexts", "text", has_field=True, suffixes=(".parquet",)),
    "arrow": SourceKind("jsonl:JsonTexts", "text", has_field=True, suffixes=(".arrow",)),
    "chat": SourceKind("chat:Conversations", "chat", suffixes=(*_LINES, *COLUMNS)),
    "preference": SourceKind("chat:Preferences", "pairs", suffixes=(*_LINES, *COLUMNS)),
    "digits": SourceKind("digits:Digits", "images", needs_path=False),
    "images": SourceKind("images:ImageFolder", "images", suffixes=(".png", ".jpg", ".jpeg", ".webp", ".bmp")),
    "image_texts": SourceKind("image_texts:ImageTextFolder", "images", suffixes=(".jsonl", ".csv")),
    "tokens": SourceKind("cache:TokenCache", "tokens"),
}

if TYPE_CHECKING:
    SourceName: TypeAlias = str
else:
    SourceName = Literal[tuple(SOURCES)]
