"""Adds the adapters of a config to a model, and removes adapters from trees of parameters."""

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from jaxmem.adapters.trained_parts import prompt, tokens
from jaxmem.config.adapter import Adapter
from jaxmem.models.decoder import Decoder
from jaxmem.models.linear import Linear
from jaxmem.models.network import Network

NAMES = ("lora", "prompt")  # the attributes of modules that contain adapters


def attach(model: Network, cfg: Adapter, key: jax.Array, order: Sequence[int] | None = None) -> None:
    """Adds the adapters of a config to a model, in place. `order`: the layer at each position of a stack. The kinds
    head, last_layers and patterns add no parameters: they train weights of the model."""
    if cfg.kind in ("lora", "dora", "qlora"):
        from jaxmem.adapters.low_rank import add_low_rank

        add_low_rank(model, cfg, key, order)
    if isinstance(model, Decoder):
        if cfg.kind == "prompt":
            prompt(model, length=cfg.virtual_tokens, key=key)
        if cfg.token_indices:
            tokens(model, cfg.token_indices)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear):
            module.dequant_matmul = None if cfg.matmul in ("auto", "dequantize") else cfg.matmul


def base_of(tree: Any) -> Any:
    """A nested dict of parameters, or of a value for each parameter, without adapters.

    >>> base_of({"q": {"weight": 1, "lora": {"a": 2}}})
    {'q': {'weight': 1}}
    """
    if not isinstance(tree, dict):
        return tree
    return {name: base_of(value) for name, value in tree.items() if name not in NAMES}
