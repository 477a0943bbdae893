"""The method `ring` of `context.py`: attention to the keys of one device after the other, merged by log-sum-exp. The
sequence is the second dimension of all arrays."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.kernels.typing import Index, Tree

from .arguments import Extras, Options, Residuals
from .derivative import Implementation

Block = tuple[jax.Array, jax.Array, jax.Array | None]  # keys, values, segment ids


class ShardedAttention(NamedTuple):
    """The attention of one device over `axis`, as an implementation (see `derivative.py`). Its log-sum-exp is of the
    heads or the positions of this device."""

    method: Callable[..., tuple[jax.Array, jax.Array]]
    derivative: Callable[..., Tree]  # the derivative of the method
    kernel: Implementation
    axis: str
    options: Options

    def forward(self, q: Any, k: Any, v: Any, _: Options, extras: Extras) -> tuple[jax.Array, jax.Array]:
        return self.method(self, q, k, v, extras)

    def gradients(self, saved: Residuals, d_out: Tree, _: Options, extras: Extras) -> Tree:
        return self.derivative(self, (*saved[:3], extras), saved.out, saved.lse, d_out)


def places(length: int, devices: int) -> np.ndarray:
    """The position of the sequence at each index of the sharded dimension.

    >>> places(8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    if length % (2 * devices):
        raise ValueError(
            f"attention: a sequence of {length} is not divisible into 2 chunks for each of {devices} devices"
        )
    chunks = np.arange(length, dtype=np.int32).reshape(2 * devices, -1)
    return np.stack([chunks[:devices], chunks[: devices - 1 : -1]], axis=1).reshape(-1)


def forward(shard: ShardedAttention, q: Any, k: Any, v: Any, extras: Extras) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp."""
    ids = extras.segment_ids

    def attend(rows: tuple[jax.Array, Any], block: Block, options: Options) -> tuple[jax.Array, jax.Array]:
        (q, ids), (k, v, key_ids) = rows, block
        out, lse = shard.kernel.forward(q, k, v, options, Extras(ids, key_ids))
        return out.astype(jnp.float32), lse.swapaxes(1, 2)

    def meet(state: Tree, block: Block, step: jax.Array) -> Tree:
        for rows, keys in _pairs(shard.axis, step):
            part = attend(_half(rows, (q, ids)), _half(keys, block), all_seen)
            state = _put(rows, state, _merged(_half(rows, state), part))
        return state

    all_seen = dataclasses.replace(shard.options, causal=False)
    local = (k, v, ids)
    out, lse = _visited(shard.axis, meet, local, attend((q, ids), local, shard.options))
    return out.astype(q.dtype), lse


def backward(
    shard: ShardedAttention, inputs: tuple[Tree, ...], out: jax.Array, lse: jax.Array, d_out: jax.Array
) -> tuple[Tree, ...]:
    """dq, dk and dv in float32, and None. `inputs`: q, k, v and extras, as in `forward`."""
    axis = shard.axis

    def gradients(rows: tuple[Tree, ...], block: Block, options: Options) -> tuple[Any, tuple[Any, Any]]:
        (q, ids, out, lse, d_out), (k, v, key_ids) = rows, block
        saved = Residuals(q, k, v, out, lse.swapaxes(1, 2))
        *parts, _ = shard.kernel.gradients(saved, d_out, options, Extras(ids, key_ids))
        dq, dk, dv = (part.astype(jnp.float32) for part in parts)
        return dq, (dk, dv)

    def meet(state: Tree, block: Block, step: jax.Array) -> Tree:
        dq, d_keys = state
        d_block = _send_to_next(axis, d_keys)  # the sum over the devices that the block has visited
        for rows, keys in _pairs(axis, step):
            dq_of_block, d_keys_of_block = gradients(_half(rows, mine), _half(keys, block), all_seen)
            dq = _put(rows, dq, _half(rows, dq) + dq_of_block)
            d_block = _put(keys, d_block, jax.tree.map(jnp.add, _half(keys, d_block), d_keys_of_block))
        return dq, d_block

    q, k, v, extras = inputs
    ids = extras.segment_ids
    all_seen = dataclasses.replace(shard.options, causal=False)
    mine = (q, ids, out, lse, d_out)
    dq, d_keys = _visited(axis, meet, (k, v, ids), gradients(mine, (k, v, ids), shard.options))
    return dq, *_send_to_next(axis, d_keys), None


def _visited(axis: str, meet: Callable[[Any, Block, Any], Any], local: Block, result: Tree) -> Tree:
    """Calls `meet` with the keys of every other device: each device sends its current block to the next device while
    `meet` uses it."""
    last = jax.lax.axis_size(axis) - 1

    def visit(state: tuple[Any, Block], step: jax.Array) -> tuple[tuple[Any, Block], None]:
        result, block = state
        return (meet(result, block, step), _send_to_next(axis, block)), None

    (result, block), _ = jax.lax.scan(visit, (result, _send_to_next(axis, local)), jnp.arange(1, last, dtype=jnp.int32))
    return meet(result, block, jnp.int32(last))


def _send_to_next(axis: str, block: Any) -> Tree:
    devices = jax.lax.axis_size(axis)
    return jax.lax.ppermute(block, axis, [(device, (device + 1) % devices) for device in range(devices)])


def _pairs(axis: str, step: jax.Array) -> list[tuple[Any, Any]]:
    """Pairs (half of the queries, half of the keys) to compute after `step` sends; 0 is the front half, 1 the back
    half. These pairs need no mask, and the causal mask excludes all others. The back half of the queries attends to the
    front half of all keys. If the keys are of an earlier device, the front half of the queries attends to their front
    half. If they are of a later device, the back half attends to their back half, which is earlier in the sequence."""
    behind = (step > jax.lax.axis_index(axis)).astype(jnp.int32)  # the keys are of a later device
    return [(1, 0), (behind, behind)]


def _half(which: Index, arrays: Tree) -> Tree:
    """The front (0) or the back half (1) of the sequence."""

    def cut(x: jax.Array) -> jax.Array:
        half = x.shape[1] // 2
        return jax.lax.dynamic_slice_in_dim(x, which * half, half, axis=1)

    return jax.tree.map(cut, arrays)


def _put(which: Index, arrays: Tree, halves: Tree) -> Tree:
    def put(x: jax.Array, half: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(x, half, which * half.shape[1], axis=1)

    return jax.tree.map(put, arrays, halves)


def _merged(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Merges outputs and log-sum-exps of two sets of keys into those of their union. A query without keys has output
    0."""
    top = jnp.maximum(a[1], b[1])
    finite = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = [jnp.exp(lse - finite) for _, lse in (a, b)]
    total = weights[0] + weights[1]
    divisor = jnp.where(total > 0.0, total, 1.0)
    out = sum((w / divisor)[..., None] * part for w, (part, _) in zip(weights, (a, b), strict=True))
    return jnp.asarray(out), jnp.where(total > 0.0, finite + jnp.log(divisor), -jnp.inf)
