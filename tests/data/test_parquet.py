"""Rows of parquet as documents, a row group at a time."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxmem.config.sections import Config
from jaxmem.data import Corpus
from jaxmem.data.parquet import DECODED, ParquetRows
from jaxmem.data.records import DocumentPiece
from jaxmem.errors import UserError
from tests.support.records import open_records

Make = Callable[..., Config]


def write_parquet(path: Path, texts: list[str | None], group: int, column: str = "text") -> Path:
    pq.write_table(pa.table({"id": list(range(len(texts))), column: texts}), path, row_group_size=group)
    return path


def test_parquet_rows_with_random_access(tmp_path: Path) -> None:
    texts: list[str | None] = [f"dócument {i}" for i in range(50)]
    paths = [
        write_parquet(tmp_path / "a.parquet", texts[:30], 7),
        write_parquet(tmp_path / "b.parquet", texts[30:], 100),
    ]
    records = open_records(ParquetRows, paths, "text")
    assert records.blocks is not None
    assert records.blocks.tolist() == [7, 7, 7, 7, 2, 20]
    for i in np.random.default_rng(0).permutation(50).tolist():
        assert records.piece(i) == DocumentPiece(texts[i], True, True)
    assert records._column.cache_info().currsize == DECODED
    assert records.where(31).endswith("b.parquet, row group 0, row 1")


def test_parquet_trains_a_row_group_at_a_time(config: Make, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [f"document {i}" for i in range(300)], 30)
    corpus = Corpus(config(source="parquet", path=str(path)))
    order = corpus.order("train")
    groups = [order[i][1] // 30 for i in range(300)]
    assert sorted(order[i][1] for i in range(300)) == list(range(300))
    assert len({*groups[:30]}) == 1
    assert groups[::30] != sorted(groups[::30])
    assert bytes(corpus.documents(*order[0])[0].tokens[:-1].astype(np.uint8)).decode() == f"document {order[0][1]}"


def test_broken_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "a.parquet", ["x", None], 10)
    with pytest.raises(UserError, match=r"a\.parquet: data\.field=txt is not a column; did you mean text\?"):
        open_records(ParquetRows, [path], "txt")
    with pytest.raises(UserError, match=r"data.field=id has type int64"):
        open_records(ParquetRows, [path], "id")
    with pytest.raises(UserError, match="text is null"):
        open_records(ParquetRows, [path], "text").piece(1)
    records = open_records(ParquetRows, [path], "text")
    path.write_bytes(b"PAR1 nothing like it PAR1")
    with pytest.raises(UserError, match=r"a\.parquet: not a valid Parquet file"):
        records.piece(0)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"requires pyarrow; run pip install 'jaxmem\[parquet\]'"):
        open_records(ParquetRows, [path], "text")
