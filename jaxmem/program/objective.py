"""From a batch to the sums that a step, an evaluation and several micro-batches all add up.

An objective gives sums, never means: the sum of the loss, of what was right, and of how many counted. Divided
at the end, micro-batches of unequal size weigh as they do in one large batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import config, losses
from jaxmem.models import Decoder, Network

Batch = dict[str, jax.Array]
Sums = dict[str, jax.Array]  # "loss", "count", and "correct" where right and wrong mean something
Objective = Callable[[Any, Batch, jax.Array | None], Sums]


def objective(cfg: config.Objective) -> Objective:
    """(network, batch, dropout key or None) -> sums."""
    return {
        "next_token": _next_token,
        "classify": _classify,
        "binary": _binary,
        "regress_l1": _regress(losses.absolute_error),
        "regress_l2": _regress(losses.squared_error),
        "contrastive": _contrastive,
    }[cfg.name](cfg)


def means(sums: Sums) -> dict[str, jax.Array]:
    """`loss`, and `accuracy` where there is one, from sums."""
    count = jnp.maximum(sums["count"], 1.0)
    mean = {"loss": sums["loss"] / count}
    return mean | {"accuracy": sums["correct"] / count} if "correct" in sums else mean


def _next_token(cfg: config.Objective) -> Objective:
    def run(network: Decoder, batch: Batch, key: jax.Array | None) -> Sums:
        x = network.features(batch["inputs"], batch["positions"], batch["segment_ids"], key)
        logits = network.logits(x)
        loss = losses.cross_entropy(logits, batch["targets"], label_smoothing=cfg.label_smoothing, z_loss=cfg.z_loss)
        return _sums(loss, batch["mask"])

    return run


def _classify(cfg: config.Objective) -> Objective:
    def run(network: Network, batch: Batch, key: jax.Array | None) -> Sums:
        logits, labels = network(batch["inputs"], key=key), batch["targets"]
        loss = losses.cross_entropy(logits, labels, label_smoothing=cfg.label_smoothing, z_loss=cfg.z_loss)
        return _sums(loss, batch["mask"], jnp.argmax(logits, axis=-1) == labels)

    return run


def _binary(_: config.Objective) -> Objective:
    def run(network: Network, batch: Batch, key: jax.Array | None) -> Sums:
        logits = network(batch["inputs"], key=key)[:, 0]
        loss = losses.binary_cross_entropy(logits, batch["targets"])
        return _sums(loss, batch["mask"], (logits > 0) == (batch["targets"] > 0.5))

    return run


def _regress(error: Callable[[jax.Array, jax.Array], jax.Array]) -> Callable[[config.Objective], Objective]:
    def make(_: config.Objective) -> Objective:
        def run(network: Network, batch: Batch, key: jax.Array | None) -> Sums:
            predicted = network(batch["inputs"], key=key)[:, 0]
            return _sums(error(predicted, batch["targets"]), batch["mask"])

        return run

    return make


def _contrastive(cfg: config.Objective) -> Objective:
    def run(network: Network, batch: Batch, key: jax.Array | None) -> Sums:
        first, second = (None, None) if key is None else jax.random.split(key)
        left, right = network(batch["inputs"], key=first), network(batch["pairs"], key=second)
        scores = losses.similarities(left, right, batch["mask"], cfg.temperature)
        correct = jnp.argmax(scores, axis=-1) == jnp.arange(scores.shape[0])
        return _sums(losses.contrastive(scores), batch["mask"], correct)

    return run


def _sums(loss: jax.Array, mask: jax.Array, correct: jax.Array | None = None) -> Sums:
    sums = {"loss": jnp.sum(loss * mask), "count": jnp.sum(mask)}
    return sums if correct is None else sums | {"correct": jnp.sum(jnp.where(correct, mask, 0.0))}
