"""The adapters of a config."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from flax import nnx

from jaxmem import config
from jaxmem.adapters.lora import lora
from jaxmem.adapters.prompt import prompt
from jaxmem.models import Decoder, Network
from jaxmem.models.parts import Linear


def attach(model: Network, cfg: config.Adapter, key: jax.Array, order: Sequence[int] | None = None) -> None:
    """`order`: which layer stands at each place of a stack. Kinds that choose among the model's own weights add
    nothing to it."""
    if cfg.kind == "prompt" and isinstance(model, Decoder):
        prompt(model, length=cfg.virtual_tokens, key=key)
    elif cfg.kind in config.LOW_RANK:
        lora(
            model,
            rank=cfg.rank,
            alpha=cfg.alpha,
            targets=cfg.targets,
            stabilized=cfg.rslora,
            dropout=cfg.dropout,
            magnitude=cfg.kind == "dora",
            key=key,
            order=order,
        )
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear):
            module.coded = None if cfg.matmul == "auto" else cfg.matmul
