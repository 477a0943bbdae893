"""The stop of 16 bits: what underflows stands still, and is rescued by loss scaling or stochastic rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from scripts.course.float16 import SCALE, Case, gradient_sizes, train


@pytest.mark.exhaustive
def test_nearly_all_gradients_are_below_the_smallest_float16_unless_scaled() -> None:
    sizes = gradient_sizes()
    assert np.mean(sizes.astype(np.float16) == 0) > 0.9
    assert np.mean((SCALE * sizes).astype(np.float16) == 0) < 0.01
    assert np.isfinite((SCALE * sizes).astype(np.float16)).all()


@pytest.mark.exhaustive
@jax.numpy_dtype_promotion("standard")
def test_loss_scaling_and_stochastic_rounding_rescue_training() -> None:
    unscaled, scaled = (train(Case(jnp.float16, scale), 100) for scale in (1.0, SCALE))
    assert unscaled[1] == 0
    assert unscaled[0][-1] == unscaled[0][0]
    assert scaled[0][-1] < 0.2 * scaled[0][0]
    nearest, stochastic = (train(Case(stored=jnp.bfloat16, stochastic=s, rate=2e-4), 400) for s in (False, True))
    assert nearest[1] < 0.6 < stochastic[1]
    assert stochastic[0][-1] < 0.7 * nearest[0][-1]
