"""AdamW, SGD and Lion of optax, with state in the dtype of the weights."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem.config.optimizers import AdamSettings, LionSettings, SgdSettings
from jaxmem.sharding.weights import is_quantized


def scale_by_adam(settings: AdamSettings = AdamSettings(), *, axes: Any = None) -> optax.GradientTransformation:
    """Two moments: 8 bytes per parameter for float32 weights."""
    del axes  # elementwise: a stack is treated like any other array
    return _in_dtype_of_weights(optax.scale_by_adam(settings.beta1, settings.beta2, settings.epsilon))


def scale_by_lion(settings: LionSettings = LionSettings(), *, axes: Any = None) -> optax.GradientTransformation:
    """One moment (Chen et al., arXiv:2302.06675)."""
    del axes
    return _in_dtype_of_weights(optax.scale_by_lion(settings.beta1, settings.beta2))


def trace(settings: SgdSettings = SgdSettings(), *, axes: Any = None) -> optax.GradientTransformation:
    """No state without momentum; with it one number per parameter."""
    del axes
    return _in_dtype_of_weights(optax.trace(settings.momentum)) if settings.momentum else optax.identity()


def _in_dtype_of_weights(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """State in the dtype of each weight, for any dtype of its gradient; quantized weights count as float32."""

    def init(params: Any) -> Any:
        plain = lambda w: jnp.zeros(w.shape, w.dtype) if is_quantized(w) else w  # noqa: E731
        return tx.init(jax.tree.map(plain, params, is_leaf=is_quantized))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, new = tx.update(updates, state, params)
        return updates, jax.tree.map(lambda new, old: new.astype(old.dtype), new, state)

    return optax.GradientTransformation(init, update)
