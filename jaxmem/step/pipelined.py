"""All micro-batches of an update in one pass, for layers that lie on stages.

Everything but the layers would be the same work on every stage. It is shared out instead: each stage embeds its part
of the micro-batches, and takes their loss, one at a time: the logits that a device holds are those of one
micro-batch, recomputed in the backward pass (one more product with the output projection). The projection itself
and the embedding lie on every stage, split as they are without stages.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.stack import Pipeline
from jaxmem.stack.pipeline import AXIS
from jaxmem.step.objective import Batch, Objective, Sums


def sums_of_all(objective: Objective, pipeline: Pipeline, network: Any, batch: Batch, keys: jax.Array | None) -> Sums:
    """Leaves of the batch are [micro-batches, rows, ...], and so are `keys`, one for each row, or None."""
    stages, empty = pipeline.stages, pipeline.slots - pipeline.micro_batches
    # Rows of zeros have a mask of zeros. So that every stage has as many micro-batches as any other.
    batch = jax.tree.map(lambda x: jnp.pad(x, [(0, empty), *[(0, 0)] * (x.ndim - 1)]), batch)
    if keys is not None:
        keys = jnp.concatenate([keys, jnp.broadcast_to(keys[:1], (empty, *keys.shape[1:]))])

    def features(batch: Batch, keys: jax.Array | None) -> Any:
        return objective.features(network, batch, keys)

    @jax.checkpoint
    def one(x: Any, batch: Batch) -> Sums:
        """A micro-batch on each stage."""
        sums = jax.vmap(lambda x, batch: objective.sums(network, x, batch), spmd_axis_name=AXIS)(x, batch)
        return jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)

    def column(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(stages, -1, *x.shape[1:]), 1, 0)

    x = jax.vmap(features, in_axes=(0, None if keys is None else 0), spmd_axis_name=AXIS)(batch, keys)
    sums = jax.lax.map(lambda xs: one(*xs), jax.tree.map(column, (x, batch)))
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
