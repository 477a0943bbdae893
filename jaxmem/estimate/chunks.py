"""The chunks in which one device computes, where the section `memory` says `auto`. `dtype` is the compute dtype."""

import math

import jax.numpy as jnp

from jaxmem.config import Decoder, Memory
from jaxmem.models.cross_entropy import max_update_entries, slice_width
from jaxmem.sharding.share import DeviceShare
from jaxmem.step.execution import chunking


def loss_chunk(memory: Memory, share: DeviceShare, dtype: jnp.dtype) -> int | None:
    """`memory.loss_chunk`, resolved: at most the vocabulary entries of the device. None: the model has no
    vocabulary."""
    if not isinstance(share.model, Decoder):
        return None
    tokens = math.ceil(share.tokens * share.shards("vocab") / share.mesh.tensor)
    most = max_update_entries(memory.update, share.model.embed)
    return slice_width(memory.loss_chunk, tokens, share.vocab, dtype.itemsize, most) or share.vocab


def mlp_chunk(memory: Memory, share: DeviceShare, dtype: jnp.dtype) -> int | None:
    """`memory.mlp_chunk`, resolved: the number of tokens of a sequence in a chunk. None: all."""
    if not isinstance(share.model, Decoder):
        return None
    return chunking(memory).chunk_size(share.stream(dtype), 0 if share.model.experts else share.model.mlp)
