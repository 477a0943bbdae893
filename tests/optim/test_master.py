"""A float32 copy of the weights: what bfloat16 would lose, and where the copy lies under every ZeRO stage."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem import optim
from jaxmem.estimate.state import bytes_on_device
from jaxmem.step.programs import program
from tests.step.conftest import Trained, config

MIXED = {"parameters": "bfloat16", "master": "float32"}


@pytest.mark.exhaustive
def test_the_copy_takes_the_steps_that_float32_weights_would_take() -> None:
    draw = np.random.default_rng(0)
    weights = {"w": jnp.asarray(draw.normal(size=(64, 32)), jnp.bfloat16), "b": jnp.zeros(32, jnp.bfloat16)}
    with jax.numpy_dtype_promotion("standard"):
        tx = optax.adamw(1e-3, weight_decay=0.1)
        mastered = optim.with_master(tx)
        state = mastered.init(weights)
        plain = state.master
        reference = tx.init(plain)
        for _ in range(20):
            grads = jax.tree.map(lambda w: jnp.asarray(draw.normal(size=w.shape), jnp.bfloat16), weights)
            updates, state = mastered.update(grads, state, weights)
            weights = optim.apply_updates(weights, updates)
            wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
            updates, reference = tx.update(wide, reference, plain)
            plain = optim.apply_updates(plain, updates)
    jax.tree.map(np.testing.assert_array_equal, state.master, plain)
    jax.tree.map(lambda w, m: np.testing.assert_array_equal(w, m.astype(jnp.bfloat16)), weights, plain)


@pytest.mark.exhaustive
def test_small_updates_are_not_lost() -> None:
    """Each is a hundredth of bfloat16's last bit."""

    def after(tx: optax.GradientTransformation) -> float:
        weights = jnp.ones((), jnp.bfloat16)
        state = tx.init(weights)
        for _ in range(1000):
            updates, state = tx.update(jnp.ones((), jnp.bfloat16), state, weights)
            weights = optim.apply_updates(weights, updates)
        return float(weights)

    assert after(optax.sgd(1e-4)) == 1.0
    assert after(optim.with_master(optax.sgd(1e-4))) == pytest.approx(0.9, rel=2**-8)


@pytest.fixture(scope="module")
def alone() -> Trained:
    return Trained(config(precision=MIXED))


@pytest.mark.exhaustive
@pytest.mark.parametrize("zero", [1, 3])
def test_every_zero_stage_trains_master_weights_as_one_device(zero: int, alone: Trained) -> None:
    """To the rounding of gradients to bfloat16, which each stage adds up in its own order."""
    split = Trained(config(precision=MIXED, mesh={"fsdp": 4}, zero=zero), 4, begin=alone)
    split.agrees_with(alone, rtol=1e-2, atol=1e-2)
    rounded = jax.tree.map(lambda m: np.asarray(m.astype(jnp.bfloat16)), split.state.opt_state.master)
    jax.tree.map(np.testing.assert_array_equal, rounded, split.params)


@pytest.mark.parametrize(("zero", "weights", "optimizer"), [(0, 2, 12), (1, 2, 3), (2, 2, 3), (3, 0.5, 3)])
def test_the_copy_lies_as_the_optimizer_s_state(zero: int, weights: float, optimizer: float) -> None:
    built = program(config(precision=MIXED, mesh={"fsdp": 4}, zero=zero), jax.devices()[:4])
    count = built.model.parameter_count
    assert bytes_on_device(built.spec.state.params) == pytest.approx(weights * count, rel=0.02)
    assert bytes_on_device(built.spec.state.opt_state) == pytest.approx(optimizer * count, rel=0.02)
