"""Cross entropy over a vocabulary whose logits are never whole: the output projection and the loss, slice by slice.

With T tokens on a device, E numbers each, V entries of the vocabulary and a compute dtype of 2 bytes, logits and their
gradient are 4 T V bytes. In slices of v entries 4 T v bytes, 2 E v of the weight, and 4 T E of the features' gradient,
summed in float32. Each slice of the weight's gradient is made once and written once: it is rounded as the whole one is,
and devices that split the weight gather and scatter a slice at a time, never hold it or its gradient whole. They gather
the next slice, 2 E v bytes more, while they compute with this one, so that none is waited for but the first.

It takes the logits twice, since what all slices add up to is known only after the last: a third more of the output
projection's arithmetic. Slices of the tokens instead would take them once, and read and write the whole gradient of
the weight in float32 for each slice, which takes longer. Logits are in the compute dtype as they are without slices,
what is made of them in float32; the partition is summed online (Milakov and Gimelshein, arXiv:1805.02867). Wijmans et
al. (arXiv:2411.09009) do it in one kernel.

`statistics` and `slice_gradients` are the two passes, for those who go through the slices themselves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmem.models.vocab_slices import NUMBERS, Columns, Entries, Slices
from jaxmem.quant import QTensor
from jaxmem.sharding import Axes, constrain, current, gather, weights
from jaxmem.sharding.host import is_on_host
from jaxmem.stack.cuts import cut

Features = Float[Array, "batch time embed"]
Labels = Int[Array, "batch time"]
PerToken = Float[Array, "batch time"]
Fetch = Callable[[Int[Array, ""]], Columns]

_Sums = tuple[jax.Array, jax.Array, jax.Array, jax.Array]
_Made = TypeVar("_Made")

WHOLE = 2**27  # bytes of logits up to which `auto` leaves them whole
PIECE = 2**25  # bytes of logits that it takes at a time
LEAST, MULTIPLE = 512, 128  # entries: fewer leave matrix units idle


@dataclass(frozen=True)
class Terms:
    """What `losses.cross_entropy` has beside logits and labels."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0


class Statistics(NamedTuple):
    """All that the loss of a token, and its gradient, need to know of all logits."""

    partition: PerToken  # log of the sum of their exponentials
    chosen: PerToken  # the label's
    mean: PerToken

    def losses(self, terms: Terms) -> PerToken:
        s = terms.label_smoothing
        loss = self.partition - (1.0 - s) * self.chosen - s * self.mean
        return loss + terms.z_loss * self.partition * self.partition


def width(chunk: int | Literal["auto"], tokens: int, held: int, itemsize: int, most: int | None = None) -> int | None:
    """Entries of a slice, of `held` that a device has a part of; None: all of them at once. `auto` leaves logits whole
    that are small, and no model that has none other pays for it. `most`: entries whose gradient is held at once.

    >>> width("auto", tokens=8192, held=128256, itemsize=2), width("auto", tokens=2048, held=32000, itemsize=2)
    (2048, None)
    """
    if chunk == "auto":
        if most is None and tokens * held * itemsize <= WHOLE:
            return None
        wide = min(max(LEAST, PIECE // (tokens * itemsize) // MULTIPLE * MULTIPLE), most or held)
    else:
        wide = chunk
    return wide if wide < held else None


def entries_at_once(update: Literal["after", "during"], embed: int) -> int | None:
    """Entries whose gradient is held at once: those that are updated together; None: all."""
    return max(LEAST, NUMBERS // embed) if update == "during" else None


def slices(chunk: int | Literal["auto"], x: Features, vocab: int, most: int | None = None) -> Slices | None:
    """For features of a batch as the current layout splits them; None: the logits as a whole."""
    layout = current()
    resting, parts, ahead, tokens = 1, 1, False, x.shape[0] * x.shape[1]
    if layout is not None:
        tokens //= layout.parts("activations", "batch") * layout.parts("activations", "vocab_time")
        resting, parts = layout.parts("weights", "vocab"), layout.parts("compute", "vocab")
        ahead = any(set(layout.over("weights", dim)) - set(layout.over("compute", dim)) for dim in ("embed", "vocab"))
    wide = width(chunk, tokens, -(-vocab // parts), x.dtype.itemsize, most)
    if wide is None:
        return None
    # Of a weight that rests whole each device computes with its part of every slice.
    return Slices(vocab, wide * parts // resting, resting, parts, ahead)


def cross_entropy(
    x: Features,
    weight: weights.Weight,
    labels: Labels,
    *,
    axes: Axes,
    slices: Slices,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> PerToken:
    """`losses.cross_entropy` of x @ weight; `weight` is [embed, vocab] or [vocab, embed], as it rests."""
    # What comes from elsewhere is on its way beside the work on what came before.
    ahead = slices.ahead or any(map(is_on_host, jax.tree.leaves(weight)))
    loss = _Loss(axes, dataclasses.replace(slices, ahead=ahead), Terms(label_smoothing, z_loss))
    if (y := cut(Projection(x, weight, labels, loss))) is not None:
        return y
    at, rest = (weight.at, weight.stored) if isinstance(weight, weights.StoredWeight) else (weight, None)
    return _cross_entropy(loss, x, at, rest, labels)


def in_turn(
    slices: Slices,
    fetch: Fetch,
    use: Callable[[_Made, Columns, Int[Array, ""]], _Made],
    made: _Made,
    *,
    back: bool = False,
) -> _Made:
    """`made = use(made, slice, its number)` for every slice, from the first to the last or `back`. The last one is used
    after the loop, so that each is fetched once."""
    numbers = jnp.arange(slices.count, dtype=jnp.int32)[:: -1 if back else 1]
    if not slices.ahead:
        return jax.lax.scan(lambda made, j: (use(made, fetch(j), j), None), made, numbers)[0]

    def one(carry: tuple[_Made, Columns], pair: tuple[jax.Array, jax.Array]) -> tuple[tuple[_Made, Columns], None]:
        (made, weight), (j, following) = carry, pair
        return (use(made, weight, j), fetch(following)), None

    made, weight = jax.lax.scan(one, (made, fetch(numbers[0])), (numbers[:-1], numbers[1:]))[0]
    return use(made, weight, numbers[-1])


def statistics(x: Features, labels: Labels, fetch: Fetch, slices: Slices) -> Statistics:
    """The first pass. Each device of `tensor` adds up its own parts; what they have together is one message."""
    empty = constrain(jnp.zeros((*labels.shape, slices.parts), jnp.float32), "batch", "vocab_time", "vocab")

    def own(j: jax.Array) -> jax.Array:
        """A slice's number, as one for these labels. Where batches follow each other in a loop that is differentiated,
        jax would make before it what is the same for all: every slice, and a mask of it for every token."""
        return jax.lax.optimization_barrier((j, labels))[0]

    def add(found: _Sums, weight: Columns, j: jax.Array) -> _Sums:
        most, total, chosen, summed = found
        logits, entries = _logits(x, weight), slices.entries(own(j))
        real = entries >= 0
        higher = jnp.maximum(most, jnp.max(jnp.where(real, logits, -jnp.inf), axis=-1))
        exponentials = jnp.where(real, jnp.exp(logits - higher[..., None]), 0.0)
        picked = jnp.where(entries == labels[..., None, None], logits, 0.0)
        return (
            higher,
            total * jnp.exp(most - higher) + jnp.sum(exponentials, axis=-1),
            chosen + jnp.sum(picked, axis=-1),
            summed + jnp.sum(jnp.where(real, logits, 0.0), axis=-1),
        )

    most, total, chosen, summed = in_turn(slices, lambda j: fetch(own(j)), add, (empty - jnp.inf, empty, empty, empty))
    highest = jnp.max(most, axis=-1)
    partition = highest + jnp.log(jnp.sum(total * jnp.exp(most - highest[..., None]), axis=-1))
    return Statistics(partition, jnp.sum(chosen, axis=-1), jnp.sum(summed, axis=-1) / slices.vocab)


def slice_gradients(
    x: Features,
    labels: Labels,
    weight: Columns,
    entries: Entries,
    found: Statistics,
    wanted: PerToken,
    terms: Terms,
    vocab: int,
) -> tuple[Columns, Float[Array, "parts batch time embed"]]:
    """The second pass, for one slice: its gradient in the compute dtype, and what it adds to the gradient of x, in
    float32 and for each part by itself, so that devices of `tensor` add theirs up once, after the last slice.
    `wanted`: how much each token's loss counts, the gradient of what is minimised by it."""
    per_token = lambda value: value[..., None, None]  # noqa: E731
    likely = jnp.exp(_logits(x, weight) - per_token(found.partition))
    of_partition = 1.0 + 2.0 * terms.z_loss * found.partition
    s = terms.label_smoothing
    aim = jnp.where(entries == per_token(labels), 1.0 - s, 0.0) + s / vocab
    g = per_token(wanted) * (per_token(of_partition) * likely - aim)
    g = jnp.where(entries >= 0, g, 0.0).astype(x.dtype)
    of_weight = jnp.einsum("bte,btpv->epv", x, g)
    of_x = jnp.einsum("btpv,epv->pbte", g, weight, preferred_element_type=jnp.float32)
    return of_weight, of_x


def _logits(x: Features, weight: Columns) -> Float[Array, "batch time parts width"]:
    logits = jnp.einsum("bte,epv->btpv", x, weight)
    return constrain(logits, "batch", "vocab_time", "vocab", None).astype(jnp.float32)


_Kept = tuple[jax.Array, Any, Any, jax.Array, Statistics]


@dataclass(frozen=True)
class _Loss:
    """What does not change while arrays do."""

    axes: Axes
    slices: Slices
    terms: Terms

    def fetch(self, weight: jax.Array | QTensor, dtype: jnp.dtype, j: jax.Array) -> jax.Array:
        return gather(self.slices.cut(weight, self.axes, j), ("embed", "vocab", None), dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(loss: _Loss, x: jax.Array, at: Any, rest: Any, labels: jax.Array) -> jax.Array:
    return _forward(loss, x, at, rest, labels)[0]


def _forward(loss: _Loss, x: jax.Array, at: Any, rest: Any, labels: jax.Array) -> tuple[jax.Array, _Kept]:
    weight = at if rest is None else rest
    found = statistics(x, labels, partial(loss.fetch, weight, x.dtype), loss.slices)
    return found.losses(loss.terms), (x, at, rest, labels, found)


def _backward(loss: _Loss, kept: _Kept, wanted: jax.Array) -> tuple[jax.Array, jax.Array | None, None, None]:
    x, at, rest, labels, found = kept
    weight = at if rest is None else rest
    slices, axes, learns = loss.slices, loss.axes, at is not None

    def add(made: tuple[Any, jax.Array], one: Columns, j: jax.Array) -> tuple[Any, jax.Array]:
        of_weight, of_x = made
        found_weight, found_x = slice_gradients(
            x, labels, one, slices.entries(j), found, wanted, loss.terms, slices.vocab
        )
        if learns:
            found_weight = constrain(found_weight, "embed", "vocab", None, role="gradients").astype(at.dtype)
            of_weight = constrain(slices.put(of_weight, axes, j, found_weight), *axes, role="gradients")
        of_x = constrain(of_x + found_x, "vocab", "batch", "vocab_time", None)
        return of_weight, of_x

    zeros = constrain(jnp.zeros(at.shape, at.dtype), *axes, role="gradients") if learns else None
    empty = constrain(jnp.zeros((slices.parts, *x.shape), jnp.float32), "vocab", "batch", "vocab_time", None)
    of_weight, of_x = in_turn(slices, partial(loss.fetch, weight, x.dtype), add, (zeros, empty), back=True)
    return constrain(jnp.sum(of_x.astype(x.dtype), axis=0), "batch", "vocab_time", "embed"), of_weight, None, None


_cross_entropy.defvjp(_forward, _backward)


@dataclass(frozen=True)
class Projection:
    """An output projection and the loss, about to be computed."""

    x: Features
    weight: weights.Weight
    labels: Labels
    loss: _Loss

    @property
    def axes(self) -> Axes:
        return self.loss.axes

    def forward(self) -> Projected:
        rest = self.weight.stored if isinstance(self.weight, weights.StoredWeight) else self.weight
        y, (*_, found) = _forward(self.loss, self.x, rest, None, self.labels)
        return Projected(y, self, rest, found)


@dataclass(frozen=True)
class Projected:
    """What is kept of it are its features and three numbers a token. A slice of the weight's gradient takes the logits
    of that slice again."""

    y: PerToken
    use: Projection
    rest: jax.Array | QTensor
    found: Statistics

    def backward(self, g: PerToken) -> Features:
        return _backward(self.use.loss, (self.use.x, None, self.rest, self.use.labels, self.found), g)[0]

    def of_weight(
        self, g: PerToken, weight: jax.Array | QTensor, slices: Slices | None = None, j: jax.Array | None = None
    ) -> Float[Array, "rows columns"]:
        x, loss = self.use.x, self.use.loss
        if slices is None or j is None:
            kept = x, jnp.zeros(weight.shape, x.dtype), weight, self.use.labels, self.found
            return jnp.asarray(_backward(loss, kept, g)[1])
        one = gather(slices.cut(weight, loss.axes, j), ("embed", "vocab", None), x.dtype)
        found, _ = slice_gradients(
            x, self.use.labels, one, slices.entries(j), self.found, g, loss.terms, loss.slices.vocab
        )
        return slices.laid(constrain(found, "embed", "vocab", None, role="gradients"), loss.axes)
