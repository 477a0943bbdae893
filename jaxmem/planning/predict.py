"""The same bytes by arithmetic alone, from the config: what one would write on a blackboard.

States are exact but for weights that nothing splits (norms, biases). Activations are those of a decoder: what each
layer keeps under a recomputation policy, and beside it the larger of two moments, the logits with their weights or
one layer at work. What the compiler adds or saves on top is the difference to the compiled column.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from jaxmem.config import Config, Decoder
from jaxmem.precision import compute_dtype
from jaxmem.program import Program


def predict(built: Program) -> dict[str, int | None]:
    """Bytes of one device; None where no formula is known."""
    cfg, mesh = built.cfg, built.layout.mesh.shape
    width = np.dtype(getattr(jax.numpy, cfg.precision.parameters)).itemsize

    master, numbers = cfg.precision.master == "float32", _numbers(cfg)

    def share(from_stage: int, numbers: int, width: int = width) -> int:
        split = mesh["tensor"] * (mesh["fsdp"] * mesh["context"] if cfg.zero >= from_stage else 1)
        return built.parameters * width * numbers // split

    batch = sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize // (mesh["replica"] * mesh["fsdp"] * mesh["context"])
        for leaf in jax.tree.leaves(built.batch)
    )
    parts: dict[str, int | None] = {
        "parameters": share(3, 1),
        "master": share(1, 1, 4) if master else 0,
        "optimizer": None if numbers is None else share(1, numbers, 4 if master else width),
        # Of one micro-batch, and their sum, which lies where the optimizer wants it.
        "gradients": share(2, 1) + (share(1, 1) if cfg.batch.accumulate > 1 else 0),
        "activations": _activations(built, cfg.model) if isinstance(cfg.model, Decoder) else None,
        "batch": batch,
    }
    known = [size for size in parts.values() if size is not None]
    return {**parts, "total": sum(known) if len(known) == len(parts) else None}


def _numbers(cfg: Config) -> int | None:
    """That an optimizer keeps beside each weight, in its dtype."""
    return {"adamw": 2, "adam": 2, "lion": 1, "sgd": int(bool(cfg.optimizer.momentum))}.get(cfg.optimizer.name)


def _activations(built: Program, model: Decoder) -> int:
    cfg, mesh = built.cfg, built.layout.mesh.shape
    platform = built.layout.mesh.devices.flat[0].platform
    width = compute_dtype(cfg.precision, platform).itemsize
    rows = cfg.batch.global_size // cfg.batch.accumulate // (mesh["replica"] * mesh["fsdp"])
    tokens, tensor = rows * cfg.data.sequence_length // mesh["context"], mesh["tensor"]

    residual = tokens * model.embed * width // tensor
    queries = tokens * model.heads * model.head_dim * width // tensor
    keys_and_values = 2 * tokens * model.kv_heads * model.head_dim * width // tensor
    hidden = tokens * model.mlp * width // tensor
    kept = {
        "full": residual,
        "dots": 2 * residual + queries + keys_and_values + 2 * hidden,
        # Beside the products: both norms in float32, each before and after its scale; the parts of the gate.
        "none": 3 * residual + 4 * 4 * tokens * model.embed // tensor + 2 * queries + keys_and_values + 6 * hidden,
    }
    each = _layer_parameters(model) * width // tensor
    at_work = each + 6 * residual + 3 * hidden + 2 * queries + keys_and_values
    logits = (tokens + model.embed) * model.vocab * width // tensor
    return model.layers * kept[cfg.memory.remat] + max(logits, at_work)


def _layer_parameters(model: Decoder) -> int:
    heads = 2 * model.heads + 2 * model.kv_heads
    return model.embed * (heads * model.head_dim + 3 * model.mlp)


def ideal_flops(built: Program) -> float:
    """Of an update, without any recomputation: 2 for each weight of a product and token forward, twice that backward,
    and causal attention's two products, of which half is empty. Pictures: the weights once for each pixel's place
    is not counted, so this is a lower bound there."""
    cfg, model = built.cfg, built.cfg.model
    if model.family != "decoder":
        return 6.0 * built.parameters * cfg.batch.global_size
    length = cfg.data.sequence_length
    looked_up = 0 if model.tie_embeddings else model.vocab * model.embed
    seen = min(model.window or length, length)
    pairs = seen * length - seen * (seen - 1) / 2  # (query, key) that see each other
    attention = 4 * model.layers * model.heads * model.head_dim * pairs
    return cfg.batch.global_size * 3.0 * (2.0 * (built.parameters - looked_up) * length + attention)


def held(tree: Any) -> int:
    """Bytes that one device holds of placed arrays (or their shapes)."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
