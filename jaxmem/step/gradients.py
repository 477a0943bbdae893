"""Gradients of a batch that comes in micro-batches, and when devices tell each other of them.

Where a device holds a part of each gradient (`fsdp` from zero 2 on), every micro-batch's is reduced into the parts at
once: nobody ever holds a whole one. Where each holds whole ones (`replica`; `fsdp` below zero 2), it adds up those of
its own rows, and the sums are reduced once an update: 2 P bytes instead of 2 a P for a micro-batches, and none of them
while micro-batches run (PyTorch's DDP calls this `no_sync`; Li et al., arXiv:2006.15704, section 3.2.4). The sum is the
one that accumulation holds anyway, in float32; it travels as what one micro-batch's gradients are made in. What a
layer has of it leaves with the last micro-batch's gradient of that layer, while the backward pass goes on through the
layers before (`weights.Hooked`): of all messages only the embedding's, the last, have nothing beside them. So the last
micro-batch is compiled by itself, next to the loop over the others.

For devices to keep their own, the loss is `jax.vmap`ped over groups of rows, one for each device along these mesh axes,
each with its own name for the same weights. Nothing is copied: a group is where its weights lie.
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
from jaxmem.sharding import Axes, Layout, Role, constrain, current, is_axes
from jaxmem.sharding.weights import HookedWeight, differentiable
from jaxmem.step.objective import Batch, Sums

Loss = Callable[[Params, Batch, jax.Array], tuple[jax.Array, Sums]]  # (weights, batch, keys of its rows)


def at_once(loss: Loss, params: Params, batch: Batch, keys: jax.Array, axes: Any) -> tuple[Params, Sums]:
    """Of one batch, reduced as they are made."""
    grads, sums = jax.grad(loss, has_aux=True)(params, batch, keys)
    # Where the layout wants them, so that they are reduced into their parts and never held whole.
    return constrain_tree(grads, axes, "gradients"), sums


def accumulated(
    loss: Loss, params: Params, batch: Batch, keys: jax.Array, axes: Any, dtype: DTypeLike
) -> tuple[Params, Sums]:
    """Of micro-batches one after the other: leaves of the batch and `keys` are [micro-batches, rows, ...]. Added up in
    float32; `dtype` is what gradients travel in."""
    layout = current()
    apart = _Apart(layout, axes, dtype) if layout is not None and layout.local_gradient_axes else None

    def micro(batch: Batch, keys: jax.Array) -> tuple[Params, Sums]:
        return at_once(loss, params, batch, keys, axes) if apart is None else apart.gradients(loss, params, batch, keys)

    def add(total: Any, one: tuple[Batch, jax.Array]) -> tuple[Any, None]:
        return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, micro(*one)), None

    looped = (batch, keys) if apart is None else jax.tree.map(lambda x: x[:-1], (batch, keys))
    last = jax.tree.map(lambda x: x[-1], (batch, keys))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), jax.eval_shape(micro, *last))
    grads, sums = jax.lax.scan(add, zeros, looped)[0]
    if apart is None:
        return grads, sums
    grads, own = apart.reduced(loss, params, grads, *last)
    return grads, jax.tree.map(jnp.add, sums, own)


def in_one_pass(
    loss: Loss, params: Params, batch: Batch, keys: jax.Array, axes: Any, dtype: DTypeLike
) -> tuple[Params, Sums]:
    """Of micro-batches that `loss` takes all together, as stages do: it adds their gradients up itself."""
    layout = current()
    if layout is None or not layout.local_gradient_axes:
        return at_once(loss, params, batch, keys, axes)
    return _Apart(layout, axes, dtype, rows=1).summed(loss, params, batch, keys)


class _Apart:
    """Gradients of rows that lie on different devices, each with its own."""

    def __init__(self, layout: Layout, axes: Any, dtype: DTypeLike, rows: int = 0) -> None:
        """`rows`: which dimension of a batch they are."""
        self._layout, self._axes, self._dtype, self._rows = layout, axes, np.dtype(dtype), rows
        self._over = layout.local_gradient_axes
        self._groups = layout.size(self._over)

    def gradients(self, loss: Loss, params: Params, batch: Batch, keys: jax.Array) -> tuple[Params, Sums]:
        """Of a micro-batch, [groups, ...]: each group's own."""
        grads, sums = self._differentiated(loss, self._named(params), batch, keys)
        return self._pinned(grads, "gradients"), sums

    def reduced(self, loss: Loss, params: Params, total: Params, batch: Batch, keys: jax.Array) -> tuple[Params, Sums]:
        """`total` and the last micro-batch's, summed over the groups, where the optimizer's state lies."""

        def hook(names: Axes, at: jax.Array, own: jax.Array, total: jax.Array) -> HookedWeight | jax.Array:
            hooked = HookedWeight(own, at, total, self._reduced(names))
            return hooked if names[:1] == ("layer",) else hooked.apply()  # layers do it one by one

        def of_group(at: Params, own: Params, total: Params, batch: Batch, keys: jax.Array) -> tuple[jax.Array, Sums]:
            return loss(jax.tree.map(hook, self._axes, at, own, total, is_leaf=is_axes), batch, keys)

        # In what they travel in: the gradients of layers that are reduced lie beside what is left of the sums.
        at = differentiable(params, self._dtype)
        grads, sums = self._differentiated(of_group, at, batch, keys, self._named(params), total)
        return jax.tree.map(lambda g: g.astype(jnp.float32), constrain_tree(grads, self._axes, "optimizer")), sums

    def summed(self, loss: Loss, params: Params, batch: Batch, keys: jax.Array) -> tuple[Params, Sums]:
        """Over the groups, once the gradients of a whole batch are there."""
        own, sums = self.gradients(loss, params, batch, keys)
        total = jax.tree.map(lambda names, g: self._reduced(names).of_all(g), self._axes, own, is_leaf=is_axes)
        return jax.tree.map(lambda total, g: total.astype(g.dtype), total, own), sums

    def _reduced(self, names: Axes) -> _Reduced:
        return _Reduced(self._layout, names, self._over, self._dtype)

    def _differentiated(self, loss: Callable[..., Any], at: Params, batch: Batch, keys: jax.Array, *own: Any) -> Any:
        """By `at`, which is all groups' together where each has its `own`, of losses that are each group's."""

        def every(at: Params, *each: Any) -> tuple[jax.Array, Sums]:
            in_axes = (None if own else 0, *[0] * len(own), self._rows, self._rows)
            mapped = jax.vmap(loss, in_axes=in_axes, spmd_axis_name=self._over)
            losses, sums = mapped(at, *each)
            return jnp.sum(losses), jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)

        # Rows lie group by group, so that this moves nothing.
        split = lambda x: x.reshape(*x.shape[: self._rows], self._groups, -1, *x.shape[self._rows + 1 :])  # noqa: E731
        batch, keys = jax.tree.map(split, (batch, keys))
        with self._layout.inside_vmap(self._over):
            return jax.grad(every, has_aux=True)(at, *own, batch, keys)

    def _named(self, params: Params) -> Params:
        """[groups, ...]: each group's name for the weights."""
        named = jax.tree.map(lambda w: jnp.broadcast_to(w, (self._groups, *w.shape)), params)
        return self._pinned(named, "weights")

    def _pinned(self, tree: Params, role: Role) -> Params:
        return jax.vmap(lambda tree: constrain_tree(tree, self._axes, role), spmd_axis_name=self._over)(tree)


@dataclass(frozen=True)
class _Reduced:
    """A group's gradient with what it added up before -> the sum over the groups, in `dtype` on its way."""

    layout: Layout
    names: Axes
    over: tuple[str, ...]
    dtype: np.dtype

    def __call__(self, g: jax.Array, before: jax.Array) -> jax.Array:
        @custom_vmap
        def reduced(own: jax.Array) -> jax.Array:
            return own

        @reduced.def_vmap
        def _(_groups: int, _batched: list[bool], own: jax.Array) -> tuple[jax.Array, bool]:
            return self.of_all(own), False

        return reduced(before + g.astype(before.dtype)).astype(self.dtype)

    def of_all(self, own: jax.Array) -> jax.Array:
        """[groups, ...] -> their sum, over neighbours first."""
        own = own.astype(self.dtype)
        names = self.names[len(self.names) - own.ndim + 1 :]
        pin = lambda x: constrain(x, *names, role="optimizer")  # noqa: E731
        for number in reversed(range(len(self.over))):
            outer, neighbours = self.over[:number], self.layout.size(self.over[number : number + 1])
            parts = own.reshape(-1, neighbours, *own.shape[1:])
            # `jnp.sum` would send float32.
            own = jax.lax.reduce(parts, jnp.zeros((), own.dtype), jax.lax.add, (1,))
            own = jax.vmap(pin, spmd_axis_name=outer)(own) if outer else own
        return pin(own[0])
