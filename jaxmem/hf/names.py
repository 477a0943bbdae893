"""The names of the weights of a decoder in a Hugging Face file, for every family; used in both directions.

In jaxmem the weights of all layers are one array [layer, in, out]; in a file each layer has its own tensor [out, in].
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flax.traverse_util import flatten_dict

from jaxmem.config.hf_modules import MODULES
from jaxmem.config.networks import Decoder

WeightPath = tuple[str, ...]
ADAPTER = "adapter_model.safetensors"
ADAPTER_PREFIX = "base_model.model."  # prefix of the names of tensors of an adapter

LEAVES = {"weight": "weight", "scale": "weight", "bias": "bias"}
# Buffers that older files contain; jaxmem computes them.
COMPUTED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class FileWeight:
    """A weight of a network and its tensor in a file; for a stack, its tensor of each layer."""

    path: WeightPath
    name: str  # of the tensor, with {} for the layer
    is_transposed: bool
    ranks: tuple[int, ...] | None = None  # rank of each layer of an adapter; 0: there is no tensor
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
    """(weight, leaf) for each leaf of the parameters of a decoder, a nested dict."""
    for path, leaf in flatten_dict(params).items():
        *module, kind = path
        name = MODULES[".".join(module)]
        yield FileWeight(path, f"{name}.{LEAVES[kind]}", kind == "weight" and module != ["embedding"]), leaf


def is_ignored(cfg: Decoder, name: str) -> bool:
    """Whether a tensor is not a weight: a computed buffer, or the second name of a tied embedding."""
    return name.endswith(COMPUTED) or (cfg.tie_embeddings and name == "lm_head.weight")


def base_tensor_name(name: str) -> str:
    """The name in the base model of a tensor in the file of an adapter."""
    name = name.removeprefix(ADAPTER_PREFIX)
    return name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
