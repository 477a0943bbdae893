"""The sections of parallelism: the device mesh, what is sharded over its axes, and the pipeline schedule."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from jaxmem.config.base import Count, Section


class Mesh(Section):
    """Devices along each axis; one may be -1: all remaining devices. In the order of the device grid, outermost first:
    neighbours along the last axis share the fastest links."""

    stage: int = 1
    replica: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def row_shards(self) -> int:
        """Number of groups of devices that the rows of a batch are divided among."""
        return math.prod(getattr(self, axis) for axis in BATCH_AXES)


MESH_AXES = tuple(Mesh.model_fields)
BATCH_AXES = ("replica", "fsdp")  # that the rows of a batch are sharded over

_Over = Annotated[tuple[Literal["fsdp", "context", "tensor"], ...], Field(strict=False)]


class Rules(Section):
    """The mesh axes that each dimension of weights is sharded over: the table of `sharding/table.py`. `fsdp` and
    `context` shard the stored weights as far as `zero` says; `tensor` also shards the computation. Where two
    dimensions of a weight name one axis, the first has it."""

    embed: Annotated[tuple[Literal["fsdp", "context"], ...], Field(strict=False)] = ("fsdp", "context")
    vocab: Annotated[tuple[Literal["tensor"], ...], Field(strict=False)] = ("tensor",)
    heads: _Over = ("tensor",)
    kv_heads: _Over = ("tensor",)
    mlp: _Over = ("tensor",)

    @property
    def table(self) -> dict[str, tuple[str, ...]]:
        return {dim: getattr(self, dim) for dim in Rules.model_fields}


class Pipeline(Section):
    """The schedule of micro-batches over the pipeline stages of `mesh.stage`."""

    rounds: Count = 1  # groups of layers per stage: 1 is GPipe, more the circular schedule
