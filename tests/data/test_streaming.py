"""Files that are read one after the other: every record as often as requested, the same records after a resume, and
few files at a time."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxmem.config import load_config
from jaxmem.config.hub import DatasetFiles
from jaxmem.config.sections import Config
from jaxmem.data import streaming
from jaxmem.data.loader import Loader, merge_states
from jaxmem.errors import UserError
from jaxmem.training.lines import data_line
from tests.data.test_loader import assert_equal, documents, take

Make = Callable[..., Config]
FILES = 6


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Files of 20 to 25 documents, each of which names its file and number."""
    place = tmp_path / "shards"
    place.mkdir()
    for file in range(FILES):
        lines = (json.dumps({"text": f"{file} {i} " + "x" * (i * 5 % 23)}) for i in range(20 + file))
        (place / f"{file}.jsonl").write_text("\n".join(lines))
    return place


def texts_of(shards: Path) -> list[str]:
    return [json.loads(line)["text"] for file in sorted(shards.iterdir()) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("options", [{}, {"packing": False, "sequence_length": 64}])
def test_every_document_that_often(config: Make, shards: Path, options: dict[str, Any]) -> None:
    cfg = config(path=str(shards), streaming=True, epochs=2, **{"sequence_length": 40, **options})
    assert documents(take(cfg)) == Counter(dict.fromkeys(texts_of(shards), 2))


@pytest.mark.parametrize("streaming", [False, True])
def test_the_end_of_the_data_is_known_without_a_batch(config: Make, shards: Path, streaming: bool) -> None:
    cfg = config(path=str(shards), streaming=streaming, epochs=1)
    with Loader(cfg) as loader:
        assert not loader.has_ended()
        batches = list(loader)
        position = json.loads(json.dumps(loader.state()))
    with Loader(cfg) as loader:
        loader.restore(position)
        assert loader.has_ended()
        loader.rewind()
        assert not loader.has_ended()
        assert_equal(list(loader), batches)


def test_the_held_out_share_of_the_first_file(config: Make, shards: Path) -> None:
    cfg = config(path=str(shards), streaming=True, epochs=1, held_out=0.3, sequence_length=64)
    trained, held_out = documents(take(cfg)), documents(take(cfg, split="held_out"))
    assert trained + held_out == Counter(texts_of(shards))
    assert {text[0] for text in held_out} == {"0"}


@pytest.mark.parametrize("packing", [True, False])
def test_a_resumed_run_opens_the_next_files_only(
    config: Make, shards: Path, monkeypatch: pytest.MonkeyPatch, packing: bool
) -> None:
    opened: list[int] = []
    monkeypatch.setattr(streaming.StreamedFiles, "_path", lambda self, file: opened.append(file) or self._files[file])
    cfg = config(path=str(shards), streaming=True, sequence_length=64, packing=packing)
    with Loader(cfg) as loader:
        states = [loader.state()]
        batches = []
        for number, batch in enumerate(islice(loader, 30)):
            if number == 0 and not packing:
                assert len(opened) <= 2
            batches.append(batch)
            states.append(json.loads(json.dumps(loader.state())))
    for step in (0, 1, 14, 29):
        opened.clear()
        with Loader(cfg) as loader:
            loader.restore(states[step])
            assert_equal([next(loader)], batches[step : step + 1])
            if not packing:  # with it, three batches are built ahead from several of these small files
                assert len(opened) <= 3
            assert_equal(list(islice(loader, 29 - step)), batches[step + 1 :])


def test_files_that_have_been_read_are_deleted(
    config: Make, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(home))
    names = tuple(sorted(file.name for file in shards.iterdir()))
    most = 0

    def fetch(self: DatasetFiles, name: str, directory: str) -> Path:
        nonlocal most
        copy = Path(directory, name)
        copy.write_bytes((shards / name).read_bytes())
        most = max(most, len(list(Path(directory).iterdir())))
        return copy

    monkeypatch.setattr(DatasetFiles, "fetch", fetch)
    monkeypatch.setattr("jaxmem.data.corpus.dataset_files", lambda *_: DatasetFiles("org/x", "org/x", "0", names))
    cfg = config(path="org/x", streaming=True, sequence_length=64, epochs=2)
    found = take(cfg)
    assert_equal(found, take(config(path=str(shards), streaming=True, sequence_length=64, epochs=2)))
    assert most <= 4
    assert not list(home.iterdir())


def test_processes_read_other_files_and_go_on_with_another_number(config: Make, shards: Path) -> None:
    cfg = config(path=str(shards), streaming=True, sequence_length=64, epochs=1, global_size=8, accumulate=2)
    parts, states = [], []
    for process in range(2):
        with Loader(cfg, rows=range(2 * process, 2 * process + 2)) as loader:
            parts.append(list(islice(loader, 3)))
            states.append(loader.state())
            rest = list(loader)
            assert not np.any([batch["mask"].sum() == 0 for batch in rest])
            parts[process] += rest
    found = [documents(part) for part in parts]
    assert sum(found, Counter()) == Counter(texts_of(shards))
    assert not {text[0] for text in found[0]} & {text[0] for text in found[1]}
    with pytest.raises(ValueError, match=r"different \(shards, columns\): \[\(1, 4\), \(2, 4\)\]"):
        merge_states([states[0], {**states[1], "shards": [1, 4]}])
    merged = json.loads(json.dumps(merge_states(states)))
    with Loader(cfg) as loader:  # one process
        loader.restore(merged)
        both = list(loader)
    one_pass = config(path=str(shards), streaming=True, sequence_length=64, epochs=1, global_size=8)
    with Loader(one_pass) as loader:  # and other micro-batches
        loader.restore(merged)
        rows = [{name: x.reshape(1, 8, *x.shape[2:]) for name, x in batch.items()} for batch in both]
        assert_equal(list(loader), rows)
    for process, part in enumerate(parts):
        own = [{name: x[:, 2 * process : 2 * process + 2] for name, x in batch.items()} for batch in both]
        assert_equal(part[3:], own[: len(part) - 3])


def test_more_processes_than_files_share_each_file(config: Make, shards: Path) -> None:
    cfg = config(path=str(shards), streaming=True, sequence_length=64, epochs=1, global_size=8)
    found = [documents(take(cfg, rows=[row])) for row in range(8)]
    assert sum(found, Counter()) == Counter(texts_of(shards))


def test_processes_that_share_some_rows_share_each_file(
    config: Make, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three processes of two devices, whose groups of three devices have one row."""
    monkeypatch.setattr("jaxmem.data.loader.gather_objects", lambda _: [2, 1, 2])
    cfg = config(path=str(shards), streaming=True, sequence_length=64, global_size=2)
    first, middle, last = (take(cfg, 4, rows=rows) for rows in ([0], [0, 1], [1]))
    for name in ("inputs", "mask"):
        for batches, column in ((first, 0), (last, 1)):
            for batch, both in zip(batches, middle, strict=True):
                np.testing.assert_array_equal(batch[name][:, 0], both[name][:, column])


def test_a_mixture_has_its_weights(config: Make, shards: Path, jsonl: Callable[..., str]) -> None:
    other = jsonl([f"other {i}" for i in range(5)])
    mixture = [{"source": "jsonl", "path": str(shards), "weight": 3}, {"source": "jsonl", "path": other}]
    cfg = config(source="stdlib", mixture=mixture, streaming=True, sequence_length=64, packing=False)
    found = documents(take(cfg, 20))
    assert found.total() == 80
    assert sum(count for text, count in found.items() if text[0] == "o") == 20


def test_a_packed_mixture_has_few_open_files(config: Make, shards: Path, tmp_path: Path) -> None:
    long = tmp_path / "long"
    long.mkdir()
    for file in range(FILES):
        (long / f"{file}.jsonl").write_text(f'{{"text": "{"y" * 200}"}}\n' * 20)
    mixture = [{"source": "jsonl", "path": str(place)} for place in (shards, long)]
    cfg = config(source="stdlib", mixture=mixture, streaming=True, sequence_length=40)
    with Loader(cfg) as loader:
        for _ in islice(loader, 300):
            assert all(len(files._opened) <= 4 for files in loader.corpus.sources)
        assert all(len(files.lengths) == FILES for files in loader.corpus.sources)


def test_the_order_of_the_files_is_computed_once_per_epoch(
    config: Make, shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []
    permutation = streaming.permutation
    monkeypatch.setattr(streaming, "permutation", lambda count, seed: seeds.append(seed) or permutation(count, seed))
    take(config(path=str(shards), streaming=True, sequence_length=64, epochs=3))
    assert len(seeds) == len(set(seeds)) >= 3


def test_empty_files_and_settings_that_do_not_fit(config: Make, tmp_path: Path, shards: Path) -> None:
    (shards / "3.jsonl").write_text("")
    cfg = config(path=str(shards), streaming=True, sequence_length=64, epochs=1)
    assert documents(take(cfg)) == Counter(texts_of(shards))
    for file in shards.iterdir():
        file.write_text("")
    with pytest.raises(UserError, match="data is empty"):
        take(config(path=str(shards), streaming=True), 1)
    for settings, text in (
        ({"source": "stdlib"}, "data.source=stdlib"),
        ({"source": "tokens", "path": "x"}, "data.source=tokens"),
        ({"source": "stdlib", "mixture": [{"source": "jsonl", "path": "x"}] * 2, "epochs": 1}, "data.epochs=1"),
    ):
        with pytest.raises(UserError, match=rf"data.streaming=true.* does not support {text}"):
            load_config(config(**settings, streaming=True).model_dump(mode="json"))
    with pytest.raises(UserError, match=r"data.held_out=0.02\): .* a text file is one record; use data.held_out=0"):
        load_config(config(source="text", path="x", streaming=True, held_out=0.02).model_dump(mode="json"))


def test_a_process_whose_files_are_empty_names_them(config: Make, shards: Path) -> None:
    (shards / "1.jsonl").write_text("")
    cfg = config(path=str(shards), streaming=True, shuffle=False, global_size=6)
    with pytest.raises(UserError, match=r"^\S*1\.jsonl: the data is empty"):
        take(cfg, 1, rows=[1])


def test_a_process_whose_first_files_are_empty_reads_those_of_the_next_epoch(config: Make, shards: Path) -> None:
    for file in range(FILES - 1):
        (shards / f"{file}.jsonl").write_text("")
    cfg = config(path=str(shards), streaming=True, global_size=FILES, sequence_length=64, packing=False)
    for row in range(FILES):
        [text] = documents(take(cfg, 1, rows=[row]))
        assert text in texts_of(shards)
    for file in shards.iterdir():
        file.write_text("")
    with pytest.raises(UserError, match=rf"\S+\.jsonl and {FILES - 1} others: the data is empty"):
        take(cfg, 1, rows=[0])


def test_the_line_of_a_run_names_the_files(config: Make, shards: Path) -> None:
    cfg = config(path=str(shards), streaming=True)
    with Loader(cfg) as loader:
        line = data_line(cfg.data, cfg.batch.global_size, cfg.steps, loader.corpus, loader.corpus.check())
    assert line is not None
    assert f"{FILES} files" in line


def test_the_summary_counts_the_first_file(config: Make, shards: Path) -> None:
    """The records that `check` reads are counted only when they are read again."""
    (shards / "0.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n{"other": 1}\n' * 20)
    with Loader(config(path=str(shards / "0.jsonl"), streaming=True, on_invalid="skip", shuffle=False)) as loader:
        loader.corpus.check()
        assert loader.corpus.summary() == []
        list(islice(loader, 2))
        [line] = loader.corpus.summary()
        assert "invalid ones skipped" in line
