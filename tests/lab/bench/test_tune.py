"""Tuning finds how kernels are cut and who wins, keeps each at once, and goes on where it was stopped."""

import json

import jax
import jax.numpy as jnp
import pytest

from jaxmem.cli import benches
from jaxmem.errors import UserError
from jaxmem.kernels import choice, tuning
from jaxmem.kernels.fused_attention import IMPLEMENTATIONS
from jaxmem.kernels.fused_attention import tuning as attention_tuning
from jaxmem.kernels.quantized_matmul import triton as matmul
from jaxmem.kernels.quantized_update import triton as update
from jaxmem.lab.bench import attention, contest, kernels, tune, work
from jaxmem.lab.bench.kernels import BenchSelection
from jaxmem.lab.bench.operations import OPERATIONS


@pytest.fixture
def quick(monkeypatch):
    """Attention forward, by one implementation that is cut in two ways."""
    monkeypatch.setattr(contest, "BURST", 0.0)
    monkeypatch.setattr(contest, "FEWEST", 1)
    monkeypatch.setattr(attention, "GRADIENTS", {})
    for name in set(IMPLEMENTATIONS) - {"reference", "blockwise", "triton"}:
        monkeypatch.delitem(IMPLEMENTATIONS, name)


def tuned(path, shapes=(), *, again=False, **options):
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    return tune.tune(path, BenchSelection(tuple(shapes), **options), again=again)


def test_tuning_runs_dry_and_its_winners_are_taken(tmp_path, quick):
    """Two sizes of blocks for a pass of one kernel, and the winner is how the next call is cut. A second time nothing
    is left to measure."""
    path = tmp_path / "tuned.json"
    path.write_text('{"attention": {"another": []}}')
    rows = list(tuned(path, operation="attention", seconds=0.0))
    assert any("rate" in row for row in rows)
    table = json.loads(path.read_text())
    here = jax.devices()[0].device_kind
    assert set(table["attention"]) == {"another", here}
    assert table["attention"][here][0]["implementation"] in IMPLEMENTATIONS
    (entry,) = table["attention blocks"][here]
    assert entry["of"] == 2
    assert list(tuned(path, operation="attention", seconds=0.0)) == []
    again = list(tuned(path, operation="attention", seconds=0.0, passes=["forward"], again=True))
    assert [row["kind"] for row in again] == [entry["kind"]]
    table = json.loads(path.read_text())
    (entry,) = table["attention blocks"][here]
    q = jnp.zeros((1, 100, 2, 16), jnp.bfloat16)
    usual = [attention_tuning.usual(way, "forward", 16, 2) for way in ("triton", "mosaic")]
    entry["blocks"] = [16, 16, 4, 2]
    with choice.use_table(table):
        assert attention_tuning.blocks("triton", "forward", q, q, 16) == (16, 16, 4, 2)
        assert attention_tuning.blocks("mosaic", "forward", q, q, 16) == usual[1]
    assert attention_tuning.blocks("triton", "forward", q, q, 16) == usual[0]


def test_every_kernel_is_tuned(tmp_path, monkeypatch):
    """Each that is not attention's, dry: two ways to cut it, of which one wins."""
    monkeypatch.setattr(contest, "BURST", 0.0)
    monkeypatch.setattr(contest, "FEWEST", 1)
    path, here = tmp_path / "tuned.json", jax.devices()[0].device_kind
    for one in ("dequant_matmul", "adam8_update", "int8_add"):
        own = OPERATIONS[one]
        list(tuned(path, operation=one, seconds=0.0, only=["triton"]))
        entries = json.loads(path.read_text())[f"{one} blocks"][here]
        assert [entry["kind"].split()[:2] for entry in entries] == [["triton", of] for of in own.passes]
        assert all(entry["of"] == 2 for entry in entries)
        assert one not in json.loads(path.read_text())  # one alone wins nothing


def test_what_was_measured_before_tuning_stopped_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(contest, "BURST", 0.0)
    monkeypatch.setattr(contest, "FEWEST", 1)
    path, operation = tmp_path / "tuned.json", {"operation": "dequant_matmul", "seconds": 0.0}
    stopped = tuned(path, **operation)
    first = next(stopped)
    stopped.close()
    (kept,) = json.loads(path.read_text())["dequant_matmul blocks"][jax.devices()[0].device_kind]
    assert kept.items() <= first.items()
    found = list(tuned(path, **operation, only=["triton"]))
    assert [row["kind"].split()[1] for row in found] == ["backward"]


def test_sizes_that_cannot_be_measured_cost_themselves_alone(tmp_path, quick, monkeypatch):
    """One does not compile, one hung before, and so is left out."""
    compiled, seen = work.BenchPass.compiled, []

    def failing(self, way, given):
        seen.append(way)
        if len(seen) == 2:  # after the one that the others are held against
            raise OSError("of a compiler's own kind")
        return compiled(self, way, given)

    monkeypatch.setattr(work.BenchPass, "compiled", failing)
    monkeypatch.setattr(tune, "DRY_SIZES", 3)
    hung = "x".join(map(str, attention_tuning.space("triton", "forward", 16, 2, tuning.SHARED["8.9"])[1]))
    given = {"operation": "attention", "seconds": 0.0, "passes": ["forward"]}
    monkeypatch.setattr(kernels, "check_selection", lambda *_: None)
    (row,) = tuned(tmp_path / "tuned.json", **given, without=[f"triton forward {hung}"])
    assert row["of"] == 2


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


@pytest.mark.parametrize("of", attention_tuning.PASSES)
def test_what_may_be_measured_has_room(of):
    capabilities = "8.9", "9.0"
    small, large = (attention_tuning.space("triton", of, 128, 2, tuning.SHARED[x]) for x in capabilities)
    assert set(small) < set(large)
    assert all((b.queries + b.keys * b.stages) * 128 * 2 <= tuning.SHARED["8.9"] for b in small)
    assert len(large) < 40  # each takes seconds to compile
    assert attention_tuning.usual("triton", of, 128, 2) in small


@pytest.mark.parametrize("of", ["forward", "gradients"])
def test_what_may_be_measured_of_mosaic_has_room(of):
    for wide in (64, 128):
        room = attention_tuning.space("mosaic", of, wide, 2, tuning.SHARED["9.0"])
        assert attention_tuning.usual("mosaic", of, wide, 2) in room
        assert len(room) < 10


def test_the_usual_sizes_are_among_those_that_may_be_measured():
    small = tuning.SHARED["8.9"]
    spaces = [(matmul.space(of, 2, 2, small), matmul.USUAL[of]) for of in ("forward", "backward")]
    spaces += [(update.space(of, along, small), update.USUAL) for of in update.REGISTERS for along in (-1, -2)]
    for space, usual in spaces:
        assert usual in space
        assert 2 < len(space) < 40  # each takes seconds to compile


def test_the_packages_table_is_not_tuned_without_a_gpu():
    with pytest.raises(UserError, match=r"no GPU .*--write FILE"):
        benches.bench_tune(write=None)


def test_what_is_chosen_to_be_tuned_has_to_be_known(tmp_path):
    path = tmp_path / "tuned.json"
    with pytest.raises(UserError, match="long: --operation is missing"):
        next(tuned(path, ["long"]))
    with pytest.raises(UserError, match=r"unknown pass 'd_key'.*d_keys"):
        next(tuned(path, operation="attention", passes=["d_key"]))
    assert not path.exists()
