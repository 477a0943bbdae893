"""Master weights: bfloat16 for computation, and a float32 copy or its lower bits for updates (arXiv:1710.03740).

An update of AdamW is often less than half of bfloat16's last bit and would be lost. With a float32 copy a step needs 16
bytes per parameter, as in the ZeRO paper (arXiv:1910.02054): 2 of weights, 2 of gradients, 4 of the copy, 8 of moments.

The weight is the rounded upper half of the copy, so only the remainder is stored, as a signed integer. `remainder16`
takes 2 bytes: weight and remainder have the 32 bits of the float32 copy. `remainder8` takes 1 byte: weight and
remainder have 24 bits, rounded stochastically, so that smaller updates are correct on average. With 8-bit AdamW this
takes 2 + 1 + 2.03 bytes per parameter, and 2 for gradients.

The bits that a copy has below bfloat16 are random at the start (`_first_bits`). If they were zero, a weight would not
move before its copy has moved half way to the next bfloat16 value, and at the learning rates of fine-tuning most
weights would stand still for dozens of updates.

The copy and the remainder are parts of the optimizer state, and sharded like it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath
from jaxtyping import Array, BFloat16, Int

from jaxmem.errors import UserError
from jaxmem.kernels.draws import scramble
from jaxmem.optim.apply import VocabSlice, axes_or_unnamed, leaf_key, leaf_number, map_with_keys
from jaxmem.sharding.table import Axes
from jaxmem.sharding.weights import WithRemainder
from jaxmem.typing import AxesTree, Tree

REMAINDER_BITS = {"remainder8": 8, "remainder16": 16}
_FINITE = 0x7F7F_FFFF  # bits of the largest float32


class MasterState(NamedTuple):
    master: Tree  # the weights in float32
    inner: Tree  # the state of `tx`


def with_master(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Applies `tx` to a float32 copy of the weights. The returned update makes the weights equal to the rounded copy.

    >>> import optax
    >>> params = {"w": jnp.ones(3, jnp.bfloat16)}
    >>> state = with_master(optax.sgd(1e-4)).init(params)
    >>> state.master["w"].dtype.name
    'float32'
    """
    tx = optax.with_extra_args_support(tx)

    def copy(path: KeyPath, w: jax.Array) -> jax.Array:
        if w.dtype != jnp.bfloat16:
            return w.astype(jnp.float32)
        return WithRemainder(w, _first_bits(path, w).astype(jnp.int16)).dequantize()

    def init(params: Tree) -> MasterState:
        master = jax.tree_util.tree_map_with_path(copy, params)
        return MasterState(master, tx.init(master))

    def update(grads: Tree, state: MasterState, params: Tree = None, **extra: Any) -> tuple[Tree, MasterState]:
        updates, inner = tx.update(_to_float32(grads), state.inner, state.master, **extra)
        master = jax.tree.map(lambda m, u: m + u.astype(jnp.float32), state.master, updates)
        # m - w is exact if m and w are within a factor of two of each other (Sterbenz). Then w plus this difference is
        # exact too.
        change = jax.tree.map(lambda m, w: m - w.astype(jnp.float32), master, params)
        return change, MasterState(master, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def in_float32(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Passes gradients and weights to `tx` in float32. For `with_remainder`, whose weights only jaxmem's optimizers can
    read."""
    tx = optax.with_extra_args_support(tx)

    def init(params: Tree) -> Tree:
        return tx.init(_to_float32(params))

    def update(grads: Tree, state: Tree, params: Tree = None, **extra: Any) -> tuple[Tree, Tree]:
        return tx.update(_to_float32(grads), state, _to_float32(params), **extra)

    return optax.GradientTransformationExtraArgs(init, update)


class RemainderState(NamedTuple):
    step: jax.Array  # updates so far
    master: Tree  # the remainders of the weights
    inner: Tree  # the state of `tx`


def with_remainder(
    tx: optax.GradientTransformation, bits: int, axes: AxesTree = None
) -> optax.GradientTransformationExtraArgs:
    """Applies `tx` to bfloat16 weights with `bits` (8 or 16) additional bits. The update is rounded
    if it shrinks a weight to less than 2^-16 of its value, or if gradients are bfloat16 and it more than doubles a
    weight. Otherwise it is exact. With 16 bits, the weights are bitwise those of `with_master` if `tx` returns float32
    updates of bfloat16 gradients: AdamW, Adam, Lion, and SGD with momentum.

    >>> params = {"w": jnp.ones(3, jnp.bfloat16)}
    >>> with_remainder(optax.sgd(1e-4), 8).init(params).master["w"].dtype.name
    'int8'
    """
    tx = optax.with_extra_args_support(tx)
    dtype = {8: jnp.int8, 16: jnp.int16}[bits]

    def init(params: Tree) -> RemainderState:
        first = lambda path, w: (_first_bits(path, w) >> (16 - bits)).astype(dtype)  # noqa: E731
        remainder = jax.tree_util.tree_map_with_path(first, params)
        return RemainderState(
            jnp.zeros((), jnp.int32), remainder, tx.init(jax.tree.map(WithRemainder, params, remainder))
        )

    def update(
        grads: Tree,
        state: RemainderState,
        params: Tree = None,
        *,
        layer: jax.Array | None = None,
        vocab_slice: VocabSlice | None = None,
        **extra: Any,
    ) -> tuple[Tree, RemainderState]:
        complete = jax.tree.map(WithRemainder, params, state.master)
        try:
            updates, inner = tx.update(grads, state.inner, complete, layer=layer, vocab_slice=vocab_slice, **extra)
        except (AttributeError, TypeError, ValueError) as error:
            if WithRemainder.__name__ not in str(error):
                raise
            raise UserError(
                f"with_remainder(tx, {bits}) does not support this optimizer, which computes with the weights or has"
                " state like them; pass optim.in_float32(tx)"
            ) from error
        key = jax.random.fold_in(jax.random.key(0), state.step)

        def change(path: KeyPath, u: jax.Array, w: jax.Array, remainder: jax.Array, names: Axes) -> Tree:
            draws = leaf_key(key, path) if bits == 8 else None
            return map_with_keys(_change, (u, remainder), w, draws, names, layer, vocab_slice)

        names = axes_or_unnamed(axes, params)
        done = jax.tree_util.tree_map_with_path(change, updates, params, state.master, names)
        changes, remainder = jax.tree.transpose(jax.tree.structure(updates), jax.tree.structure((0, 0)), done)
        return changes, RemainderState(state.step + 1, remainder, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _change(pair: tuple[jax.Array, jax.Array], w: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """From an update and a remainder: the difference to add to `w`, so that it becomes the bfloat16 nearest to the new
    weight, and the new remainder. Both are computed on the bits as integers: the upper 16 bits of a float32 are a
    bfloat16, and adding half a unit rounds ties away from zero."""
    u, remainder = pair
    new = WithRemainder(w, remainder).dequantize() + u.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(new, jnp.int32)
    sign = bits & jnp.int32(-(2**31))
    size = bits & jnp.int32(2**31 - 1)
    unit = 1 << (16 - 8 * remainder.dtype.itemsize)  # the unit of the remainder, in units of the last float32 bit
    if key is not None:
        size = jnp.minimum(size + jax.random.bits(key, w.shape, jnp.uint8).astype(jnp.int32) % unit, _FINITE)
    size = size & -unit
    near = (size + 0x8000) & jnp.int32(-0x1_0000)
    target = jax.lax.bitcast_convert_type(sign | jnp.where(jnp.isfinite(new), near, size), jnp.float32)
    change = jnp.where(jnp.isfinite(new), target - w.astype(jnp.float32), new).astype(u.dtype)
    # The weight after `apply_updates`, whether the difference is exact or not.
    new_weight = (w.astype(jnp.float32) + change.astype(jnp.float32)).astype(w.dtype)
    high = jax.lax.bitcast_convert_type(new_weight, jnp.uint16).astype(jnp.int32) << 16
    remainder_units = ((sign | size) - high) // unit
    remainder_units = jnp.clip(remainder_units, jnp.iinfo(remainder.dtype).min, jnp.iinfo(remainder.dtype).max)
    # The weight may be 0 where the new value is -0 or next to it: bits below those of 0 would be NaN.
    has_same_sign = (high < 0) == (sign < 0)
    return change, jnp.where(jnp.isfinite(new) & has_same_sign, remainder_units, 0).astype(remainder.dtype)


def _first_bits(path: KeyPath, w: BFloat16[Array, "*shape"]) -> Int[Array, "*shape"]:
    """The 16 bits of a float32 copy below a bfloat16 weight, as a signed integer: evenly distributed over the values
    that are rounded to the weight, by a hash of the position; 0 for a weight that is 0."""
    place = jnp.uint32(leaf_number(path))
    for dim, size in enumerate(w.shape):
        place = scramble(place) * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, w.shape, dim)
    bits = (scramble(place) >> 16).astype(jnp.int32) - 2**15
    return jnp.where(w == 0, 0, jnp.maximum(bits, 1 - 2**15))  # -2^15 is between two values


def _to_float32(tree: Tree) -> Tree:
    def convert(x: jax.Array | WithRemainder) -> jax.Array:
        return x.dequantize() if isinstance(x, WithRemainder) else x.astype(jnp.float32)

    return jax.tree.map(convert, tree, is_leaf=lambda x: isinstance(x, WithRemainder))
