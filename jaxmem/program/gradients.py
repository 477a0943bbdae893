"""Gradients of a batch that comes in micro-batches, and when devices tell each other of them.

Where a device holds a part of each gradient (`fsdp` from zero 2 on), every micro-batch's is reduced into the parts at
once: nobody ever holds a whole one. Where each holds whole ones (`replica`; `fsdp` below zero 2), it adds up those of
its own rows, and the sums are reduced once an update: 2 P bytes instead of 2 a P for a micro-batches, and none of them
while micro-batches run (PyTorch's DDP calls this `no_sync`; Li et al., arXiv:2006.15704, section 3.2.4). The sum is the
one that accumulation holds anyway, in float32; it travels as what one micro-batch's gradients are made in.

For devices to keep their own, the loss is `jax.vmap`ped over groups of rows, one for each device along these mesh axes,
each with its own name for the same weights. Nothing is copied: a group is where its weights lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxmem.optim.parts import pinned
from jaxmem.precision import Params
from jaxmem.program.objective import Batch, Sums
from jaxmem.sharding import Layout, Role, current

Loss = Callable[[Params, Batch, jax.Array], tuple[jax.Array, Sums]]  # (weights, batch, keys of its rows)


def at_once(loss: Loss, params: Params, batch: Batch, keys: jax.Array, axes: Any) -> tuple[Params, Sums]:
    """Of one batch, reduced as they are made."""
    grads, sums = jax.grad(loss, has_aux=True)(params, batch, keys)
    # Where the layout wants them, so that they are reduced into their parts and never held whole.
    return pinned(grads, axes, "gradients"), sums


def accumulated(
    loss: Loss, params: Params, batch: Batch, keys: jax.Array, axes: Any, dtype: DTypeLike
) -> tuple[Params, Sums]:
    """Of micro-batches one after the other: leaves of the batch and `keys` are [micro-batches, rows, ...]. Added up in
    float32; `dtype` is what gradients travel in."""
    apart = _Apart(current(), axes)
    own = apart.weights(params)

    def micro(batch: Batch, keys: jax.Array) -> tuple[Params, Sums]:
        return apart.gradients(loss, own, batch, keys)

    def add(total: Any, one: tuple[Batch, jax.Array]) -> tuple[Any, None]:
        return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, micro(*one)), None

    shapes = jax.eval_shape(lambda: micro(jax.tree.map(lambda x: x[0], batch), keys[0]))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)
    grads, sums = jax.lax.scan(add, zeros, (batch, keys))[0]
    return apart.reduced(grads, dtype), sums


class _Apart:
    """Gradients of rows that lie on different devices, each with its own."""

    def __init__(self, layout: Layout | None, axes: Any) -> None:
        self._layout, self._axes = layout, axes
        self._over = () if layout is None else layout.apart

    def weights(self, params: Params) -> Params:
        """[groups, ...]: each group's name for them."""
        if not self._layout or not self._over:
            return params
        groups = self._layout.size(self._over)
        named = jax.tree.map(lambda w: jnp.broadcast_to(w, (groups, *w.shape)), params)
        return self._pinned(named, "weights", self._over)

    def gradients(self, loss: Loss, own: Params, batch: Batch, keys: jax.Array) -> tuple[Params, Sums]:
        """Of a micro-batch, [groups, ...] where devices keep their own."""
        if not self._layout or not self._over:
            return at_once(loss, own, batch, keys, self._axes)
        groups = self._layout.size(self._over)

        def every(own: Params, batch: Batch, keys: jax.Array) -> tuple[jax.Array, Sums]:
            losses, sums = jax.vmap(loss, spmd_axis_name=self._over)(own, batch, keys)
            return jnp.sum(losses), jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)

        # Rows lie group by group, so that this moves nothing.
        batch, keys = jax.tree.map(lambda x: x.reshape(groups, -1, *x.shape[1:]), (batch, keys))
        with self._layout.within(self._over):
            grads, sums = jax.grad(every, has_aux=True)(own, batch, keys)
        return self._pinned(grads, "gradients", self._over), sums

    def reduced(self, grads: Params, dtype: DTypeLike) -> Params:
        """Their sum over the groups, where the optimizer's state lies: over neighbours first."""
        if not self._layout or not self._over:
            return grads
        total = jax.tree.map(lambda g: g.astype(dtype), grads)
        for number in reversed(range(len(self._over))):
            outer, neighbours = self._over[:number], self._layout.size(self._over[number : number + 1])
            total = jax.tree.map(lambda g, n=neighbours: _summed(g, n), total)
            total = self._pinned(total, "optimizer", outer) if outer else total
        total = jax.tree.map(lambda g: g[0], total)
        return jax.tree.map(lambda g: g.astype(jnp.float32), pinned(total, self._axes, "optimizer"))

    def _pinned(self, tree: Params, role: Role, groups: tuple[str, ...]) -> Params:
        return jax.vmap(lambda tree: pinned(tree, self._axes, role), spmd_axis_name=groups)(tree)


def _summed(grads: jax.Array, neighbours: int) -> jax.Array:
    """[groups, ...] -> [groups / neighbours, ...], in the dtype that they have: `jnp.sum` would send float32."""
    parts = grads.reshape(-1, neighbours, *grads.shape[1:])
    return jax.lax.reduce(parts, jnp.zeros((), grads.dtype), jax.lax.add, (1,))
