"""Weights in codes under projected and 8-bit optimizers: trained in full, through low-rank updates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import optim
from jaxmem.quant import quantize
from tests.optim.conftest import normal

AXES = {"w": ("layer", "embed", "mlp")}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "form", "kernel", "own", "most"),
    [
        ("qgalore", "int8", "triton", {"rank": 4, "refresh_every": 5, "scale": 1.0}, 0.2),
        ("galore_adamw8bit", "int4", "none", {"rank": 4, "refresh_every": 5, "scale": 1.0}, 0.4),
        ("apollo_mini", "int8", "none", {"scale": 4.0}, 0.2),
    ],
)
def test_quantized_weights_converge(name, form, kernel, own, most):
    """A matrix of full rank, through updates of rank 4 and less: bases change, weights add up, as near as codes can."""
    aim = normal(2, 32, 64, scale=0.1)
    params = {"w": quantize(jnp.zeros((2, 32, 64)).at[:, 0].set(0.1), form, 32, -2)}
    tx = getattr(optim, name)(1e-2, weight_decay=0.0, axes=AXES, **own)

    @jax.jit
    def step(params, state, key):
        grads = {"w": params["w"].dequantize(jnp.float32) - aim}
        updates, state = tx.update(grads, state, params)
        return optim.apply_updates(params, updates, key, AXES, kernel=kernel), state

    state = jax.jit(tx.init)(params)
    for number in range(150):
        params, state = step(params, state, jax.random.key(number))
    left = np.square(params["w"].dequantize(jnp.float32) - aim).mean() / np.square(aim).mean()
    assert left < most
