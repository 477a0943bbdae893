"""Losses and their gradients compared with float64, for logits that overflow, and for sharded classes."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.config import load_config
from jaxmem.models import losses
from jaxmem.models.losses import cross_entropy
from jaxmem.sharding.arrays import constrain
from jaxmem.sharding.layout import layout_for


def draw(*shape, seed=0, scale=1.0):
    return np.random.default_rng(seed).normal(size=shape) * scale


def log_sum(x, axis=-1):
    top = x.max(axis=axis, keepdims=True)
    return np.log(np.exp(x - top).sum(axis=axis)) + np.squeeze(top, axis)


def softmax(x):
    return np.exp(x - log_sum(x)[..., None])


def slope(function, x, step=1e-6):
    """The gradient by central differences, in float64."""
    result = np.zeros_like(x)
    for place in np.ndindex(x.shape):
        moved = np.zeros_like(x)
        moved[place] = step
        result[place] = (function(x + moved) - function(x - moved)) / (2 * step)
    return result


def agree(loss, reference, *inputs, rtol=2e-6):
    """Values, and gradients in every input of a weighted sum, of float32 against float64."""
    inputs = [x.astype(np.float32).astype(np.float64) for x in inputs]
    narrow = [jnp.asarray(x, jnp.float32) for x in inputs]
    values = np.asarray(jax.jit(loss)(*narrow))
    assert values.dtype == np.float32
    np.testing.assert_allclose(values, reference(*inputs), rtol=rtol, atol=rtol)
    weights = draw(*values.shape, seed=9)

    def weighed(*xs):
        return jnp.sum(loss(*xs) * jnp.asarray(weights, jnp.float32))

    for i, ours in enumerate(jax.jit(jax.grad(weighed, argnums=tuple(range(len(inputs)))))(*narrow)):
        theirs = slope(lambda x: np.sum(reference(*inputs[:i], x, *inputs[i + 1 :]) * weights), inputs[i])  # noqa: B023
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5 * np.abs(theirs).max())


def entropy(logits, labels, label_smoothing=0.0, z_loss=0.0):
    """Cross entropy with the smoothed labels written out."""
    classes = logits.shape[-1]
    target = np.eye(classes)[labels] * (1 - label_smoothing) + label_smoothing / classes
    partition = log_sum(logits)
    return -(target * (logits - partition[..., None])).sum(-1) + z_loss * partition**2


def pairs(left, right, mask, temperature):
    """Contrastive loss by loops, over the rows that count."""
    real = np.flatnonzero(mask)
    cosine = {
        (i, j): left[i] @ right[j] / np.linalg.norm(left[i]) / np.linalg.norm(right[j]) / temperature
        for i in real
        for j in real
    }
    result = []
    for i in real:
        forth = log_sum(np.array([cosine[i, j] for j in real])) - cosine[i, i]
        back = log_sum(np.array([cosine[j, i] for j in real])) - cosine[i, i]
        result.append((forth + back) / 2)
    return np.array(result)


@partial(jax.jit, static_argnames="temperature")
def paired(left, right, mask, temperature=0.3):
    left, right = jnp.asarray(left, jnp.float32), jnp.asarray(right, jnp.float32)
    return losses.contrastive(losses.similarities(left, right, jnp.asarray(mask, jnp.float32), temperature))


# ------------------------------------------------------------------ cross entropy

LABELS = np.random.default_rng(1).integers(0, 7, (3, 4)).astype(np.int32)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_cross_entropy(smoothing, z_loss):
    options = {"label_smoothing": smoothing, "z_loss": z_loss}
    agree(
        lambda x: cross_entropy(x, jnp.asarray(LABELS), **options),
        lambda x: entropy(x, LABELS, **options),
        draw(3, 4, 7, scale=3.0),
    )


@pytest.mark.parametrize("label", [0, 6])
def test_cross_entropy_of_logits_in_the_ten_thousands(label):
    logits = draw(5, 7, scale=1e4).astype(np.float32)
    labels = np.full(5, label, np.int32)
    value, gradient = jax.jit(
        jax.value_and_grad(lambda x: jnp.sum(cross_entropy(x, jnp.asarray(labels), label_smoothing=0.1)))
    )(logits)
    np.testing.assert_allclose(value, entropy(logits.astype(np.float64), labels, 0.1).sum(), rtol=1e-6)
    target = np.eye(7)[labels] * 0.9 + 0.1 / 7
    np.testing.assert_allclose(gradient, softmax(logits.astype(np.float64)) - target, atol=1e-6)


def test_equal_logits_cost_the_logarithm_of_the_classes():
    of = jax.jit(lambda x: cross_entropy(x, jnp.zeros(2, jnp.int32), label_smoothing=0.3))
    for size in (-1e4, 0.0, 1e4):
        loss = of(jnp.full((2, 16), size))
        np.testing.assert_allclose(loss, np.log(16), rtol=2e-4)  # 1e4 has three decimals in float32


def test_z_loss_is_least_for_a_partition_of_one():
    """Shifting all logits leaves the loss alone but for the z term, which is least where log(partition) is zero."""
    logits = jnp.asarray(draw(7), jnp.float32)
    label = jnp.asarray(2, jnp.int32)
    shift = jax.jit(lambda by, z: cross_entropy(logits + by, label, z_loss=z), static_argnums=1)
    best = -log_sum(np.asarray(logits))
    np.testing.assert_allclose(shift(3.0, 0.0), shift(best, 0.0), rtol=1e-5)
    np.testing.assert_allclose(shift(best, 0.5), shift(best, 0.0), rtol=1e-5)
    assert shift(best + 1.0, 0.5) == pytest.approx(float(shift(best, 0.0)) + 0.5, rel=1e-5)


def test_narrow_logits_are_summed_in_float32():
    """A bfloat16 sum would stop at 256 of the 4096 equal terms."""
    logits, labels = jnp.zeros((2, 4096), jnp.bfloat16), jnp.zeros(2, jnp.int32)
    value, gradient = jax.jit(jax.value_and_grad(lambda x: jnp.sum(cross_entropy(x, labels))))(logits)
    np.testing.assert_allclose(value, 2 * np.log(4096), rtol=1e-6)
    assert value.dtype == jnp.float32
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(gradient[:, 1:].astype(jnp.float32), 1 / 4096, rtol=0.01)


# ------------------------------------------------------------------ the others


def test_contrastive():
    agree(
        lambda a, b: paired(a, b, np.ones(6)), lambda a, b: pairs(a, b, np.ones(6), 0.3), draw(6, 5), draw(6, 5, seed=1)
    )


def test_padding_rows_are_negatives_of_no_row():
    mask = np.array([1, 0, 1, 1, 0, 1])
    left, right = draw(6, 5).astype(np.float32), draw(6, 5, seed=1).astype(np.float32)

    def counted(x):
        each = paired(x, right, mask)
        return jnp.sum(each * jnp.asarray(mask, jnp.float32)), each

    gradient, whole = map(np.asarray, jax.jit(jax.grad(counted, has_aux=True))(left))
    np.testing.assert_allclose(whole[mask > 0], pairs(left, right, mask, 0.3), rtol=1e-5)
    assert np.all(np.isfinite(whole))
    assert not np.any(gradient[mask == 0])
    assert np.all(np.any(gradient[mask == 1] != 0, axis=1))


def test_contrastive_is_symmetric_and_scale_invariant():
    left, right, mask = draw(6, 5), draw(6, 5, seed=1), np.ones(6)
    one = paired(left, right, mask)
    swapped = paired(7 * right, left / 3, mask)
    np.testing.assert_allclose(one, swapped, rtol=1e-5)
    turned = paired(left[::-1], right[::-1], mask)
    np.testing.assert_allclose(one[::-1], turned, rtol=1e-5)


def test_contrastive_of_orthogonal_pairs():
    """Of B such pairs each finds its own with probability 1 / (1 + (B - 1) exp(-1 / temperature))."""
    for size, temperature in ((4, 1.0), (8, 0.1)):
        same = paired(np.eye(size), 2 * np.eye(size), np.ones(size), temperature=temperature)
        np.testing.assert_allclose(same, np.log1p((size - 1) * np.exp(-1 / temperature)), rtol=1e-5, atol=1e-6)


def test_an_embedding_of_zeros_has_a_gradient():
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(paired(x, np.eye(3, 4), np.ones(3)))))(jnp.zeros((3, 4)))
    assert np.all(np.isfinite(gradient))


# ------------------------------------------------------------------ split over devices


def collectives(compiled):
    """Name and number of elements of each collective."""
    found = re.findall(
        r" = \(?\w+\[([\d,]*)\][^=]*? (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)[\w-]*\(",
        compiled.as_text(),
    )
    return {(name, int(np.prod([int(n) for n in shape.split(",") if n]))) for shape, name in found}


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3}])
def test_sharded_classes_are_reduced_in_place(options):
    rows, classes = 24, 64
    cfg = load_config({"name": "x", "model": {"preset": "tiny"}, "mesh": {"tensor": 8}, "train": {"steps": 1}})
    layout = layout_for(cfg, jax.devices()[:8])
    place = layout.sharding("activations", ("batch", "time", "vocab"), (2, rows // 2, classes))
    logits = jnp.asarray(draw(2, rows // 2, classes, scale=3.0), jnp.float32)
    labels = jnp.asarray(np.random.default_rng(3).integers(0, classes, (2, rows // 2)), jnp.int32)

    def loss(x):
        return jnp.sum(cross_entropy(constrain(x, "batch", "time", "vocab"), labels, **options))

    expected = jax.jit(jax.value_and_grad(loss))(logits)
    with layout:
        compiled = (
            jax.jit(jax.value_and_grad(loss), out_shardings=(None, place))
            .lower(jax.ShapeDtypeStruct(logits.shape, logits.dtype, sharding=place))
            .compile()
        )
    value, gradient = compiled(jax.device_put(logits, place))
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    np.testing.assert_allclose(gradient, expected[1], atol=1e-6)
    found = collectives(compiled)
    assert {name for name, _ in found} == {"all-reduce"}, found
    assert max(size for _, size in found) <= rows  # a number or a few for each position, never a logit for each class
