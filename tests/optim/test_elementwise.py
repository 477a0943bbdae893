"""Optimizers of optax whose updates can be computed layer by layer."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxmem.optim import is_elementwise

SHAPE = jax.ShapeDtypeStruct((2, 130, 140), jnp.float32)
PARAMS = {"stack": SHAPE, "bias": SHAPE}
WARMUP = optax.warmup_cosine_decay_schedule(0.0, 0.1, 5, 10)  # the first update is zero


@pytest.mark.parametrize(
    ("tx", "expected"),
    [
        (optax.sgd(0.1, momentum=0.9), True),
        (optax.chain(optax.clip(1.0), optax.adamw(WARMUP)), True),
        (optax.inject_hyperparams(optax.lion)(0.1), True),
        (optax.MultiSteps(optax.adam(0.1), 2), True),
        (optax.partition({"a": optax.adam(0.1), "b": optax.sgd(0.1)}, {"stack": "a", "bias": "b"}), True),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), False),
        (optax.chain(optax.clip_by_global_norm(1e6), optax.lion(WARMUP)), False),
        (optax.MultiSteps(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), 8), False),
        (optax.chain(optax.scale_by_param_block_rms(), optax.sgd(WARMUP)), False),
        (optax.chain(optax.centralize(), optax.sgd(0.1)), False),
        (optax.clip_by_block_rms(1.0), False),
        (optax.apply_if_finite(optax.sgd(0.1), 3), False),
        (optax.lars(0.1), False),
        (optax.lamb(0.1), False),
        (optax.adafactor(0.1), False),
        (optax.adafactor(WARMUP, clipping_threshold=None, multiply_by_parameter_scale=False), False),
        (optax.stateless(lambda g, _: {"stack": g["stack"] + g["bias"], "bias": g["bias"]}), False),
        (optax.stateless(lambda g, _: jax.tree.map(lambda x: jnp.flip(x, 0), g)), False),
    ],
)
def test_updates_that_depend_on_other_values_are_not_elementwise(tx, expected):
    with jax.numpy_dtype_promotion("standard"):
        assert is_elementwise(tx, PARAMS) == expected
