"""Lines as documents: whatever their length, ends and defects."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem.config.sections import Config
from jaxmem.data import jsonl, long_line
from jaxmem.data.files import find_files
from jaxmem.data.jsonl import JsonLines
from jaxmem.data.records import TextRecords
from jaxmem.errors import UserError

Make = Callable[..., Config]
Join = Callable[[TextRecords], list[bytes]]


LINE_ENDS = ["\n", "\r\n", "\n\n", "\n\r\n"]


@given(
    st.lists(st.tuples(st.text(max_size=30), st.booleans(), st.sampled_from(LINE_ENDS)), min_size=1, max_size=12),
    st.integers(40, 120),
    st.integers(20, 60),
    st.integers(20, 60),
    st.booleans(),
)
def test_lines_come_back_whatever_their_length(
    tmp_path_factory: pytest.TempPathFactory,
    joined: Join,
    lines: list[tuple[str, bool, str]],
    limit: int,
    block: int,
    chunk: int,
    end: bool,
) -> None:
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    written = [
        json.dumps({"id": i, "text": line, "m": [1, {"t": "]"}]}, ensure_ascii=a) + e
        for i, (line, a, e) in enumerate(lines)
    ]
    path.write_bytes("".join(written).rstrip("" if end else "\r\n").encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "BLOCK", block)
        patch.setattr(jsonl, "CHUNK", chunk)
        records = JsonLines([path], "text", limit)
        assert joined(records) == [line.encode() for line, _, _ in lines]
        if max(len(line.encode()) for line in written) <= limit:
            assert len(records) == len(lines)
        content = path.read_bytes().split(b"\n")
        for i in range(len(records)):
            number = int(records.where(i).rsplit(" ", 1)[1])
            assert json.loads(content[number - 1])["text"].encode().find(records[i].text) >= 0
        records.close()


@given(
    st.text(st.sampled_from('a "\\\n\té€😀\x7f\u2028'), min_size=1, max_size=300),
    st.booleans(),
    st.integers(32, 60),
    st.integers(13, 100),
)
def test_a_long_line_is_cut_between_characters_and_escapes(
    tmp_path_factory: pytest.TempPathFactory, joined: Join, content: str, ascii_only: bool, limit: int, window: int
) -> None:
    path = tmp_path_factory.mktemp("long") / "x.jsonl"
    rest = {"before": [[], {"a": ['"}', -1.5e3]}], "n": None, "later": "x" * 70}
    line = json.dumps({"before": rest, "text": content, "later": rest}, ensure_ascii=ascii_only)
    path.write_text(f'\ufeff{line}\n{{"text": "next"}}', encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_line, "WINDOW", window)
        records = JsonLines([path], "text", limit)
    assert joined(records) == [content.encode(), b"next"]
    assert all(len(records[i].text) <= limit for i in range(len(records)))
    records.close()


LONG = "x" * 200
BROKEN = [
    ("nonsense", "invalid JSON"),
    ('{"text": "' + "y" * 20, "invalid JSON"),
    ('{"text": "a"} trailing', "invalid JSON"),
    ("7", "expected an object, found int"),
    ("[1]", "expected an object, found list"),
    ('{"txet": "a", "id": 1}', r"no field 'text'; fields: txet, id \(set data\.field"),
    ('{"text": 7}', "'text' is not a string"),
    ('{"text": "\\ud800"}', "'text' is not valid text"),
    ('{"a": ' + "[" * 50_000, "invalid JSON"),
    ('{"a": ' + "9" * 5000 + "}", "invalid JSON"),
]
BROKEN_LONG = [
    ('{"text": "' + LONG, "string without end"),
    (LONG, "invalid JSON at byte 14: Expecting value"),
    ("[" + f'"{LONG}"' + "]", "expected an object, found list"),
    ('{"text": "' + LONG + '"', "invalid JSON at byte 225: Expecting ',' delimiter"),
    ('{"text": "' + LONG + '"} x', "invalid JSON at byte 227: Extra data"),
    ('{"text": "' + LONG + "\\x" + '"}', "invalid character or escape"),
    ('{"text": "' + LONG + "\t" + '"}', "invalid character or escape"),
    ('{"text": "' + LONG + "\\ud800" + '"}', "invalid character or escape"),
    ('{"text": 1, "a": "' + LONG + '"}', "'text' is not a string"),
    ('{"a": "' + LONG + '"}', r"no field 'text'; fields: a \(set data\.field"),
    ('{"a": [' + "[" * 2000 + "]" * 2000 + "]}", "invalid JSON.*recursion"),
    ('{"a": [' + "1, " * 80 + '}], "text": ""}', "invalid JSON at byte"),
    ('{"a": tru, "text": "' + LONG + '"}', "invalid JSON at byte 20"),
    ('{"a": , "text": "' + LONG + '"}', "invalid JSON at byte 20"),
]


@pytest.mark.parametrize(("line", "message"), BROKEN)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"text": "a"}}\n\n{line}\n{{"text": "b"}}\n')
    records = JsonLines([path], "text", 1 << 20)
    assert [records[0].text, records[2].text] == [b"a", b"b"]
    assert records.where(1).endswith("x.jsonl, line 3")
    with pytest.raises(UserError, match=message) as caught:
        records[1]
    assert "\n" not in str(caught.value)
    records.close()


@pytest.mark.parametrize(("line", "message"), BROKEN_LONG)
def test_a_broken_long_line_is_named_at_once(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"text": "a"}}\n{line}\n')
    with pytest.raises(UserError, match=rf"x\.jsonl, line 2: .*{message}") as caught:
        JsonLines([path], "text", 64)
    assert len(str(caught.value)) < 400


def test_what_is_outside_of_the_strings_of_a_long_line_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(long_line, "MAX_STRUCTURE", 1 << 20)
    path = tmp_path / "x.jsonl"
    path.write_text('{"numbers": [' + "1, " * 400_000 + '1], "text": "x"}')
    with pytest.raises(UserError, match=r"x\.jsonl, line 1: more than 1 MiB outside of strings"):
        JsonLines([path], "text", 64)


def test_files_without_a_document(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("\n\r\n\n")
    with pytest.raises(UserError, match=r"x\.jsonl: empty, no documents"):
        JsonLines([path], "text", 100)


def test_several_files_follow_each_other(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{name}{i}"}}\n' for i in range(3)))
    records = JsonLines(find_files(str(tmp_path), "jsonl"), "text", 100)
    assert [records[i].text for i in range(9)] == [f"{name}{i}".encode() for name in "abc" for i in range(3)]
    assert records.where(7).endswith("c.jsonl, line 2")
    records.close()


MEMORY = """
import json, resource, sys
from pathlib import Path
from jaxmem.data.jsonl import JsonLines
from jaxmem.data.text import TextFiles

def peak():
    status = Path("/proc/self/status")
    if status.exists():  # Linux: its ru_maxrss begins at that of the process that started this one
        return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

path = Path(sys.argv[1])
part = 'quoted "text" and\\nlines, ' * 2000
with path.open("w") as file:
    file.write('{"text": "')
    for _ in range(1000):
        file.write(json.dumps(part)[1:-1])
    file.write('"}\\n')
    for i in range(40000):
        file.write('{"text": "' + 'short line ' * 50 + '"}\\n')
before = peak()
lines, whole = JsonLines([path], "text", 16384), TextFiles([path], 16384)
read = sum(len(records[i].text) for records in (lines, whole) for i in range(0, len(records), 7))
print(path.stat().st_size, len(lines), len(whole), read, peak() - before)
"""


def test_large_files_and_long_lines_stream_in_constant_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "large.jsonl")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    size, lines, whole, read, growth = map(int, result.stdout.split())
    assert size > 70_000_000  # 50 MB of it one line
    assert lines > 40_000 + 3000
    assert whole > 4000
    assert read > 15_000_000
    assert growth < 12_000_000
