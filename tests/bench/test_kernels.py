"""The kernels' benchmark works without a GPU, says what it could not run, and notices a wrong implementation."""

import json
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from jaxmem.bench import attention, contest, kernels, torch_kernels
from jaxmem.bench.operations import OPERATIONS
from jaxmem.cli import benches
from jaxmem.errors import UserError
from jaxmem.kernels import attention as operation
from jaxmem.kernels import choice, tuning
from jaxmem.kernels.attention import IMPLEMENTATIONS
from jaxmem.kernels.attention import tuning as attention_tuning


def test_every_contestant_has_a_row(monkeypatch):
    def never(*_):
        raise ValueError("attention: never")

    def wrong(q, k, v, options, extras):
        out, lse = operation(q, k, v, causal=options.causal, return_lse=True, implementation="reference")
        return out + jnp.ones((), q.dtype), lse

    names = {"reference": IMPLEMENTATIONS["reference"], "never": never, "wrong": wrong}
    for name in IMPLEMENTATIONS.copy():
        monkeypatch.delitem(IMPLEMENTATIONS, name)
    for name, function in names.items():
        monkeypatch.setitem(IMPLEMENTATIONS, name, function)
    found = kernels.bench_kernels(["long"], seconds=0.01)
    assert found["dry_run"]
    assert all(number > 0 for number in found["ceilings"].values())
    rows = {(row["contestant"], row.get("pass")): row for row in found["rows"]}
    assert rows["never", None]["why_not"] == "attention: never"
    assert rows["wrong", "forward"]["error"] > 20
    assert rows["jax.nn xla", "backward"]["rate"] > 0
    assert "why_not" in rows["torch flash", None]


def test_the_reference_is_right():
    shape = attention.cut(attention.SHAPES["mistral-7b"])
    assert attention._error(shape, "reference") < 2


def test_an_unknown_shape_names_the_nearest():
    with pytest.raises(UserError, match=r"no shape 'lomg'.*long"):
        kernels.bench_kernels(["lomg"])


@pytest.mark.parametrize(
    "operation", ["dequant_matmul", "adam8_update", "int8_add", "rms_norm", "cross_entropy", "sliding_max"]
)
def test_each_operation_is_right_and_takes_its_turns(operation, monkeypatch):
    """All passes against float64, on one shape; of the reference alone, which is quick to compile."""
    monkeypatch.setattr(contest, "BURST", 0.0)
    own = kernels.OPERATIONS[operation]
    for name in set(own.implementations) - {"reference"}:
        monkeypatch.delitem(own.implementations, name)
    found = kernels.bench_kernels([next(iter(own.shapes))], operation=operation, seconds=0.0)
    rows = [row for row in found["rows"] if row["contestant"] in own.implementations]
    assert {row["contestant"] for row in rows} == {"reference"}
    assert all(row["rate"] > 0 and row["error"] <= kernels.RIGHT for row in rows), rows


@pytest.mark.parametrize("operation", ["adam8_update", "int8_add"])
def test_what_a_run_updates_in_place_is_measured_so(operation):
    """Each call takes the memory of what the one before gave; what they are compared with stays."""
    own = OPERATIONS[operation]
    work = own.work(own.shape("llama3-8b up", dry=True))
    call = work.passes["update"].compiled("reference", work.arrays)
    first, second = call(), call()
    assert jax.tree.leaves(first)[-1].is_deleted()
    assert not any(x.is_deleted() for x in jax.tree.leaves((second, work.arrays)))


def torch_with(monkeypatch, **modules):
    """A PyTorch that sees a GPU, and libraries for it, of which every call is only written down."""
    torch = mock.MagicMock()
    torch.cuda.is_available.return_value = True
    for name, module in {"torch": torch, **modules}.items():
        monkeypatch.setitem(sys.modules, name, module)
    return torch


def test_libraries_that_are_here_take_turns_and_others_say_why_not(monkeypatch):
    monkeypatch.setattr(contest, "BURST", 0.0)
    own = kernels.OPERATIONS["dequant_matmul"]
    for name in set(own.implementations) - {"reference"}:
        monkeypatch.delitem(own.implementations, name)
    here, functional = mock.MagicMock(), mock.MagicMock()
    codes = functional.quantize_4bit.return_value = mock.MagicMock(), "state"
    torch_with(monkeypatch, bitsandbytes=here, **{"bitsandbytes.functional": functional})
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    found = kernels.bench_kernels(["llama3-8b up"], operation="dequant_matmul", seconds=0.0)
    rows = {(row["contestant"], row.get("pass")): row for row in found["rows"]}
    for of in ("forward", "backward"):
        assert rows["bitsandbytes", of]["rate"] > 0
        assert rows["bitsandbytes, decoded", of]["rate"] > 0
    assert rows["torchao", None]["why_not"] == "torchao is not installed"
    form = {"blocksize": 64, "compress_statistics": True, "quant_type": "nf4"}
    assert all(call.kwargs == form for call in functional.quantize_4bit.call_args_list)
    assert all(call.kwargs == {"quant_state": "state"} for call in here.matmul_4bit.call_args_list)
    assert functional.dequantize_4bit.call_args_list[0].args == codes

    shape = own.shapes["llama3-8b up"]
    with pytest.raises(ValueError, match="bitsandbytes multiplies nf4 and fp4 in blocks, not int4"):
        torch_kernels.product_by_bitsandbytes(shape._replace(format="int4"))
    with pytest.raises(ValueError, match="bitsandbytes' blocks are of 256 numbers, not 172"):
        torch_kernels.adam8_by_bitsandbytes(kernels.OPERATIONS["adam8_update"].shapes["llama2-7b down"])
    assert set(torch_kernels.adam8_by_bitsandbytes(kernels.OPERATIONS["adam8_update"].shapes["llama3-8b up"])) == {
        "update"
    }


def test_a_library_that_cannot_be_run_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match="torch is not installed"):
        torch_kernels.needed("bitsandbytes")
    torch_with(monkeypatch).cuda.is_available.return_value = False
    with pytest.raises(ValueError, match="torch sees no GPU"):
        torch_kernels.needed()


def test_it_says_what_is_picked_and_a_measured_device_takes_its_winner(monkeypatch):
    rows = kernels.explain([])
    assert {row["operation"] for row in rows} == set(kernels.OPERATIONS)
    assert all("was not measured" in row["why"] for row in rows)
    names = {row["operation"]: row["implementation"] for row in rows}
    assert names["attention"] == "blockwise"
    assert names["dequant_matmul"] == names["cross_entropy"] == "sliced"

    measured = [
        {"contestant": way, "pass": of, "rate": rate, "error": error}
        for way, rate, error in (("sliced", 2.0, 1.0), ("pallas", 3.0, 1.0), ("reference", 9.0, 99.0))
        for of in ("forward", "backward")
    ]
    winner = kernels._winner("dequant_matmul", "llama3-8b up", [*measured, {"contestant": "x", "why_not": "y"}])
    assert winner["implementation"] == "pallas"  # the reference was faster, and wrong
    table = {"dequant_matmul": {jax.devices()[0].device_kind: [json.loads(json.dumps(winner))]}}
    monkeypatch.setattr(choice, "tuned", lambda: table)
    choice._measured.cache_clear()
    (row,) = kernels.explain(["llama3-8b up, long"], operation="dequant_matmul")
    assert row["implementation"] == "pallas"
    assert row["why"].startswith("the fastest of [512, 4096, 14336] on ")
    choice._measured.cache_clear()


def test_tuning_runs_dry_and_its_winners_are_taken(tmp_path, monkeypatch):
    """Two sizes of blocks for a pass of one kernel, and the winner is how the next call is cut."""
    monkeypatch.setattr(contest, "BURST", 0.0)
    monkeypatch.setattr(attention, "GRADIENTS", {})
    for name in set(IMPLEMENTATIONS) - {"reference", "blockwise", "triton"}:
        monkeypatch.delitem(IMPLEMENTATIONS, name)
    monkeypatch.setitem(IMPLEMENTATIONS, "triton", IMPLEMENTATIONS["triton"])
    path = tmp_path / "tuned.json"
    path.write_text('{"attention": {"another": []}}')
    kernels.tune(path, operation="attention", seconds=0.0)
    table = json.loads(path.read_text())
    here = jax.devices()[0].device_kind
    assert set(table["attention"]) == {"another", here}
    assert table["attention"][here][0]["implementation"] in IMPLEMENTATIONS
    (entry,) = table["attention blocks"][here]
    assert entry["of"] == 2
    q = jnp.zeros((1, 100, 2, 16), jnp.bfloat16)
    usual = [attention_tuning.usual(way, "forward", 16, 2) for way in ("triton", "pallas")]
    entry["blocks"] = [16, 16, 4, 2]
    with choice.supplied(table):
        assert attention_tuning.blocks("triton", "forward", q, q, 16) == (16, 16, 4, 2)
        assert attention_tuning.blocks("pallas", "forward", q, q, 16) == usual[1]
    assert attention_tuning.blocks("triton", "forward", q, q, 16) == usual[0]


def test_every_kernel_is_tuned(tmp_path, monkeypatch):
    """Each that is not attention's, dry: two ways to cut it, of which one wins."""
    monkeypatch.setattr(contest, "BURST", 0.0)
    monkeypatch.setattr(kernels, "_winner", lambda *_: None)
    path, here = tmp_path / "tuned.json", jax.devices()[0].device_kind
    monkeypatch.setattr(kernels, "_measured", lambda *_: [])
    for one in ("dequant_matmul", "adam8_update", "int8_add", "rms_norm", "cross_entropy"):
        own = kernels.OPERATIONS[one]
        kernels.tune(path, operation=one, seconds=0.0)
        entries = json.loads(path.read_text())[f"{one} blocks"][here]
        passes = own.work(own.shape(own.tuned[0], dry=True)).passes
        assert [entry["kind"].split()[:2] for entry in entries] == [["pallas", of] for of in passes]
        assert all(entry["of"] == 2 for entry in entries)


@pytest.mark.parametrize("of", attention_tuning.PASSES)
def test_what_may_be_measured_has_room(of):
    capabilities = "8.9", "9.0"
    small, large = (attention_tuning.space("pallas", of, 128, 2, tuning.SHARED[x]) for x in capabilities)
    assert set(small) < set(large)
    assert all((b.queries + b.keys * b.stages) * 128 * 2 <= tuning.SHARED["8.9"] for b in small)
    assert len(large) < 40  # each takes seconds to compile
    kept = [attention_tuning.usual(implementation, of, 128, 2) for implementation in ("pallas", "triton")]
    assert set(kept) <= set(small)


@pytest.mark.parametrize("of", [*attention_tuning.PASSES, "gradients"])
def test_what_may_be_measured_of_mosaic_has_room(of):
    for wide in (64, 128):
        room = attention_tuning.space("mosaic", of, wide, 2, tuning.SHARED["9.0"])
        assert attention_tuning.usual("mosaic", of, wide, 2) in room
        assert len(room) < 10


def test_the_usual_sizes_are_among_those_that_may_be_measured():
    small = tuning.SHARED["8.9"]
    spaces = [
        (pallas.space(of, 2, 2, small), pallas.USUAL[of])
        for pallas in [OPERATIONS["dequant_matmul"].implementations["pallas"]]
        for of in ("forward", "backward")
    ]
    loss = OPERATIONS["cross_entropy"].implementations["pallas"]
    spaces += [(loss.space(itemsize, small), usual) for itemsize, usual in loss.USUAL.items()]
    update = OPERATIONS["adam8_update"].implementations["pallas"]
    spaces += [(update.space(of, along, small), update.USUAL[of]) for of in update.HELD for along in (-1, -2)]
    norm = OPERATIONS["rms_norm"].implementations["pallas"]
    spaces += [(norm.space(of, 4096, small), norm.USUAL) for of in norm.HELD]
    for space, usual in spaces:
        assert usual in space
        assert 2 < len(space) < 40  # each takes seconds to compile


def test_the_packages_table_is_not_tuned_without_a_gpu():
    with pytest.raises(UserError, match=r"there is none here; --write FILE runs it dry"):
        benches.bench_tune(write=None)


def test_an_operation_has_to_be_known():
    with pytest.raises(UserError, match=r"no operation 'atention'.*attention"):
        kernels.explain([], operation="atention")
