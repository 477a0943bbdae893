"""All micro-batches of an update in one pass, for pipeline stages.

Everything except the layers would be the same work on every stage, so it is divided: each stage embeds its share of
the micro-batches, and computes their loss, one micro-batch at a time. Logits are recomputed in the backward pass (one
more matmul with the output projection), so a device stores the logits of one micro-batch. Embedding and output
projection are replicated over stages.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.stack import Pipeline
from jaxmem.stack.pipeline import AXIS
from jaxmem.step.objective import Batch, Objective, Sums


def sums_of_all(objective: Objective, pipeline: Pipeline, network: Any, batch: Batch, keys: jax.Array | None) -> Sums:
    """The sums of the objective. Leaves of the batch are [micro-batches, rows, ...]. `keys` has the same shape, one per
    row, or is None."""
    stages, empty = pipeline.stages, pipeline.slots - pipeline.micro_batches
    # Padded with rows of zeros, whose mask is zero, so that every stage has the same number of micro-batches.
    batch = jax.tree.map(lambda x: jnp.pad(x, [(0, empty), *[(0, 0)] * (x.ndim - 1)]), batch)
    if keys is not None:
        keys = jnp.concatenate([keys, jnp.broadcast_to(keys[:1], (empty, *keys.shape[1:]))])

    def features(batch: Batch, keys: jax.Array | None) -> Any:
        return objective.features(network, batch, keys)

    @jax.checkpoint
    def one(x: Any, batch: Batch) -> Sums:
        """One micro-batch per stage."""
        sums = jax.vmap(lambda x, batch: objective.sums(network, x, batch), spmd_axis_name=AXIS)(x, batch)
        return jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)

    def column(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(stages, -1, *x.shape[1:]), 1, 0)

    x = jax.vmap(features, in_axes=(0, None if keys is None else 0), spmd_axis_name=AXIS)(batch, keys)
    sums = jax.lax.map(lambda xs: one(*xs), jax.tree.map(column, (x, batch)))
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)
