"""How a config's network runs, whatever its weights are."""

from __future__ import annotations

import numpy as np

from jaxmem import models
from jaxmem.config import Config, Memory, Save
from jaxmem.config.names import on_host
from jaxmem.errors import UserError
from jaxmem.models.chunks import Long
from jaxmem.stack import Pipeline, Way


def execution(cfg: Config, compute: np.dtype, pipeline: Pipeline | None) -> models.Execution:
    memory = cfg.memory
    if memory.remat == "budget":
        raise UserError("memory.remat: budget is what `plan` and `train` decide for one; use full, dots or names")
    remat = memory.remat.save if isinstance(memory.remat, Save) else memory.remat
    return models.Execution(
        dtype=compute,
        attention=None if memory.attention == "auto" else memory.attention,
        deterministic=cfg.train.deterministic,
        long=pieces(memory),
        stack=Way(remat, pipeline, on_host(memory.offload)),
    )


def pieces(memory: Memory) -> Long:
    """`auto` stands for pieces only where nothing that is made within a layer is kept: pieces are made again."""
    if memory.remat not in ("none", "dots") and not isinstance(memory.remat, Save):
        return Long(memory.mlp_chunk, memory.head_groups)
    chunk = None if memory.mlp_chunk == "auto" else memory.mlp_chunk
    return Long(chunk, 1 if memory.head_groups == "auto" else memory.head_groups)
