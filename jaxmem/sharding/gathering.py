"""All-gathers weights from their stored sharding for computation, and reduce-scatters their gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jaxmem.quant import QTensor
from jaxmem.sharding import host
from jaxmem.sharding.arrays import constrain, row_major_if_gathered, vmap_groups
from jaxmem.sharding.layout import current
from jaxmem.sharding.table import Axes, Role, if_even, is_axes, relax_resized
from jaxmem.sharding.weights import GatheredWeight, StoredWeight, Weight, is_quantized, proxy_of, stored_of
from jaxmem.typing import AxesTree, Tree

GATHERED = "gathered_weight"  # the checkpoint name of a gathered weight
# Gradients are delayed (`gather_with_input`) only if a device has at least this many times as many tokens as the
# smaller dimension of the weight.
MIN_TOKENS_PER_ROW = 2


def stored_axes(axes: AxesTree, weights: Tree) -> AxesTree:
    """The axes of each array in a tree of weights (of a model or of one layer), from the axes of each weight. The codes
    and scales of a quantized weight are sharded like the weight, in each dimension that is divisible."""

    def array_axes(axes: Axes, w: Any) -> AxesTree:
        if not is_quantized(w):
            return axes
        return jax.tree.map(lambda x: relax_resized(axes[len(axes) - x.ndim :], x.shape, w.shape), w)

    return jax.tree.map(array_axes, axes, weights, is_leaf=is_axes)


def gather(weight: Weight | GatheredWeight, axes: Axes, dtype: DTypeLike, role: Role = "compute") -> jax.Array:
    """The weight for computation: in the compute dtype, gathered, and padded if it is not divisible by `tensor`.

    It is cast before it is gathered, so that fewer bytes are sent; the codes of a quantized weight are gathered and
    then dequantized. Weights in host memory are first copied to the device. The gradient is constrained to the sharding
    of gradients, so that XLA reduce-scatters it.

    Args:
        weight: the stored weight.
        axes: its logical axes.
        dtype: the compute dtype.
        role: how it is sharded for computation.
    """
    return gather_with_input(None, weight, axes, dtype, role)[1]


def gather_with_input(
    x: jax.Array | None,
    weight: Weight | GatheredWeight,
    axes: Axes,
    dtype: DTypeLike,
    role: Role = "compute",
    encode: Callable[[jax.Array], Tree] | None = None,
) -> tuple[jax.Array | None, Any]:
    """`gather`, which also returns `x`, the input of the matmul, and delays the gradient of `x` until the weight
    gradient has been reduce-scattered.

    By default XLA computes the weight gradients of a layer after the rest of its backward pass, so that nothing
    overlaps with the last reduce-scatter. With the delay, each reduce-scatter overlaps with the matmul for the gradient
    of x.

    Args:
        encode: computes the form in which a weight in `dtype` is gathered: arrays of its shape, and numbers that all
            shards share. None of them has a derivative. A `StoredWeight` is returned, with this form, and an array of
            zeros that receives the gradient."""
    if isinstance(weight, GatheredWeight):
        value = weight.value.astype(dtype)
        return x, value if encode is None else StoredWeight(encode(jax.lax.stop_gradient(value)), value)
    layout = current()
    shape = weight.shape if layout is None else layout.padded(role, axes, weight.shape)
    proxy = proxy_of(weight)
    stored = None if proxy is weight else stored_of(weight)
    if proxy is not None and stored is not None and vmap_groups():
        stored = _mapped_like(proxy, stored)
    delays = x is not None and proxy is not None and _delays(x, weight, axes, role)

    def for_compute(w: jax.Array) -> jax.Array:
        if w.ndim and shape != w.shape:
            w = jnp.pad(w, [(0, padded - size) for padded, size in zip(shape, w.shape, strict=True)])
        return constrain(w, *axes, role=role) if w.ndim else w

    def sharded(w: jax.Array) -> jax.Array:
        # The cast is between two constraints; otherwise XLA gathers before it casts.
        w = constrain(w, *axes, role="weights") if w.ndim else w
        return row_major_if_gathered(w, axes, "weights", role)

    @jax.custom_vjp
    def gathered(proxy: Tree, stored: Tree, x: Tree) -> tuple[Tree, Tree]:
        w = host.fetch_from_host(proxy if stored is None else stored)
        if is_quantized(w):
            w = _dequantize(gather_quantized(w, axes), np.dtype(dtype))
            encoded = w if encode is None else encode(w)
        else:
            w = sharded(w.astype(dtype))
            encoded = w if encode is None else jax.tree.map(sharded, encode(w))
        encoded = jax.tree.map(for_compute, encoded)
        return encoded if encode is None else StoredWeight(encoded, _zeros_beside(w, shape, dtype)), x

    def backward(_: None, gradients: tuple[Tree, Tree]) -> tuple[jax.Array | None, None, Tree]:
        of_w, of_x = gradients
        g = proxy_of(of_w)
        if proxy is None:
            return None, None, of_x
        # First constrain the gradient to partial sums; otherwise XLA may gather the operands of the matmul.
        g = constrain(g, *axes, role=role)
        g = jax.lax.slice(g, (0,) * g.ndim, weight.shape)
        g = row_major_if_gathered(constrain(g, *axes, role="gradients"), axes, "gradients", role)
        if delays:
            g, of_x = jax.lax.optimization_barrier((g, of_x))
        return g.astype(proxy.dtype), None, of_x

    gathered.defvjp(lambda proxy, stored, x: (gathered(proxy, stored, x), None), backward)
    # The backward pass may gather again, for which all operands of this call are saved.
    w, delayed = gathered(proxy, stored, x if delays else None)
    x = delayed if delays else x
    if encode is None:
        return x, checkpoint_name(w, GATHERED)
    return x, StoredWeight(checkpoint_name(w.stored, GATHERED), w.proxy)


def _delays(x: jax.Array, weight: Weight, axes: Axes, role: Role) -> bool:
    """Whether to delay: if the weight gradient is reduce-scattered, and the gradient of x needs no communication. The
    delay frees an activation earlier, but keeps the weight and its gradient in memory longer, so it saves memory only
    with enough tokens."""
    layout = current()
    if layout is None or any(layout.mesh_axes_each(role, axes)) or not any(layout.mesh_axes_each("gradients", axes)):
        return False
    tokens = x.size // x.shape[-1] // layout.parts("activations", "batch") // layout.parts("activations", "time")
    return tokens >= MIN_TOKENS_PER_ROW * min(weight.shape)


def _zeros_beside(w: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """What receives the gradient of a weight: for each group of rows its own."""
    zeros = jnp.zeros(shape, dtype)
    return _mapped_like(w, zeros) if vmap_groups() else zeros


def _mapped_like(proxy: jax.Array, stored: Tree) -> Tree:
    """A separate view of a stored weight for each group of rows, like `proxy`; XLA removes the operation. A shared
    value would have one gradient, the sum over the groups, which the proxy of each group would receive."""
    first = jax.lax.stop_gradient(proxy)[(0,) * proxy.ndim]
    return jax.tree.map(lambda x: jnp.where(False, first.astype(x.dtype), x), stored)


def gather_quantized(q: QTensor, axes: Axes) -> QTensor:
    """Gathers codes and scales for the computation."""
    even = tuple(map(if_even, axes))  # a dimension that needs padding stays replicated until it is dequantized

    def gather_part(x: jax.Array) -> jax.Array:
        return constrain(row_major_if_gathered(x, even, "weights", "compute"), *even, role="compute")

    return jax.tree.map(gather_part, host.fetch_from_host(q))


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _dequantize(q: QTensor, dtype: np.dtype) -> jax.Array:
    """Dequantizes in one operation that recompute policies recognize: codes may be saved for the backward pass, their
    dequantized values are not."""
    return q.dequantize(dtype)


def _no_derivative(*_: Any) -> Any:
    raise TypeError("quantized weights have no gradient: differentiate with respect to the proxy of a StoredWeight")


_dequantize.defvjp(_no_derivative, _no_derivative)
