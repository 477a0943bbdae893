"""Optimizers: plain optax transformations that work in anyone's loop, and the chain that a config names.

AdamW in float32 holds two numbers beside each weight and needs a third for the gradient: 16 bytes a parameter
with the weight itself (Kingma and Ba, arXiv:1412.6980; Loshchilov and Hutter, arXiv:1711.05101).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem import config
from jaxmem.optim.master import with_master
from jaxmem.sharding import Axes, is_axes


def schedule(cfg: config.Optimizer, steps: int) -> optax.Schedule:
    """Learning rate by update: linear warm-up from zero, then down to `final` of the peak at the last update."""
    peak, rest = cfg.learning_rate, max(steps - cfg.warmup, 1)
    decay: optax.Schedule = {
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, alpha=cfg.final),
        "linear": lambda: optax.linear_schedule(peak, peak * cfg.final, rest),
        "constant": lambda: optax.constant_schedule(peak),
    }[cfg.schedule]()
    if cfg.warmup:
        # The first update is number 0 and should move: warm-up counts from 1.
        warmup = optax.linear_schedule(peak / cfg.warmup, peak, max(cfg.warmup - 1, 1))
        decay = optax.join_schedules([warmup, decay], [cfg.warmup])
    return _standard_promotion(decay)


def build(cfg: config.Optimizer, learning_rate: optax.Schedule, axes: Any) -> optax.GradientTransformation:
    """The chain that a config names. `axes` are the parameters' logical axes: only matrices decay."""

    def decays(name: Axes) -> bool:
        return sum(axis != "layer" for axis in name) > 1

    mask = jax.tree.map(decays, axes, is_leaf=is_axes)
    chain = [] if cfg.clip is None else [optax.clip_by_global_norm(cfg.clip)]
    chain.append(optax.scale_by_adam(cfg.beta1, cfg.beta2, cfg.epsilon))
    if cfg.name == "adamw":
        chain.append(optax.add_decayed_weights(cfg.weight_decay, mask))
    chain.append(optax.scale_by_learning_rate(learning_rate))
    chained = optax.chain(*chain)
    return optax.GradientTransformation(_standard_promotion(chained.init), _standard_promotion(chained.update))


def apply(params: Any, updates: Any) -> Any:
    """The one place where weights change: added in float32, stored as they were."""

    def add(w: jax.Array, u: jax.Array) -> jax.Array:
        return (w.astype(jnp.float32) + u.astype(jnp.float32)).astype(w.dtype)

    return jax.tree.map(add, params, updates)


def global_norm(tree: Any) -> jax.Array:
    """Length of all leaves as one vector, summed in float32."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)))


def _standard_promotion(function: Callable[..., Any]) -> Callable[..., Any]:
    """optax mixes dtypes on purpose; our own code does not."""

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return function(*args)

    return call


__all__ = ["apply", "build", "global_norm", "schedule", "with_master"]
