"""Networks as Flax NNX modules, all from one small set of parts. They know parameters and logical axes, not devices."""

from __future__ import annotations

from typing import Any

from flax import nnx

from jaxmem import config
from jaxmem.models.chunks import Long
from jaxmem.models.convnet import Convnet
from jaxmem.models.decoder import Decoder
from jaxmem.models.mlp import Mlp
from jaxmem.models.parts import Execution
from jaxmem.models.vit import Vit

Network = Decoder | Vit | Convnet | Mlp

_FAMILIES: dict[str, Any] = {"decoder": Decoder, "vit": Vit, "convnet": Convnet, "mlp": Mlp}


def build(cfg: config.Model, rngs: nnx.Rngs, execution: Execution = Execution()) -> Network:
    """The network that a config's `model` section describes."""
    return _FAMILIES[cfg.family](cfg, rngs, execution)


__all__ = ["Convnet", "Decoder", "Execution", "Long", "Mlp", "Network", "Vit", "build"]
