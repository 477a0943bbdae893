"""Lines as documents: whatever their length, ends and defects."""

import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from jaxmem.data import jsonl
from jaxmem.data.corpus import source_of
from jaxmem.data.files import find_files
from jaxmem.data.jsonl import JsonRecords, JsonTexts
from jaxmem.data.records import InvalidRecordError
from jaxmem.errors import UserError
from tests.support.records import open_records

LINE_ENDS = ["\n", "\r\n", "\n\n", "\n\r\n"]


@given(
    st.lists(st.tuples(st.text(max_size=30), st.booleans(), st.sampled_from(LINE_ENDS)), min_size=1, max_size=12),
    st.integers(20, 60),
    st.integers(20, 60),
    st.booleans(),
)
def test_lines_come_back_whatever_their_length(
    tmp_path_factory: pytest.TempPathFactory, lines: list[tuple[str, bool, str]], block: int, chunk: int, end: bool
) -> None:
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    written = [
        json.dumps({"id": i, "text": line, "m": [1, {"t": "]"}]}, ensure_ascii=a) + e
        for i, (line, a, e) in enumerate(lines)
    ]
    path.write_bytes("".join(written).rstrip("" if end else "\r\n").encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "BLOCK_BYTES", block)
        patch.setattr(jsonl, "CHUNK_BYTES", chunk)
        records = open_records(JsonTexts, [path])
        assert [records.piece(i).text for i in range(len(records))] == [line for line, _, _ in lines]
        content = path.read_bytes().split(b"\n")
        for i, (line, _, _) in enumerate(lines):
            assert json.loads(content[int(records.where(i).rsplit(" ", 1)[1]) - 1])["text"] == line
        records.close()


def test_a_line_longer_than_the_most_is_named_when_it_is_read(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 1 << 20)
    path = tmp_path / "x.jsonl"
    long = "y" * (1 << 21)
    path.write_text(f'\ufeff{{"text": "a"}}\n{{"text": "{long}"}}\n{{"text": "b"}}\n', encoding="utf-8")
    records = open_records(JsonTexts, [path])
    assert [records.piece(0).text, records.piece(2).text] == ["a", "b"]
    with pytest.raises(InvalidRecordError, match="limit of 1 MiB"):
        records.piece(1)
    records.close()


BROKEN = [
    ("nonsense", "invalid JSON"),
    ('{"text": "' + "y" * 20, "invalid JSON"),
    ('{"text": "a"} trailing', "invalid JSON"),
    ("7", "must be a JSON object, not 7"),
    ("[1]", "must be a JSON object, not \\[1\\]"),
    ('{"txet": "a", "id": 1}', r"data\.field=text is not a key of the record; expected one of txet, id"),
    ('{"text": 7}', "text must be a string"),
    ('{"text": "\\ud800"}', "not valid Unicode"),
    ('{"a": ' + "[" * 50_000, "invalid JSON"),
    ('{"a": ' + "9" * 5000 + "}", "invalid JSON"),
]


@pytest.mark.parametrize(("line", "message"), BROKEN)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"text": "a"}}\n\n{line}\n{{"text": "b"}}\n')
    records = open_records(JsonTexts, [path])
    assert [records.piece(0).text, records.piece(2).text] == ["a", "b"]
    assert records.where(1).endswith("x.jsonl, line 3")
    with pytest.raises(UserError, match=message) as caught:
        records.piece(1)
    assert "\n" not in str(caught.value)
    records.close()


def test_files_without_a_document(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("\n\r\n\n")
    with pytest.raises(UserError, match=r"x\.jsonl: the data is empty"):
        open_records(JsonRecords, [path])


def test_a_file_may_end_with_an_empty_line_without_a_line_break(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "a"}\r\n\r')
    records = open_records(JsonTexts, [path])
    assert [records.piece(i).text for i in range(len(records))] == ["a"]


def test_a_record_before_many_empty_lines_is_read_without_them(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    empty_lines = 1 << 20
    path.write_bytes(b'{"text": "a"}\n\r\n{"text": "b"}' + b"\n" * empty_lines + b'{"text": "c"}')
    records = open_records(JsonTexts, [path])
    tracemalloc.start()
    try:
        assert [records.piece(i).text for i in range(3)] == ["a", "b", "c"]
        assert tracemalloc.get_traced_memory()[1] < 3 * empty_lines  # a list of the lines is 8 bytes for each
    finally:
        tracemalloc.stop()
    assert [records.where(i).rsplit(" ", 1)[1] for i in range(3)] == ["1", "3", str(3 + empty_lines)]
    records.close()


def test_several_files_follow_each_other(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{name}{i}"}}\n' for i in range(3)))
    records = open_records(JsonTexts, find_files(str(tmp_path), "jsonl"))
    assert [records.piece(i).text for i in range(9)] == [f"{name}{i}" for name in "abc" for i in range(3)]
    assert records.where(7).endswith("c.jsonl, line 2")
    records.close()


MEMORY = """
import json, resource, sys
from pathlib import Path
from jaxmem.data.jsonl import JsonTexts
sys.path.insert(0, sys.argv[2])  # the repository
from tests.support.records import open_records, open_text_files

def peak():
    status = Path("/proc/self/status")
    if status.exists():  # Linux: its ru_maxrss begins at that of the process that started this one
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

path = Path(sys.argv[1])
with path.open("w") as file:
    for i in range(100000):
        file.write('{"text": "' + 'short line ' * 50 + '"}\\n')
before = peak()
lines, whole = open_records(JsonTexts, [path]), open_text_files([path], 16384)
read = sum(len(records.piece(i).text) for records in (lines, whole) for i in range(0, len(records), 7))
print(path.stat().st_size, len(lines), len(whole), read, peak() - before)
"""


@pytest.mark.exhaustive
def test_large_files_stream_in_constant_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "large.jsonl"), str(Path(__file__).parents[2])]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    size, lines, whole, read, growth = map(int, result.stdout.split())
    assert size > 50_000_000
    assert lines == 100_000
    assert whole > 3000
    assert read > 14_000_000
    assert growth < 12_000_000


def test_the_source_of_a_directory_is_that_of_its_data_and_not_of_a_readme(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("Data.")
    assert source_of(str(tmp_path)) == "text"
    (tmp_path / "data.jsonl").write_text('{"text": "a"}')
    assert source_of(str(tmp_path)) == "jsonl"
    (tmp_path / "data.jsonl").write_text('{"messages": []}')
    assert source_of(str(tmp_path)) == "chat"
    for columns, source in (
        ({"text": ["a"]}, "parquet"),
        ({"text": ["a"], "instruction": ["b"], "output": ["c"]}, "chat"),
        ({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}, "preference"),
    ):
        parquet.write_table(pa.table(columns), tmp_path / "columns.parquet")
        assert source_of(str(tmp_path)) == source  # the first file in the order of names
