"""The named optimizers. Each is a chain of a transformation, decoupled weight decay of matrices, and the learning rate.

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
from typing import Any

import jax.numpy as jnp
import optax

from jaxmem import config
from jaxmem.config.optimizers import OPTIMIZERS, Entry
from jaxmem.optim.clipping import clip
from jaxmem.optim.transformation import Rate, Transformation, chain, with_learning_rate, with_promotion
from jaxmem.typing import AxesTree


def build(cfg: config.Optimizer, learning_rate: optax.Schedule, axes: AxesTree) -> Transformation:
    """Gradient clipping and the optimizer that a config names. `axes` are the parameters' logical axes."""
    tx = optimizer(cfg.name)(learning_rate, axes=axes, **cfg.hyperparameters)
    return tx if cfg.clip is None else chain(clip(cfg.clip, cfg.clip_by, axes=axes), tx)


def optimizer(name: str) -> Callable[..., Transformation]:
    """The named optimizer, a function of the learning rate, its hyperparameters by name, and `axes`."""
    entry = OPTIMIZERS[name]

    def make(learning_rate: Rate, *, axes: AxesTree = None, **hyperparameters: Any) -> Transformation:
        settings = entry.settings(**hyperparameters)
        scale = _transformation(entry)(settings, axes=axes)
        return with_learning_rate(scale, learning_rate, getattr(settings, "weight_decay", 0.0), axes)

    make.__name__ = make.__qualname__ = name
    # `help` shows the hyperparameters with their defaults, and `optax.inject_hyperparams` reads them.
    hyperparameters = inspect.signature(entry.settings).parameters
    learning_rate = inspect.Parameter("learning_rate", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    axes = inspect.Parameter("axes", inspect.Parameter.KEYWORD_ONLY, default=None)
    make.__signature__ = inspect.Signature([learning_rate, *hyperparameters.values(), axes])  # type: ignore[attr-defined]
    descriptions = {field: config.Optimizer.model_fields[field].description for field in hyperparameters}
    lines = [f"    {argument}: {text}" for argument, text in {**_RATE, **descriptions, **_AXES}.items()]
    make.__doc__ = "\n".join([entry.summary, "", "Args:", *lines])
    return make


_RATE = {"learning_rate": "a number, or a function of the number of earlier updates"}
_AXES = {"axes": "the logical axes of each parameter; None: no parameter is a stack of layers"}


def _transformation(entry: Entry) -> Callable[..., optax.GradientTransformation]:
    """The function that scales gradients, before weight decay and learning rate."""
    if callable(entry.implementation):
        return entry.implementation
    module, _, function = entry.implementation.partition(":")
    return getattr(importlib.import_module(f"jaxmem.optim.rules.{module}"), function)


def learning_rate_schedule(cfg: config.Optimizer, steps: int) -> optax.Schedule:
    """The learning rate of each update, a function of the number of earlier updates.

    It increases linearly to the peak at update `warmup` (without warmup at the first), then decays to `min_lr_ratio` of
    the peak at the last update, which has the rate 0 if `min_lr_ratio` is 0. With `n` counted from 1 and `warmup` at
    least 1 the cosine is `optax.warmup_cosine_decay_schedule(0, peak, warmup, steps, end)(n)`, so the rate of the first
    update is above 0.
    """
    peak = cfg.learning_rate
    warmup = max(cfg.warmup, 1)
    decay_steps = max(steps - warmup, 1)
    decay: optax.Schedule = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, decay_steps, alpha=cfg.min_lr_ratio),
        "linear": lambda: optax.linear_schedule(peak, peak * cfg.min_lr_ratio, decay_steps),
        "constant": lambda: optax.constant_schedule(peak),
    }[cfg.schedule]()
    rate = optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), decay], [warmup])
    return with_promotion(lambda count: jnp.maximum(rate(count + 1), 0.0))  # rounding may end below 0
