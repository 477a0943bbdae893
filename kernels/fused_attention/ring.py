"""Attention to the keys of one device after the other, merged by log-sum-exp: the methods `ring` and `all_gather` of
`context.py`, forward and backward."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .arguments import Extras, Options

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


def forward(kernel: Any, axis: str, options: Options, q: Any, k: Any, v: Any, ids: Any) -> Any:
    meet, found = _blocks(kernel, axis, options, q, k, v, ids)

    def visit(state: tuple[Any, Block], step: jax.Array) -> tuple[tuple[Any, Block], None]:
        found, block = state
        return (meet(found, block, step), _next(axis, block)), None

    *steps, last = range(1, jax.lax.axis_size(axis))
    (found, block), _ = jax.lax.scan(visit, (found, _next(axis, (k, v, ids))), jnp.asarray(steps, jnp.int32))
    out, lse = meet(found, block, jnp.int32(last))
    return out.astype(q.dtype), lse


def backward(
    kernel: Any, axis: str, options: Options, q: Any, k: Any, v: Any, ids: Any, out: Any, lse: Any, d_out: Any
) -> Any:
    meet, dq, d_block = _block_gradients(kernel, axis, options, q, k, v, ids, out, lse, d_out)

    def visit(state: tuple[Any, Any, Block], step: jax.Array) -> tuple[tuple[Any, Any, Block], None]:
        dq, d_block, block = state
        # The gradients of these keys come from the devices that they have passed.
        return (*meet(dq, _next(axis, d_block), block, step), _next(axis, block)), None

    *steps, last = range(1, jax.lax.axis_size(axis))
    state = dq, d_block, _next(axis, (k, v, ids))
    (dq, d_block, block), _ = jax.lax.scan(visit, state, jnp.asarray(steps, jnp.int32))
    dq, d_block = meet(dq, _next(axis, d_block), block, jnp.int32(last))
    return dq, *_next(axis, d_block)  # home again


def all_gather_forward(kernel: Any, axis: str, options: Options, q: Any, k: Any, v: Any, ids: Any) -> Any:
    meet, found = _blocks(kernel, axis, options, q, k, v, ids)
    block, steps = _gathered(axis, (k, v, ids))
    (out, lse), _ = jax.lax.scan(lambda found, step: (meet(found, block(step), step), None), found, steps)
    return out.astype(q.dtype), lse


def all_gather_backward(
    kernel: Any, axis: str, options: Options, q: Any, k: Any, v: Any, ids: Any, out: Any, lse: Any, d_out: Any
) -> Any:
    meet, dq, own = _block_gradients(kernel, axis, options, q, k, v, ids, out, lse, d_out)
    block, steps = _gathered(axis, (k, v, ids))
    zeros = jax.tree.map(jnp.zeros_like, own)
    dq, others = jax.lax.scan(lambda dq, step: meet(dq, zeros, block(step), step), dq, steps)
    devices = jnp.arange(jax.lax.axis_size(axis), dtype=jnp.int32)

    def home(own: jax.Array, others: jax.Array) -> jax.Array:
        found = jnp.concatenate([own[None], others])[_before(axis, devices)]
        return jax.lax.psum_scatter(found, axis)

    return dq, *jax.tree.map(home, own, others)


def _gathered(axis: str, own: Block) -> tuple[Callable[[jax.Array], Block], jax.Array]:
    """A function that returns the block of the device `step` places before this one, and all steps."""
    every = jax.tree.map(lambda x: jax.lax.all_gather(x, axis), own)

    def block(step: jax.Array) -> Block:
        device = _before(axis, step)
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, device, keepdims=False), every)

    return block, jnp.arange(1, jax.lax.axis_size(axis), dtype=jnp.int32)


def _before(axis: str, step: jax.Array) -> jax.Array:
    """The device `step` places before this one; also, how many places a device is before this one."""
    return (jax.lax.axis_index(axis) - step) % jax.lax.axis_size(axis)


def _blocks(
    kernel: Any, axis: str, options: Options, q: Any, k: Any, v: Any, ids: Any
) -> tuple[Callable[[Any, Block, Any], Any], tuple[jax.Array, jax.Array]]:
    """A function that adds the keys of the device `step` places before this one to an output and log-sum-exp, and those
    of its own keys. The sequence is the second dimension of all arrays."""

    def attend(rows: tuple[jax.Array, Any], block: Block, options: Options) -> tuple[jax.Array, jax.Array]:
        (q, ids), (k, v, key_ids) = rows, block
        out, lse = kernel.attend(q, k, v, options, Extras(ids, key_ids))
        return out.astype(jnp.float32), lse.swapaxes(1, 2)

    def meet(found: Any, block: Block, step: jax.Array) -> Any:
        for rows, keys in _pairs(axis, step):
            part = attend(_half(rows, (q, ids)), _half(keys, block), all_seen)
            found = _put(rows, found, _merged(_half(rows, found), part))
        return found

    all_seen = dataclasses.replace(options, causal=False)
    return meet, attend((q, ids), (k, v, ids), options)


def _block_gradients(
    kernel: Any, axis: str, options: Options, q: Any, k: Any, v: Any, ids: Any, out: Any, lse: Any, d_out: Any
) -> tuple[Callable[..., Any], jax.Array, tuple[jax.Array, jax.Array]]:
    """A function that adds the contributions of a device's keys to dq and to the gradients of these keys, and those of
    its own keys."""

    def gradients(rows: tuple[Any, ...], block: Block, options: Options) -> tuple[Any, tuple[Any, Any]]:
        (q, ids, out, lse, d_out), (k, v, key_ids) = rows, block
        parts = kernel.gradients(q, k, v, out, lse.swapaxes(1, 2), d_out, options, Extras(ids, key_ids))
        dq, dk, dv = (part.astype(jnp.float32) for part in parts)
        return dq, (dk, dv)

    def meet(dq: jax.Array, d_block: Any, block: Block, step: jax.Array) -> Any:
        for rows, keys in _pairs(axis, step):
            more, d_more = gradients(_half(rows, mine), _half(keys, block), all_seen)
            dq = _put(rows, dq, _half(rows, dq) + more)
            d_block = _put(keys, d_block, jax.tree.map(jnp.add, _half(keys, d_block), d_more))
        return dq, d_block

    all_seen = dataclasses.replace(options, causal=False)
    mine = q, ids, out, lse, d_out
    return meet, *gradients(mine, (k, v, ids), options)


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
