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
from collections.abc import Callable
from types import ModuleType
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
    if isinstance(entry.implementation, str):
        return getattr(_module(entry.implementation), name)
    return functools.partial(_registered, entry)


def _registered(entry: Entry, learning_rate: Rate, *, axes: AxesTree = None, **hyperparameters: Any) -> Transformation:
    """The optimizer of a transformation that a script has registered."""
    settings = entry.settings(**hyperparameters)
    assert callable(entry.implementation)
    scale = entry.implementation(settings, axes=axes)
    return with_learning_rate(scale, learning_rate, getattr(settings, "weight_decay", 0.0), axes)


def _module(implementation: str) -> ModuleType:
    return importlib.import_module(f"jaxmem.optim.rules.{implementation.partition(':')[0]}")


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
