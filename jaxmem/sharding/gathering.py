"""All-gathers weights from their stored sharding for computation, and reduce-scatters their gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

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
from jaxmem.sharding.weights import GatheredWeight, StoredWeight, Weight, is_encoded, proxy_of, stored_of
from jaxmem.typing import AxesTree, Tree

GATHERED = "gathered_weight"  # the checkpoint name of a gathered weight
# Gradients are delayed (`gather_with_input`) only if a device has at least this many times as many tokens as the
# smaller dimension of the weight.
MIN_TOKENS_PER_ROW = 2


Input = TypeVar("Input", jax.Array, None)


def stored_axes(axes: AxesTree, weights: Tree) -> AxesTree:
    """The axes of each array in a tree of weights (of a model or of one layer), from the axes of each weight. The codes
    and scales of a quantized weight are sharded like the weight, in each dimension that is divisible."""

    def array_axes(axes: Axes, w: Any) -> AxesTree:
        if not is_encoded(w):
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
    x: Input, weight: Weight | GatheredWeight, axes: Axes, dtype: DTypeLike, role: Role = "compute"
) -> tuple[Input, jax.Array]:
    """`gather`, which also returns `x`, the input of the matmul, and delays the gradient of `x` until the weight
    gradient has been reduce-scattered.

    By default XLA computes the weight gradients of a layer after the rest of its backward pass, so that nothing
    overlaps with the last reduce-scatter. With the delay, each reduce-scatter overlaps with the matmul for the gradient
    of x."""
    if isinstance(weight, GatheredWeight):
        return x, weight.value.astype(dtype)
    form = _GatheredForm.of(weight, axes, dtype, role)

    def values(w: jax.Array | QTensor) -> jax.Array:
        return form.for_compute(form.dequantized(w) if isinstance(w, QTensor) else form.stored(w.astype(dtype)))

    x, w = _gathered(x, weight, form, values)
    return x, checkpoint_name(w, GATHERED)


def gather_encoded(
    x: jax.Array, weight: Weight | GatheredWeight, axes: Axes, dtype: DTypeLike, encode: Callable[[jax.Array], Tree]
) -> tuple[jax.Array, StoredWeight]:
    """`gather_with_input`, which gathers a weight in another form: `encode` computes, from the weight in `dtype`,
    arrays of its shape, and numbers that all shards share. None of them has a derivative, so the gradient is that of
    the `proxy` of the result, an array of zeros."""
    if isinstance(weight, GatheredWeight):
        value = weight.value.astype(dtype)
        return x, StoredWeight(encode(jax.lax.stop_gradient(value)), value)
    form = _GatheredForm.of(weight, axes, dtype, "compute")

    def encoded(w: jax.Array | QTensor) -> StoredWeight:
        if isinstance(w, QTensor):
            values = form.dequantized(w)
            arrays = encode(values)
        else:
            values = form.stored(w.astype(dtype))
            arrays = jax.tree.map(form.stored, encode(values))
        return StoredWeight(jax.tree.map(form.for_compute, arrays), form.zeros_beside(values))

    x, w = _gathered(x, weight, form, encoded)
    return x, StoredWeight(checkpoint_name(w.stored, GATHERED), w.proxy)


@dataclass(frozen=True)
class _GatheredForm:
    """The form of a weight for computation."""

    axes: Axes
    dtype: DTypeLike
    role: Role
    shape: tuple[int, ...]
    padded_shape: tuple[int, ...]  # divisible by `tensor`

    @classmethod
    def of(cls, weight: Weight, axes: Axes, dtype: DTypeLike, role: Role) -> "_GatheredForm":
        layout = current()
        padded = weight.shape if layout is None else layout.padded(role, axes, weight.shape)
        return cls(axes, dtype, role, weight.shape, padded)

    def stored(self, w: jax.Array) -> jax.Array:
        """The cast weight, still sharded. The cast is between two constraints; otherwise XLA gathers before it
        casts."""
        w = constrain(w, *self.axes, role="weights") if w.ndim else w
        return row_major_if_gathered(w, self.axes, "weights", self.role)

    def dequantized(self, q: QTensor) -> jax.Array:
        return _dequantize(gather_quantized(q, self.axes), np.dtype(self.dtype))

    def for_compute(self, w: jax.Array) -> jax.Array:
        """The gathered and padded weight."""
        if w.ndim and w.shape != self.padded_shape:
            w = jnp.pad(w, [(0, padded - size) for padded, size in zip(self.padded_shape, w.shape, strict=True)])
        return constrain(w, *self.axes, role=self.role) if w.ndim else w

    def zeros_beside(self, w: jax.Array) -> jax.Array:
        """What receives the gradient of a weight: for each group of rows its own."""
        zeros = jnp.zeros(self.padded_shape, self.dtype)
        return _mapped_like(w, zeros) if vmap_groups() else zeros

    def gradient(self, g: jax.Array) -> jax.Array:
        """The gradient of the stored weight, reduce-scattered."""
        # First constrain the gradient to partial sums; otherwise XLA may gather the operands of the matmul.
        g = constrain(g, *self.axes, role=self.role)
        g = jax.lax.slice(g, (0,) * g.ndim, self.shape)
        return row_major_if_gathered(constrain(g, *self.axes, role="gradients"), self.axes, "gradients", self.role)


def _gathered(
    x: Tree, weight: Weight, form: _GatheredForm, gather: Callable[[jax.Array | QTensor], Tree]
) -> tuple[Tree, Tree]:
    """(x, `gather` of the stored weight on the device), differentiable; may delay the gradient of x."""
    proxy = proxy_of(weight)
    stored = None if proxy is weight else stored_of(weight)
    if proxy is not None and stored is not None and vmap_groups():
        stored = _mapped_like(proxy, stored)
    delays = x is not None and proxy is not None and _delays(x, weight, form.axes, form.role)

    @jax.custom_vjp
    def gathered(proxy: Tree, stored: Tree, x: Tree) -> tuple[Tree, Tree]:
        return gather(host.fetch_from_host(proxy if stored is None else stored)), x

    def backward(_: None, gradients: tuple[Tree, Tree]) -> tuple[jax.Array | None, None, Tree]:
        of_w, of_x = gradients
        if proxy is None:
            return None, None, of_x
        g = form.gradient(proxy_of(of_w))
        if delays:
            g, of_x = jax.lax.optimization_barrier((g, of_x))
        return g.astype(proxy.dtype), None, of_x

    gathered.defvjp(lambda proxy, stored, x: (gathered(proxy, stored, x), None), backward)
    # The backward pass may gather again, for which all operands of this call are saved.
    w, delayed = gathered(proxy, stored, x if delays else None)
    return delayed if delays else x, w


def _delays(x: jax.Array, weight: Weight, axes: Axes, role: Role) -> bool:
    """Whether to delay: if the weight gradient is reduce-scattered, and the gradient of x needs no communication. The
    delay frees an activation earlier, but keeps the weight and its gradient in memory longer, so it saves memory only
    with enough tokens."""
    layout = current()
    if layout is None or any(layout.mesh_axes_each(role, axes)) or not any(layout.mesh_axes_each("gradients", axes)):
        return False
    shards = layout.shard_count("activations", "batch") * layout.shard_count("activations", "time")
    tokens = x.size // x.shape[-1] // shards
    return tokens >= MIN_TOKENS_PER_ROW * min(weight.shape)


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
