"""The loss in plain JAX, a slice of the vocabulary at a time: runs wherever XLA does.

Forward, the partition is summed online (Milakov and Gimelshein, arXiv:1805.02867). Backward, each slice's logits are
made again, from them their gradient, and from that its part of the weight's gradient, written once, and of that of x,
summed in float32. Four products of T x E x V in place of three. Beside the results a slice of logits is held, T
numbers for each of its entries, and 4 T E bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .arguments import Statistics, Terms, of_logits

SLICE = 1 << 24  # numbers of a slice's logits: 32 MiB of their gradient in 16 bits
LEAST, MULTIPLE = 512, 128  # entries: fewer leave matrix units idle

Features = Float[Array, "tokens embed"]
Weight = Float[Array, "embed vocab"]
Labels = Int[Array, "tokens"]
PerToken = Float[Array, "tokens"]
_Made = TypeVar("_Made")


@runtime_checkable
class Parts(Protocol):
    """What is made of logits, without them."""

    def statistics(self, x: Features, weight: Weight, labels: Labels) -> Statistics: ...

    def gradient(
        self,
        terms: Terms,
        x: Features,
        weight: Weight,
        labels: Labels,
        partition: PerToken,
        wanted: PerToken,
        first: jax.Array,
        width: int,
    ) -> jax.Array:
        """That of the logits of `width` entries from `first` on, [tokens, width], in the dtype of x."""  # fmt: skip


class Plain:
    def statistics(self, x: Features, weight: Weight, labels: Labels) -> Statistics:
        empty = jnp.zeros(labels.shape, jnp.float32)

        def add(found: Any, first: jax.Array, width: int) -> Any:
            most, total, chosen, summed = found
            logits = _logits(x, weight, first, width)
            higher = jnp.maximum(most, jnp.max(logits, axis=1))
            own = labels[:, None] == first + jnp.arange(width, dtype=labels.dtype)
            return (
                higher,
                total * jnp.exp(most - higher) + jnp.sum(jnp.exp(logits - higher[:, None]), axis=1),
                chosen + jnp.sum(jnp.where(own, logits, 0.0), axis=1),
                summed + jnp.sum(logits, axis=1),
            )

        most, total, chosen, summed = in_slices(x, weight, add, (empty - jnp.inf, empty, empty, empty))
        return Statistics(most + jnp.log(total), chosen, summed / weight.shape[1])

    def gradient(
        self, terms: Terms, x: Features, weight: Weight, labels: Labels, partition: PerToken, wanted: PerToken,
        first: jax.Array, width: int,
    ) -> jax.Array:  # fmt: skip
        entry = first + jnp.arange(width, dtype=labels.dtype)
        column = (labels[:, None], partition[:, None], wanted[:, None])
        logits = _logits(x, weight, first, width)
        return of_logits(logits, entry, *column, weight.shape[1], terms).astype(x.dtype)


def losses(terms: Terms, x: Features, weight: Weight, labels: Labels) -> PerToken:
    return by_parts(Plain(), terms, x, weight, labels)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def by_parts(parts: Parts, terms: Terms, x: Features, weight: Weight, labels: Labels) -> PerToken:
    return parts.statistics(x, weight, labels).losses(terms)


def _forward(parts: Parts, terms: Terms, x: jax.Array, weight: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
    found = parts.statistics(x, weight, labels)
    return found.losses(terms), (x, weight, labels, found.partition)


def _backward(parts: Parts, terms: Terms, kept: Any, wanted: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, weight, labels, partition = kept

    def add(made: tuple[jax.Array, jax.Array], first: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
        of_x, of_weight = made
        g = parts.gradient(terms, x, weight, labels, partition, wanted, first, width)
        of_x += jnp.matmul(g, _slice(weight, first, width).T, preferred_element_type=jnp.float32)
        of_slice = jnp.matmul(x.T, g, preferred_element_type=jnp.float32).astype(weight.dtype)
        return of_x, jax.lax.dynamic_update_slice_in_dim(of_weight, of_slice, first, axis=1)

    empty = jnp.zeros(x.shape, jnp.float32), jnp.zeros(weight.shape, weight.dtype)
    of_x, of_weight = in_slices(x, weight, add, empty)
    return of_x.astype(x.dtype), of_weight, None


by_parts.defvjp(_forward, _backward)


def in_slices(x: Features, weight: Weight, add: Callable[[_Made, jax.Array, int], _Made], made: _Made) -> _Made:
    """`made = add(made, first entry, width)` for every slice; a last one may be narrower."""
    vocab = weight.shape[1]
    width = min(vocab, max(LEAST, SLICE // x.shape[0] // MULTIPLE * MULTIPLE))
    count, rest = divmod(vocab, width)
    made = jax.lax.fori_loop(0, count, lambda i, made: add(made, jnp.int32(i) * width, width), made)
    return add(made, jnp.int32(count * width), rest) if rest else made


def _logits(x: Features, weight: Weight, first: jax.Array, width: int) -> jax.Array:
    return jnp.matmul(x, _slice(weight, first, width), preferred_element_type=jnp.float32)


def _slice(weight: Weight, first: jax.Array, width: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(weight, first, width, axis=1)
