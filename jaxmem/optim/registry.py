"""The named optimizers. Each is a chain of a transformation, decoupled weight decay of matrices, and the learning rate.

    tx = optim.muon(learning_rate=1e-3, weight_decay=0.1)
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)
    params = optim.apply_updates(params, updates)

Names, hyperparameters and the modules that implement them are in `jaxmem.config.optimizers`; an optimizer's module is
imported when it is used. `axes` names the dimensions of stacked weights, see `jaxmem.optim.layers`.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jaxmem import config
from jaxmem.config.optimizers import OPTIMIZERS
from jaxmem.optim.apply import axes_or_unnamed
from jaxmem.optim.clipping import clip
from jaxmem.optim.in_place import update_rows
from jaxmem.sharding import Axes, is_axes
from jaxmem.sharding.weights import is_quantized

Rate: TypeAlias = float | optax.Schedule
Transformation: TypeAlias = optax.GradientTransformationExtraArgs


def build(cfg: config.Optimizer, learning_rate: optax.Schedule, axes: Any) -> Transformation:
    """Gradient clipping and the optimizer that a config names. `axes` are the parameters' logical axes."""
    tx = optimizer(cfg.name)(learning_rate, axes=axes, **cfg.hyperparameters)
    return tx if cfg.clip is None else chain(clip(cfg.clip, cfg.clip_by, axes=axes), tx)


def optimizer(name: str) -> Callable[..., Transformation]:
    """The named optimizer, a function of the learning rate, `axes`, and its hyperparameters by name."""
    entry = OPTIMIZERS[name]

    def make(learning_rate: Rate, *, axes: Any = None, **hyperparameters: Any) -> Transformation:
        settings = entry.settings(**hyperparameters)
        scale = _implementation(entry.implementation)
        weight_decay = getattr(settings, "weight_decay", 0.0)
        decay = [add_decayed_weights(weight_decay, axes)] if weight_decay else []
        return chain(scale(settings, axes=axes), *decay, optax.scale_by_learning_rate(learning_rate))

    keyword = inspect.Parameter.KEYWORD_ONLY
    hyperparameters = [inspect.Parameter(field, keyword, default=default) for field, default in entry.fields.items()]
    rate, axes, _ = inspect.signature(make).parameters.values()
    make.__signature__ = inspect.Signature([rate, *hyperparameters, axes])  # type: ignore[attr-defined]
    make.__name__ = make.__qualname__ = name
    make.__doc__ = entry.summary
    return make


def _implementation(named: str | Callable[..., Any]) -> Callable[..., Any]:
    if callable(named):
        return named
    module, _, function = named.partition(":")
    return getattr(importlib.import_module(f"jaxmem.optim.rules.{module}"), function)


def schedule(cfg: config.Optimizer, steps: int) -> optax.Schedule:
    """The learning rate: a linear warmup from zero, then decay to `min_lr_ratio` of the peak at the last update."""
    peak, rest = cfg.learning_rate, max(steps - cfg.warmup, 1)
    decay: optax.Schedule = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, alpha=cfg.min_lr_ratio),
        "linear": lambda: optax.linear_schedule(peak, peak * cfg.min_lr_ratio, rest),
        "constant": lambda: optax.constant_schedule(peak),
    }[cfg.schedule]()
    if cfg.warmup:
        # Updates are counted from 1, so that the first has a learning rate above 0.
        warmup = optax.linear_schedule(peak / cfg.warmup, peak, max(cfg.warmup - 1, 1))
        decay = optax.join_schedules([warmup, decay], [cfg.warmup])
    return _with_promotion(decay)


def add_decayed_weights(weight_decay: float, axes: Any = None) -> Transformation:
    """Decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101) of matrices, but not of norms and biases.
    Quantized weights are dequantized layer by layer, at most 8 M elements at a time, and added to the update in place.
    With `update(..., layer=i)`, each stacked leaf contains one layer."""

    def update(updates: Any, state: Any, params: Any, **_: Any) -> tuple[Any, Any]:
        def one(names: Axes, u: jax.Array, w: Any) -> jax.Array:
            if len(names) - (names[:1] == ("layer",)) < 2:
                return u
            if not is_quantized(w):
                return u + weight_decay * w
            return update_rows(decayed, u, w, names[len(names) - w.ndim :])

        def decayed(u: jax.Array, w: Any, *_: jax.Array) -> jax.Array:
            return (u.astype(jnp.float32) + weight_decay * w.dequantize(jnp.float32)).astype(u.dtype)

        return jax.tree.map(one, axes_or_unnamed(axes, updates), updates, params, is_leaf=is_axes), state

    return Transformation(lambda _: optax.EmptyState(), update)


def chain(*parts: optax.GradientTransformation) -> Transformation:
    """`optax.chain` that also works if implicit dtype promotion is off."""
    tx = optax.chain(*parts)
    return Transformation(_with_promotion(tx.init), _with_promotion(tx.update))


def _with_promotion(function: Callable[..., Any]) -> Callable[..., Any]:
    """optax relies on implicit dtype promotion, which jaxmem turns off."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return function(*args, **options)

    return call
