"""Rows of parquet as documents, a row group at a time."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxmem.config.sections import Config
from jaxmem.data import columns
from jaxmem.data.columns import MAX_DECODED_ROW_GROUPS
from jaxmem.data.corpus import Corpus
from jaxmem.data.jsonl import JsonRecords, JsonTexts
from jaxmem.data.records import DocumentPiece, InvalidRecordError
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
    records = open_records(JsonTexts, paths, "text")
    assert records.blocks is not None
    assert records.blocks.tolist() == [7, 7, 7, 7, 2, 20]
    for i in np.random.default_rng(0).permutation(50).tolist():
        assert records.piece(i) == DocumentPiece(texts[i], True, True)
    assert records.rows.decoded.cache_info().currsize == MAX_DECODED_ROW_GROUPS
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
        open_records(JsonTexts, [path], "txt")
    with pytest.raises(UserError, match=r"data.field=id has type int64"):
        open_records(JsonTexts, [path], "id")
    with pytest.raises(UserError, match="text must be a string, not null"):
        open_records(JsonTexts, [path], "text").piece(1)
    records = open_records(JsonTexts, [path], "text")
    path.write_bytes(b"PAR1 nothing like it PAR1")
    with pytest.raises(UserError, match=r"a\.parquet: not a valid parquet file"):
        records.piece(0)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"require pyarrow; run pip install 'jaxmem\[parquet\]'"):
        open_records(JsonTexts, [path], "text")


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def saved_dataset(place: Path, columns: dict[str, list[Any]], *, files: int = 2, batch: int = 3) -> Path:
    """A directory as `datasets` saves it: streams of record batches."""
    place.mkdir(parents=True)
    rows = len(next(iter(columns.values())))
    for i in range(files):
        part = pa.table({name: values[i * rows // files : (i + 1) * rows // files] for name, values in columns.items()})
        with pa.ipc.new_stream(str(place / f"data-{i:05}-of-{files:05}.arrow"), part.schema) as writer:
            writer.write_table(part, max_chunksize=batch)
    (place / "state.json").write_text("{}")
    return place


def test_directories_that_datasets_saved(config: Make, tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(20)]
    place = saved_dataset(tmp_path / "saved/train", {"text": texts, "id": [*range(20)]})
    corpus = Corpus(config(source="arrow", path=str(place)))
    assert corpus.sources[0].blocks.tolist() == [3, 3, 3, 1, 3, 3, 3, 1]
    assert [bytes(corpus.documents(0, i)[0].tokens[:-1].tolist()).decode() for i in (0, 7, 19)] == [
        texts[i] for i in (0, 7, 19)
    ]
    assert corpus.sources[0].where(13).endswith("data-00001-of-00002.arrow, row group 1, row 0")
    (tmp_path / "saved/dataset_dict.json").write_text("{}")
    saved_dataset(tmp_path / "saved/hard", {"text": texts, "id": [*range(20)]})
    with pytest.raises(UserError, match=r"saved: contains the splits hard, train; set data.path to one"):
        Corpus(config(source="arrow", path=str(tmp_path / "saved")))
    assert len(Corpus(config(source="arrow", path=str(place))).sources[0]) == 20


def test_conversations_in_columns(tmp_path: Path) -> None:
    place = saved_dataset(tmp_path / "chats", {"messages": [CHAT] * 4, "note": [None] * 4}, files=1)
    pq.write_table(pa.table({"messages": [CHAT] * 4}), tmp_path / "chats.parquet")
    lines = [open_records(JsonRecords, [path]) for path in (tmp_path / "chats.parquet", *place.glob("*.arrow"))]
    assert [one.rows.record(2)["messages"] for one in lines] == [CHAT, CHAT]
    assert [len(one) for one in lines] == [4, 4]


def test_objects_in_columns_have_their_own_fields_only(tmp_path: Path) -> None:
    tools = [{"name": "f", "parameters": {"a": {"enum": [1, None]}}}, {"name": "g", "parameters": {"b": {"type": "x"}}}]
    pq.write_table(pa.table({"tools": [tools], "note": pa.array([None], pa.string())}), tmp_path / "tools.parquet")
    records = open_records(JsonRecords, [tmp_path / "tools.parquet"])
    assert records.rows.record(0) == {"tools": tools, "note": None}


def test_text_that_a_file_has_as_bytes_is_text(tmp_path: Path) -> None:
    file = tmp_path / "chats.parquet"
    pq.write_table(pa.table({"output": ["h\u00e9".encode()], "image": [b"\xff"], "nested": [[{"a": b"b"}]]}), file)
    records = open_records(JsonRecords, [file])
    assert records.rows.record(0) == {"output": "h\u00e9", "image": None, "nested": [{"a": "b"}]}


def write_file(path: Path, texts: list[bytes]) -> Path:
    """A file whose column of strings contains these bytes."""
    table = pa.table({"text": pa.array(texts).view(pa.string())})
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_a_row_that_is_not_utf_8_is_invalid_and_the_others_are_read(tmp_path: Path, name: str) -> None:
    records = open_records(JsonTexts, [write_file(tmp_path / name, [b"one", b"\xff", b"three"])], "text")
    with pytest.raises(InvalidRecordError, match="a string is not UTF-8: "):
        records.piece(1)
    assert [records.piece(index).text for index in (0, 2)] == ["one", "three"]


def test_offsets_outside_of_the_data_are_refused(tmp_path: Path) -> None:
    path = write_file(tmp_path / "x.arrow", [b"abc", b"defgh"])
    data, offsets = path.read_bytes(), np.array([0, 3, 8], np.int32)
    assert data.count(offsets.tobytes()) == 1
    path.write_bytes(data.replace(offsets.tobytes(), np.array([0, 3, 2**30], np.int32).tobytes()))
    with pytest.raises(UserError, match=r"x\.arrow: not a valid arrow file: .*out of bounds"):
        open_records(JsonTexts, [path], "text").piece(1)


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_a_row_that_is_too_large_is_invalid(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MAX_ROW_BYTES", 1 << 20)
    records = open_records(JsonTexts, [write_file(tmp_path / name, [b"one", b"x" * (2 << 20)])], "text")
    with pytest.raises(InvalidRecordError, match="the row is larger than the limit of 1 MiB; split it"):
        records.piece(1)
    assert records.piece(0).text == "one"


def test_a_small_file_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MAX_DECODED_BYTES", 8 << 20)
    path = write_file(tmp_path / "x.parquet", [b"x" * 1000] * 100_000)
    assert path.stat().st_size < 1 << 14
    with pytest.raises(UserError, match=r"x\.parquet: not a valid parquet file: row group 0 needs more memory than"):
        open_records(JsonTexts, [path], "text").piece(0)
