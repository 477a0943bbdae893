"""The kernels' benchmark works without a GPU, says what it could not run, and notices a wrong implementation."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxmem.errors import UserError
from jaxmem.kernels import Moments8
from jaxmem.kernels.fused_attention import IMPLEMENTATIONS, reference
from jaxmem.kernels.quantized_update import reference as update_reference
from scripts.bench import contest, kernels, operations
from scripts.bench.kernels import BenchSelection, measured
from scripts.bench.operations import OPERATIONS


def only(monkeypatch, implementations, **others):
    """Of an operation's implementations the reference, and these."""
    for name in set(implementations) - {"reference"}:
        monkeypatch.delitem(implementations, name)
    for name, function in others.items():
        monkeypatch.setitem(implementations, name, function)


def bench(shapes, *, check=False, only=(), without=(), **options):
    selection = BenchSelection(tuple(shapes), only=tuple(only), without=tuple(without), **options)
    return kernels.bench_kernels(selection, check=check)


class OwnError(Exception):
    """Of a compiler's own kind, and here without a word."""


def by_pass(rows):
    return {(row["contestant"], row.get("pass")): row for row in rows if "check" not in row and "contestant" in row}


def attending(attend):
    """An implementation of attention."""
    return SimpleNamespace(attend=attend)


@attending
def wrong(q, k, v, options, extras):
    out, lse = reference.attend(q, k, v, options, extras)
    return out + jnp.ones((), q.dtype), lse


@pytest.mark.exhaustive
def test_every_contestant_has_rows(monkeypatch):
    @attending
    def never(*_):
        raise OwnError

    monkeypatch.setattr(contest, "BURST_SECONDS", 0.0)
    only(monkeypatch, IMPLEMENTATIONS, never=never, wrong=wrong)
    here, *rows = bench(["long"], seconds=0.0)
    assert here["dry_run"]
    assert {"driver", "time", "versions"} <= set(here)
    checks = {(row["contestant"], row["pass"]): row for row in rows if "check" in row}
    assert checks["never", "forward"]["why_not"] == "OwnError"
    assert checks["wrong", "forward"]["error"] > 20
    assert not checks["wrong", "forward"]["right"]
    assert checks["reference", "backward"]["right"]
    found = by_pass(rows)
    assert ("never", "forward") not in found
    assert not found["wrong", "forward"]["right"]
    peer = found["jax.nn xla", "backward"]
    assert len(peer["seconds"]) >= 5
    assert peer["spread"][0] <= peer["rate"] <= peer["spread"][1]
    assert set(found["reference", "forward"]["ratios"]) == {"jax.nn xla", "this device"}
    assert {found["this device", of]["unit"] for of in ("matmul", "copy")} == {"TFLOP/s", "GB/s"}


@pytest.mark.exhaustive
def test_names_choose_contestants_and_their_passes(monkeypatch):
    monkeypatch.setattr(contest, "BURST_SECONDS", 0.0)
    only(monkeypatch, IMPLEMENTATIONS, wrong=wrong)
    chosen = bench(["long"], seconds=0.0, only=["reference", "jax.nn"])
    found = by_pass(chosen)
    assert {name for name, _ in found} == {"reference", "jax.nn xla", "jax.nn cudnn", "this device"}
    left = bench(["long"], seconds=0.0, without=["jax.nn", "wrong", "reference backward"])
    assert set(by_pass(left)) == {("reference", "forward"), ("this device", "matmul"), ("this device", "copy")}
    with pytest.raises(UserError, match=r"unknown contestant reference bakward"):
        next(bench([], without=["reference bakward"]))
    with pytest.raises(UserError, match=r"unknown contestant mosaik.*reference"):
        next(bench([], only=["mosaik"]))


@pytest.mark.exhaustive
def test_one_that_fails_in_its_turn_is_out_and_the_others_go_on(monkeypatch):
    """Out of memory beside the others, where there was enough for it alone."""
    monkeypatch.setattr(contest, "BURST_SECONDS", 0.0)
    only(monkeypatch, IMPLEMENTATIONS)
    compiled, calls = operations.BenchPass.compiled, []
    attention = OPERATIONS["attention"]

    def greedy(self, way, given):
        call = compiled(self, way, given)

        def second_fails():
            calls.append(way)
            if calls.count(way) > 6 and way == "jax.nn xla":
                raise MemoryError("out of memory\nand a page of where")
            return call()

        return second_fails

    monkeypatch.setattr(operations.BenchPass, "compiled", greedy)
    found = by_pass(measured(attention, attention.shape("long", dry=True), BenchSelection(seconds=0.0), dry=True))
    assert found["jax.nn xla", "backward"]["why_not"] == "out of memory"
    assert found["reference", "forward"]["rate"] > 0
    assert set(found["reference", "backward"]["ratios"]) == {"this device"}


@pytest.mark.exhaustive
def test_triton_without_what_calls_its_kernels_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    rows = list(bench(["long"], check=True, only=["triton forward"]))[1:]
    assert rows
    assert all("the triton implementation requires jax-triton; run pip install" in row["why_not"] for row in rows)


@pytest.mark.exhaustive
def test_scores_that_are_too_many_are_not_held():
    shape, run = operations.ATTENTION_SHAPES["mistral-7b"], operations._run_attention
    with pytest.raises(ValueError, match=r"jax.nn xla stores all scores several times, 32 GiB each"):
        run(shape, {}, "jax.nn xla", None, None, None)
    small = jnp.zeros((1, 4, 1, 8))
    options = {"causal": True, "window": None}
    assert (
        run(operations.ATTENTION_SHAPES["llama3-8b"], options, "jax.nn xla", small, small, small).shape == small.shape
    )


# ---------------------------------------------------------------- right


@pytest.mark.exhaustive
def test_attention_is_checked_with_every_option(monkeypatch):
    only(monkeypatch, IMPLEMENTATIONS)
    _, *rows = bench(["mistral-7b"], check=True)
    checks = ("as it is", "float16", "full", "window", "segments", "soft cap")
    assert [(row["check"], row["pass"]) for row in rows] == [(c, of) for c in checks for of in ("forward", "backward")]
    assert all(row["right"] and row["error"] < 2 for row in rows)
    works = operations.attention_checks(operations.ATTENTION_SHAPES["mistral-7b"])
    windows = [works[c]().arrays[0].shape[1] for c in ("as it is", "window")]
    assert windows == [1024, 998]


# What an implementation forgets, and the check that must notice.
FORGOTTEN = {
    "window": "window",
    "segment_ids": "segments",
    "soft_cap": "soft cap",
    "causal": "as it is",
}


@pytest.mark.exhaustive
def test_an_implementation_that_forgets_an_option_is_noticed(monkeypatch):
    """At least where that option is checked."""

    def forgetful(forgotten):
        def attend(q, k, v, options, extras):
            if forgotten in ("window", "soft_cap", "causal"):
                options = dataclasses.replace(options, **{forgotten: False if forgotten == "causal" else None})
            else:
                extras = extras._replace(segment_ids=None)
            return reference.attend(q, k, v, options, extras)

        return attending(attend)

    only(monkeypatch, IMPLEMENTATIONS, **{name: forgetful(name) for name in FORGOTTEN})
    _, *rows = bench(["long"], check=True, only=[f"{name} forward" for name in FORGOTTEN])
    wrong = {(row["contestant"], row["check"]) for row in rows if not row["right"]}
    assert wrong >= {*FORGOTTEN.items()}


def test_results_are_written_where_nan_stood(monkeypatch):
    """Otherwise what a kernel leaves out may be right by chance."""
    poisoned, there, places = operations.poisoned, [], []

    def noted(x):
        made = poisoned(x)
        there.append(made.unsafe_buffer_pointer())
        return made

    def read(pair):
        places.extend(y.unsafe_buffer_pointer() for y in pair)
        return pair

    monkeypatch.setattr(operations, "poisoned", noted)
    one = operations.BenchPass(lambda _, x: (x + x, x.astype(jnp.int8)), lambda x: (x + x, x), 1.0, read=read)
    given = operations.BenchWork((jnp.ones((4096,), jnp.bfloat16),), {}, "")
    assert one.error("", given, one.expected(given)) == 0
    assert places == there
    assert bool(jnp.isnan(poisoned(jax.ShapeDtypeStruct((1,), jnp.bfloat16)))[0])
    assert int(poisoned(jax.ShapeDtypeStruct((1,), jnp.uint8))[0]) == 255


def states(change):
    """adam8_update by the reference, its state changed after."""

    class Changed:
        @staticmethod
        def adam8(*given):
            u, state = update_reference.adam8(*given)
            return u, change(state)

    return Changed


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state._replace(m=jnp.full_like(state.m, 127)),
        lambda state: state._replace(v_scale=state.v_scale * jnp.nan),
        lambda state: Moments8(state.v, state.m, state.m_scale, state.v_scale),
    ],
)
def test_a_wrong_state_is_noticed(monkeypatch, change):
    own = OPERATIONS["adam8_update"]
    only(monkeypatch, own.implementations, changed=states(change))
    _, *rows = bench(["llama3-8b up"], operation="adam8_update", check=True)
    right = {row["contestant"]: row["right"] for row in rows}
    assert right == {"changed": False, "reference": True}
    assert "Infinity" not in json.dumps(rows, allow_nan=False)


@pytest.mark.exhaustive
def test_a_wrong_gradient_is_noticed(monkeypatch):
    @attending
    def doubled(*given):
        out, lse = reference.attend(*given)
        return out + (out - jax.lax.stop_gradient(out)), lse

    only(monkeypatch, IMPLEMENTATIONS, doubled=doubled)
    own = OPERATIONS["attention"]
    first = dataclasses.replace(own, checks=lambda shape: {"as it is": operations.attention_checks(shape)["as it is"]})
    monkeypatch.setitem(OPERATIONS, "attention", first)
    _, *rows = bench(["long"], check=True)
    right = {(row["contestant"], row["pass"], row["check"]): row["right"] for row in rows}
    assert {name for name, is_right in right.items() if not is_right} >= {("doubled", "backward", "as it is")}
    assert all(is_right for (name, of, _), is_right in right.items() if (name, of) != ("doubled", "backward"))


def test_an_unknown_shape_names_the_nearest():
    with pytest.raises(UserError, match=r"unknown shape lomg.*long"):
        next(bench(["lomg"]))


@pytest.mark.exhaustive
@pytest.mark.parametrize("operation", ["adam8_update", "int8_add"])
def test_each_operation_is_right_and_takes_its_turns(operation, monkeypatch):
    """All passes against float64, on one shape; of the reference alone, which is quick to compile."""
    monkeypatch.setattr(contest, "BURST_SECONDS", 0.0)
    own = OPERATIONS[operation]
    only(monkeypatch, own.implementations)
    _, *found = bench([next(iter(own.shapes))], operation=operation, seconds=0.0)
    rows = [row for row in found if row["contestant"] == "reference" and "check" not in row]
    assert {row["pass"] for row in rows} == set(own.passes)
    assert all(row["rate"] > 0 and row["right"] for row in rows), rows
    assert all(row["sizes"] and row["ratios"]["this device"] > 0 for row in rows)


@pytest.mark.parametrize("operation", ["adam8_update", "int8_add"])
def test_what_a_run_updates_in_place_is_measured_so(operation):
    """Each call takes the memory of what the one before gave; what they are compared with stays."""
    own = OPERATIONS[operation]
    given = own.work(own.shape("llama3-8b up", dry=True))
    call = given.passes["update"].compiled("reference", given)
    first, second = call(), call()
    assert jax.tree.leaves(first)[-1].is_deleted()
    assert not any(x.is_deleted() for x in jax.tree.leaves((second, given.arrays)))


def test_an_operation_has_to_be_known():
    with pytest.raises(UserError, match=r"unknown operation atention.*attention"):
        next(kernels.bench_kernels(BenchSelection(operation="atention")))
