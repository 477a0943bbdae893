"""The layers of a model as pipeline stages store them."""

import jax.numpy as jnp


def arranged(pipeline, stacked):
    """[layers, ...] in stored order; identity layers are zeros."""
    padded = jnp.pad(stacked, [(0, pipeline.stored - pipeline.layers), *[(0, 0)] * (stacked.ndim - 1)])
    return padded[pipeline.order]
