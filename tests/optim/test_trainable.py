"""Freezing: in anyone's loop, with any optimizer; what is frozen has neither state nor gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import optim
from jaxmem.errors import UserError

AXES = {"head": {"bias": (None,), "weight": ("embed", "vocab")}, "stack": {"weight": ("layer", None, None)}}
SHAPES = {"head": {"bias": (256,), "weight": (64, 256)}, "stack": {"weight": (3, 64, 64)}}
PARAMS = jax.tree.map(jnp.ones, SHAPES, is_leaf=lambda x: isinstance(x, tuple))


def loss(params, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["stack"]["weight"])
    return jnp.sum((x @ params["head"]["weight"] + params["head"]["bias"]) ** 2)


def step(tx):
    def run(params, state, x):
        updates, state = tx.update(jax.grad(loss)(params, x), state, params)
        return optim.apply_updates(params, updates), state

    return jax.jit(run, donate_argnums=(0, 1))


@pytest.mark.parametrize(
    "make",
    [
        lambda axes: optim.adam(1e-2, axes=axes),
        lambda axes: optim.adamw8bit(1e-2, axes=axes),
        lambda axes: optim.muon(1e-2, axes=axes),
    ],
    ids=["adam", "adamw8bit", "muon"],
)
@pytest.mark.parametrize("patterns", [["head.*"], ["*.bias", "stack.*"]], ids=str)
def test_what_is_trained_moves_as_it_would_alone(make, patterns):
    tx = optim.trainable(make(optim.select_trainable(AXES, patterns)), patterns)
    state = tx.init(PARAMS)
    grads = jax.tree.map(lambda w: jnp.asarray(np.random.default_rng(w.ndim).normal(size=w.shape), w.dtype), PARAMS)
    updates, _ = jax.jit(tx.update)(grads, state, PARAMS)
    chosen = optim.select_trainable(PARAMS, patterns)
    own = make(optim.select_trainable(AXES, patterns))
    alone, _ = jax.jit(own.update)(optim.select_trainable(grads, patterns), own.init(chosen), chosen)
    for u, expected in zip(jax.tree.leaves(updates), jax.tree.leaves(alone, is_leaf=lambda x: x is None), strict=True):
        np.testing.assert_allclose(u, 0.0 if expected is None else expected, rtol=1e-6)
    held = sum(x.size for x in jax.tree.leaves(state))
    assert held <= 2.2 * sum(w.size for w in jax.tree.leaves(chosen)) + 16


def test_the_compiled_step_holds_nothing_of_what_is_frozen():
    """No state among the arguments, and no product that would make a gradient."""
    free, x = optim.adam(1e-2), jnp.ones((8, 64))
    txs = {"frozen": optim.trainable(free, ["head.bias"]), "free": free}
    compiled = {name: step(tx).lower(PARAMS, tx.init(PARAMS), x).compile() for name, tx in txs.items()}
    weights = sum(w.nbytes for w in jax.tree.leaves(PARAMS))
    arguments = {name: one.memory_analysis().argument_size_in_bytes for name, one in compiled.items()}
    assert arguments["frozen"] < weights + x.nbytes + 3 * PARAMS["head"]["bias"].nbytes
    assert arguments["free"] > 3 * weights
    flops = {name: one.cost_analysis()["flops"] for name, one in compiled.items()}
    assert flops["frozen"] < 0.5 * flops["free"]


def test_a_pattern_that_names_nothing():
    with pytest.raises(
        UserError, match=r"optimizer.trainable: haed.\* matches no parameter; expected one of head.bias"
    ):
        optim.trainable(optim.adam(1e-2), ["haed.*"]).init(PARAMS)
