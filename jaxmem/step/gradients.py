"""Gradients of a batch of several micro-batches, and when devices reduce them.

The backward pass adds the gradient of each layer to the sum over micro-batches as soon as it is computed
(`weights.HookedWeight`), so memory holds one float32 sum per weight, and the gradients of one layer.

Where gradients are sharded (`fsdp` with ZeRO-2 or 3), the gradients of every micro-batch are reduce-scattered as soon
as they are computed, and no device ever stores a full gradient. Where they are replicated (`replica`; `fsdp` below
ZeRO-2), each device accumulates the gradients of its own rows, and the sums are all-reduced once per update, which
communicates 2 P w bytes instead of 2 a P w, for P parameters of w bytes and `a` micro-batches (PyTorch's DDP calls this
`no_sync`; Li et al., arXiv:2006.15704, section 3.2.4). Gradients are accumulated in float32, and their sums are
communicated in the compute dtype. The all-reduce of a layer starts as soon as the last micro-batch's gradient of this
layer is computed, and is overlapped with the backward pass of the earlier layers (`weights.HookedWeight`). Only the
all-reduce of the embedding is exposed, because its gradient is computed last. For this overlap, the last micro-batch is
compiled separately, after the loop over the others. The loss of a script is a function of all rows of a micro-batch,
which need not be a mean of independent rows (InfoNCE, a masked mean), so its gradients are reduced for every
micro-batch.

To compute separate gradients on each device, `jax.vmap` maps the loss over groups of rows: one group per device along
the mesh axes that shard the batch but not the gradients. Each group has a view of the same weights. No data is copied,
since each group is on the device that holds its weights.

`memory.update: during` has its own loop over micro-batches (`stack.reverse`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jax.typing import DTypeLike

from jaxmem.optim.groups import constrain_tree
from jaxmem.quant.precision import Params
from jaxmem.sharding.arrays import GROUPS, constrain
from jaxmem.sharding.layout import Layout, current
from jaxmem.sharding.table import Axes, Role, is_axes, is_stacked
from jaxmem.sharding.weights import HookedWeight, differentiable
from jaxmem.step.objective import FORWARD_STATE, Batch, Sums
from jaxmem.typing import AxesTree, Tree

Loss = Callable[[Params, Batch, jax.Array], tuple[jax.Array, Sums]]  # (weights, batch, keys of its rows)


def accumulate(
    loss: Loss,
    params: Params,
    batch: Batch,
    keys: jax.Array,
    axes: AxesTree,
    dtype: DTypeLike | None,
    state: Tree = None,
) -> tuple[Params, Sums]:
    """Gradients of micro-batches one after the other, accumulated in float32.

    Args:
        loss: of a micro-batch.
        params: the trainable weights.
        batch: arrays [micro-batches, rows, ...].
        keys: the random key of each row, [micro-batches, rows].
        axes: the logical axes of the weights.
        dtype: the dtype of communication of gradients that each device accumulates for its own rows; None: the
            gradients of every micro-batch are reduced, because the loss needs all rows of a micro-batch.
        state: the arrays that the forward pass changes, for example the statistics of BatchNorm. Each micro-batch
            begins with the state that the previous one returned. Such statistics need all rows of a micro-batch, so
            devices do not compute separate gradients: with `state`, the gradients of every micro-batch are reduced.
    """
    layout = current()
    local = None
    if layout is not None and layout.local_gradient_axes and dtype is not None and not state:
        local = _LocalGradients(layout, axes, dtype)
    added = _with_hooks(loss, axes, Add, in_place=True)

    def add(carry: Tree, micro_batch: tuple[Batch, jax.Array]) -> tuple[Tree, None]:
        total, all_sums, state = carry
        batch, keys = micro_batch
        batch = {**batch, FORWARD_STATE: state} if state else batch
        proxies = jax.tree.map(jnp.zeros_like, total)
        if local is None:
            total, sums = jax.grad(added, has_aux=True)(proxies, params, total, batch, keys)
        else:
            total, sums = local.add(added, proxies, params, total, batch, keys)
        state = sums.pop(FORWARD_STATE, None)
        return (total, jax.tree.map(lambda t, x: t + x.astype(t.dtype), all_sums, sums), state), None

    looped = (batch, keys) if local is None else jax.tree.map(lambda x: x[:-1], (batch, keys))
    last = jax.tree.map(lambda x: x[-1], (batch, keys))
    groups = () if local is None else (local.groups,)
    zeros = jax.tree.map(lambda w: jnp.zeros((*groups, *w.shape), jnp.float32), params)
    _, shapes = jax.eval_shape(loss, params, *last)
    no_sums = {name: jnp.zeros(x.shape, jnp.float32) for name, x in shapes.items() if name != FORWARD_STATE}
    (grads, sums, state), _ = jax.lax.scan(add, (zeros, no_sums, state or None), looped)
    if local is None:
        return grads, sums | ({FORWARD_STATE: state} if state else {})
    grads, sums_of_last = local.add_last(loss, params, grads, *last)
    return grads, jax.tree.map(jnp.add, sums, sums_of_last)


def _with_hooks(loss: Loss, axes: AxesTree, hook: Callable[[Axes], Any], in_place: bool = False) -> Callable[..., Any]:
    """A loss of (proxies, weights, sums, batch, keys), whose gradient is `hook(axes)(weight gradient, sum)`."""

    def hooked_weight(names: Axes, proxy: jax.Array, stored: jax.Array, total: jax.Array) -> HookedWeight | jax.Array:
        hooked = HookedWeight(stored, proxy, total, hook(names), in_place)
        return hooked if is_stacked(names) else hooked.apply()  # a stack applies the hook layer by layer

    def hooked(proxies: Params, stored: Params, total: Params, batch: Batch, keys: jax.Array) -> tuple[jax.Array, Sums]:
        return loss(jax.tree.map(hooked_weight, axes, proxies, stored, total, is_leaf=is_axes), batch, keys)

    return hooked


@dataclass(frozen=True)
class Add:
    """A function of a gradient and the sum of the gradients of earlier micro-batches, which returns the new sum. The
    gradient is constrained to its sharding, so that it is reduce-scattered before it is added to the sum."""

    axes: Axes

    def __call__(self, g: jax.Array, before: jax.Array) -> jax.Array:
        g = constrain(g, *self.axes[len(self.axes) - g.ndim :], role="gradients")
        return before + g.astype(before.dtype)


class _LocalGradients:
    """Gradients of groups of rows, one group and its gradients per device."""

    def __init__(self, layout: Layout, axes: AxesTree, dtype: DTypeLike) -> None:
        self._layout = layout
        self._axes = axes
        self._dtype = np.dtype(dtype)
        self._over = layout.local_gradient_axes
        self.groups = layout.size(self._over)

    def add(
        self, loss: Callable[..., Any], proxies: Params, params: Params, total: Params, batch: Batch, keys: jax.Array
    ) -> tuple[Params, Sums]:
        """The sum of `total` and the gradients of a micro-batch, [groups, ...]."""
        total, sums = self._differentiate(loss, 0, proxies, batch, keys, self._views_of_groups(params), total)
        return self._constrain_groups(total, "gradients"), sums

    def add_last(self, loss: Loss, params: Params, total: Params, batch: Batch, keys: jax.Array) -> tuple[Params, Sums]:
        """The sum of `total` and the gradients of the last micro-batch over the groups, sharded like the optimizer
        state."""
        hooked = _with_hooks(loss, self._axes, lambda axes: Reduce(self._layout, axes, self._over, self._dtype))
        # The reduced gradients have the dtype of the proxies. It is the dtype of communication, not float32, because
        # these gradients are in memory together with the sums that are not reduced yet.
        proxies = differentiable(params, self._dtype)
        grads, sums = self._differentiate(hooked, None, proxies, batch, keys, self._views_of_groups(params), total)
        return jax.tree.map(lambda g: g.astype(jnp.float32), constrain_tree(grads, self._axes, "optimizer")), sums

    def _differentiate(
        self,
        loss: Callable[..., Any],
        proxies_axis: int | None,
        proxies: Params,
        batch: Batch,
        keys: jax.Array,
        *arrays: Params,
    ) -> tuple[Params, Sums]:
        """Gradients with respect to `proxies` of the sum of the losses of all groups. If `proxies_axis` is None, all
        groups share `proxies`. If it is 0, they are [groups, ...], like the trees in `arrays`."""

        def every(proxies: Params, *arrays_of_groups: Any) -> tuple[jax.Array, Sums]:
            in_axes = (proxies_axis, *[0] * len(arrays), 0, 0)
            mapped = jax.vmap(loss, in_axes=in_axes, axis_name=GROUPS, spmd_axis_name=self._over)
            losses, sums = mapped(proxies, *arrays_of_groups)
            return jnp.sum(losses), jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)

        # Rows are sharded group by group, so no data is moved.
        split = lambda x: x.reshape(self.groups, -1, *x.shape[1:])  # noqa: E731
        batch, keys = jax.tree.map(split, (batch, keys))
        with self._layout.inside_vmap(self._over):
            return jax.grad(every, has_aux=True)(proxies, *arrays, batch, keys)

    def _views_of_groups(self, params: Params) -> Params:
        """[groups, ...]: a view of the weights for each group."""
        views = jax.tree.map(lambda w: jnp.broadcast_to(w, (self.groups, *w.shape)), params)
        return self._constrain_groups(views, "weights")

    def _constrain_groups(self, tree: Params, role: Role) -> Params:
        return jax.vmap(lambda tree: constrain_tree(tree, self._axes, role), spmd_axis_name=self._over)(tree)


@dataclass(frozen=True)
class Reduce:
    """A function of the gradient and the accumulated gradient of a group. It adds both, and returns the sum over all
    groups, communicated in `dtype`."""

    layout: Layout
    axes: Axes
    over: tuple[str, ...]
    dtype: np.dtype

    def __call__(self, g: jax.Array, before: jax.Array) -> jax.Array:
        @custom_vmap
        def reduced(x: jax.Array) -> jax.Array:
            return x

        @reduced.def_vmap
        def _(_groups: int, _batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
            return self.reduce_groups(x), False

        return reduced(before + g.astype(before.dtype)).astype(self.dtype)

    def reduce_groups(self, x: jax.Array) -> jax.Array:
        """[groups, ...] -> the sum over groups. The last mesh axis, which has the fastest links, is reduced first."""
        x = x.astype(self.dtype)
        axes = self.axes[len(self.axes) - x.ndim + 1 :]
        pin = lambda x: constrain(x, *axes, role="optimizer")  # noqa: E731
        for number in reversed(range(len(self.over))):
            outer = self.over[:number]
            neighbours = self.layout.size(self.over[number : number + 1])
            parts = x.reshape(-1, neighbours, *x.shape[1:])
            # `jnp.sum` would communicate float32.
            x = jax.lax.reduce(parts, jnp.zeros((), x.dtype), jax.lax.add, (1,))
            if outer:
                with self.layout.without(*outer):
                    x = jax.vmap(pin, spmd_axis_name=outer)(x)
        return pin(x[0])
