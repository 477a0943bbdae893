"""A token cache gives the batches of its source, is whole or absent, and is refused where it does not fit."""

import json
import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmem.config import hub
from jaxmem.config.sections import Config
from jaxmem.data import cache, corpus
from jaxmem.data.cache import tokenize
from jaxmem.data.corpus import fingerprint
from jaxmem.data.loader import Loader
from jaxmem.errors import UserError

Make = Callable[..., Config]


@pytest.mark.parametrize("name", ["bytes", "file"])
@pytest.mark.parametrize("source", ["jsonl", "text"])
def test_training_from_the_cache_gives_the_same_batches(
    config: Make,
    jsonl: Callable[..., str],
    tmp_path: Path,
    tokenizer_file: str,
    name: str,
    source: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache, "BATCH_CHARACTERS", 3000)
    texts = [f"the cat {i} " * (i * 37 % 50) for i in range(40)] + ["the mat é " * 5000]  # the last: several pieces
    options: dict[str, Any] = {"tokenizer": "bytes" if name == "bytes" else tokenizer_file, "held_out": 0.1}
    path = jsonl(texts)
    calls: list[tuple[int, int]] = []
    meta = tokenize(config(source=source, path=path, **options), tmp_path / "cache", lambda *at: calls.append(at))
    assert calls[-1] == (meta["records"], meta["records"])
    for split in ("train", "held_out"):
        with (
            Loader(config(source=source, path=path, **options), split) as direct,
            Loader(config(source="tokens", path=str(tmp_path / "cache"), **options), split) as cached,
        ):
            assert len(direct.corpus.sources[0]) == len(cached.corpus.sources[0]) == meta["records"]
            found = 0
            for a, b in zip(islice(direct, 60), islice(cached, 60), strict=True):
                for key in a:
                    np.testing.assert_array_equal(a[key], b[key])
                found += 1
            assert direct.state() == cached.state()
            assert found > 5


def test_a_cache_has_two_bytes_per_token_and_no_other_file_is_left(config: Make, numbered: str, tmp_path: Path) -> None:
    meta = tokenize(config(path=numbered), tmp_path / "deep" / "cache")
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["cache"]
    files = {file.name: file.stat().st_size for file in (tmp_path / "deep" / "cache").iterdir()}
    assert files.pop("meta.json")
    assert files == {"tokens.bin": 2 * meta["tokens"], "ends.bin": 8 * 120}
    assert meta["tokens"] == sum((i * 7) % 41 + 1 for i in range(120))


def test_a_failure_leaves_no_cache(
    config: Make, jsonl: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "BATCH_CHARACTERS", 100)
    path = Path(jsonl(["some text"] * 50))
    path.write_text(path.read_text() + "broken\n")
    with pytest.raises(UserError, match="line 51"):
        tokenize(config(path=str(path)), tmp_path / "cache")
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_or_tokenized(config: Make, numbered: str, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(UserError, match="full exists already"):
        tokenize(config(path=numbered), tmp_path / "full")
    with pytest.raises(UserError, match=r"cannot write .*: (File exists|Not a directory)"):
        tokenize(config(path=numbered), tmp_path / "full" / "x" / "cache")
    mixture = [{"source": "jsonl", "path": numbered}] * 2
    with pytest.raises(UserError, match="tokenize each source"):
        tokenize(config(source="stdlib", mixture=mixture), tmp_path / "cache")
    with pytest.raises(UserError, match=r"does not support data\.source=tokens"):
        tokenize(config(source="tokens", path="x"), tmp_path / "cache")
    (tmp_path / "empty").mkdir()
    assert tokenize(config(path=numbered), tmp_path / "empty")["records"] == 120


def test_a_cache_of_another_tokenizer_is_refused(
    config: Make, numbered: str, tmp_path: Path, tokenizer_file: str
) -> None:
    tokenize(config(path=numbered, tokenizer=tokenizer_file), tmp_path / "cache")
    with pytest.raises(UserError, match=r"made with .*tokenizer\.json \(2[67]. tokens\).*257 tokens"):
        Loader(config(source="tokens", path=str(tmp_path / "cache")))


def damage_meta(**changes: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        meta = json.loads((path / "meta.json").read_text())
        (path / "meta.json").write_text(json.dumps(meta | changes))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "meta.json").unlink(), "not a token cache"),
        (lambda path: (path / "meta.json").write_text(""), r"meta\.json: invalid JSON"),
        (lambda path: (path / "meta.json").write_text("[]"), r"meta\.json: must contain a JSON object"),
        (lambda path: (path / "meta.json").write_text("[" * 100_000), r"meta\.json: invalid JSON"),
        (damage_meta(records="many"), 'records="many" must be'),
        (damage_meta(format=9), "format=9 is not supported; expected 1; run"),
        (damage_meta(records=2**60), r"ends\.bin: damaged: 960 bytes"),
        (lambda path: os.truncate(path / "tokens.bin", 100), r"tokens\.bin: damaged: 100 bytes instead"),
        (lambda path: (path / "ends.bin").unlink(), r"ends\.bin: damaged: 0 bytes"),
        (lambda path: (path / "ends.bin").write_bytes(bytes(960)), "does not match"),
    ],
)
def test_a_damaged_cache_is_refused(
    config: Make, numbered: str, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    tokenize(config(path=numbered), tmp_path / "cache")
    damage(tmp_path / "cache")
    with pytest.raises(UserError, match=message):
        Loader(config(source="tokens", path=str(tmp_path / "cache")))
    with pytest.raises(UserError, match=r"requires data\.path"):
        Loader(config(source="tokens"))


# ------------------------------------------------------------------ fingerprint


def test_the_fingerprint_changes_with_the_data_and_only_then(
    config: Make, tmp_path: Path, tokenizer_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for i in range(3):
            (tmp_path / folder / f"{i}.txt").write_text(f"text {i}" * 4000)
    cfg = config(source="text", path=str(tmp_path / "a"))
    found = {fingerprint(cfg)}
    assert {fingerprint(config(source="text", path=str(tmp_path / "b"), sequence_length=32, seed=5))} == found

    def changed(some: Config = cfg) -> bool:
        before = len(found)
        found.add(fingerprint(some))
        return len(found) > before

    assert not changed()
    middle = (tmp_path / "a" / "1.txt").read_bytes()
    (tmp_path / "a" / "1.txt").write_bytes(middle[:9000] + b"X" + middle[9001:])
    assert changed()
    os.truncate(tmp_path / "a" / "1.txt", 5)
    assert changed()
    (tmp_path / "a" / "1.txt").rename(tmp_path / "a" / "4.txt")
    assert changed()
    assert changed(config(source="text", path=str(tmp_path / "a"), tokenizer=tokenizer_file))


def test_the_fingerprint_of_large_files_reads_blocks_of_them(
    config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the time of change, which for a copy on another host is that of the copy."""
    monkeypatch.setattr(corpus, "MAX_HASHED", 1000)
    content = bytes(1 << 20)
    file = tmp_path / "x.txt"
    cfg = config(source="text", path=str(file))

    def fingerprint_with(place: int | None = None) -> str:
        file.write_bytes(content if place is None else content[:place] + b"X" + content[place + 1 :])
        os.utime(file, (1, 1) if place is None else None)
        return fingerprint(cfg)

    before = fingerprint_with()
    os.utime(file)
    assert fingerprint(cfg) == before
    blocks = corpus.SAMPLE_BLOCKS - 1
    places = [0, *((len(content) - corpus.BLOCK) * number // blocks for number in (1, blocks // 2)), len(content) - 1]
    assert len({before, *map(fingerprint_with, places)}) == 5
    file.write_bytes(content + b"\0")
    assert fingerprint(cfg) != before


def test_the_fingerprint_of_a_dataset_of_the_hub_is_that_of_its_files(
    config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new commit may change other files only."""
    cfg = config(source="jsonl", path="hf://datasets/org/name/data/*.jsonl")

    def fingerprint_of(commit: str, text: str) -> str:
        directory = tmp_path / text / commit
        (directory / "data").mkdir(parents=True)
        (directory / "data/0.jsonl").write_text(f'{{"text": "{text}"}}')
        hub.fetched_files.cache_clear()
        monkeypatch.setattr(hub, "_fetch", lambda *_: str(directory))
        return fingerprint(cfg)

    assert fingerprint_of("5f0c", "a") == fingerprint_of("77aa", "a") != fingerprint_of("5f0c", "b")
    hub.fetched_files.cache_clear()
