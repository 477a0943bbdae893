"""Sources of data without a config of a run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from jaxmem.config import Data, Source
from jaxmem.data.records import RecordSource
from jaxmem.data.text import TextFiles
from jaxmem.data.tokenizer import Bytes


def open_records(reader: type[RecordSource], paths: Sequence[Path], field: str = "text", **data: Any) -> Any:
    return reader(paths, Source(field=field), Data(**data), Bytes())


def open_text_files(paths: Sequence[Path], limit: int) -> Any:
    """`limit`: bytes of a record."""
    with patch("jaxmem.data.text.piece_bytes", lambda _: limit):
        return open_records(TextFiles, paths)
