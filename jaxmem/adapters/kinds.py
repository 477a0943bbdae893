"""The registry of adapter kinds: the parameters that `adapter.kind` adds to a model."""

from collections.abc import Sequence
from importlib import import_module

import jax
from flax import nnx

from jaxmem.adapters.token_rows import tokens
from jaxmem.config.sections import Adapter
from jaxmem.models.decoder import Decoder
from jaxmem.models.linear import Linear
from jaxmem.models.network import Network

# The module whose `attach_from_config` adds parameters to a model. The kinds head, last_layers and patterns add no
# parameters: they train some weights of the model.
MODULES = {"lora": "low_rank", "dora": "low_rank", "qlora": "low_rank", "prompt": "prompt_tuning"}


def attach(model: Network, cfg: Adapter, key: jax.Array, order: Sequence[int] | None = None) -> None:
    """Adds the adapters of a config to a model, in place. `order`: the layer at each position of a
    stack."""
    if cfg.kind in MODULES:
        import_module(f"jaxmem.adapters.{MODULES[cfg.kind]}").attach_from_config(model, cfg, key, order)
    if cfg.token_indices and isinstance(model, Decoder):
        tokens(model, cfg.token_indices)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear):
            module.dequant_matmul = None if cfg.matmul == "auto" else cfg.matmul
