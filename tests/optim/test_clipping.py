"""Gradients no longer than a limit: by whose length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import optim
from tests.optim.conftest import normal, same, updates

AXES = {"w": ("layer", "embed", "mlp"), "b": ("norm",)}
LIMIT = 0.5


def tree(seed):
    return {"w": normal(3, 4, 5, seed=seed), "b": normal(5, seed=seed + 1)}


def length(*leaves):
    return np.sqrt(sum(np.sum(np.square(np.asarray(x, np.float64))) for x in leaves))


def test_by_the_length_of_all_or_what_it_was():
    grads = [tree(0), jax.tree.map(lambda x: 3 * x, tree(1)), tree(2)]
    lengths = [length(*g.values()) for g in grads]
    for by, seen in (("global", lengths), ("previous", [LIMIT, *lengths[:2]])):
        said, _ = updates(optim.clip(LIMIT, by), grads[0], grads)
        for g, clipped, norm in zip(grads, said, seen, strict=True):
            same(clipped, jax.tree.map(lambda x, n=norm: x * min(1, LIMIT / n), g))


def test_parts_are_clipped_by_the_length_of_all():
    tx = optim.clip(LIMIT, "global")
    said, _ = tx.update({"b": jnp.ones(4)}, tx.init({}), norm=jnp.float32(10.0))
    same(said, {"b": jnp.full(4, 0.05)})
    tx = optim.clip(LIMIT, "previous")
    state = optim.record_norm(tx.update({"b": jnp.ones(4)}, tx.init({}))[1], jnp.float32(10.0))
    same(tx.update({"b": jnp.ones(4)}, state)[0], {"b": jnp.full(4, 0.05)})


@pytest.mark.parametrize("alone", [False, True])
def test_each_weight_of_each_layer_by_its_own(alone):
    tx, g = optim.clip(LIMIT, "weight", axes=AXES), tree(0)
    if alone:
        one = [tx.update({**g, "w": x}, tx.init({}), layer=jnp.int32(i))[0] for i, x in enumerate(g["w"])]
        said = {"w": jnp.stack([x["w"] for x in one]), "b": one[0]["b"]}
    else:
        said, _ = tx.update(g, tx.init({}))
    same(said["w"], np.stack([x * min(1, LIMIT / length(x)) for x in g["w"]]))
    same(said["b"], g["b"] * min(1, LIMIT / length(g["b"])))
    assert length(*said.values()) > LIMIT
