"""The share of one device, for a config whose mesh is resolved: sequences, vocabulary entries, chunks, passes whose
activations are in memory, and shapes of weights and gradients, by which temporaries of a step are recognized."""

import functools
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax

from jaxmem import config
from jaxmem.config import Config, Decoder
from jaxmem.models.cross_entropy import max_update_entries, slice_width
from jaxmem.quant.precision import compute_dtype
from jaxmem.sharding import Axes, is_axes
from jaxmem.sharding.table import Table, has_vocab_on_stages, make_rules
from jaxmem.step import Program
from jaxmem.step.model import chunking, pipeline_of

_BACKWARD = 0.75  # share of the backward pass in the time of both, with full recompute


def shards(cfg: Config, axis: str) -> int:
    """The number of devices over which a logical axis of the weights is sharded for computation."""
    return math.prod(getattr(cfg.mesh, over) for over in _computing(cfg.rules)[axis])


@functools.lru_cache(maxsize=256)
def _computing(rules: config.Rules) -> Table:
    return make_rules(zero=0, section=rules).compute


def one_share(shape: Config, cfg: Config) -> Config:
    """The shape of one device's part of a decoder that the config shards over `tensor`, and its vocabulary over
    pipeline stages."""
    model, tensor = shape.model, cfg.mesh.tensor
    if not isinstance(model, Decoder):
        return shape
    if has_vocab_on_stages(cfg):
        model = model.replace(vocab=model.vocab // cfg.mesh.stage)
    if tensor == 1:
        return shape.replace(model=model)
    split = shards(cfg, "heads")
    heads = model.heads // split
    # If KV heads are not divisible by `tensor`, they are replicated; each device uses the KV heads of its query heads.
    keys = model.kv_heads // split if model.kv_heads % split == 0 else math.gcd(model.kv_heads, heads)
    share = {"heads": heads, "kv_heads": keys, "mlp": model.mlp // tensor, "vocab": -(-model.vocab // tensor)}
    return shape.replace(model=model.replace(**share))


def rows_of(cfg: Config) -> float:
    """Sequences of one micro-batch on one device. With `context`, a part of a sequence counts as a fraction."""
    mesh = cfg.mesh
    return cfg.batch.global_size / cfg.batch.accumulate / (mesh.row_shards * mesh.context)


def vocab_entries(cfg: Config) -> int:
    """Vocabulary entries for which one device computes logits."""
    stages = cfg.mesh.stage if has_vocab_on_stages(cfg) else 1
    return -(-cfg.model.vocab // (stages * shards(cfg, "vocab"))) if isinstance(cfg.model, Decoder) else 0


def loss_chunk(cfg: Config, platform: str) -> int | None:
    """`memory.loss_chunk` resolved for this batch and mesh: at most the vocabulary entries of one device. None: the
    model has no vocabulary."""
    if not isinstance(cfg.model, Decoder):
        return None
    itemsize, entries = compute_dtype(cfg.precision, platform).itemsize, vocab_entries(cfg)
    tokens = rows_of(cfg) * cfg.data.sequence_length * shards(cfg, "vocab") / cfg.mesh.tensor
    most = max_update_entries(cfg.memory.update, cfg.model.embed)
    return slice_width(cfg.memory.loss_chunk, math.ceil(tokens), entries, itemsize, most) or entries


def mlp_chunk(cfg: Config, platform: str) -> int | None:
    """`memory.mlp_chunk`, resolved: the number of tokens of a sequence in a chunk. None: all."""
    if not isinstance(cfg.model, Decoder):
        return None
    return chunking(cfg.memory).chunk_size(stream_of(cfg, platform), 0 if cfg.model.experts else cfg.model.mlp)


def head_groups(cfg: Config, platform: str) -> int:
    """`memory.head_groups`, resolved."""
    model, split = cfg.model, shards(cfg, "heads")
    if not isinstance(model, Decoder) or model.kv_heads % split:
        return 1
    heads, kv_heads = model.heads // split, model.kv_heads // split
    context = cfg.mesh.context if cfg.mesh.context_method == "ulysses" else 1
    return chunking(cfg.memory).group_count(stream_of(cfg, platform), heads, kv_heads, model.head_dim, context)


def stream_of(cfg: Config, platform: str) -> jax.ShapeDtypeStruct:
    """The residual stream of a decoder for one micro-batch, as one device stores it between layers."""
    assert isinstance(cfg.model, Decoder)
    mesh, compute = cfg.mesh, compute_dtype(cfg.precision, platform)
    rows, length = max(round(rows_of(cfg) * mesh.context), 1), cfg.data.sequence_length // (mesh.context * mesh.tensor)
    return jax.ShapeDtypeStruct((rows, length, cfg.model.embed), compute)


def passes_per_update(cfg: Config) -> float:
    """The duration of an update as a number of passes of a micro-batch."""
    return cfg.batch.accumulate * (1 + _BACKWARD) if cfg.needs_global_norm_first else cfg.batch.accumulate


def layers_per_pass(cfg: Config) -> float:
    """The layers that a device computes for a micro-batch. The time in which a pipeline stage is idle counts as more
    layers."""
    if (pipeline := pipeline_of(cfg)) is None:
        return getattr(cfg.model, "layers", 1)
    return pipeline.group * pipeline.rounds / (1 - pipeline.bubble)


def passes_in_memory(cfg: Config) -> float:
    """The number of passes whose saved activations are in memory at the same time; in a pipeline, of passes through one
    group of layers."""
    if (pipeline := pipeline_of(cfg)) is not None:
        return pipeline.timetable.slots.counts[0]
    return cfg.batch.accumulate if cfg.memory.update == "during" else 1


Dims = tuple[int, ...]


@dataclass(frozen=True)
class KnownShapes:
    stored: frozenset[Dims]  # weights as they are stored, layers stacked
    gradients: frozenset[Dims]  # all shapes of gradients: sharded or gathered, of one layer or stacked
    stacked_sizes: frozenset[int]  # numbers of elements of stacked gradients, for buffers that XLA reshaped
    full_weights: frozenset[Dims]  # all layers of a sharded weight, gathered; without shapes of sharded arrays
    full_gradients: frozenset[Dims]
    positions: int | None = None  # number of positions of a sequence
    layers: int | None = None  # number of layers of a stack on one device


def sorted_dims(dims: Iterable[int]) -> Dims:
    """The dimensions above 1, sorted: the same for an array and its transposes.

    >>> sorted_dims((1, 512, 32, 4096))
    (32, 512, 4096)
    """
    return tuple(sorted(d for d in dims if d != 1))


def known_shapes(built: Program) -> KnownShapes:
    """The shapes of a program's weights and gradients, from its layout."""
    shapes_by_kind: dict[str, set[Any]] = defaultdict(set)
    params = built.spec.state.params

    def add(axes: Axes, leaf: Any, trainable: Any) -> None:
        stored, split, used, moments = (
            built.layout.sharding(role, axes, shape).shard_shape(shape)
            for role in ("weights", "gradients", "compute", "optimizer")
            for shape in (built.layout.padded(role, axes, leaf.shape),)
        )
        shapes_by_kind["stored"].update(sorted_dims(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(leaf))
        is_stacked, has_gradient = axes[:1] == ("layer",), trainable is not None
        if has_gradient:
            for dims in (stored, split, used, moments, leaf.shape):
                count = dims[:1] if trainable.shape == leaf.shape else trainable.shape[:1]  # some layers may be frozen
                shapes = ((*count, *dims[1:]), dims[1:]) if is_stacked else (dims,)
                shapes_by_kind["gradients"].update(map(sorted_dims, shapes))
        if not is_stacked:
            return
        shapes_by_kind["layers"].add(stored[0])
        shapes_by_kind["sharded"].update(sorted_dims(dims) for dims in (stored, split) if dims != used)
        shapes_by_kind["full_weights"].update({sorted_dims(used)} if used != stored else ())
        if has_gradient:
            shapes_by_kind["stacked_sizes"].add(math.prod(split))
            shapes_by_kind["full_gradients"].update({sorted_dims(used)} if used != split else ())

    jax.tree.map(add, built.model.axes, params, built.model.select(params), is_leaf=is_axes)
    return KnownShapes(
        frozenset(shapes_by_kind["stored"]),
        frozenset(shapes_by_kind["gradients"]),
        frozenset(shapes_by_kind["stacked_sizes"]),
        frozenset(shapes_by_kind["full_weights"] - shapes_by_kind["sharded"]),
        frozenset(shapes_by_kind["full_gradients"] - shapes_by_kind["sharded"]),
        built.cfg.row_length if built.cfg.reads_text else None,
        max(shapes_by_kind["layers"], default=None),
    )
