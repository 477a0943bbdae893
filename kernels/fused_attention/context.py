"""Attention of sequences that are sharded over a mesh axis (context parallelism), inside `jax.shard_map`, on one shard.

METHODS, for implementations that compute gradients for some of the keys (`gradients` in the module):

`ring` (Liu et al., arXiv:2310.01889): keys and values are passed around the ring; each device attends to the keys that
it has received and merges results by log-sum-exp. A causal mask would leave the first devices idle, so positions are in
the order of `ring.places`: of 2n chunks, device i has the i-th from the front and the i-th from the back, so that all
devices have equal work. `ulysses` (DeepSpeed-Ulysses, arXiv:2309.14509): all-to-all from shards of
the sequence to shards of the heads, attention to the complete sequence, and back; positions are in order.

Each device saves its shards of q, k, v, output and log-sum-exp for the backward pass, which repeats the communication.
Kernels compute the gradients of a block of keys from the output and the log-sum-exp of all keys, so the log-sum-exp of
a block is never differentiated.

With a window a device needs only the last keys before its own keys: `ring` is then `halo`, and positions are in order.
"""

import dataclasses
import importlib
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.kernels.support import Request, attention_refusal
from jaxmem.kernels.typing import Tree

from . import ring
from .arguments import CHECKS, Extras, Options, Residuals, check_arguments
from .derivative import Implementation, differentiable
from .ring import ShardedAttention


def attention_over(
    axis: str,
    method: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    implementation: str,
    **arguments: Any,
) -> jax.Array:
    """Causal attention of a sequence over all devices of `axis`. Options are those of `attention`."""
    _, options, extras = check_arguments(q, k, v, causal=True, **arguments)
    devices = jax.lax.axis_size(axis)
    time = q.shape[1]
    window = arguments.get("window")
    options = dataclasses.replace(options, window=window)  # the window may be longer than this device's part
    every = dataclasses.replace(Request.of(q, k, options, extras), queries=devices * time, keys=devices * time)
    why = attention_refusal(implementation, every.over_context(method, devices), None)
    CHECKS.require(why is None, why or "")
    kernel = Implementation(importlib.import_module(f"{__package__}.{implementation}"))
    if method == "ring":
        CHECKS.require(extras.has_window is None, "has_window is set; ring does not support it, use ulysses")
        if window is not None:
            return _halo(kernel, axis, options, q, k, v, extras)
        CHECKS.require(extras.sinks is None, "sinks is set; ring does not support it, use ulysses")
    attend, derivative = METHODS[method]
    return differentiable(ShardedAttention(attend, derivative, kernel, axis, options), options, q, k, v, extras)


# ---------------------------------------------------------------- ulysses


def _ulysses(shard: ShardedAttention, q: Any, k: Any, v: Any, extras: Extras) -> tuple[jax.Array, jax.Array]:
    q, k, v = _to_heads(shard.axis, q, *_repeated(shard.axis, k, v))
    out, lse = shard.kernel.forward(q, k, v, shard.options, _of_sequence(shard.axis, extras))
    return _to_sequence(shard.axis, out)[0], lse


def _ulysses_backward(shard: ShardedAttention, inputs: Tree, out: Any, lse: Tree, d_out: Tree) -> Tree:
    axis = shard.axis
    q, k, v, extras = inputs
    q, keys, values, out, d_out = _to_heads(axis, q, *_repeated(axis, k, v), out, d_out)
    here = _of_sequence(axis, extras)
    *gradients, d_sinks = shard.kernel.gradients(Residuals(q, keys, values, out, lse), d_out, shard.options, here)
    if d_sinks is not None:  # the gradients for this device's heads; zeros for the other heads
        first = jax.lax.axis_index(axis) * d_sinks.size
        d_sinks = jax.lax.dynamic_update_slice_in_dim(jnp.zeros_like(extras.sinks), d_sinks, first, 0)
    dq, *others = _to_sequence(axis, *gradients)
    return dq, *(jnp.sum(d.reshape(*k.shape[:3], -1, k.shape[3]), axis=3) for d in others), d_sinks


def _repeated(axis: str, *arrays: jax.Array) -> list[jax.Array]:
    """KV heads, repeated so that each device has the KV heads of its queries."""
    devices = jax.lax.axis_size(axis)
    return [jnp.repeat(x, devices // math.gcd(x.shape[2], devices), axis=2) for x in arrays]


def _to_heads(axis: str, *arrays: jax.Array) -> list[jax.Array]:
    return [jax.lax.all_to_all(x, axis, split_axis=2, concat_axis=1, tiled=True) for x in arrays]


def _to_sequence(axis: str, *arrays: jax.Array) -> list[jax.Array]:
    return [jax.lax.all_to_all(x, axis, split_axis=1, concat_axis=2, tiled=True) for x in arrays]


def _of_sequence(axis: str, extras: Extras) -> Extras:
    """The extras with the sinks of this device's heads, and the segment ids of the complete sequence."""
    if extras.sinks is not None:
        size = extras.sinks.size // jax.lax.axis_size(axis)
        sinks = jax.lax.dynamic_slice_in_dim(extras.sinks, jax.lax.axis_index(axis) * size, size)
        extras = extras._replace(sinks=sinks)
    if extras.segment_ids is None:
        return extras
    ids = jax.lax.all_gather(extras.segment_ids, axis, axis=1, tiled=True)
    return extras._replace(segment_ids=ids, kv_segment_ids=ids)


# ---------------------------------------------------------------- a window


def _halo(kernel: Implementation, axis: str, options: Options, q: Any, k: Any, v: Any, extras: Extras) -> jax.Array:
    """Causal attention with a window: devices send the last keys of their part to the devices that need them."""
    ids = extras.segment_ids
    if ids is None:
        ids = jnp.zeros(q.shape[:2], jnp.int32)
    ids = ids + jnp.iinfo(jnp.int32).min  # int32 wraps; no id becomes 0, that of keys that no device sent
    devices = jax.lax.axis_size(axis)
    time = q.shape[1]
    assert options.window is not None
    count = min(options.window - 1, (devices - 1) * time)  # keys before the first of this device
    parts = [(k, v, ids)]
    for distance in range(1, -(-count // time) + 1):
        size = min(time, count - (distance - 1) * time)
        pairs = [(device, device + distance) for device in range(devices - distance)]
        parts.insert(0, jax.lax.ppermute(tuple(x[:, time - size :] for x in parts[-1]), axis, pairs))
    k, v, key_ids = (jnp.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    options = dataclasses.replace(options, window=min(options.window, k.shape[1]))
    return kernel.attend(q, k, v, options, Extras(ids, key_ids, sinks=extras.sinks))


METHODS: dict[str, Any] = {  # (method, its derivative)
    "ulysses": (_ulysses, _ulysses_backward),
    "ring": (ring.forward, ring.backward),
}
