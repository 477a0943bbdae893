"""A table updated in slices is the table updated as a whole: whatever the rule, with its state, rounded alike."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import optim
from jaxmem.config.sections import Precision
from jaxmem.optim.groups import ParameterGroup
from jaxmem.optim.transformation import chain
from jaxmem.sharding.trees import select
from jaxmem.sharding.weights import Storage, store
from jaxmem.step.update_piecewise import VocabUpdate
from tests.optim.conftest import normal, same

AXES = {"head": ("embed", "vocab"), "rows": ("vocab", "embed")}
EPSILON = {"epsilon": 1e-3}


def built(name, own, precision):
    """(axes -> optimizer), weights at rest, and new state."""

    def optimizer_for(axes):
        tx = chain(optim.clip(0.5, "weight", axes=axes), optim.optimizer(name)(0.1, axes=axes, **own))
        return optim.with_remainder(tx, 8, axes) if precision.master == "remainder8" else tx

    params = {"head": normal(64, 512), "rows": normal(512, 64, seed=1)}
    params = jax.tree.map(lambda w, axes: store(w, axes, Storage(precision)), params, AXES)
    return optimizer_for, params, optimizer_for(AXES).init(params)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "own", "precision", "in_slices"),
    [
        ("adamw", EPSILON, {"parameters": "bfloat16", "rounding": "stochastic"}, True),
        ("adafactor", {}, {}, True),
        ("adam_mini", EPSILON, {}, True),
        ("adamw8bit", EPSILON, {"parameters": "bfloat16", "master": "remainder8"}, True),
        ("apollo", {**EPSILON, "project_embeddings": True}, {}, True),
        ("apollo_mini", {**EPSILON, "project_embeddings": True}, {"parameters": "int8"}, True),
        ("galore_adamw", {**EPSILON, "project_embeddings": True}, {}, False),  # needs the gradient whole, and gets it
    ],
)
def test_an_update_in_slices_is_that_of_the_whole(name, own, precision, in_slices):
    """Of weights in int8 by the kernel, too."""
    precision = Precision(**precision)
    kernel = "triton" if precision.parameters == "int8" else "none"
    optimizer_for, params, state = built(name, own, precision)
    axes_of_state = optim.state_axes(optimizer_for(AXES), params, AXES)
    grads = [{"head": normal(64, 512, seed=s, scale=0.1), "rows": normal(512, 64, seed=9 + s)} for s in (2, 3)]
    slices_seen = []

    @jax.jit
    def whole(params, state, grads, key):
        key = key if precision.stochastic_rounding else None
        tx = optimizer_for(AXES)
        updates, state = tx.update(grads, state, params)
        return optim.apply_updates(params, updates, key, AXES), state

    @jax.jit
    def sliced(params, state, grads, key):
        key = key if precision.stochastic_rounding else None
        write, found = partial(optim.apply_updates, key=key, kernel=kernel), []
        every = ParameterGroup(optimizer_for(AXES), AXES, axes_of_state, lambda _: None)
        for leaf, axes in AXES.items():
            dim = axes.index("vocab")

            def gradient(_, slices=None, j=None, leaf=leaf, dim=dim):
                slices_seen.append(slices)
                return grads[leaf] if slices is None else slices.read(grads[leaf], dim, j)

            own = select(params, {leaf: 0})
            part = every.part(own, optimizer_for)
            table = VocabUpdate(part, own, part.state(state), jnp.dtype(jnp.float32), 128)
            found.append(table.update(gradient, write, None))
            squares = table.squares(gradient)
            found[-1] = (*found[-1], squares)
        weights = {leaf: new[leaf] for leaf, (new, *_) in zip(AXES, found, strict=True)}
        return weights, [one for _, one, *_ in found], [squares for *_, squares in found], [one[2] for one in found]

    params, state = whole(params, state, grads[0], jax.random.key(0))
    expected, after = whole(params, state, grads[1], jax.random.key(1))
    weights, states, squares, summed = sliced(params, state, grads[1], jax.random.key(1))
    for leaf, one, *sums in zip(AXES, states, squares, summed, strict=True):
        mine, theirs = by_name(one), by_name(after)
        assert any(leaf in name for name in mine)
        near(mine, {name: theirs[name] for name in mine})
        same(sums, [jnp.sum(jnp.square(grads[1][leaf]))] * 2)
    near(weights, expected)
    assert any(one is not None and one.count == 4 for one in slices_seen)
    assert (None in slices_seen) == (not in_slices)
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), weights, params)
    assert all(jax.tree.leaves(moved))


def by_name(tree):
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def near(one, two):
    """But for codes on the border of two, where sums in another order decide."""

    def compare(a, b):
        assert a.shape == b.shape
        if jnp.issubdtype(a.dtype, jnp.integer):
            assert np.mean(a != b) < 0.01
        else:
            np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (a, b)), rtol=2e-5, atol=2e-6)

    assert jax.tree.structure(one) == jax.tree.structure(two)
    jax.tree.map(compare, one, two)
