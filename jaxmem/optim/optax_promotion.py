"""optax relies on implicit dtype promotion, which jaxmem turns off."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax


def standard_promotion(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **options)

    return call


def chain(*parts: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """optax.chain for callers with strict dtypes."""
    tx = optax.chain(*parts)
    return optax.GradientTransformationExtraArgs(standard_promotion(tx.init), standard_promotion(tx.update))
