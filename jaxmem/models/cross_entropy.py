"""Cross entropy over a vocabulary, from features: all logits at once, or in slices of the vocabulary.

With T tokens on a device, E features each, V entries of the vocabulary and a compute dtype of 2 bytes, logits and their
gradient, which overwrites them, take 2 T V bytes. Slices of v entries take 2 T v bytes, 4 E v for the weight and its
gradient, and 4 T E for the gradient of the features, summed in float32. Each slice of the weight gradient is computed,
rounded and written once. If the weight is sharded, one slice at a time is all-gathered and reduce-scattered; the next
slice, 2 E v bytes more, is gathered while the current one is used.

The logits are computed twice, since the partition function is known only after the last slice: the output projection
has a third more FLOPs. Slices of the tokens would compute logits once, but read and write the complete weight gradient
in float32 for each slice, which takes longer. The partition function is summed online (Milakov and Gimelshein,
arXiv:1805.02867). Wijmans et al. (arXiv:2411.09009) compute this loss in one kernel.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmem.models.layers import Features, soft_cap, soft_cap_slope
from jaxmem.models.losses import Terms, axis_size, cross_entropy
from jaxmem.models.vocab_slices import SLICE_SIZE, Columns, VocabOp, VocabOpResult, VocabSlices
from jaxmem.quant import QTensor
from jaxmem.sharding import weights
from jaxmem.sharding.arrays import constrain, sum_gradients, sum_parts, vocab_over
from jaxmem.sharding.gathering import gather
from jaxmem.sharding.host import is_on_host
from jaxmem.sharding.layout import shard_axes, shard_count
from jaxmem.sharding.table import Axes
from jaxmem.stack.call import intercepted
from jaxmem.typing import Tree

Labels = Int[Array, "batch time"]
PerToken = Float[Array, "batch time"]

MAX_COMPLETE_LOGITS = 2**27  # largest size in bytes, per device, of logits that `auto` computes at once
SLICE_BYTES = 2**25  # bytes of logits in a slice that `auto` chooses
MIN_WIDTH, WIDTH_MULTIPLE = 512, 128  # entries of a slice; matmuls of other widths leave matrix units idle

_Carry = TypeVar("_Carry")
_Sums = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def vocab_cross_entropy(
    network: Any,
    x: Features,
    labels: Labels,
    chunk: int | Literal["auto"],
    *,
    max_entries: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> PerToken:
    """The loss per token of a decoder, from its features. With an adapter on the output projection the logits are
    computed at once. Pipeline stages compute it together, each in its part of the vocabulary (Yeung et al.,
    arXiv:2411.05288).

    Args:
        network: The decoder.
        x: Its features, [batch, time, embed].
        labels: [batch, time].
        chunk: The vocabulary entries whose logits are computed at a time; see `slice_width`.
        max_entries: Limits the entries whose gradient may exist at the same time.
        label_smoothing: As in `cross_entropy`.
        z_loss: As in `cross_entropy`.

    Returns:
        The loss of each token, [batch, time].
    """
    over = vocab_over()
    if over:
        # `tensor` shards the tokens of x here, so its gradient is summed over `over` in this sharding.
        x = constrain(sum_gradients(x, over), "batch", "stream", "embed")
        labels = labels - jax.lax.axis_index(over) * (network.cfg.vocab // axis_size(over))
    loss = _sliced_loss(network, x, chunk, max_entries, label_smoothing=label_smoothing, z_loss=z_loss)
    if loss is None:
        return cross_entropy(network.logits(x), labels, label_smoothing=label_smoothing, z_loss=z_loss, over=over)
    return loss(constrain(x, *_FEATURES), network.projection.get_value(), labels)


def separate_cross_entropy(
    network: Any,
    x: Features,
    labels: Labels,
    chunk: int | Literal["auto"],
    *,
    max_entries: int | None = None,
    **terms: float,
) -> VocabOpResult | None:
    """`vocab_cross_entropy`, with functions for its gradients; None if all logits are computed at once."""
    loss = _sliced_loss(network, x, chunk, max_entries, **terms)
    if loss is None:
        return None
    result = loss.separate(constrain(x, *_FEATURES), network.projection.get_value(), labels)

    def input_gradient(g: jax.Array) -> jax.Array:
        gradient = result.input_gradient(g)
        assert gradient is not None  # the input is an array of features
        return constrain(gradient, *_FEATURES)

    return dataclasses.replace(result, input_gradient=input_gradient)


_FEATURES: Axes = ("vocab_batch", "vocab_time", "embed")


def _sliced_loss(
    network: Any, x: Features, chunk: int | Literal["auto"], max_entries: int | None, **terms: float
) -> "SlicedLoss | None":
    over = vocab_over()
    weight = network.projection
    slices = slices_for(chunk, x, network.cfg.vocab // axis_size(over), max_entries)
    if slices is None or weight is None:
        return None
    terms_of_loss = Terms(**terms, soft_cap=getattr(network.cfg, "logit_soft_cap", None))
    return SlicedLoss(weight.get_metadata()["axes"], slices, terms_of_loss, over)


def slice_width(
    chunk: int | Literal["auto"], tokens: int, entries: int, itemsize: int, max_entries: int | None = None
) -> int | None:
    """The vocabulary entries per slice, for `entries` entries on a device; None: all at once. `auto` computes small
    logits at once, unless `max_entries` limits the entries whose gradient may exist at the same time.

    >>> slice_width("auto", 8192, 128256, itemsize=2), slice_width("auto", 2048, 32000, itemsize=2)
    (2048, None)
    """
    if chunk != "auto":
        width = chunk
    elif max_entries is None and tokens * entries * itemsize <= MAX_COMPLETE_LOGITS:
        return None
    else:
        multiples = SLICE_BYTES // (tokens * itemsize) // WIDTH_MULTIPLE
        width = min(max(MIN_WIDTH, multiples * WIDTH_MULTIPLE), max_entries or entries)
    return width if width < entries else None


def max_update_entries(update: Literal["after", "during"], embed: int) -> int | None:
    """The number of vocabulary entries whose gradient may exist at the same time: with `memory.update: during`, those
    that are updated together; None: all."""
    return max(MIN_WIDTH, SLICE_SIZE // embed) if update == "during" else None


def slices_for(
    chunk: int | Literal["auto"], x: Features, vocab: int, max_entries: int | None = None
) -> VocabSlices | None:
    """Slices for these features in the current layout; None: all logits at once."""
    tokens = x.shape[0] * x.shape[1] // shard_count("activations", "vocab_batch")
    tokens //= shard_count("activations", "vocab_time")
    stored = shard_count("weights", "vocab")
    parts = shard_count("compute", "vocab")
    prefetch = any(set(shard_axes("weights", dim)) - set(shard_axes("compute", dim)) for dim in ("embed", "vocab"))
    width = slice_width(chunk, tokens, -(-vocab // parts), x.dtype.itemsize, max_entries)
    # If the vocabulary is stored in one part but computed in several, each device computes its part of every slice.
    return None if width is None else VocabSlices(vocab, width * parts // stored, stored, parts, prefetch)


class Statistics(NamedTuple):
    """Statistics of the logits of a token from which its loss and gradient are computed."""

    log_partition: PerToken  # log of the sum of exponentials
    label_logit: PerToken
    mean: PerToken


@dataclass(frozen=True)
class SlicedLoss:
    """`cross_entropy` of x @ weight, in slices of the vocabulary; `weight` is [embed, vocab] or [vocab, embed]."""

    axes: Axes  # the logical axes of the weight
    slices: VocabSlices
    terms: Terms = Terms()  # noqa: RUF009 - immutable
    mesh_axes: tuple[str, ...] = ()  # mesh axes of a `jax.shard_map` that shard the vocabulary

    @property
    def classes(self) -> int:
        """The entries of the complete vocabulary."""
        return self.slices.vocab * axis_size(self.mesh_axes)

    def __call__(self, x: Features, weight: weights.Weight, labels: Labels) -> PerToken:
        loss = self._prefetching(weight)
        if (y := intercepted(VocabOp(weight, x, partial(self.separate, x, weight, labels)))) is not None:
            return y
        proxy = weights.proxy_of(weight)
        return _sliced(loss, x, proxy, None if proxy is weight else weights.stored_of(weight), labels)

    def _prefetching(self, weight: weights.Weight) -> "SlicedLoss":
        """If the weight is gathered or in host memory, the next slice is fetched while the current one is used."""
        prefetch = self.slices.prefetch or any(map(is_on_host, jax.tree.leaves(weight)))
        return dataclasses.replace(self, slices=dataclasses.replace(self.slices, prefetch=prefetch))

    def separate(self, x: jax.Array, weight: weights.Weight, labels: jax.Array) -> VocabOpResult:
        """The loss, with one function for the gradient of the features and one for that of the weight. Features and
        one float32 per token are saved; the weight gradient of a slice recomputes the logits of this slice."""
        loss = self._prefetching(weight)
        stored = weights.stored_of(weight)
        y, (*_, statistics) = _forward(loss, x, stored, None, labels)

        def weight_gradient(
            g: jax.Array, weight: Any, slices: VocabSlices | None = None, j: jax.Array | None = None
        ) -> jax.Array:
            if slices is None or j is None:
                zeros = jnp.zeros(weight.shape, x.dtype)
                return jnp.asarray(_backward(loss, (x, zeros, weight, labels, statistics), g)[1])
            of_slices = dataclasses.replace(loss, slices=slices)
            columns, _ = of_slices.gradients(x, labels, of_slices.fetch(weight, x.dtype, j), j, statistics, g)
            return slices.as_weight(constrain(columns, "embed", "vocab", None, role="gradients"), self.axes)

        return VocabOpResult(y, lambda g: _backward(loss, (x, None, stored, labels, statistics), g)[0], weight_gradient)

    def fetch(self, weight: jax.Array | QTensor, dtype: jnp.dtype, j: jax.Array) -> jax.Array:
        """Slice j of the weight, gathered, in the compute dtype."""
        return gather(self.slices.read_columns(weight, self.axes, j), ("embed", "vocab", None), dtype)

    def fold(
        self,
        fetch: Callable[[jax.Array], Columns],
        update: Callable[[_Carry, Columns, jax.Array], _Carry],
        carry: _Carry,
        *,
        reverse: bool = False,
    ) -> _Carry:
        """`carry = update(carry, columns, j)` for each slice. With prefetch the last slice is used after the loop, so
        that each slice is fetched once."""
        numbers = jnp.arange(self.slices.count, dtype=jnp.int32)[:: -1 if reverse else 1]
        if not self.slices.prefetch:
            return jax.lax.scan(lambda carry, j: (update(carry, fetch(j), j), None), carry, numbers)[0]

        def step(pair: tuple[_Carry, Columns], j: tuple[jax.Array, jax.Array]) -> tuple[tuple[_Carry, Columns], None]:
            return (update(*pair, j[0]), fetch(j[1])), None

        carry, columns = jax.lax.scan(step, (carry, fetch(numbers[0])), (numbers[:-1], numbers[1:]))[0]
        return update(carry, columns, numbers[-1])

    def statistics(self, x: Features, labels: Labels, fetch: Callable[[jax.Array], Columns]) -> Statistics:
        """The first pass. Each device along `tensor` and `mesh_axes` sums over its part of the vocabulary, followed by
        all-reduces."""
        slices = self.slices
        zeros = constrain(jnp.zeros((*labels.shape, slices.parts), jnp.float32), "vocab_batch", "vocab_time", "vocab")

        def depend(j: jax.Array) -> jax.Array:
            """Returns j, made to depend on the labels. Otherwise jax would hoist whatever is equal for all
            micro-batches out of the differentiated loop over them, and store all slices and a mask per token."""
            return jax.lax.optimization_barrier((j, labels))[0]

        def add(sums: _Sums, weight: Columns, j: jax.Array) -> _Sums:
            highest, total, label_logit, summed = sums
            logits = self.logits(x, weight)
            entries = slices.entries(depend(j))
            real = entries >= 0
            higher = jnp.maximum(highest, jnp.max(jnp.where(real, logits, -jnp.inf), axis=-1))
            exponentials = jnp.where(real, jnp.exp(logits - higher[..., None]), 0.0)
            picked = jnp.where(real & (entries == labels[..., None, None]), logits, 0.0)
            return (
                higher,
                total * jnp.exp(highest - higher) + jnp.sum(exponentials, axis=-1),
                label_logit + jnp.sum(picked, axis=-1),
                summed + jnp.sum(jnp.where(real, logits, 0.0), axis=-1),
            )

        start = (zeros - jnp.inf, zeros, zeros, zeros)
        highest, total, label_logit, summed = self.fold(lambda j: fetch(depend(j)), add, start)
        top = jnp.max(highest, axis=-1)
        top = jax.lax.pmax(top, self.mesh_axes) if self.mesh_axes else top
        sums = total * jnp.exp(highest - top[..., None]), label_logit, summed
        total, label_logit, summed = (sum_parts(jnp.sum(x, axis=-1), self.mesh_axes) for x in sums)
        return Statistics(top + jnp.log(total), label_logit, summed / self.classes)

    def gradients(
        self, x: Features, labels: Labels, weight: Columns, j: jax.Array, statistics: Statistics, g: PerToken
    ) -> tuple[Columns, Float[Array, "parts batch time embed"]]:
        """The second pass for slice j, from the gradient `g` of each token's loss. Returns the gradient of the slice in
        the compute dtype, and its contribution to the gradient of x in float32. The contributions of the parts of the
        vocabulary are separate, so that devices along `tensor` reduce them once, after the last slice."""
        per_token = lambda value: value[..., None, None]  # noqa: E731
        entries = self.slices.entries(j)
        s = self.terms.label_smoothing
        x = constrain(x, "vocab_batch", "vocab_time", "embed")
        logits = self.logits(x, weight)
        probability = jnp.exp(logits - per_token(statistics.log_partition))
        of_partition = 1.0 + 2.0 * self.terms.z_loss * statistics.log_partition
        target = jnp.where(entries == per_token(labels), 1.0 - s, 0.0) + s / self.classes
        of_logits = per_token(g) * (per_token(of_partition) * probability - target)
        if (cap := self.terms.soft_cap) is not None:
            of_logits = of_logits * soft_cap_slope(logits, cap)
        of_logits = jnp.where(entries >= 0, of_logits, 0.0).astype(x.dtype)
        of_weight = jnp.einsum("bte,btpv->epv", x, of_logits)
        if shard_count("activations", "vocab_batch") < shard_count("activations", "batch"):
            # With `rules.logits`, a device has its entries for all tokens; unconstrained, XLA would gather the logits.
            of_weight = constrain(of_weight, "embed", "vocab", None, role="compute")
        of_x = jnp.einsum("btpv,epv->pbte", of_logits, weight, preferred_element_type=jnp.float32)
        return of_weight, of_x

    def logits(self, x: Features, weight: Columns) -> Float[Array, "batch time parts width"]:
        x = constrain(x, "vocab_batch", "vocab_time", "embed")
        logits = jnp.einsum("bte,epv->btpv", x, weight)
        logits = constrain(logits, "vocab_batch", "vocab_time", "vocab", None).astype(jnp.float32)
        cap = self.terms.soft_cap
        return logits if cap is None else soft_cap(logits, cap)


_Saved = tuple[jax.Array, Any, Any, jax.Array, Statistics]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sliced(loss: SlicedLoss, x: jax.Array, proxy: Any, stored: Tree, labels: jax.Array) -> jax.Array:
    return _forward(loss, x, proxy, stored, labels)[0]


def _forward(loss: SlicedLoss, x: jax.Array, proxy: Any, stored: Tree, labels: jax.Array) -> tuple[jax.Array, _Saved]:
    weight = proxy if stored is None else stored
    labels = constrain(labels, "vocab_batch", "vocab_time")
    statistics = loss.statistics(x, labels, partial(loss.fetch, weight, x.dtype))
    y = loss.terms.loss(statistics.log_partition, statistics.label_logit, lambda: statistics.mean)
    return y, (x, proxy, stored, labels, statistics)


def _backward(loss: SlicedLoss, saved: _Saved, g: jax.Array) -> tuple[jax.Array, jax.Array | None, None, None]:
    x, proxy, stored, labels, statistics = saved
    # Gathered before the loop over slices; inside of it, XLA would gather the features for each slice.
    x = constrain(x, "vocab_batch", "vocab_time", "embed")
    labels, g = (constrain(array, "vocab_batch", "vocab_time") for array in (labels, g))
    weight = proxy if stored is None else stored
    trainable = proxy is not None
    slices = loss.slices
    axes = loss.axes

    def add(sums: tuple[Any, jax.Array], columns: Columns, j: jax.Array) -> tuple[Any, jax.Array]:
        of_weight, of_x = sums
        slice_of_weight, slice_of_x = loss.gradients(x, labels, columns, j, statistics, g)
        if trainable:
            slice_of_weight = constrain(slice_of_weight, "embed", "vocab", None, role="gradients").astype(proxy.dtype)
            # From the last slice to the first: columns masked in one slice are then overwritten by the slice before.
            of_weight = slices.write(of_weight, axes.index("vocab"), j, slices.as_weight(slice_of_weight, axes))
            of_weight = constrain(of_weight, *axes, role="gradients")
        return of_weight, constrain(of_x + slice_of_x, "vocab", "vocab_batch", "vocab_time", None)

    zeros = constrain(jnp.zeros(proxy.shape, proxy.dtype), *axes, role="gradients") if trainable else None
    empty = constrain(jnp.zeros((slices.parts, *x.shape), jnp.float32), "vocab", "vocab_batch", "vocab_time", None)
    of_weight, of_x = loss.fold(partial(loss.fetch, weight, x.dtype), add, (zeros, empty), reverse=True)
    return constrain(jnp.sum(of_x.astype(x.dtype), axis=0), "batch", "vocab_time", "embed"), of_weight, None, None


_sliced.defvjp(_forward, _backward)
