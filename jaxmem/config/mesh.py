"""The sections of parallelism: the device mesh, what is sharded over its axes, and the pipeline schedule."""

import math
from collections.abc import Iterable
from typing import Literal

from jaxmem.config.base import Count, ListOf, Section, setting
from jaxmem.config.networks import SHARDED, Decoder, Model


class Mesh(Section):
    """Number of devices along each axis; -1 for one axis: all remaining devices. Axes are ordered from outermost to
    innermost: neighbours along the last axis have the fastest links."""

    stage: int = setting(1, "pipeline stages, each with a part of the layers (pipeline parallelism)")
    replica: int = setting(1, "copies of the model; the batch is sharded over them (data parallelism)")
    fsdp: int = setting(1, "shards of the batch and, depending on zero, of weights, gradients and optimizer state")
    expert: int = setting(
        1, "shards of the experts of each layer (expert parallelism); shards the batch and other weights like fsdp"
    )
    context: int = setting(1, "shards of the sequence (context parallelism)")
    tensor: int = setting(1, "shards of each matmul (tensor parallelism)")
    context_method: Literal["auto", "ring", "ulysses"] = setting(
        "auto",
        "attention over context; ring: keys and values are sent in a ring; ulysses: all-to-all over heads",
    )

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in MESH_AXES}

    def count(self, axes: Iterable[str]) -> int:
        """The number of devices along these axes."""
        return math.prod(getattr(self, axis) for axis in axes)

    def shown(self, axes: Iterable[str]) -> str:
        """The settings of these axes, for errors."""
        return " x ".join(f"mesh.{axis}={getattr(self, axis)}" for axis in axes)

    @property
    def row_shards(self) -> int:
        """The number of groups of devices that the rows of a batch are divided among."""
        return self.count(BATCH_AXES)


MESH_AXES = tuple(name for name in Mesh.model_fields if name != "context_method")
BATCH_AXES = ("replica", "fsdp", "expert")  # axes over which the rows of a batch are sharded
SEQUENCE_AXES = ("context", "tensor")  # axes over which the sequence of the residual stream is sharded

_Over = ListOf[Literal["fsdp", "context", "tensor"]]
WeightKind = Literal["attention", "gate_up", "down", "experts", "head"]


class Rules(Section):
    """The mesh axes that each dimension of weights is sharded over: the table of `sharding/table.py`. `fsdp` and
    `context` shard only the stored arrays that `zero` selects, and `expert` shards what `fsdp` shards; `tensor` also
    shards the computation. If two dimensions of a weight name the same axis, only the first is sharded over it.

    `logits`, `replicated` and `optimizer` change this for single kinds of weights and for the optimizer state."""

    embed: ListOf[Literal["fsdp", "context"]] = setting(("fsdp", "context"), "mesh axes of the residual stream's width")
    vocab: ListOf[Literal["tensor"]] = setting(("tensor",), "mesh axes of the vocabulary")
    heads: _Over = setting(("tensor",), "mesh axes of query heads")
    kv_heads: _Over = setting(("tensor",), "mesh axes of key and value heads")
    mlp: _Over = setting(("tensor",), "mesh axes of the hidden width of the MLP")

    logits: ListOf[Literal["fsdp"]] = setting(
        (), "mesh axes that shard logits by vocabulary instead of by token; features are gathered, not weights"
    )
    replicated: ListOf[WeightKind] = setting(
        (), "kinds of weights that are stored replicated, as with zero=2, although zero=3; head: the output matrix"
    )
    optimizer: ListOf[Literal["replica"]] = setting((), "additional mesh axes that shard the optimizer state")

    @property
    def table(self) -> dict[str, tuple[str, ...]]:
        return {dim: getattr(self, dim) for dim in SHARDED}


class Pipeline(Section):
    """The schedule of micro-batches over the pipeline stages of `mesh.stage`."""

    schedule: Literal["auto", "gpipe", "circular", "1f1b", "interleaved_1f1b"] = setting(
        "auto", "order of forward and backward passes; auto: 1f1b, or interleaved_1f1b with several rounds"
    )
    rounds: Count = setting(1, "groups of layers per stage, interleaved over the stages; more groups: less idle time")

    @property
    def name(self) -> str:
        """The schedule that `auto` stands for."""
        return self.schedule if self.schedule != "auto" else "1f1b" if self.rounds == 1 else "interleaved_1f1b"


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def replicated_dims(model: Model, rules: Rules, mesh: Mesh) -> tuple[str, ...]:
    """The dimensions that are not divisible by `mesh.tensor` and need not be: KV heads are then replicated over some of
    its devices; a vocabulary is stored replicated and padded for computation."""
    if not isinstance(model, Decoder):
        return ()
    named = (name for name in ("kv_heads", "vocab") if "tensor" in getattr(rules, name))
    return tuple(name for name in named if getattr(model, name) % mesh.tensor)


def unsupported_by_ring(model: Decoder, mesh: Mesh) -> str | None:
    """What `mesh.context_method: ring` does not support. All devices send to the next device, but with stages only some
    of them are in the operation of a stage."""
    if mesh.stage != 1:
        return f"mesh.stage={mesh.stage}"
    if model.windows_differ:
        return "layers with and without a window"
    return "model.attention_sinks=true" if model.attention_sinks else None


def head_group_counts(heads: int, kv_heads: int, context: int = 1) -> list[int]:
    """The possible values of `memory.head_groups`: attention is computed for one group of heads at a time. `context`:
    the number of devices that shard a group (`mesh.context_method: ulysses`). Several groups may share a KV head.

    >>> head_group_counts(32, 8), head_group_counts(32, 8, 8)
    ([1, 2, 4, 8, 16, 32], [1, 2, 4])
    """
    return [n for n in range(1, heads // context + 1) if heads % math.lcm(kv_heads, context * n) == 0]
