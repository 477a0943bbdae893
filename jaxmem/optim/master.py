"""Weights in few bits to compute with, and what they lack of float32 to be updated: mixed precision (arXiv:1710.03740).

An update of AdamW is often less than half of bfloat16's last bit and would be lost. With a float32 copy a step holds,
per parameter, 2 bytes of weights, 2 of gradients, 4 of the copy and 8 of moments: the 16 bytes of ZeRO's arithmetic
(arXiv:1910.02054).

The copy's upper half is nearly the weight. Kept is only what the weight lacks, as a signed integer: `remainder16`, 2
bytes, is the float32 copy bit by bit; `remainder8`, 1 byte, makes 24 bits in all, rounded stochastically, so that
updates below its last bit too add up. With 8-bit AdamW that is 2 + 1 + 2.03 bytes a parameter, and 2 of gradients.

Copy and remainder are parts of the optimizer's state and lie where that lies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmem.optim.apply import each_layer, leaf_key
from jaxmem.optim.piece import Piece
from jaxmem.sharding import Axes
from jaxmem.sharding.weights import WithRemainder

BITS = {"remainder8": 8, "remainder16": 16}
_FINITE = 0x7F7F_FFFF  # bits of the largest float32


class Mastered(NamedTuple):
    master: Any  # the weights in float32
    inner: Any  # the optimizer's own state, which knows only the float32 weights


def with_master(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`tx` on a float32 copy of weights that rest in less. The update given back leads to the copy, rounded.

    >>> import optax
    >>> params = {"w": jnp.ones(3, jnp.bfloat16)}
    >>> state = with_master(optax.sgd(1e-4)).init(params)
    >>> state.master["w"].dtype.name
    'float32'
    """
    tx = optax.with_extra_args_support(tx)

    def init(params: Any) -> Mastered:
        master = _in_float32(params)
        return Mastered(master, tx.init(master))

    def update(grads: Any, state: Mastered, params: Any = None, **extra: Any) -> tuple[Any, Mastered]:
        updates, inner = tx.update(_in_float32(grads), state.inner, state.master, **extra)
        master = jax.tree.map(lambda m, u: m + u.astype(jnp.float32), state.master, updates)
        # Exact where the two are within a factor of two of each other (Sterbenz), and so is the sum with the weights.
        change = jax.tree.map(lambda m, w: m - w.astype(jnp.float32), master, params)
        return change, Mastered(master, inner)

    return optax.GradientTransformationExtraArgs(init, update)


class Remaindered(NamedTuple):
    step: jax.Array  # updates so far
    master: Any  # what each weight lacks
    inner: Any  # the optimizer's own state, which knows completed weights


def with_remainder(
    tx: optax.GradientTransformation, bits: int, axes: Any = None
) -> optax.GradientTransformationExtraArgs:
    """`tx` on bfloat16 weights and `bits` (8 or 16) that complete them. Exact but where a weight falls to less than
    2^-16 of itself in one update, or gradients in bfloat16 more than double it: the update is then rounded.

    >>> params = {"w": jnp.ones(3, jnp.bfloat16)}
    >>> with_remainder(optax.sgd(1e-4), 8).init(params).master["w"].dtype.name
    'int8'
    """
    tx = optax.with_extra_args_support(tx)
    kept = {8: jnp.int8, 16: jnp.int16}[bits]

    def init(params: Any) -> Remaindered:
        lacks = jax.tree.map(lambda w: jnp.zeros(w.shape, kept), params)
        return Remaindered(jnp.zeros((), jnp.int32), lacks, tx.init(jax.tree.map(WithRemainder, params, lacks)))

    def update(
        grads: Any,
        state: Remaindered,
        params: Any = None,
        *,
        layer: jax.Array | None = None,
        piece: Piece | None = None,
        **extra: Any,
    ) -> tuple[Any, Remaindered]:
        whole = jax.tree.map(WithRemainder, params, state.master)
        updates, inner = tx.update(grads, state.inner, whole, layer=layer, piece=piece, **extra)
        key = jax.random.fold_in(jax.random.key(0), state.step)

        def change(path: Any, u: jax.Array, w: jax.Array, lacks: jax.Array, names: Axes | None) -> Any:
            draws = leaf_key(key, path) if bits == 8 else None
            return each_layer(_changed, (u, w, lacks), draws, names, layer, piece)

        names = jax.tree.map(lambda _: None, params) if axes is None else axes
        done = jax.tree_util.tree_map_with_path(change, updates, params, state.master, names)
        changes, lacks = jax.tree.transpose(jax.tree.structure(updates), jax.tree.structure((0, 0)), done)
        return changes, Remaindered(state.step + 1, lacks, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _changed(u: jax.Array, w: jax.Array, lacks: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The change of a weight that leads to the nearest bfloat16, and what that then lacks. As integers: of a float's
    bits the upper 16 are a bfloat16's, and half a step up is half a step away from zero."""
    new = WithRemainder(w, lacks).dequantize() + u.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(new, jnp.int32)
    sign, size = bits & jnp.int32(-(2**31)), bits & jnp.int32(2**31 - 1)
    unit = 1 << (16 - 8 * lacks.dtype.itemsize)  # of what is lacked, in bits of a float32
    if key is not None:
        size = jnp.minimum(size + jax.random.bits(key, w.shape, jnp.uint8).astype(jnp.int32) % unit, _FINITE)
    size = size & -unit
    near = (size + 0x8000) & jnp.int32(-0x1_0000)
    target = jax.lax.bitcast_convert_type(sign | jnp.where(jnp.isfinite(new), near, size), jnp.float32)
    change = jnp.where(jnp.isfinite(new), target - w.astype(jnp.float32), new).astype(u.dtype)
    # What `apply` makes of it, be the difference exact or not.
    lands = (w.astype(jnp.float32) + change.astype(jnp.float32)).astype(w.dtype)
    high = jax.lax.bitcast_convert_type(lands, jnp.uint16).astype(jnp.int32) << 16
    rest = ((sign | size) - high) // unit
    rest = jnp.clip(rest, jnp.iinfo(lacks.dtype).min, jnp.iinfo(lacks.dtype).max)
    return change, jnp.where(jnp.isfinite(new), rest, 0).astype(lacks.dtype)


def _in_float32(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)
