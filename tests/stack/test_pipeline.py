"""The schedule by itself, on one device: every micro-batch sees every layer once and in order, whatever divides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem.stack import Pipeline, StackOptions, apply_stack, stacked

SHAPES = [  # layers, stages, micro-batches, rounds
    (4, 2, 4, 1),
    (4, 4, 1, 1),  # one stage works at a time
    (5, 3, 7, 1),  # neither layers nor micro-batches divide
    (6, 2, 4, 2),  # two of eight places do nothing
    (12, 2, 2, 3),
    (10, 2, 4, 1),  # segments of two layers do not divide five
    (8, 2, 4, 1),
]
REMAT = ["none", "full", "dots", "none", "full", "every_2", "sqrt"]


class Affine(nnx.Module):
    """Does not commute: the order of the layers can be read from the result."""

    def __init__(self, rngs):
        self.a = nnx.Param(1.0 + jax.random.uniform(rngs.params(), (3,)), axes=("norm",))
        self.b = nnx.Param(jax.random.normal(rngs.params(), (3,)), axes=("norm",))


def layer(block, x, own, beside):
    shared, micro = beside
    return jnp.tanh(x * block.a.get_value() + block.b.get_value()) * shared + micro * own, None


def loss(blocks, x, own, beside, way):
    """`own` is each layer's, for each micro-batch; `beside` holds something of all and something of each."""
    apply = lambda x, own, micro: apply_stack(blocks, layer, x, own, (beside[0], micro), options=way)[0]  # noqa: E731
    return jax.vmap(apply)(x, own, beside[1])


def padded(x, slots):
    return jnp.pad(x, [(0, slots - len(x)), *[(0, 0)] * (x.ndim - 1)])


@pytest.mark.parametrize(("shape", "remat"), list(zip(SHAPES, REMAT, strict=True)))
def test_stages_do_what_layers_do(shape, remat):
    layers, stages, micro, rounds = shape
    pipeline = Pipeline(layers, stages, micro, rounds)
    draw = np.random.default_rng(0)
    x, own = (jnp.asarray(draw.normal(size=(micro, *n, 3)), jnp.float32) for n in ((), (layers,)))
    beside = jnp.float32(0.5), jnp.asarray(draw.normal(size=(micro, 3)), jnp.float32)
    graphdef, state = nnx.split(stacked(Affine, layers, nnx.Rngs(0)))
    weights = nnx.to_pure_dict(state)
    target = jnp.asarray(draw.normal(size=x.shape), jnp.float32)

    def plain(weights, x):
        y = loss(nnx.merge(graphdef, weights), x, own, beside, StackOptions(remat))
        return jnp.sum(y * target), y

    def staged(weights, x):
        blocks = nnx.merge(graphdef, jax.tree.map(pipeline.arrange, weights))
        slots = pipeline.slots
        given = padded(own, slots), (beside[0], padded(beside[1], slots))
        y = loss(blocks, padded(x, slots), *given, StackOptions(remat, pipeline))[:micro]
        return jnp.sum(y * target), y

    results = [jax.jit(jax.grad(f, argnums=(0, 1), has_aux=True))(weights, x) for f in (plain, staged)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), *results)


def test_without_micro_batches_layer_follows_layer():
    layers = 6
    pipeline = Pipeline(layers, stages=2, micro_batches=4, rounds=2)
    graphdef, state = nnx.split(stacked(Affine, layers, nnx.Rngs(0)))
    weights = nnx.to_pure_dict(state)
    x, own = jnp.ones((3,)), jnp.arange(3.0 * layers).reshape(layers, 3)
    count = lambda block, x, own, beside: (layer(block, x, own, beside)[0], jnp.sum(x))  # noqa: E731
    beside = jnp.float32(0.5), jnp.ones((3,))
    plain = apply_stack(nnx.merge(graphdef, weights), count, x, own, beside)
    arrange = nnx.merge(graphdef, jax.tree.map(pipeline.arrange, weights))
    staged = apply_stack(arrange, count, x, own, beside, options=StackOptions(pipeline=pipeline))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), plain, staged)


def test_each_layer_has_one_place():
    for layers, stages, micro, rounds in SHAPES:
        pipeline = Pipeline(layers, stages, micro, rounds)
        assert sorted(pipeline.order) == list(range(pipeline.stored))
        assert 0 <= pipeline.stored - layers < stages * rounds
        # What a stage runs in its turn are neighbours in the model.
        order = pipeline.order.reshape(stages, pipeline.group, rounds)
        assert (np.diff(order, axis=1) == 1).all()


def test_rounds_make_the_bubble_smaller():
    assert Pipeline(32, 4, 8).bubble == pytest.approx(3 / 11)
    assert Pipeline(32, 4, 8, rounds=2).bubble == pytest.approx(3 / 19)
    assert Pipeline(32, 4, 1).bubble == pytest.approx(3 / 4)
