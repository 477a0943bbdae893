"""All-gathers weights from their stored sharding for computation, and reduce-scatters their gradients."""

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
from jaxmem.sharding.arrays import constrain, row_major, vmap_groups
from jaxmem.sharding.layout import current
from jaxmem.sharding.table import Axes, Role, if_even, is_axes, relax_resized
from jaxmem.sharding.weights import StoredWeight, Weight, is_quantized

GATHERED = "gathered_weight"  # the checkpoint name of a gathered weight
# Tokens per device and row of a weight's smaller side from which on it pays to delay gradients (`gather_with_input`).
MIN_TOKENS_PER_ROW = 2


def stored_axes(axes: Any, weights: Any) -> Any:
    """The axes of each array in a tree of weights, or of one layer of them, given those of each weight. The codes and
    scales of a quantized weight are sharded as the weight would be where that is even."""

    def one(axes: Axes, w: Any) -> Any:
        if not is_quantized(w):
            return axes
        return jax.tree.map(lambda x: relax_resized(axes[len(axes) - x.ndim :], x.shape, w.shape), w)

    return jax.tree.map(one, axes, weights, is_leaf=is_axes)


def gather(weight: Weight, axes: Axes, dtype: DTypeLike, role: Role = "compute") -> jax.Array:
    """A weight as it is computed with: in the compute dtype, replicated over `fsdp`, padded where `tensor` does not
    divide it. It is cast before it is gathered, so that fewer bytes are communicated; quantized weights are gathered as
    codes and dequantized afterwards. Weights in host memory are fetched first. The gradient is constrained to the
    sharding of gradients, so that XLA reduce-scatters it."""
    return gather_with_input(None, weight, axes, dtype, role)[1]


def gather_with_input(
    x: jax.Array | None, weight: Weight, axes: Axes, dtype: DTypeLike, role: Role = "compute"
) -> tuple[jax.Array | None, jax.Array]:
    """Also returns `x`, the input of the matmul; delays its gradient until the weight gradient has been
    reduce-scattered.

    By default XLA computes a layer's weight gradients after everything else in its backward pass, so that nothing is
    left to overlap the last reduce-scatter with. Delayed, each one overlaps with the matmul that gives the gradient of
    x."""
    layout = current()
    shape = weight.shape if layout is None else layout.padded(role, axes, weight.shape)
    if isinstance(weight, StoredWeight) and weight.at is not None and vmap_groups():
        weight = dataclasses.replace(weight, stored=_mapped_like(weight.at, weight.stored))
    at, stored = (weight.at, weight.stored) if isinstance(weight, StoredWeight) else (weight, None)
    delays = x is not None and at is not None and _delays(x, weight, axes, role)

    @jax.custom_vjp
    def gathered(at: Any, stored: Any, x: Any) -> tuple[jax.Array, Any]:
        w = host.fetch_from_host(at if stored is None else stored)
        if is_quantized(w):
            w = _dequantize(gather_quantized(w, axes), np.dtype(dtype))
        else:
            # Constrained before and after, otherwise XLA gathers before it casts.
            w = constrain(w.astype(dtype), *axes, role="weights")
            w = _row_major_if_gathered(w, axes, "weights", role)
        if shape != w.shape:
            w = jnp.pad(w, [(0, padded - size) for padded, size in zip(shape, w.shape, strict=True)])
        return constrain(w, *axes, role=role), x

    def backward(_: None, gradients: tuple[jax.Array, Any]) -> tuple[jax.Array | None, None, Any]:
        g, of_x = gradients
        if at is None:
            return None, None, of_x
        # Partial sums first, or XLA may gather the operands to compute each shard in one matmul.
        g = constrain(g, *axes, role=role)
        g = jax.lax.slice(g, (0,) * g.ndim, weight.shape)
        g = _row_major_if_gathered(constrain(g, *axes, role="gradients"), axes, "gradients", role)
        if delays:
            g, of_x = jax.lax.optimization_barrier((g, of_x))
        return g.astype(at.dtype), None, of_x

    gathered.defvjp(lambda at, stored, x: (gathered(at, stored, x), None), backward)
    w, x = gathered(at, stored, x)
    return x, checkpoint_name(w, GATHERED)


def _delays(x: jax.Array, weight: Weight, axes: Axes, role: Role) -> bool:
    """Whether the weight's gradient is scattered and the gradient of x needs no communication of its own. Delaying
    keeps the weight and its gradient alive longer and frees an activation earlier, so it has to pay off."""
    layout = current()
    if layout is None or any(layout.mesh_axes_each(role, axes)) or not any(layout.mesh_axes_each("gradients", axes)):
        return False
    tokens = x.size // x.shape[-1] // layout.parts("activations", "batch") // layout.parts("activations", "time")
    return tokens >= MIN_TOKENS_PER_ROW * min(weight.shape)


def _row_major_if_gathered(x: jax.Array, axes: Axes, role: Role, compute_role: Role) -> jax.Array:
    """Row-major on each device, where the two roles are sharded differently. A gather or scatter along a dimension is
    fastest with that dimension outermost, and XLA would transpose not this array but the whole stack of layers that it
    is sliced from or written into: a second copy of it."""
    layout = current()
    if layout is None or x.ndim < 2:
        return x
    if layout.mesh_axes_each(role, axes) == layout.mesh_axes_each(compute_role, axes):
        return x
    return row_major(x, *axes, role=role)


def _mapped_like(at: jax.Array, stored: Any) -> Any:
    """A stored weight, shared by groups of rows, as each group's own, as `at` is; XLA drops the operation. A shared
    value would have one gradient, the sum over the groups, and each group's `at` would receive all of it."""
    one = jax.lax.stop_gradient(at)[(0,) * at.ndim]
    return jax.tree.map(lambda x: jnp.where(False, one.astype(x.dtype), x), stored)


def gather_quantized(q: QTensor, axes: Axes) -> QTensor:
    """Codes and scales gathered to where the weight is computed with."""
    even = tuple(if_even(axis) for axis in axes)  # what would have to be padded is replicated until it is dequantized

    def one(x: jax.Array) -> jax.Array:
        return constrain(_row_major_if_gathered(x, even, "weights", "compute"), *even, role="compute")

    return jax.tree.map(one, host.fetch_from_host(q))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _dequantize(q: QTensor, dtype: np.dtype) -> jax.Array:
    """One operation for recomputation policies: codes may be saved for the backward pass, their values are not."""
    return q.dequantize(dtype)


def _no_derivative(*_: Any) -> Any:
    raise TypeError("quantized weights have no gradient: differentiate with respect to the `at` of a StoredWeight")


_dequantize.defvjp(_no_derivative, _no_derivative)
