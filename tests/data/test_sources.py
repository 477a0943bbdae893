"""Where documents come from: what is read, how long documents are cut, what is said of broken input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem.config.sections import Config
from jaxmem.data import Corpus, jsonl, text
from jaxmem.data.files import OPEN_FILES, find_files
from jaxmem.data.jsonl import JsonLines
from jaxmem.data.parquet import ParquetRows
from jaxmem.data.text import Records, TextFiles, stdlib_files
from jaxmem.errors import UserError

Make = Callable[..., Config]


def joined(records: Records) -> list[bytes]:
    """The documents, put together from their pieces."""
    found: list[bytes] = []
    for i in range(len(records)):
        piece = records[i]
        part = piece.text.encode() if isinstance(piece.text, str) else piece.text
        found = [*found, part] if piece.first else [*found[:-1], found[-1] + part]
        if i + 1 < len(records):
            assert piece.last == records[i + 1].first
    assert records[len(records) - 1].last
    return found


# ------------------------------------------------------------------ text


@given(st.lists(st.text(st.sampled_from("aé€😀\n"), max_size=40), min_size=1, max_size=5), st.integers(8, 30))
def test_pieces_of_text_files_give_the_files_back(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    for i, content in enumerate(texts):
        (folder / f"{i}.txt").write_bytes(content.encode())
    expected = [content.encode() for content in texts if content]
    if not expected:
        with pytest.raises(UserError, match="no documents"):
            TextFiles(find_files(str(folder), "text"), limit)
        return
    records = TextFiles(find_files(str(folder), "text"), limit)
    assert joined(records) == expected
    for i in range(len(records)):
        piece = records[i].text
        assert isinstance(piece, bytes)
        piece.decode()  # no character is cut
        assert len(piece) <= limit + 3
    records.close()


def test_files_are_found_in_one_order_by_directory_and_by_glob(tmp_path: Path) -> None:
    names = ["b.txt", "a.txt", "Z.txt", "sub/ä ö.txt", "sub/c.md", ".hidden", ".git/x.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    expected = sorted((name for name in names if not name.startswith(".")), key=os.fsencode)
    assert [str(path.relative_to(tmp_path)) for path in find_files(str(tmp_path), "text")] == expected
    found = find_files(f"{tmp_path}/**/*.txt", "text")
    assert [path.name for path in found] == ["Z.txt", "a.txt", "b.txt", "ä ö.txt"]
    assert find_files(str(tmp_path / "a.txt"), "text") == [tmp_path / "a.txt"]


def test_ten_thousand_files_need_few_descriptors(tmp_path: Path) -> None:
    for i in range(3 * OPEN_FILES):
        (tmp_path / f"{i:03d}").write_text(str(i))
    records = TextFiles(find_files(str(tmp_path), "text"), 100)
    before = open_files()
    assert [records[i].text for i in range(len(records))] == [str(i).encode() for i in range(3 * OPEN_FILES)]
    assert open_files() <= before + OPEN_FILES
    records.close()
    assert open_files() == before


def open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, "source text needs data.path"),
        ("{0}/corpsu.txt", r"no such file.*did you mean corpus\.txt\?"),
        ("{0}/nowhere/x", "no such file or directory$"),
        ("{0}/*.md", "no file matches"),
        ("{0}/empty", "empty directory"),
    ],
)
def test_paths_that_name_nothing(tmp_path: Path, path: str | None, message: str) -> None:
    (tmp_path / "corpus.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=message):
        find_files(path and path.format(tmp_path), "text")


def test_a_directory_without_the_right_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match=r"no file ending in \.jsonl"):
        find_files(str(tmp_path), "jsonl", (".jsonl",))


def test_a_file_that_shrinks_or_goes_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x" * 100)
    records = TextFiles([path], 10)
    assert records[9].text == b"x" * 10
    os.truncate(path, 50)
    with pytest.raises(UserError, match=r"a\.txt: the file became shorter"):
        records[9]
    records.close()
    path.unlink()
    with pytest.raises(UserError, match=r"a\.txt: cannot be read: No such file"):
        records[0]


def test_text_that_is_not_utf8_stops_a_tokenizer_that_needs_it(
    config: Make, tmp_path: Path, tokenizer_file: str
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 10)
    cfg = config(source="text", path=str(tmp_path / "latin.txt"))
    assert bytes(Corpus(cfg).tokens(0, 0)[:-1].astype(np.uint8)) == b"caf\xe9 " * 10
    with pytest.raises(UserError, match=r"latin\.txt: not UTF-8.*data\.tokenizer=bytes"):
        Corpus(config(source="text", path=str(tmp_path / "latin.txt"), tokenizer=tokenizer_file)).tokens(0, 0)


def test_the_standard_library_is_ten_megabytes_of_source() -> None:
    files = stdlib_files()
    assert sum(path.stat().st_size for path in files) > 10_000_000
    assert {"argparse.py", "typing.py"} <= {path.name for path in files}
    assert not any("site-packages" in path.parts or "test" in path.parts for path in files)
    assert files == stdlib_files()


def test_a_python_without_source_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "python311.zip")})
    with pytest.raises(UserError, match=r"no source text.*python311\.zip.*data\.source=text"):
        stdlib_files()


# ------------------------------------------------------------------ jsonl

LINE_ENDS = ["\n", "\r\n", "\n\n", "\n\r\n"]


@given(
    st.lists(st.tuples(st.text(max_size=30), st.booleans(), st.sampled_from(LINE_ENDS)), min_size=1, max_size=12),
    st.integers(40, 90),
    st.integers(20, 60),
    st.integers(20, 60),
    st.booleans(),
)
def test_lines_come_back_whatever_their_length(
    tmp_path_factory: pytest.TempPathFactory,
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
        if limit > 80:
            assert len(records) == len(lines)
        content = path.read_bytes().split(b"\n")
        for i in range(len(records)):
            number = int(records.where(i).rsplit(" ", 1)[1])
            assert json.loads(content[number - 1])["text"].encode().find(records[i].text) >= 0
        records.close()


@given(
    st.text(st.sampled_from('a "\\\n\té€😀\x7f\u2028'), min_size=1, max_size=300), st.booleans(), st.integers(32, 60)
)
def test_a_long_line_is_cut_between_characters_and_escapes(
    tmp_path_factory: pytest.TempPathFactory, content: str, ascii_only: bool, limit: int
) -> None:
    path = tmp_path_factory.mktemp("long") / "x.jsonl"
    rest = {"before": [[], {"a": ['"}', -1.5e3]}], "n": None, "later": "x" * 70}
    line = json.dumps({"before": rest, "text": content, "later": rest}, ensure_ascii=ascii_only)
    path.write_text(f'\ufeff{line}\n{{"text": "next"}}', encoding="utf-8")
    records = JsonLines([path], "text", limit)
    assert joined(records) == [content.encode(), b"next"]
    assert all(len(records[i].text) <= limit for i in range(len(records)))
    records.close()


LONG = "x" * 200
BROKEN = [
    ("nonsense", "no valid JSON"),
    ('{"text": "' + "y" * 20, "no valid JSON"),
    ('{"text": "a"} trailing', "no valid JSON"),
    ("[1]", "expected an object with the field 'text', found list"),
    ('{"txet": "a", "id": 1}', r"no field 'text'; fields: txet, id \(data\.field"),
    ('{"text": 7}', "'text' is not a string"),
    ('{"text": "\\ud800"}', "no valid text"),
    ('{"a": ' + "[" * 50_000, "no valid JSON"),
    ('{"a": ' + "9" * 5000 + "}", "no valid JSON"),
]
BROKEN_LONG = [
    ('{"text": "' + LONG, "string without end"),
    (LONG, r"expected \{, found 'x'"),
    ('{"text": "' + LONG + '"', "expected , or }, the line ends"),
    ('{"text": "' + LONG + '"} x', "more text after the object"),
    ('{"text": "' + LONG + "\\x" + '"}', "invalid character or escape"),
    ('{"text": "' + LONG + "\t" + '"}', "invalid character or escape"),
    ('{"text": "' + LONG + "\\ud800" + '"}', "invalid character or escape"),
    ('{"text": 1, "a": "' + LONG + '"}', "'text' is not a string"),
    ('{"a": "' + LONG + '"}', r"no field 'text'; fields: a \(data\.field"),
    ('{"a": [' + "[" * 2000 + "]" * 2000 + "]}", "nested deeper than 1000"),
    ('{"a": [' + "1, " * 80 + '}], "text": ""}', "brackets do not match"),
    ('{"a": tru, "text": "' + LONG + '"}', "no valid JSON at byte 20"),
    ('{"a": , "text": "' + LONG + '"}', "no valid JSON at byte 20"),
]


@pytest.mark.parametrize(("line", "message"), BROKEN)
def test_a_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"text": "a"}}\n\n{line}\n{{"text": "b"}}\n')
    records = JsonLines([path], "text", 1 << 20)
    assert [records[0].text, records[2].text] == [b"a", b"b"]
    with pytest.raises(UserError, match=rf"x\.jsonl, line 3: {message}") as caught:
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
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

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


# ------------------------------------------------------------------ parquet


def write_parquet(path: Path, texts: list[str | None], group: int, column: str = "text") -> Path:
    pq.write_table(pa.table({"id": list(range(len(texts))), column: texts}), path, row_group_size=group)
    return path


def test_parquet_rows_with_random_access(tmp_path: Path) -> None:
    texts: list[str | None] = [f"dócument {i}" for i in range(50)]
    paths = [
        write_parquet(tmp_path / "a.parquet", texts[:30], 7),
        write_parquet(tmp_path / "b.parquet", texts[30:], 100),
    ]
    records = ParquetRows(paths, "text")
    assert records.blocks is not None
    assert records.blocks.tolist() == [7, 7, 7, 7, 2, 20]
    for i in np.random.default_rng(0).permutation(50).tolist():
        assert records[i] == text.Piece(texts[i], True, True)
    assert records.where(31).endswith("b.parquet, row group 0, row 1")


def test_parquet_trains_a_row_group_at_a_time(config: Make, tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [f"document {i}" for i in range(300)], 30)
    corpus = Corpus(config(source="parquet", path=str(path)))
    order = corpus.order("train")
    groups = [order[i][1] // 30 for i in range(300)]
    assert sorted(order[i][1] for i in range(300)) == list(range(300))
    assert len({*groups[:30]}) == 1
    assert groups[::30] != sorted(groups[::30])
    assert bytes(corpus.tokens(*order[0])[:-1].astype(np.uint8)).decode() == f"document {order[0][1]}"


def test_broken_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "a.parquet", ["x", None], 10)
    with pytest.raises(UserError, match=r"a\.parquet: no column 'txt' \(data\.field\); did you mean text\?"):
        ParquetRows([path], "txt")
    with pytest.raises(UserError, match=r"column 'id' holds int64, not strings"):
        ParquetRows([path], "id")
    with pytest.raises(UserError, match=r"row group 0, row 1: 'text' is null"):
        ParquetRows([path], "text")[1]
    records = ParquetRows([path], "text")
    path.write_bytes(b"PAR1 nothing like it PAR1")
    with pytest.raises(UserError, match=r"a\.parquet: no readable parquet file"):
        records[0]
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(UserError, match=r"needs pyarrow: pip install 'jaxmem\[parquet\]'"):
        ParquetRows([path], "text")
