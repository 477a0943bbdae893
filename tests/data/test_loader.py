"""Batches: the same for any number of processes, exact after a resume, complete at the end of the data."""

import json
import threading
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest

from jaxmem.checkpoint.same_run import changed
from jaxmem.config.sections import Config
from jaxmem.data.cache import tokenize
from jaxmem.data.loader import Loader, merge_states
from jaxmem.errors import UserError
from jaxmem.step.batches import batch_spec

Make = Callable[..., Config]
Batch = dict[str, np.ndarray]


def take(cfg: Config, count: int | None = None, **options: Any) -> list[Batch]:
    with Loader(cfg, **options) as loader:
        return list(islice(loader, count))


def assert_equal(found: list[Batch], expected: list[Batch]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].dtype == b[name].dtype
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def documents(batches: list[Batch]) -> Counter[str]:
    """The documents in the batches of one or more rows, put together again."""
    found: Counter[str] = Counter()
    for a, b in np.ndindex(batches[0]["inputs"].shape[:2]):
        inputs = np.concatenate([batch["inputs"][a, b][batch["segment_ids"][a, b] > 0] for batch in batches])
        parts = bytes(np.where(inputs == 256, 0, inputs).astype(np.uint8)).split(b"\0")
        assert parts.pop() == b""
        found.update(part.decode() for part in parts)
    return found


def test_batches_are_what_the_spec_says(config: Make, numbered: str) -> None:
    cfg = config(path=numbered, global_size=6, accumulate=3)
    spec = batch_spec(cfg)
    [batch] = take(cfg, 1)
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
        name: (shape, np.dtype(dtype)) for name, (shape, dtype, _) in spec.items()
    }
    assert spec["inputs"] == ((3, 2, 16), np.int32, ("accumulate", "batch", "time"))


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("processes", [2, 4])
def test_processes_together_make_the_batches_of_one(config: Make, numbered: str, packing: bool, processes: int) -> None:
    cfg = config(path=numbered, global_size=16, accumulate=2, packing=packing, held_out=0.1)
    whole, share = take(cfg, 12), 8 // processes
    parts = [take(cfg, 12, rows=range(p * share, (p + 1) * share)) for p in range(processes)]
    together = [
        {name: np.concatenate([part[name] for part in step], axis=1) for name in step[0]}
        for step in zip(*parts, strict=True)
    ]
    assert_equal(together, whole)


def test_accumulation_divides_the_same_rows(config: Make, numbered: str) -> None:
    once, thrice = (take(config(path=numbered, global_size=6, accumulate=a), 5) for a in (1, 3))
    reshaped = [{name: x.reshape(3, 2, *x.shape[2:]) for name, x in batch.items()} for batch in once]
    assert_equal(thrice, reshaped)


@pytest.mark.parametrize("options", [{}, {"packing": False}, {"shuffle": False, "epochs": 2}, {"split": "held_out"}])
def test_a_resumed_run_sees_exactly_what_it_would_have_seen(
    config: Make, numbered: str, options: dict[str, Any]
) -> None:
    split = options.pop("split", "train") if "split" in options else "train"
    cfg = config(path=numbered, held_out=0.3, **options)
    with Loader(cfg, split) as loader:
        states, batches = [loader.state()], []
        for batch in islice(loader, 14):
            batches.append(batch)
            states.append(json.loads(json.dumps(loader.state())))
    with Loader(cfg, split) as loader:
        for step in reversed(range(len(states))):
            loader.restore(states[step])
            assert loader.state() == states[step]
            assert_equal(list(islice(loader, 14 - step)), batches[step:])


def test_a_run_goes_on_with_another_number_of_processes(config: Make, numbered: str) -> None:
    cfg = config(path=numbered, global_size=8)
    whole = take(cfg, 9)
    states = []
    for p in range(4):
        with Loader(cfg, rows=range(2 * p, 2 * p + 2)) as loader:
            list(islice(loader, 5))
            states.append(loader.state())
    merged = json.loads(json.dumps(merge_states(states)))
    for columns in (range(8), range(4), range(4, 8), [7]):
        with Loader(cfg, rows=columns) as loader:
            loader.restore(merged)
            found = list(islice(loader, 4))
        assert_equal(found, [{name: x[:, columns] for name, x in batch.items()} for batch in whole[5:]])


def test_states_that_do_not_fit_together_are_refused(config: Make, numbered: str) -> None:
    cfg = config(path=numbered, global_size=4)
    with Loader(cfg, rows=range(2)) as one, Loader(cfg, rows=range(2, 4)) as two:
        half = one.state()
        with pytest.raises(ValueError, match="contain 2 of 4 rows"):
            merge_states([half])
        with pytest.raises(UserError, match=r"lacks rows \[2, 3\]"):
            two.restore(half)
        next(two)
        with pytest.raises(ValueError, match="different"):
            merge_states([half, two.state()])
        moved = {**half, "rows": [[0, 9, 9], [1, 0, 0]]}
        with pytest.raises(ValueError, match="row 0"):
            merge_states([half, moved, {**two.state(), "step": 0}])
    with (
        Loader(config(path=numbered, global_size=8)) as other,
        pytest.raises(UserError, match=r"global_size=8 .*use batch.global_size=4"),
    ):
        other.restore({**half, "global_size": 4})


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("epochs", [1, 3])
def test_epochs_read_every_document_that_often_and_end(config: Make, numbered: str, packing: bool, epochs: int) -> None:
    cfg = config(path=numbered, epochs=epochs, packing=packing, sequence_length=64, global_size=7)
    texts = Counter((f"{i:03d} " * 10)[: (i * 7) % 41] for i in range(120))
    assert documents(take(cfg)) == Counter({text: n * epochs for text, n in texts.items()})


def test_training_and_evaluation_share_no_document_and_miss_none(config: Make, jsonl: Callable[..., str]) -> None:
    texts = [f"document {i}" for i in range(200)]
    cfg = config(path=jsonl(texts), held_out=0.2, epochs=2)
    trained, held = documents(take(cfg)), documents(take(cfg, split="held_out"))
    assert set(held.values()) == {1}
    assert set(trained.values()) == {2}
    assert not set(trained) & set(held)
    assert set(trained) | set(held) == set(texts)
    assert 20 < len(held) < 60


def test_all_is_every_record_once_though_fewer_than_rows(config: Make, jsonl: Callable[..., str]) -> None:
    cfg = config(path=jsonl([f"<{i}>" for i in range(3)]), held_out=0.2)
    assert documents(take(cfg, split="all")) == Counter({f"<{i}>": 1 for i in range(3)})


def test_rewind_starts_evaluation_from_the_first_batch(config: Make, numbered: str) -> None:
    cfg = config(path=numbered, held_out=0.2)
    with Loader(cfg) as training, Loader(cfg, "held_out", corpus=training.corpus) as loader:
        first = list(loader)
        end = loader.state()
        assert next(loader, None) is None
        assert loader.state() == end
        assert end["step"] == len(first)
        loader.rewind()
        assert_equal(list(loader), first)
        assert np.any(next(training)["mask"])


def test_rows_end_together_in_every_process(config: Make, numbered: str) -> None:
    cfg = config(path=numbered, global_size=4, epochs=1)
    whole = take(cfg)
    alone = [take(cfg, rows=[column]) for column in range(4)]
    assert len({len(part) for part in alone}) > 1  # left to themselves they would end at different steps
    barrier, votes = threading.Barrier(4, timeout=20), [False] * 4
    found: list[list[Batch]] = [[] for _ in range(4)]

    def process(p: int) -> None:
        def agree(going: bool) -> bool:
            votes[p] = going
            barrier.wait()
            result = any(votes)
            barrier.wait()
            return result

        found[p] = take(cfg, rows=[p], agree=agree)

    threads = [threading.Thread(target=process, args=(p,)) for p in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for p in range(4):
        assert_equal(found[p], [{name: x[:, [p]] for name, x in batch.items()} for batch in whole])


def test_a_mixture_is_read_by_weight(config: Make, jsonl: Callable[..., str]) -> None:
    paths = [jsonl([letter * 3] * n, f"{letter}.jsonl") for letter, n in (("a", 50), ("b", 400), ("c", 30))]
    mixture = [{"source": "jsonl", "path": path, "weight": w} for path, w in zip(paths, (1.0, 6.0, 3.0), strict=True)]
    cfg = config(source="stdlib", mixture=mixture, sequence_length=4, packing=False, global_size=10)
    found = [documents([batch]) for batch in take(cfg, 40)]
    assert all(batch == {"aaa": 1, "bbb": 6, "ccc": 3} for batch in found)
    once = take(config(source="stdlib", mixture=mixture, sequence_length=4, packing=False, global_size=10, epochs=1))
    assert sum(map(documents, ([batch] for batch in once)), Counter()) == {"aaa": 10, "bbb": 61, "ccc": 30}


@pytest.mark.parametrize("global_size", [7, 8])
def test_packed_rows_read_a_mixture_by_weight(config: Make, jsonl: Callable[..., str], global_size: int) -> None:
    """Documents of different lengths, and a number of rows with and without a factor of the sum of the weights."""
    paths = [jsonl([letter * length] * 40, f"{letter}.jsonl") for letter, length in (("a", 5), ("b", 100))]
    mixture = [{"source": "jsonl", "path": path} for path in paths]
    cfg = config(source="stdlib", mixture=mixture, sequence_length=64, global_size=global_size)
    last_letters = np.concatenate([batch["inputs"][batch["targets"] == 256] for batch in take(cfg, 150)])
    assert np.mean(last_letters == ord("a")) == pytest.approx(0.5, abs=0.03)
    read = documents(take(cfg.replace(data={"epochs": 3})))
    assert {text[0]: count for text, count in read.items()} == {"a": 120, "b": 120}


@pytest.mark.parametrize("streaming", [False, True])
def test_a_mixture_goes_on_with_another_number_of_processes(
    config: Make, jsonl: Callable[..., str], streaming: bool
) -> None:
    paths = [jsonl([letter * length] * 40, f"{letter}.jsonl") for letter, length in (("a", 5), ("b", 100))]
    mixture = [{"source": "jsonl", "path": path} for path in paths]
    cfg = config(source="stdlib", mixture=mixture, sequence_length=64, global_size=8, streaming=streaming)
    whole = take(cfg, 20)
    states = []
    for process in range(2):
        with Loader(cfg, rows=range(4 * process, 4 * process + 4)) as loader:
            list(islice(loader, 15))
            states.append(loader.state())
    merged = json.loads(json.dumps(merge_states(states)))
    for columns in (range(8), range(2, 4)):
        with Loader(cfg, rows=columns) as loader:
            loader.restore(merged)
            assert_equal(list(islice(loader, 5)), [{name: x[:, columns] for name, x in b.items()} for b in whole[15:]])


def test_the_seed_decides_the_order(config: Make, numbered: str) -> None:
    one, again, other = (take(config(path=numbered, seed=seed), 5) for seed in (1, 1, 2))
    assert_equal(again, one)
    assert any(not np.array_equal(a["inputs"], b["inputs"]) for a, b in zip(one, other, strict=True))


def test_too_few_records_for_the_epochs_are_refused(config: Make, jsonl: Callable[..., str]) -> None:
    with pytest.raises(UserError, match=r"epochs=2 of 3 records.*global_size=8"):
        Loader(config(path=jsonl(["a", "b", "c"]), epochs=2, global_size=8))
    endless = take(config(path=jsonl(["a", "b", "c"]), global_size=8), 3)
    assert all(batch["mask"].any() for batch in endless)


def test_a_vocabulary_too_small_is_refused(config: Make, numbered: str) -> None:
    with pytest.raises(UserError, match=r"has 257 tokens, .*model.vocab=256; use model.vocab=257"):
        Loader(config(path=numbered, vocab=256))


def test_errors_of_the_thread_reach_the_consumer_at_their_turn(config: Make, tmp_path: Any) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "good"}\n' * 6 + "broken\n" + '{"text": "good"}\n' * 9)
    cfg = config(path=str(path), shuffle=False, packing=False, global_size=2)
    cfg_that_skips = cfg.replace(data={"on_invalid": "skip"})
    with Loader(cfg) as loader:
        assert all(documents([next(loader)]) == {"good": 2} for _ in range(3))
        state = loader.state()
        for _ in range(2):
            with pytest.raises(UserError, match=r"x\.jsonl, line 7: invalid JSON"):
                next(loader)
        assert loader.state() == state
    stopping, skipping = (loader_config.model_dump(mode="json") for loader_config in (cfg, cfg_that_skips))
    assert changed(stopping, skipping) == [], "the run can be resumed with it"
    with Loader(cfg_that_skips) as loader:
        loader.restore(state)
        assert documents([next(loader)]) == {"good": 1}


def test_the_records_of_all_processes_are_counted(config: Make, tmp_path: Any) -> None:
    """Once, where several processes read the same rows."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "good"}\n' * 3 + "broken\n")
    asked = {"path": str(path), "shuffle": False, "packing": False, "epochs": 1, "held_out": 0.0, "global_size": 2}
    processes = [[0], [1], [1]]
    sent: list[Any] = []
    for rows in processes:
        with Loader(config(**asked, on_invalid="skip"), rows=rows) as loader:
            list(loader)
            loader.corpus.summary(rows, lambda mine: sent.append(json.loads(json.dumps(mine))) or [mine])
            summary = loader.corpus.summary(rows, lambda _: sent)
    assert summary == ["of 4 documents read: 1 invalid ones skipped"]


def test_broken_lines_are_passed_over_and_counted(config: Make, tmp_path: Any) -> None:
    """Short and long ones, also where a cache is written; of nothing else no row is made."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "good"}\n' * 3 + "broken\n" + '{"text": "' + "x" * 99_999 + "\n" + '{"text": "last"}\n')
    asked = {"path": str(path), "shuffle": False, "packing": False, "epochs": 1, "held_out": 0.0, "global_size": 1}
    with Loader(config(**asked, on_invalid="skip")) as loader:
        assert documents(list(loader)) == {"good": 3, "last": 1}
        assert loader.corpus.summary() == ["of 6 documents read: 2 invalid ones skipped"]
    assert tokenize(config(**asked, on_invalid="skip"), tmp_path / "cache")["records"] == 4
    path.write_text("broken\n")
    with (
        pytest.raises(UserError, match=r"1000 consecutive records have no token to train on"),
        Loader(config(path=str(path), on_invalid="skip", held_out=0.0, global_size=1)) as loader,
    ):
        next(loader)
    with pytest.raises(UserError, match="every record is invalid"):
        tokenize(config(**asked, on_invalid="skip"), tmp_path / "other")


def test_closing_stops_the_thread_also_when_python_exits(config: Make, numbered: str) -> None:
    for close in (Loader.close, lambda loader: loader._stop.atexit and loader._stop()):
        before = threading.active_count()
        loader = Loader(config(path=numbered))
        next(loader)
        assert threading.active_count() == before + 1
        close(loader)
        assert threading.active_count() == before
        with pytest.raises(ValueError, match="closed"):
            next(loader)


def test_rows_that_do_not_exist_are_refused(config: Make, numbered: str) -> None:
    for rows in ([], [4], [-1]):
        with pytest.raises(ValueError, match="4 columns"):
            Loader(config(path=numbered), rows=rows)
