"""Tuning finds the fastest implementation, keeps each at once, and goes on where it was stopped."""

import json

import jax
import pytest

from jaxmem.cli import benches
from jaxmem.errors import UserError
from jaxmem.kernels.fused_attention import IMPLEMENTATIONS
from jaxmem.lab.bench import contest, tune
from jaxmem.lab.bench.kernels import BenchSelection
from jaxmem.lab.bench.operations import OPERATIONS


def tuned(path, shapes=(), *, again=False, **options):
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    return tune.tune(path, BenchSelection(tuple(shapes), **options), again=again)


def test_tuning_runs_dry_and_a_second_time_nothing_is_left_to_measure(tmp_path, monkeypatch):
    monkeypatch.setattr(contest, "BURST_SECONDS", 0.0)
    monkeypatch.setattr(contest, "MIN_BURSTS", 1)
    for name in set(IMPLEMENTATIONS) - {"reference", "blockwise"}:
        monkeypatch.delitem(IMPLEMENTATIONS, name)
    path = tmp_path / "tuned.json"
    path.write_text('{"attention": {"another": []}}')
    rows = list(tuned(path, operation="attention", seconds=0.0))
    assert any("rate" in row for row in rows)
    assert not any(row.get("contestant") == "jax.nn xla" for row in rows)
    table = json.loads(path.read_text())
    here = jax.devices()[0].device_kind
    assert set(table["attention"]) == {"another", here}
    (entry,) = table["attention"][here]
    assert entry["implementation"] == "blockwise"
    assert list(tuned(path, operation="attention", seconds=0.0)) == []
    assert list(tuned(path, operation="attention", seconds=0.0, again=True))
    assert len(json.loads(path.read_text())["attention"][here]) == 1


def test_what_was_measured_before_tuning_stopped_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(contest, "BURST_SECONDS", 0.0)
    monkeypatch.setattr(contest, "MIN_BURSTS", 1)
    path, here = tmp_path / "tuned.json", jax.devices()[0].device_kind
    shapes = ["llama3-8b up", "llama2-7b down"]
    options = {"operation": "int8_add", "seconds": 0.0, "only": ["reference"]}
    stopped = tuned(path, shapes, **options)
    first = next(row for row in stopped if "implementation" in row)
    stopped.close()
    (kept,) = json.loads(path.read_text())["int8_add"][here]
    assert kept.items() <= first.items()
    assert {row["shape"] for row in tuned(path, shapes, **options)} == {"llama2-7b down"}
    assert len(json.loads(path.read_text())["int8_add"][here]) == 2


@pytest.mark.parametrize(
    ("text", "said"), [("{", "is not JSON"), ("[]", "is not a table"), (None, "there is no folder")]
)
def test_a_table_that_cannot_be_kept_is_said_before_anything_is_measured(tmp_path, text, said):
    path = tmp_path / "tuned.json"
    if text is None:
        path = tmp_path / "missing/tuned.json"
    else:
        path.write_text(text)
    with pytest.raises(UserError, match=said):
        next(tuned(path))


def test_who_wins():
    """The least time of all passes together: rates would count a backward pass, twice and a half the work, no more than
    the forward pass."""
    attention_, update = OPERATIONS["attention"], OPERATIONS["adam8_update"]

    def row(way, of, milliseconds, right=True):
        return {"contestant": way, "pass": of, "milliseconds": milliseconds, "right": right}

    even = [row("mosaic", "forward", 1.8), row("mosaic", "backward", 9.196)]  # 600 and 300 TFLOP/s
    uneven = [row("triton", "forward", 2.4), row("triton", "backward", 8.374)]  # 450 and 330
    assert tune.fastest(attention_, even + uneven)["implementation"] == "triton"
    wrong = [row("triton", "forward", 0.1), row("triton", "backward", 0.1, right=False)]
    half = [row("blockwise", "forward", 0.1)]
    largest = [row("reference", "forward", 0.1), row("reference", "backward", 0.1)]
    others = [row("jax.nn cudnn", "forward", 0.1), {"contestant": "x", "why_not": "y"}]
    assert tune.fastest(attention_, even + wrong + half + largest + others)["implementation"] == "mosaic"
    plain = [row("reference", "update", 1.0), row("triton", "update", 2.0)]
    assert tune.fastest(update, plain)["implementation"] == "reference"
    assert tune.fastest(update, []) is None


def test_the_packages_table_is_not_tuned_without_a_gpu():
    with pytest.raises(UserError, match=r"no GPU .*--write FILE"):
        benches.bench_tune(write=None)


def test_what_is_chosen_to_be_tuned_has_to_be_known(tmp_path):
    path = tmp_path / "tuned.json"
    with pytest.raises(UserError, match="long requires --operation"):
        next(tuned(path, ["long"]))
    with pytest.raises(UserError, match=r"unknown contestant tritn.*triton"):
        next(tuned(path, operation="attention", only=["tritn"]))
    assert not path.exists()
