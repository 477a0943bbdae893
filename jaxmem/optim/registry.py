"""The named optimizers: each a transformation, decoupled weight decay of matrices, and the learning rate.

    tx = optim.muon(learning_rate=1e-3, weight_decay=0.1)
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)
    params = optim.apply(params, updates)

What each keeps beside a weight is in its own module. `axes` names the dimensions of stacked weights, see `by_layer`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jaxmem import config
from jaxmem.optim.adafactor import scale_by_adafactor
from jaxmem.optim.adam_mini import scale_by_adam_mini
from jaxmem.optim.apollo import scale_by_apollo
from jaxmem.optim.clipping import clip
from jaxmem.optim.decay import add_decayed_weights
from jaxmem.optim.galore import scale_by_galore_adam
from jaxmem.optim.muon import scale_by_muon
from jaxmem.optim.promotion import chained
from jaxmem.optim.quantized import scale_by_adam4bit, scale_by_adam8bit, scale_by_lion8bit, trace8bit
from jaxmem.sharding.weights import is_quantized

Rate: TypeAlias = float | optax.Schedule
Transformation: TypeAlias = optax.GradientTransformationExtraArgs


def build(cfg: config.Optimizer, learning_rate: optax.Schedule, axes: Any) -> Transformation:
    """The optimizer that a config names, after clipping. `axes` are the parameters' logical axes."""
    named = NAMED[cfg.name](learning_rate, axes=axes, **cfg.hyperparameters)
    return named if cfg.clip is None else chained(clip(cfg.clip, cfg.clip_by, axes=axes), named)


def adamw(learning_rate: Rate, *, weight_decay: float = 0.1, axes: Any = None, **moments: float) -> Transformation:
    """Two numbers a weight in its own dtype: 8 bytes for float32 (Loshchilov and Hutter, arXiv:1711.05101)."""
    return _chain(_adam(**moments), learning_rate, weight_decay, axes)


def adam(learning_rate: Rate, *, axes: Any = None, **moments: float) -> Transformation:
    """AdamW without weight decay."""
    return adamw(learning_rate, weight_decay=0.0, axes=axes, **moments)


def sgd(learning_rate: Rate, *, momentum: float = 0.0, weight_decay: float = 0.0, axes: Any = None) -> Transformation:
    """Nothing a weight; with momentum one number."""
    scaled = _numbers(optax.trace(momentum)) if momentum else optax.identity()
    return _chain(scaled, learning_rate, weight_decay, axes)


def lion(
    learning_rate: Rate, *, beta1: float = 0.9, beta2: float = 0.99, weight_decay: float = 0.1, axes: Any = None
) -> Transformation:
    """One number a weight; updates are signs (Chen et al., arXiv:2302.06675): a learning rate a third of Adam's or
    less, with that much more weight decay."""
    return _chain(_numbers(optax.scale_by_lion(beta1, beta2)), learning_rate, weight_decay, axes)


def adafactor(learning_rate: Rate, *, weight_decay: float = 0.0, axes: Any = None) -> Transformation:
    return _chain(scale_by_adafactor(axes=axes), learning_rate, weight_decay, axes)


def adam_mini(learning_rate: Rate, *, weight_decay: float = 0.1, axes: Any = None, **moments: float) -> Transformation:
    return _chain(scale_by_adam_mini(**moments, axes=axes), learning_rate, weight_decay, axes)


def muon(learning_rate: Rate, *, weight_decay: float = 0.1, axes: Any = None, **rates: float) -> Transformation:
    return _chain(scale_by_muon(**rates, axes=axes), learning_rate, weight_decay, axes)


def adamw8bit(learning_rate: Rate, *, weight_decay: float = 0.1, axes: Any = None, **own: Any) -> Transformation:
    return _chain(scale_by_adam8bit(**own, axes=axes), learning_rate, weight_decay, axes)


def adamw4bit(learning_rate: Rate, *, weight_decay: float = 0.1, axes: Any = None, **moments: float) -> Transformation:
    return _chain(scale_by_adam4bit(**moments, axes=axes), learning_rate, weight_decay, axes)


def lion8bit(learning_rate: Rate, *, weight_decay: float = 0.1, axes: Any = None, **betas: float) -> Transformation:
    return _chain(scale_by_lion8bit(**betas, axes=axes), learning_rate, weight_decay, axes)


def momentum8bit(
    learning_rate: Rate, *, momentum: float = 0.9, weight_decay: float = 0.0, axes: Any = None
) -> Transformation:
    return _chain(trace8bit(momentum, axes=axes), learning_rate, weight_decay, axes)


def galore_adamw(learning_rate: Rate, *, weight_decay: float = 0.1, axes: Any = None, **own: Any) -> Transformation:
    return _chain(scale_by_galore_adam(**own, axes=axes), learning_rate, weight_decay, axes)


def galore_adamw8bit(learning_rate: Rate, *, weight_decay: float = 0.1, axes: Any = None, **own: Any) -> Transformation:
    return _chain(scale_by_galore_adam(**own, bits=8, axes=axes), learning_rate, weight_decay, axes)


def qgalore(
    learning_rate: Rate, *, similarity: float = 0.4, weight_decay: float = 0.1, axes: Any = None, **own: Any
) -> Transformation:
    scaled = scale_by_galore_adam(**own, bits=8, similarity=similarity, axes=axes)
    return _chain(scaled, learning_rate, weight_decay, axes)


def apollo(learning_rate: Rate, *, weight_decay: float = 0.1, axes: Any = None, **own: Any) -> Transformation:
    return _chain(scale_by_apollo(**own, axes=axes), learning_rate, weight_decay, axes)


def apollo_mini(
    learning_rate: Rate, *, scale: float = 128.0, weight_decay: float = 0.1, axes: Any = None, **own: Any
) -> Transformation:
    return _chain(scale_by_apollo(1, scale=scale, whole=True, **own, axes=axes), learning_rate, weight_decay, axes)


NAMED: dict[str, Callable[..., Transformation]] = {
    one.__name__: one
    for one in (
        adamw, adam, sgd, lion, adafactor, adam_mini, muon, adamw8bit, adamw4bit, lion8bit, momentum8bit,
        galore_adamw, galore_adamw8bit, qgalore, apollo, apollo_mini,
    )
}  # fmt: skip


def _adam(beta1: float = 0.9, beta2: float = 0.95, epsilon: float = 1e-8) -> optax.GradientTransformation:
    return _numbers(optax.scale_by_adam(beta1, beta2, epsilon))


def _numbers(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """What optax keeps beside each weight has its dtype, whatever that of its gradient is; weights in codes count as
    the numbers that they stand for."""

    def init(params: Any) -> Any:
        plain = lambda w: jnp.zeros(w.shape, w.dtype) if is_quantized(w) else w  # noqa: E731
        return tx.init(jax.tree.map(plain, params, is_leaf=is_quantized))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, new = tx.update(updates, state, params)
        return updates, jax.tree.map(lambda new, old: new.astype(old.dtype), new, state)

    return optax.GradientTransformation(init, update)


def _chain(scaled: optax.GradientTransformation, learning_rate: Rate, weight_decay: float, axes: Any) -> Transformation:
    decayed = [add_decayed_weights(weight_decay, axes)] if weight_decay else []
    return chained(scaled, *decayed, optax.scale_by_learning_rate(learning_rate))
