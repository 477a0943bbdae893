"""Number formats: what runs in which."""

import jax
import jax.numpy as jnp
import pytest

from jaxmem.config import Precision
from jaxmem.precision import compute_dtype, stored


@pytest.mark.parametrize(
    ("asked", "platform", "given"),
    [
        ("auto", "cpu", jnp.float32),
        ("auto", "gpu", jnp.bfloat16),
        ("auto", "tpu", jnp.bfloat16),
        ("float32", "gpu", jnp.float32),
        ("bfloat16", "cpu", jnp.bfloat16),
    ],
)
def test_compute_follows_the_hardware_unless_asked(asked, platform, given):
    assert compute_dtype(Precision(compute=asked), platform) == given


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_weights_rest_as_asked(name):
    weights = stored({"a": {"w": jnp.ones((2, 3))}}, Precision(parameters=name))
    assert {w.dtype.name for w in jax.tree.leaves(weights)} == {name}
