"""The names of a decoder's weights in a Hugging Face file, for every family: one table, used in both directions.

Here the weights of all layers are one array [layer, in, out]; in a file each layer has its own tensor [out, in].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flax.traverse_util import flatten_dict

from jaxmem.config.hf_modules import MODULES
from jaxmem.config.networks import Decoder

WeightPath = tuple[str, ...]
ADAPTER = "adapter_model.safetensors"
ADAPTER_PREFIX = "base_model.model."  # of the names of its tensors

LEAVES = {"weight": "weight", "scale": "weight", "bias": "bias"}
# Buffers that older files contain, and that are computed here.
COMPUTED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class FileWeight:
    """A weight of a network and its tensor in a file, or its tensor of each layer."""

    path: WeightPath
    name: str  # with {} for the layer
    is_transposed: bool
    ranks: tuple[int, ...] | None = None  # of the layers of an adapter; 0: there is no tensor
    rank_dim: int | None = None  # the dimension of the tensor that is the rank

    @property
    def is_stacked(self) -> bool:
        return "{}" in self.name

    def tensor_name(self, layer: int) -> str:
        return self.name.format(layer)

    def file_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the largest tensor in the file, from the shape of the weight."""
        one = shape[1:] if self.is_stacked else shape
        return one[::-1] if self.is_transposed else one

    def tensors(self, shape: tuple[int, ...], layers: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(layer, shape) of each tensor in the file, from the shape of the weight."""
        full = self.file_shape(shape)
        for layer in range(layers) if self.is_stacked else (0,):
            rank = 1 if self.ranks is None else self.ranks[layer]
            if rank > 0:
                yield layer, tuple(rank if dim == self.rank_dim else n for dim, n in enumerate(full))


def decoder_weights(params: Any) -> Iterator[tuple[FileWeight, Any]]:
    """Each weight of a decoder's parameters, a nested dict, with its leaf."""
    for path, leaf in flatten_dict(params).items():
        *module, kind = path
        name = MODULES[".".join(module)]
        yield FileWeight(path, f"{name}.{LEAVES[kind]}", kind == "weight" and module != ["embedding"]), leaf


def is_ignored(cfg: Decoder, name: str) -> bool:
    """Tensors that a file may contain beside the weights: computed buffers, and the second name of a tied embedding."""
    return name.endswith(COMPUTED) or (cfg.tie_embeddings and name == "lm_head.weight")


def base_tensor_name(name: str) -> str:
    """The name in the base model of a tensor that an adapter's file contains."""
    name = name.removeprefix(ADAPTER_PREFIX)
    return name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
