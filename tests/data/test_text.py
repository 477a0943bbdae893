"""Files as documents: which are read, where long ones are cut, what is said of bad paths."""

import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmem.config.sections import Config
from jaxmem.data.cache import tokenize
from jaxmem.data.corpus import Corpus
from jaxmem.data.files import OPEN_FILES, find_files
from jaxmem.data.records import TokenizedText
from jaxmem.data.text import stdlib_files
from jaxmem.errors import UserError
from tests.support.records import open_text_files

Make = Callable[..., Config]
Join = Callable[[TokenizedText], list[bytes]]


@given(st.lists(st.text(st.sampled_from("aé€😀\n"), max_size=40), min_size=1, max_size=5), st.integers(8, 30))
def test_pieces_of_text_files_give_the_files_back(
    tmp_path_factory: pytest.TempPathFactory, joined: Join, texts: list[str], limit: int
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    for i, content in enumerate(texts):
        (folder / f"{i}.txt").write_bytes(content.encode())
    expected = [content.encode() for content in texts if content]
    if not expected:
        with pytest.raises(UserError, match="the data is empty"):
            open_text_files(find_files(str(folder), "text"), limit)
        return
    records = open_text_files(find_files(str(folder), "text"), limit)
    assert joined(records) == expected
    for i in range(len(records)):
        piece = records.piece(i).text
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
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    assert len(find_files(str(tmp_path), "text")) == len(expected)
    assert len(find_files(f"{tmp_path}/*.txt", "text")) == 3


def test_links_to_directories_are_followed_once(tmp_path: Path) -> None:
    for name in ("elsewhere", "data/sub"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "x.txt").write_text(name)
    (tmp_path / "data/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data/sub/itself").symlink_to(tmp_path / "data")
    (tmp_path / "elsewhere/itself").symlink_to(tmp_path / "data/link")
    files = find_files(str(tmp_path / "data"), "text")
    assert [file.relative_to(tmp_path / "data").as_posix() for file in files] == ["link/x.txt", "sub/x.txt"]


def test_all_files_of_a_dataset_that_its_pattern_fetches_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a.jsonl", "en/b.jsonl", "en/c.txt"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    monkeypatch.setattr("jaxmem.config.hub._fetch", lambda *_: str(tmp_path))
    for path, count in (("*.jsonl", 2), ("", 2), ("en", 1), ("en/b.jsonl", 1), ("*", 3)):
        files = find_files(f"hf://datasets/org/{tmp_path.name}/{path}", "jsonl", (".jsonl",))
        assert len(files) == count, path


def test_ten_thousand_files_need_few_descriptors(tmp_path: Path) -> None:
    for i in range(3 * OPEN_FILES):
        (tmp_path / f"{i:03d}").write_text(str(i))
    records = open_text_files(find_files(str(tmp_path), "text"), 100)
    before = open_files()
    assert [records.piece(i).text for i in range(len(records))] == [str(i).encode() for i in range(3 * OPEN_FILES)]
    assert open_files() <= before + OPEN_FILES
    records.close()
    assert open_files() == before


def open_files() -> int:
    return len(list(Path("/dev/fd").iterdir()))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (None, "data.source=text requires data.path"),
        ("{0}/corpsu.txt", r"no such file.*did you mean corpus\.txt\?"),
        ("{0}/nowhere/x", "no such file or directory$"),
        ("{0}/*.md", "no file matches"),
        ("{0}/empty", "the directory is empty"),
    ],
)
def test_paths_that_name_nothing(tmp_path: Path, path: str | None, message: str) -> None:
    (tmp_path / "corpus.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=message):
        find_files(path and path.format(tmp_path), "text")


def test_a_directory_without_the_right_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match=r"no file in this directory ends with \.jsonl"):
        find_files(str(tmp_path), "jsonl", (".jsonl",))


@pytest.mark.parametrize(
    ("names", "path", "problem"),
    [
        (["train.jsonl", "val.jsonl"], "", "splits train, val; set one, for example data.path=ROOT/*train*.jsonl"),
        (
            ["train0001.jsonl", "test0001.jsonl"],
            "",
            "splits test, train; set one, for example data.path=ROOT/*train*.jsonl",
        ),
        (["Training/a.jsonl", "val/b.jsonl"], "", "splits Training, val; set one, for example data.path=ROOT/Training"),
        (
            ["train/cat/1.jsonl", "eval/cat/1.jsonl"],
            "",
            "splits eval, train; set one, for example data.path=ROOT/train",
        ),
        (
            ["a train.jsonl", "a dev.jsonl"],
            "*.jsonl",
            "splits dev, train; set one, for example data.path=ROOT/*train*.jsonl",
        ),
        (["en/train-1.jsonl", "de/train-2.jsonl", "en/test.jsonl"], "*/*train*", None),
        (["train.jsonl", "val.jsonl"], "train.jsonl", None),
        (["x/val.jsonl", "x/validation/b.jsonl", "x/contest.jsonl"], "", None),
        (["training-set/a.jsonl", "test-set/b.jsonl"], "test-set", None),
        (["train-a.jsonl", "test.txt"], "", None),
    ],
)
def test_files_of_several_splits_are_refused(tmp_path: Path, names: list[str], path: str, problem: str | None) -> None:
    root = tmp_path / "test" / "data"  # a directory above the path does not count
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    if problem is None:
        assert find_files(str(root / path), "jsonl", (".jsonl",))
        return
    with pytest.raises(UserError) as error:
        find_files(str(root / path), "jsonl", (".jsonl",))
    assert str(error.value) == f"data.path={root / path} contains the {problem.replace('ROOT', str(root))}"


def test_a_file_that_shrinks_or_goes_is_said(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x" * 100)
    records = open_text_files([path], 10)
    assert records.piece(9).text == b"x" * 10
    os.truncate(path, 50)
    with pytest.raises(UserError, match=r"a\.txt: the file became shorter"):
        records.piece(9)
    records.close()
    path.unlink()
    with pytest.raises(UserError, match=r"a\.txt: cannot be read: No such file"):
        records.piece(0)


def test_text_that_is_not_utf8_stops_a_tokenizer_that_needs_it(
    config: Make, tmp_path: Path, tokenizer_file: str
) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 10)
    cfg = config(source="text", path=str(tmp_path / "latin.txt"))
    assert bytes(Corpus(cfg).documents(0, 0)[0].tokens[:-1].astype(np.uint8)) == b"caf\xe9 " * 10
    (tmp_path / "utf8.txt").write_text("the cat")
    asked = {"source": "text", "path": str(tmp_path), "tokenizer": tokenizer_file}
    with pytest.raises(UserError, match=r"latin\.txt: not UTF-8.*data\.tokenizer=bytes.*data\.on_invalid=skip"):
        Corpus(config(**asked)).documents(0, 0)
    skipping = config(**asked, on_invalid="skip")
    corpus = Corpus(skipping)
    assert [len(document.tokens) > 0 for i in range(2) for document in corpus.documents(0, i)] == [False, True]
    assert corpus.summary() == ["of 2 documents read: 1 invalid ones skipped"]
    assert tokenize(skipping, tmp_path / "cache")["records"] == 1


def test_the_standard_library_is_ten_megabytes_of_source() -> None:
    files = stdlib_files()
    assert sum(path.stat().st_size for path in files) > 10_000_000
    assert {"argparse.py", "typing.py"} <= {path.name for path in files}
    assert not any("site-packages" in path.parts or "test" in path.parts for path in files)
    assert files == stdlib_files()


def test_a_python_without_source_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "python311.zip")})
    with pytest.raises(UserError, match=r"python311\.zip has no source text.*data\.source=text"):
        stdlib_files()
