"""Gradients of gradients: of plain JAX they are right, a kernel says that it has none. So it does of a first gradient
where an operation has none by kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.kernels import Moments8, adam8_update, attention

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((6, 16)), jnp.float32)
STATE = Moments8(*[jnp.ones((6, 16), jnp.uint8)] * 2, *[jnp.ones((6, 1))] * 2)


# operation: a loss of X by an implementation; which have one gradient only, and which have none.
LOSSES = {
    "attention": (
        lambda x, way: attention(*[x.reshape(1, 6, 2, 8)] * 3, causal=True, implementation=way),
        ("triton",),
        ("blockwise",),
    ),
}
NONE = {
    "adam8_update": (
        lambda x, way: adam8_update(x, STATE, jnp.ones(2), block_size=16, implementation=way)[0],
        {"triton": "adam8_update"},
    ),
}


def twice(loss, way):
    first = jax.grad(lambda x: jnp.sum(loss(x, way) ** 2))
    return jax.grad(lambda x: jnp.sum(jnp.sin(first(x))))


@pytest.mark.exhaustive
@pytest.mark.parametrize("operation", LOSSES)
def test_second_gradients(operation):
    loss, once, others = LOSSES[operation]
    for way in once:
        with pytest.raises(ValueError, match=f"^{operation}\\w*: a kernel has no gradient; use impl.*'reference'"):
            jax.eval_shape(twice(loss, way), X)
    wanted, *found = jax.jit(lambda x: [twice(loss, way)(x) for way in ("reference", *others)])(X)
    assert np.abs(wanted).max() > 1e-3
    for got in found:
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("operation", NONE)
def test_operations_without_a_gradient_by_kernels(operation):
    loss, names = NONE[operation]
    for way, name in names.items():
        with pytest.raises(ValueError, match=f"^{name}: a kernel has no gradient; use implementation='reference'"):
            jax.eval_shape(jax.grad(lambda x, way=way: jnp.sum(loss(x, way))), X)
    g = jax.jit(jax.grad(lambda x: jnp.sum(loss(x, "reference"))))(X)
    assert np.isfinite(g).all()
    assert g.any()
