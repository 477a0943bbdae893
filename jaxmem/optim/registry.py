"""The named optimizers: each a transformation, decoupled weight decay of matrices, and the learning rate.

    tx = optim.muon(learning_rate=1e-3, weight_decay=0.1)
    state = tx.init(params)
    updates, state = tx.update(grads, state, params)
    params = optim.apply_updates(params, updates)

Names, hyperparameters and the modules that implement them are in `jaxmem.config.optimizers`; an optimizer's module is
imported when it is used. `axes` names the dimensions of stacked weights, see `jaxmem.optim.layers`.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import optax

from jaxmem import config
from jaxmem.config.optimizers import OPTIMIZERS
from jaxmem.optim.clipping import clip
from jaxmem.optim.decay import add_decayed_weights
from jaxmem.optim.optax_promotion import chain

Rate: TypeAlias = float | optax.Schedule
Transformation: TypeAlias = optax.GradientTransformationExtraArgs


def build(cfg: config.Optimizer, learning_rate: optax.Schedule, axes: Any) -> Transformation:
    """The optimizer that a config names, after clipping. `axes` are the parameters' logical axes."""
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
    own = [inspect.Parameter(field, keyword, default=default) for field, default in entry.fields.items()]
    rate, axes, _ = inspect.signature(make).parameters.values()
    make.__signature__ = inspect.Signature([rate, *own, axes])  # type: ignore[attr-defined]
    make.__name__ = make.__qualname__ = name
    make.__doc__ = entry.summary
    return make


def _implementation(named: str | Callable[..., Any]) -> Callable[..., Any]:
    if callable(named):
        return named
    module, _, function = named.partition(":")
    return getattr(importlib.import_module(f"jaxmem.optim.rules.{module}"), function)
