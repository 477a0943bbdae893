"""Objectives: sums over a batch, which are added up over micro-batches and over the batches of an evaluation.

An objective returns sums instead of means: of the loss, of correct predictions, and the count. They are divided at the
end, so that the result does not depend on the sizes of micro-batches.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem import config
from jaxmem.config.user import UserObjects
from jaxmem.errors import UserError
from jaxmem.models import losses
from jaxmem.models.cross_entropy import max_update_entries, separate_cross_entropy, vocab_cross_entropy
from jaxmem.models.layers import split_keys
from jaxmem.models.network import STATISTICS, Flow, MatrixPart, Network, NetworkPart, Part, names_parts, run_parts
from jaxmem.models.vocab_slices import VocabOpResult
from jaxmem.sharding.arrays import mean_over_groups
from jaxmem.step.nonfinite import METRIC

Batch = dict[str, jax.Array]
FORWARD_STATE = "state"  # the key, in a batch and in sums, of what the forward pass changes
RESERVED = ("loss", "count", FORWARD_STATE, "learning_rate", "gradient_norm", METRIC)  # not metrics of a script
_NAMES = {"correct": "accuracy"}  # names of means that differ from the names of sums
Sums = dict[str, jax.Array]  # "loss", "count"; "correct" for classification; "margin" for pairs; STATISTICS of routers


@dataclass(frozen=True)
class Objective:
    """(network, batch, dropout key of each row or None) -> sums, as the parts of the network and of the loss."""

    cfg: config.Objective
    memory: config.Memory
    user: UserObjects

    @property
    def is_of_script(self) -> bool:
        """Whether a script passed the loss, which is one part, also if the network names its parts."""
        return self.cfg.name == "own"

    @property
    def needs_all_rows(self) -> bool:
        """Whether the loss of a row depends on the other rows of its micro-batch."""
        return self.cfg.name in ("own", "contrastive")

    def count_losses(self, mask: jax.Array) -> float:
        """The losses in a micro-batch with this mask [rows, ...]: of each token, pair of answers, or row."""
        counts = {"next_token": mask.size, "dpo": len(mask) / 2}
        return counts.get(self.cfg.name, len(mask))

    def __call__(self, network: Any, batch: Batch, keys: jax.Array | None) -> Sums:
        return self.sums(network, self.features(network, batch, keys), batch)

    def features(self, network: Any, batch: Batch, keys: jax.Array | None) -> Flow:
        """The result of the network before its output projection."""
        flow: Flow = run_parts(network, self.network_parts(network, batch, keys))
        return flow

    def sums(self, network: Any, features: Flow, batch: Batch) -> Sums:
        """The output projection and the loss."""
        sums: Sums = run_parts(network, self.loss_parts(network, batch), features)
        return sums

    def named_parts(self, network: Any, batch: Batch, keys: jax.Array | None) -> list[NetworkPart] | None:
        """The parts, if the network names its stacks of layers."""
        if self.is_of_script or not names_parts(network):
            return None
        return [*self.network_parts(network, batch, keys), *self.loss_parts(network, batch)]

    def network_parts(self, network: Any, batch: Batch, keys: jax.Array | None) -> list[NetworkPart]:
        """The parts of the network before its output projection. For a script, its complete loss is one part, so that
        all stacks of layers are in it."""
        name = self.cfg.name
        if self.is_of_script:
            return [Part(lambda network, _: Flow(_sums_of_user(self.user, network, batch, keys)))]
        if name in ("next_token", "dpo"):
            return _token_parts(network, batch, keys)
        if name == "contrastive":
            return _pair_parts(network, batch, keys)
        return _image_parts(network, batch["inputs"], keys)

    def loss_parts(self, network: Any, batch: Batch) -> list[NetworkPart]:
        """From the result of `network_parts` to the sums."""
        from jaxmem.kernels.scopes import purpose

        if self.is_of_script:
            return [Part(lambda _, flow: flow.x)]
        if self.cfg.name in ("next_token", "dpo"):
            return self._token_loss_parts(network, batch)
        loss = _IMAGE_LOSSES[self.cfg.name]
        return [Part(purpose("logits")(lambda network, flow: loss(self.cfg, network, flow.x, batch)))]

    def _token_loss_parts(self, network: Any, batch: Batch) -> list[NetworkPart]:
        """The output projection with the cross entropy of each token, and the sums."""
        from jaxmem.kernels.scopes import purpose

        is_dpo = self.cfg.name == "dpo"
        terms = {} if is_dpo else {"label_smoothing": self.cfg.label_smoothing, "z_loss": self.cfg.z_loss}
        labels = batch["targets"]
        chunk = self.memory.loss_chunk

        def options(x: jax.Array) -> dict[str, Any]:
            return {**terms, "max_entries": max_update_entries(self.memory.update, x.shape[-1])}

        @purpose("logits")
        def loss(network: Any, flow: Flow) -> Flow:
            return flow._replace(x=vocab_cross_entropy(network, flow.x, labels, chunk, **options(flow.x)))

        @purpose("logits")
        def separate(network: Any, flow: Flow) -> VocabOpResult | None:
            return separate_cross_entropy(network, flow.x, labels, chunk, **options(flow.x))

        @purpose("logits")
        def add_up(_: Any, flow: Flow) -> Sums:
            sums = _preferred(self.cfg, flow.x, batch) if is_dpo else _sums(flow.x, batch["mask"])
            return _with_router(sums, flow.kept, batch["mask"])

        loss_part = MatrixPart(loss, network.projection_path, separate) if names_parts(network) else Part(loss)
        return [loss_part, Part(add_up)]

    def trained_sum(self, sums: Sums) -> jax.Array:
        """The sum that is differentiated: the loss, and the losses of routers. The metrics of a script, which may have
        the name of the latter, are not trained."""
        return sums["loss"] if self.is_of_script else sums["loss"] + sums.get(STATISTICS[0], jnp.float32(0))


def objective_of(cfg: config.Config) -> Objective:
    """The objective of a config."""
    return Objective(cfg.objective, cfg.memory, cfg.user)


def means(sums: Mapping[str, jax.Array | float]) -> dict[str, jax.Array]:
    """The mean `loss`, and `accuracy`, `margin`, statistics of routers and the metrics of a script if there are any."""
    count = jnp.maximum(sums["count"], 1.0)
    return {_NAMES.get(kind, kind): total / count for kind, total in sums.items() if kind != "count"}


def _sums_of_user(user: UserObjects, network: Any, batch: Batch, keys: jax.Array | None) -> Sums:
    """The sums of a script's loss, which is the mean over the rows of a micro-batch."""
    from jaxmem.models.user import FlaxNetwork

    loss_function = user.loss_with_keys or user.loss
    if loss_function is None:
        raise UserError(
            "objective.name=own is the loss of a script; pass the argument loss to jaxmem.train(cfg, ...) or"
            " jaxmem.evaluate(run, data, ...), or set another objective.name"
        )
    mask = batch["mask"]
    rows = jnp.float32(mask.shape[0])
    if user.data is None:  # a row without a target is padding
        rows = jnp.sum(jnp.any(mask.reshape(mask.shape[0], -1) > 0, axis=-1), dtype=jnp.float32)
        # The mean over no rows is 0 / 0, and NaN also times `rows` = 0.
        batch = batch | {"mask": jnp.where(rows > 0, mask, jnp.ones_like(mask))}
    else:
        batch = {name: x for name, x in batch.items() if name in user.data.first}
    if isinstance(network, FlaxNetwork):
        # A sum over more than 256 values of a mask would be rounded in bfloat16.
        kept = () if user.data else ("mask",)
        floating = [name for name, x in batch.items() if jnp.issubdtype(x.dtype, jnp.floating) and name not in kept]
        batch = batch | {name: batch[name].astype(network.dtype) for name in floating}
        network = network.prepared(keys)
    with jax.numpy_dtype_promotion("standard"):
        result = loss_function(network, batch, *([keys] if user.loss_with_keys else []))
    loss, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not hasattr(loss, "dtype") or jnp.shape(loss) or not jnp.issubdtype(loss.dtype, jnp.floating):
        returned = f"{loss.dtype}{list(loss.shape)}" if hasattr(loss, "dtype") else type(loss).__name__
        raise UserError(
            f"loss returned {returned}; it must return a scalar (the mean loss of the rows) or a tuple (scalar,"
            " metrics)"
        )
    if not isinstance(metrics, Mapping):
        raise UserError(
            f"loss returned a tuple (scalar, {type(metrics).__name__}); its second element must be a dict of metrics,"
            ' e.g. {"accuracy": accuracy}'
        )
    if wrong := [name for name, x in metrics.items() if jnp.shape(x) or name in RESERVED]:
        raise UserError(
            f"loss: the metric {wrong[0]} must be a scalar, and must not have the name of a metric of every run:"
            f" {', '.join(RESERVED)}"
        )
    return {name: jnp.float32(x) * rows for name, x in {"loss": loss, **metrics}.items()} | {"count": rows}


def _token_parts(network: Any, batch: Batch, keys: jax.Array | None) -> list[NetworkPart]:
    inputs = batch["inputs"], batch["positions"], batch["segment_ids"], keys
    if names_parts(network):
        return network.parts(*inputs)
    return [Part(lambda network, _: Flow(*network.features_and_router_statistics(*inputs)))]


def _image_parts(network: Any, images: jax.Array, keys: jax.Array | None) -> list[NetworkPart]:
    if names_parts(network):
        return network.parts(images, keys)
    return [Part(lambda network, _: Flow(network.features(images, keys=keys)))]


def _pair_parts(network: Any, batch: Batch, keys: jax.Array | None) -> list[NetworkPart]:
    """Both images of each pair, in one batch: row by row, so that no row changes its device."""
    rows = batch["mask"].shape[0]
    images = jnp.stack([batch["inputs"], batch["pairs"]], axis=1).reshape(2 * rows, *batch["inputs"].shape[1:])
    both = None if keys is None else jnp.stack(list(split_keys(keys, 2)), axis=1).reshape(2 * rows)

    def split(_: Any, flow: Flow) -> Flow:
        x = flow.x.reshape(rows, 2, *flow.x.shape[1:])
        return Flow((x[:, 0], x[:, 1]))

    return [*_image_parts(network, images, both), Part(split)]


def _preferred(cfg: config.Objective, per_token: jax.Array, batch: Batch) -> Sums:
    """DPO: rows 2 i and 2 i + 1 are a pair of answers, the preferred one first; padding pairs have no weight."""
    gained = (_likelihoods(per_token, batch) - batch["reference"]).reshape(-1, 2)
    real = jnp.all(jnp.any(batch["mask"] > 0, axis=-1).reshape(-1, 2), axis=-1).astype(jnp.float32)
    margins = cfg.beta * (gained[:, 0] - gained[:, 1])
    sums = _sums(losses.preference(margins, cfg.label_smoothing), real, margins > 0)
    return sums | {"margin": jnp.sum(margins * real)}


def likelihoods(network: Any, batch: Batch, memory: config.Memory) -> jax.Array:
    """For each row, the log-probability of its tokens whose mask is 1."""
    flow = run_parts(network, _token_parts(network, batch, None))
    entries = max_update_entries(memory.update, flow.x.shape[-1])
    per_token = vocab_cross_entropy(network, flow.x, batch["targets"], memory.loss_chunk, max_entries=entries)
    return _likelihoods(per_token, batch)


def _likelihoods(per_token: jax.Array, batch: Batch) -> jax.Array:
    return -jnp.sum(per_token * batch["mask"], axis=-1)


def _with_router(sums: Sums, router: jax.Array | None, mask: jax.Array) -> Sums:
    """Adds the statistics of routers: their means over the tokens of all devices with a target, times the count. With
    one target per token this is a plain sum, so it does not depend on how rows are divided into micro-batches."""
    if router is None:
        return sums
    tokens = jnp.maximum(mean_over_groups(jnp.sum(mask)), jnp.finfo(jnp.float32).tiny)
    weight = mask * (mean_over_groups(sums["count"]) / tokens)
    totals = jnp.einsum("btn,bt->n", router, weight)
    return sums | dict(zip(STATISTICS, totals, strict=True))


def _classify(cfg: config.Objective, network: Network, x: jax.Array, batch: Batch) -> Sums:
    logits = network.logits(x)
    labels = batch["targets"]
    loss = losses.cross_entropy(logits, labels, label_smoothing=cfg.label_smoothing, z_loss=cfg.z_loss)
    return _sums(loss, batch["mask"], jnp.argmax(logits, axis=-1) == labels)


def _binary(_: config.Objective, network: Network, x: jax.Array, batch: Batch) -> Sums:
    logits = network.logits(x)[:, 0].astype(jnp.float32)
    labels = batch["targets"]
    loss = optax.losses.sigmoid_binary_cross_entropy(logits, labels)
    return _sums(loss, batch["mask"], (logits > 0) == (labels > 0.5))


def _regress(cfg: config.Objective, network: Network, x: jax.Array, batch: Batch) -> Sums:
    error = network.logits(x)[:, 0].astype(jnp.float32) - batch["targets"]
    return _sums(jnp.abs(error) if cfg.name == "regress_l1" else jnp.square(error), batch["mask"])


def _contrastive(cfg: config.Objective, network: Network, pair: tuple[jax.Array, jax.Array], batch: Batch) -> Sums:
    left, right = (network.logits(x) for x in pair)
    scores = losses.similarities(left, right, batch["mask"], cfg.temperature)
    correct = jnp.argmax(scores, axis=-1) == jnp.arange(scores.shape[0])
    return _sums(losses.contrastive(scores), batch["mask"], correct)


_IMAGE_LOSSES: Mapping[str, Callable[[config.Objective, Network, Any, Batch], Sums]] = {
    "classify": _classify,
    "binary": _binary,
    "regress_l1": _regress,
    "regress_l2": _regress,
    "contrastive": _contrastive,
}


def _sums(loss: jax.Array, mask: jax.Array, correct: jax.Array | None = None) -> Sums:
    sums = {"loss": jnp.sum(loss * mask), "count": jnp.sum(mask)}
    return sums if correct is None else sums | {"correct": jnp.sum(jnp.where(correct, mask, 0.0))}
