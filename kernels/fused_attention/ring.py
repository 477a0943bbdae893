"""Attention of sequences that are sharded over a mesh axis. The functions run inside `jax.shard_map`, on one shard.

`ring` (Liu et al., arXiv:2310.01889): keys and values are passed around the ring; each device attends to the keys that
it has received and merges results by log-sum-exp. A causal mask would leave the first devices idle, so positions are
in the order of `places`: of 2n chunks, device i has the i-th from the front and the i-th from the back, so that all
devices have equal work at each step. `halo`: with a window, a device needs only the keys before its own, and positions
are in order.

With c devices, T positions each and windows of w, a device sends, of keys and of values:

    ring   (c - 1) T forward; (c - 1) T and c T float32 gradients backward
    halo   min(w - 1, (c - 1) T) forward, the same backward

and stores the keys of at most three devices (with a window, the keys of the window). The backward pass of the ring
saves the same arrays as attention on one device, its own shards of q, k, v, output and log-sum-exp, and sends keys and
values around the ring again.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from . import blockwise
from .arguments import Extras, Options, check_arguments

Block = tuple[jax.Array, jax.Array, jax.Array | None]  # keys, values, segment ids


def places(length: int, devices: int) -> np.ndarray:
    """The position of the sequence at each index of the sharded dimension.

    >>> places(8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    if length % (2 * devices):
        raise ValueError(f"attention: {length} positions do not make 2 chunks for each of {devices} devices")
    chunks = np.arange(length, dtype=np.int32).reshape(2 * devices, -1)
    return np.stack([chunks[:devices], chunks[: devices - 1 : -1]], axis=1).reshape(-1)


def ring(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: str,
    segment_ids: jax.Array | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> jax.Array:
    """Causal attention of a sequence over all devices of `axis`, with positions in the order of `places`."""
    _, options, extras = check_arguments(
        q, k, v, causal=True, window=None, segment_ids=segment_ids, kv_segment_ids=None, scale=scale,
        soft_cap=soft_cap, dropout=None, deterministic=False,
    )  # fmt: skip
    return _ring(axis, options, q, k, v, extras.segment_ids)


def halo(
    attend: Callable[..., jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    axis: str,
    window: int,
    segment_ids: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """Causal attention with a window, with positions in order. `attend` is `attention` or has its signature."""
    if segment_ids is None:
        segment_ids = jnp.zeros(q.shape[:2], jnp.int32)
    ids = segment_ids - jax.lax.pmin(jnp.min(segment_ids), axis) + 1  # 0 is what no device sent
    devices, time = jax.lax.axis_size(axis), q.shape[1]
    wanted = min(window - 1, (devices - 1) * time)  # keys before the first of this device
    parts = [(k, v, ids)]
    for distance in range(1, -(-wanted // time) + 1):
        size = min(time, wanted - (distance - 1) * time)
        pairs = [(device, device + distance) for device in range(devices - distance)]
        parts.insert(0, jax.lax.ppermute(tuple(x[:, time - size :] for x in parts[-1]), axis, pairs))
    k, v, key_ids = (jnp.concatenate(part, axis=1) for part in zip(*parts, strict=True))
    return attend(q, k, v, causal=True, window=window, segment_ids=ids, kv_segment_ids=key_ids, **options)


# ---------------------------------------------------------------- the ring


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(axis: str, options: Options, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None) -> jax.Array:
    return _forward(axis, options, q, k, v, ids)[0]


def _forward(axis: str, options: Options, q: jax.Array, k: jax.Array, v: jax.Array, ids: Any) -> tuple[jax.Array, Any]:
    def attend(rows: tuple[jax.Array, Any], block: Block, options: Options) -> tuple[jax.Array, jax.Array]:
        (q, ids), (k, v, key_ids) = rows, block
        out, lse = blockwise.attend(q, k, v, options, Extras(ids, key_ids))
        return out.astype(jnp.float32), lse.swapaxes(1, 2)  # the time comes second everywhere

    def meet(found: Any, block: Block, step: jax.Array) -> Any:
        for rows, keys in _pairs(axis, step):
            part = attend(_half(rows, (q, ids)), _half(keys, block), all_seen)
            found = _put(rows, found, _merged(_half(rows, found), part))
        return found

    all_seen = dataclasses.replace(options, causal=False)
    own = k, v, ids
    out, lse = _visited(axis, meet, own, attend((q, ids), own, options))
    out, lse = (checkpoint_name(x, blockwise.SAVED) for x in (out.astype(q.dtype), lse))
    return out, (q, k, v, ids, out, lse)


def _backward(axis: str, options: Options, saved: Any, d_out: jax.Array) -> tuple[Any, ...]:
    q, k, v, ids, out, lse = saved

    def gradients(rows: tuple[Any, ...], block: Block, options: Options) -> tuple[Any, tuple[Any, Any]]:
        (q, ids, out, lse, d_out), (k, v, key_ids) = rows, block
        parts = blockwise.gradients(q, k, v, out, lse.swapaxes(1, 2), d_out, options, Extras(ids, key_ids))
        dq, dk, dv = (part.astype(jnp.float32) for part in parts)
        return dq, (dk, dv)

    def meet(found: Any, block: Block, step: jax.Array) -> Any:
        dq, d_block = found
        d_block = _next(axis, d_block)  # of these keys, from the devices that they have passed
        for rows, keys in _pairs(axis, step):
            more, d_more = gradients(_half(rows, mine), _half(keys, block), all_seen)
            dq = _put(rows, dq, _half(rows, dq) + more)
            d_block = _put(keys, d_block, jax.tree.map(jnp.add, _half(keys, d_block), d_more))
        return dq, d_block

    all_seen = dataclasses.replace(options, causal=False)
    mine, own = (q, ids, out, lse, d_out), (k, v, ids)
    dq, d_block = _visited(axis, meet, own, gradients(mine, own, options))
    dk, dv = _next(axis, d_block)  # home again
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None


_ring.defvjp(_forward, _backward)


def _visited(axis: str, meet: Callable[[Any, Block, Any], Any], own: Block, found: Any) -> Any:
    """Calls `meet` with the keys of every other device, while the next ones are sent."""

    def visit(state: tuple[Any, Block], step: jax.Array) -> tuple[tuple[Any, Block], None]:
        found, block = state
        return (meet(found, block, step), _next(axis, block)), None

    last = jax.lax.axis_size(axis) - 1
    (found, block), _ = jax.lax.scan(visit, (found, _next(axis, own)), jnp.arange(1, last, dtype=jnp.int32))
    return meet(found, block, jnp.int32(last))


def _next(axis: str, block: Any) -> Any:
    devices = jax.lax.axis_size(axis)
    return jax.lax.ppermute(block, axis, [(device, (device + 1) % devices) for device in range(devices)])


def _pairs(axis: str, step: jax.Array) -> list[tuple[Any, Any]]:
    """Which half of the queries meets which half of the keys that came `step` devices far: all that see anything,
    and they see everything. The back half sees every front half. If the keys' device stands before this one, the
    front half sees their front half too; if behind, the back half sees their back half, which is nearer the front."""
    behind = (step > jax.lax.axis_index(axis)).astype(jnp.int32)  # the message came round the end
    return [(1, 0), (behind, behind)]


def _half(which: Any, arrays: Any) -> Any:
    """The front (0) or the back half (1) of the time."""

    def cut(x: jax.Array) -> jax.Array:
        half = x.shape[1] // 2
        return jax.lax.dynamic_slice_in_dim(x, which * half, half, axis=1)

    return jax.tree.map(cut, arrays)


def _put(which: Any, arrays: Any, halves: Any) -> Any:
    def put(x: jax.Array, half: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(x, half, which * half.shape[1], axis=1)

    return jax.tree.map(put, arrays, halves)


def _merged(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Outputs and log-sum-exps of two sets of keys as of their union. A query that has seen nothing keeps zeros."""
    top = jnp.maximum(a[1], b[1])
    finite = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = [jnp.exp(lse - finite) for _, lse in (a, b)]
    total = weights[0] + weights[1]
    some = jnp.where(total > 0.0, total, 1.0)
    out = sum((w / some)[..., None] * part for w, (part, _) in zip(weights, (a, b), strict=True))
    return jnp.asarray(out), jnp.where(total > 0.0, finite + jnp.log(some), -jnp.inf)
