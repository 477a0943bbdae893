"""Mixtures whose frozen experts are in host memory (`memory.expert_groups`). Equal groups of experts are computed one
after the other, while the weights of the next group are copied to the device, which thus stores two groups and not two
layers. Each group is copied once in the forward pass and once in the backward pass, which also recomputes it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.quant import QTensor
from jaxmem.sharding.host import is_streamed

Tree = Any
# (trainable and frozen weights of a group, x, choices, counted from its first expert, and shares) -> result
Run = Callable[[Tree, Tree, jax.Array, jax.Array, jax.Array], jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def map_expert_groups(
    run: Run, groups: int, trainable: Tree, frozen: Tree, x: jax.Array, choices: jax.Array, shares: jax.Array
) -> jax.Array:
    """The sum of `run` over groups of the experts. Weights are [experts, ...], on the device or streamed. Gradients
    exist for `trainable`, `x` and `shares`."""
    weights = _Groups(groups, trainable, frozen, x.dtype)

    def step(group: jax.Array | int, own: Tree, y: jax.Array) -> jax.Array:
        new = run(weights.trainable_of(group), own, x, weights.within(choices, group), shares)
        return y + new.astype(jnp.float32)

    return weights.each(step, jnp.zeros(x.shape, jnp.float32)).astype(x.dtype)


def _backward(run: Run, groups: int, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    trainable, frozen, x, choices, shares = saved
    weights = _Groups(groups, trainable, frozen, x.dtype)

    def step(group: jax.Array | int, own: Tree, gradients: tuple[Tree, jax.Array, jax.Array]) -> tuple[Any, ...]:
        chosen = weights.within(choices, group)

        def result(trainable: Tree, x: jax.Array, shares: jax.Array) -> jax.Array:
            return run(trainable, own, x, chosen, shares)

        def write(all_groups: jax.Array, new: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(all_groups, new, group * new.shape[0], 0)

        of_trainable, of_x, of_shares = gradients
        new, dx, dshares = jax.vjp(result, weights.trainable_of(group), x, shares)[1](g)
        return jax.tree.map(write, of_trainable, new), of_x + dx.astype(jnp.float32), of_shares + dshares

    begin = jax.tree.map(jnp.zeros_like, trainable), jnp.zeros(x.shape, jnp.float32), jnp.zeros_like(shares)
    of_trainable, of_x, of_shares = weights.each(step, begin)
    return of_trainable, None, of_x.astype(x.dtype), None, of_shares


map_expert_groups.defvjp(lambda run, groups, *saved: (map_expert_groups(run, groups, *saved), saved), _backward)


class _Groups:
    def __init__(self, groups: int, trainable: Tree, frozen: Tree, dtype: Any):
        self._groups, self._trainable, self._frozen, self._dtype = groups, trainable, frozen, dtype
        self._size = jax.tree.leaves((trainable, frozen), is_leaf=is_streamed)[0].shape[0] // groups

    def within(self, choices: jax.Array, group: jax.Array | int) -> jax.Array:
        return choices - jnp.asarray(group * self._size, choices.dtype)

    def trainable_of(self, group: jax.Array | int) -> Tree:
        return jax.tree.map(lambda x: self._slice(x, group), self._trainable)

    def each(self, step: Callable[[Any, Tree, Any], Any], carry: Any) -> Any:
        """Applies `step(group, frozen weights, carry)` to each group."""

        def next_group(group: jax.Array, state: tuple[Any, Tree]) -> tuple[Any, Tree]:
            following = self._fetch(group + 1)
            return step(group, state[1], state[0]), following

        # The last group is not in the loop, which would copy one group too many.
        carry, last = jax.lax.fori_loop(0, self._groups - 1, next_group, (carry, self._fetch(0)))
        return step(self._groups - 1, last, carry)

    def _fetch(self, group: jax.Array | int) -> Tree:
        def weight(w: Any) -> Any:
            w = jax.tree.map(lambda x: self._slice(x, group), w, is_leaf=is_streamed)
            return w if isinstance(w, QTensor) else w.astype(self._dtype)

        return jax.tree.map(weight, self._frozen, is_leaf=lambda w: isinstance(w, QTensor) or is_streamed(w))

    def _slice(self, x: Any, group: jax.Array | int) -> jax.Array:
        if is_streamed(x):
            return x.group(group)
        return jax.lax.dynamic_slice_in_dim(x, group * self._size, self._size)
