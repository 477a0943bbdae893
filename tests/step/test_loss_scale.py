"""Loss scaling and stochastic rounding in the step: what is left out, what still moves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import optim
from jaxmem.checkpoint.saved_state import SavedState
from jaxmem.errors import UserError
from jaxmem.quant.precision import rounded
from jaxmem.step import state as states
from jaxmem.step.programs import program
from tests.step.conftest import Trained, config

HALF = {"compute": "float16", "loss_scale": "dynamic"}


def test_a_dynamic_scale_halves_at_an_overflow_and_doubles_after_enough_sound_updates(monkeypatch):
    monkeypatch.setattr(states, "GROWTH_INTERVAL", 3)
    state, seen = states.initial_loss_scale("dynamic"), []
    for finite in (True, True, True, False, True, False, True, True, True):
        state = states.next_loss_scale(state, jnp.asarray(finite), dynamic=True)
        seen.append(float(state.scale) / states.INITIAL_SCALE)
    assert seen == [1, 1, 2, 1, 1, 0.5, 0.5, 0.5, 1]
    assert int(state.skipped) == 2


def test_a_scale_never_falls_below_one_and_a_fixed_one_never_moves():
    state = states.initial_loss_scale(2.0)
    for _ in range(3):
        state = states.next_loss_scale(state, jnp.asarray(False), dynamic=True)
    assert float(state.scale) == states.MIN_SCALE
    fixed = states.next_loss_scale(states.initial_loss_scale(1024.0), jnp.asarray(False), dynamic=False)
    assert (float(fixed.scale), int(fixed.skipped)) == (1024.0, 1)


@pytest.mark.parametrize(("setting", "expected"), [(256.0, 256.0), ("dynamic", 1024.0)])
def test_a_resumed_run_has_the_constant_scale_of_its_config(setting, expected):
    built = program(config(precision={**HALF, "loss_scale": setting}), jax.devices()[:1])
    state = built.initialise()
    before = dataclasses.replace(state.loss_scale, scale=jnp.float32(1024.0))
    saved = dataclasses.replace(state, loss_scale=before)
    resumed = SavedState(built).complete(saved, built.cfg.model_dump(mode="json"))
    assert float(resumed.loss_scale.scale) == expected


@pytest.mark.exhaustive
def test_float16_with_a_scale_learns_what_float32_learns():
    wide = Trained(config(), updates=2)
    half = Trained(config(precision={**HALF, "loss_scale": 256.0}, mesh={"fsdp": 4}), devices=4, updates=2)
    for mine, exact in zip(half.metrics, wide.metrics, strict=True):
        assert mine["loss"] == pytest.approx(exact["loss"], rel=2e-3)
        assert mine["gradient_norm"] == pytest.approx(exact["gradient_norm"], rel=2e-2)
    assert half.metrics[-1]["skipped"] == 0


@pytest.mark.exhaustive
def test_the_scale_of_a_loss_of_pairs_does_not_depend_on_the_tokens_of_a_pair():
    data = {"source": "preference", "path": "pairs.jsonl", "sequence_length": 24, "packing": False}
    precision = {**HALF, "loss_scale": 2.0**-12}  # near the least that float16 can hold, without a factor of 1 / 48
    wide = Trained(config(objective="dpo", data=data), updates=1)
    half = Trained(config(objective="dpo", data=data, precision=precision), updates=1)
    assert half.metrics[0]["gradient_norm"] == pytest.approx(wide.metrics[0]["gradient_norm"], rel=5e-2)


@pytest.mark.exhaustive
def test_quantized_weights_computed_in_float16_learn_what_they_learn_in_float32():
    """Gradients are not stored in float16: AdamW squares them."""
    adamw = {"epsilon": 1e-8}  # a second moment of zero divides by this
    wide = Trained(config(precision={"parameters": "uint5"}, optimizer=adamw), updates=2)
    in_half = {"parameters": "uint5", "compute": "float16"}
    half = Trained(config(precision=in_half, optimizer=adamw), updates=2, begin=wide)
    for mine, exact in zip(half.metrics, wide.metrics, strict=True):
        assert mine["loss"] == pytest.approx(exact["loss"], rel=1e-2)


@pytest.mark.exhaustive
def test_a_dynamic_scale_finds_what_float16_can_hold():
    found = Trained(config(precision=HALF), updates=6).metrics
    assert not np.isfinite(found[0]["gradient_norm"])  # a norm of 12 times 2^15 is too much
    assert np.isfinite(found[-1]["gradient_norm"])
    assert 0 < found[-1]["skipped"] == found[-2]["skipped"] < 5


def test_an_update_that_overflows_changes_nothing_but_the_scale():
    trained = Trained(config(precision={**HALF, "loss_scale": 1e30}), updates=1)
    assert trained.metrics[0]["skipped"] == 1
    after, before = trained.state, trained.begun
    for mine, theirs in zip(jax.tree.leaves(after.params), jax.tree.leaves(before.params), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    for mine, theirs in zip(jax.tree.leaves(after.opt_state), jax.tree.leaves(before.opt_state), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert int(after.step) == 1


@pytest.mark.exhaustive
def test_small_updates_of_bfloat16_weights_are_lost_but_for_stochastic_rounding():
    weights, updates = {"w": jnp.ones((8, 64, 64), jnp.bfloat16)}, {"w": jnp.full((8, 64, 64), -1e-4)}
    axes = {"w": ("layer", "embed", "mlp")}
    nearest = drawn = weights
    for step in range(10):
        nearest = optim.apply_updates(nearest, updates)
        drawn = optim.apply_updates(drawn, updates, jax.random.key(step), axes)
    assert float(jnp.mean(nearest["w"].astype(jnp.float32))) == 1
    assert float(jnp.mean(drawn["w"].astype(jnp.float32))) == pytest.approx(1 - 1e-3, abs=5e-5)


@pytest.mark.exhaustive
def test_a_layer_alone_is_rounded_as_among_all():
    w, key = jax.random.normal(jax.random.key(0), (3, 8, 8)), jax.random.key(1)
    every = optim.apply_updates({"w": w.astype(jnp.bfloat16)}, {"w": w * 1e-3}, key, {"w": ("layer", "embed", "mlp")})[
        "w"
    ]
    own = jax.random.fold_in(optim.leaf_key(key, (jax.tree_util.DictKey("w"),)), 2)
    alone = rounded(w[2].astype(jnp.bfloat16).astype(jnp.float32) + w[2] * 1e-3, jnp.bfloat16, own)
    np.testing.assert_array_equal(every[2].astype(jnp.float32), alone.astype(jnp.float32))


@pytest.mark.exhaustive
def test_stochastically_rounded_weights_are_the_same_on_every_mesh():
    bfloat16 = {"precision": {"parameters": "bfloat16", "rounding": "stochastic"}}
    alone = Trained(config(**bfloat16), updates=1)
    split = Trained(config(mesh={"fsdp": 4, "tensor": 2}, **bfloat16), devices=8, updates=1, begin=alone)
    mine, theirs = (np.concatenate([np.ravel(w) for w in jax.tree.leaves(x.params)]) for x in (alone, split))
    assert (mine != theirs).mean() < 1e-3  # sums in another order, near a draw


@pytest.mark.parametrize(
    ("precision", "kernel", "said"),
    [
        (
            {"rounding": "stochastic"},
            "none",
            "rounding=stochastic does not support precision.parameters=float32",
        ),
        ({"loss_scale": "dynamic"}, "none", "precision.loss_scale=dynamic requires precision.compute=float16"),
        (
            {"parameters": "int4"},
            "triton",
            "kernel=triton does not support .*adamw with .*=int4; use .*adamw8bit or .*=int8",
        ),
        (
            {"parameters": "int8", "rounding": "nearest"},
            "triton",
            "kernel=triton with .*=int8 does not support precision.rounding=nearest",
        ),
    ],
)
def test_what_does_nothing_is_refused(precision, kernel, said):
    with pytest.raises(UserError, match=said):
        config(precision=precision, optimizer={"kernel": kernel})
