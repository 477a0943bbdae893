"""What one device has at a time, as a config comes out on its mesh: rows, tokens, entries of the vocabulary, passes."""

from __future__ import annotations

import math

import jax

from jaxmem.config import Config, Decoder
from jaxmem.models.cross_entropy import max_update_entries, slice_width
from jaxmem.quant.precision import compute_dtype
from jaxmem.step.model import chunking, pipeline_of


def loss_chunk(cfg: Config, platform: str) -> int | None:
    """`memory.loss_chunk` as it comes out for this config's batch and mesh: a whole part of the vocabulary, or less.
    None: there is no vocabulary."""
    if not isinstance(cfg.model, Decoder):
        return None
    itemsize, held = compute_dtype(cfg.precision, platform).itemsize, held_vocabulary(cfg)
    tokens = rows_of(cfg) * cfg.data.sequence_length
    if "tensor" not in cfg.rules.vocab:
        tokens /= cfg.mesh.tensor
    most = max_update_entries(cfg.memory.update, cfg.model.embed)
    return slice_width(cfg.memory.loss_chunk, math.ceil(tokens), held, itemsize, most) or held


def mlp_chunk(cfg: Config, platform: str) -> int | None:
    """`memory.mlp_chunk` as it comes out: tokens of a row at a time. None: all."""
    model = cfg.model
    return chunking(cfg.memory).chunk_size(stream_of(cfg, platform), model.mlp) if isinstance(model, Decoder) else None


def head_groups(cfg: Config, platform: str) -> int:
    """`memory.head_groups` as it comes out."""
    model, split = cfg.model, cfg.mesh.tensor if "tensor" in cfg.rules.heads else 1
    if not isinstance(model, Decoder) or model.kv_heads % split:
        return 1
    heads, kv_heads = model.heads // split, model.kv_heads // split
    return chunking(cfg.memory).group_count(stream_of(cfg, platform), heads, kv_heads, model.head_dim)


def stream_of(cfg: Config, platform: str) -> jax.ShapeDtypeStruct:
    """What one device has of a micro-batch between two layers of a decoder."""
    assert isinstance(cfg.model, Decoder)
    mesh, compute = cfg.mesh, compute_dtype(cfg.precision, platform)
    rows, length = max(round(rows_of(cfg) * mesh.context), 1), cfg.data.sequence_length // (mesh.context * mesh.tensor)
    return jax.ShapeDtypeStruct((rows, length, cfg.model.embed), compute)


def held_vocabulary(cfg: Config) -> int:
    """Entries that one device computes with."""
    parts = cfg.mesh.tensor if "tensor" in cfg.rules.vocab else 1
    return -(-cfg.model.vocab // parts) if isinstance(cfg.model, Decoder) else 0


_BACKWARD = 0.75  # of both passes' time, with each layer's forward pass run again


def passes_run(cfg: Config) -> float:
    """How many passes through all layers take as long as an update's: on stages its ticks, bubble included."""
    if cfg.measures_first:
        return cfg.batch.accumulate * (1 + _BACKWARD)
    pipeline = pipeline_of(cfg)
    return cfg.batch.accumulate if pipeline is None else pipeline.ticks * pipeline.group / pipeline.layers


def passes_held(cfg: Config) -> float:
    """Of how many passes what is kept is there at once: on stages every tick keeps its own, but for the boundaries
    within a segment of layers, which are those of the one that is gone back through."""
    if cfg.memory.update == "during":
        return cfg.batch.accumulate
    if (pipeline := pipeline_of(cfg)) is None:
        return 1
    together = layers_together(cfg)
    within = together**2 / (pipeline.layers + together**2) if together > 1 else 0.0
    return passes_run(cfg) * (1 - within) + within


def layers_together(cfg: Config) -> int:
    """On stages, how many layers go back from one boundary that is kept."""
    pipeline, remat = pipeline_of(cfg), cfg.memory.remat
    return pipeline.together(remat) if pipeline is not None and isinstance(remat, str) else 1


def rows_of(cfg: Config) -> float:
    """Of one micro-batch on one device."""
    mesh = cfg.mesh
    return cfg.batch.global_size / cfg.batch.accumulate / (mesh.replica * mesh.fsdp * mesh.context)
