"""Optimizers of optax whose updates can be computed layer by layer."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxmem.optim import is_elementwise

PARAMS = {"stack": jax.ShapeDtypeStruct((2, 3, 4), jnp.float32), "bias": jax.ShapeDtypeStruct((2, 3, 4), jnp.float32)}


@pytest.mark.parametrize(
    ("tx", "expected"),
    [
        (optax.sgd(0.1, momentum=0.9), True),
        (optax.chain(optax.clip(1.0), optax.adamw(optax.cosine_decay_schedule(0.1, 10))), True),
        (optax.inject_hyperparams(optax.lion)(0.1), True),
        (optax.MultiSteps(optax.adam(0.1), 2), True),
        (optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"stack": "a", "bias": "b"}), True),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), False),
        (optax.clip_by_block_rms(1.0), False),
        (optax.apply_if_finite(optax.sgd(0.1), 3), False),
        (optax.lars(0.1), False),
        (optax.lamb(0.1), False),
        (optax.adafactor(0.1), False),
        (optax.stateless(lambda g, _: {"stack": g["stack"] + g["bias"], "bias": g["bias"]}), False),
        (optax.stateless(lambda g, _: jax.tree.map(lambda x: jnp.flip(x, 0), g)), False),
    ],
)
def test_updates_that_depend_on_other_values_are_not_elementwise(tx, expected):
    with jax.numpy_dtype_promotion("standard"):
        assert is_elementwise(tx, PARAMS) == expected
