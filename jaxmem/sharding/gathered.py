"""Weights brought from where they rest to where they are computed with, and their gradients back."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxmem.quant import QTensor
from jaxmem.sharding import host
from jaxmem.sharding.arrays import constrain, groups, row_major
from jaxmem.sharding.layout import current
from jaxmem.sharding.table import IF_EVEN, Axes, Role, as_even, is_axes
from jaxmem.sharding.weights import Point, Weight, is_quantized

GATHERED = "gathered_weight"  # the checkpoint name of a weight as it is computed with
ENOUGH = 2  # tokens of a device, for each row of a weight's smaller side: from here on to wait for a gradient pays


def axes_at_rest(axes: Any, weights: Any) -> Any:
    """The axes of each array of a tree of weights, or of one layer of them, from those of each weight. Codes and
    constants of a quantized one lie as it would where that comes out even; where a mesh cuts between, another
    dimension is split."""

    def one(axes: Axes, w: Any) -> Any:
        if not is_quantized(w):
            return axes
        return jax.tree.map(lambda x: as_even(axes[len(axes) - x.ndim :], x.shape, w.shape), w)

    return jax.tree.map(one, axes, weights, is_leaf=is_axes)


def gather(weight: Weight, axes: Axes, dtype: DTypeLike, role: Role = "computing") -> jax.Array:
    """A weight as it is computed with: in the compute dtype, whole over `fsdp`, with zeros added where `tensor` does
    not divide it. It is cast before it travels, so that fewer bytes do; codes travel as they are and are decoded
    where they are used. What lies in host memory comes from there. Its gradient goes back to where gradients lie, which
    makes XLA reduce-scatter it."""
    return gather_for(None, weight, axes, dtype, role)[1]


def gather_for(
    x: jax.Array | None, weight: Weight, axes: Axes, dtype: DTypeLike, role: Role = "computing"
) -> tuple[jax.Array | None, jax.Array]:
    """And `x`, which is multiplied with it and whose gradient goes on only when the weight's is at rest. Left to itself
    XLA makes a layer's gradients of weights behind all others, and nothing follows the last of them that its message
    could move beside. So each one's moves beside the product that makes the gradient of x."""
    layout = current()
    shape = weight.shape if layout is None else layout.padded(role, axes, weight.shape)
    if isinstance(weight, Point) and weight.at is not None and groups():
        weight = dataclasses.replace(weight, rest=_mapped_as(weight.at, weight.rest))
    at, rest = (weight.at, weight.rest) if isinstance(weight, Point) else (weight, None)
    waits = x is not None and at is not None and _waits(x, weight, axes, role)

    @jax.custom_vjp
    def brought(at: Any, rest: Any, x: Any) -> tuple[jax.Array, Any]:
        w = host.brought(at if rest is None else rest)
        if is_quantized(w):
            w = _decoded(whole(w, axes), np.dtype(dtype))
        else:
            # Pinned on both sides, or XLA gathers first and casts after.
            w = constrain(w.astype(dtype), *axes, role="weights")
            w = _as_it_rests(w, axes, "weights", role)
        if shape != w.shape:
            w = jnp.pad(w, [(0, more - size) for more, size in zip(shape, w.shape, strict=True)])
        return constrain(w, *axes, role=role), x

    def back(_: None, gradients: tuple[jax.Array, Any]) -> tuple[jax.Array | None, None, Any]:
        g, of_x = gradients
        if at is None:
            return None, None, of_x
        # Partial sums first, or XLA may gather what they are made of to make each part of them in one go.
        g = constrain(g, *axes, role=role)
        g = jax.lax.slice(g, (0,) * g.ndim, weight.shape)
        g = _as_it_rests(constrain(g, *axes, role="gradients"), axes, "gradients", role)
        if waits:
            g, of_x = jax.lax.optimization_barrier((g, of_x))
        return g.astype(at.dtype), None, of_x

    brought.defvjp(lambda at, rest, x: (brought(at, rest, x), None), back)
    w, x = brought(at, rest, x)
    return x, checkpoint_name(w, GATHERED)


def _waits(x: jax.Array, weight: Weight, axes: Axes, role: Role) -> bool:
    """Whether a weight's gradient is scattered and the gradient of x is none of sums that travel too. Waiting, a device
    holds the weight and its gradient longer and an array of its tokens shorter, which has to be worth it."""
    layout = current()
    if layout is None or any(layout.over_each(role, axes)) or not any(layout.over_each("gradients", axes)):
        return False
    tokens = x.size // x.shape[-1] // layout.parts("activations", "batch") // layout.parts("activations", "time")
    return tokens >= ENOUGH * min(weight.shape)


def _as_it_rests(x: jax.Array, axes: Axes, role: Role, computing: Role) -> jax.Array:
    """Row after row on each device, as arrays rest, where the other role is not split alike. What is gathered or
    scattered along a dimension lies best with that one outermost, and XLA would turn not this array but all that it
    is cut out of or written into: a whole stack of layers, twice there."""
    layout = current()
    if layout is None or x.ndim < 2 or layout.over_each(role, axes) == layout.over_each(computing, axes):
        return x
    return row_major(x, *axes, role=role)


def _mapped_as(at: jax.Array, rest: Any) -> Any:
    """`rest`, which groups of rows share, as each group's own, as `at` is; XLA drops what says so. Shared values would
    have one gradient, the sum over the groups, and each group's `at` would be given all of it."""
    one = jax.lax.stop_gradient(at)[(0,) * at.ndim]
    return jax.tree.map(lambda x: jnp.where(False, one.astype(x.dtype), x), rest)


def whole(q: QTensor, axes: Axes) -> QTensor:
    """Codes and constants where the weight is computed with."""
    even = tuple(axis and axis + IF_EVEN for axis in axes)  # what is padded to be split is whole until it is decoded

    def one(x: jax.Array) -> jax.Array:
        return constrain(_as_it_rests(x, even, "weights", "computing"), *even, role="computing")

    return jax.tree.map(one, host.brought(q))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _decoded(q: QTensor, dtype: np.dtype) -> jax.Array:
    """One operation for those who say what is kept for the backward pass: codes are, their values are not."""
    return q.dequantize(dtype)


def _never(*_: Any) -> Any:
    raise TypeError("codes have no gradient: differentiate by the `at` of a `weights.Point`")


_decoded.defvjp(_never, _never)
