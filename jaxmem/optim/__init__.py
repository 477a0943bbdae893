"""Optimizers: plain optax transformations that work in anyone's loop, and the chain that a config names.

AdamW in float32 holds two numbers beside each weight and needs a third for the gradient: 16 bytes a parameter
with the weight itself (Kingma and Ba, arXiv:1412.6980; Loshchilov and Hutter, arXiv:1711.05101).
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem import config
from jaxmem.optim.master import with_master
from jaxmem.precision import rounded
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


def apply(params: Any, updates: Any, key: jax.Array | None = None, axes: Any = None) -> Any:
    """The one place where weights change: added in float32, stored as they were; with a key rounded stochastically.

    Each leaf, and each layer of a leaf whose `axes` begin with `layer`, draws from a key of its own: a layer that is
    updated alone is rounded as it would be among all.
    """

    def add(path: Any, w: jax.Array, u: jax.Array, axes: Axes | None) -> jax.Array:
        new = w.astype(jnp.float32) + u.astype(jnp.float32)
        if key is None:
            return new.astype(w.dtype)
        own = leaf_key(key, path)
        if axes is None or axes[:1] != ("layer",):
            return rounded(new, w.dtype, own)
        keys = jax.vmap(lambda layer: jax.random.fold_in(own, layer))(jnp.arange(w.shape[0]))
        return jax.vmap(lambda x, k: rounded(x, w.dtype, k))(new, keys)

    axes = jax.tree.map(lambda _: None, params) if axes is None else axes
    return jax.tree_util.tree_map_with_path(add, params, updates, axes)


def leaf_key(key: jax.Array, path: Any) -> jax.Array:
    """A leaf's own key, by its name."""
    return jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))


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
