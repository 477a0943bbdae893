"""The names of a decoder's weights in a Hugging Face file, for every family: one table, used in both directions.

Here the weights of all layers are one array [layer, in, out]; in a file each layer has its own tensor [out, in].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flax.traverse_util import flatten_dict

from jaxmem.config.networks import Decoder

WeightPath = tuple[str, ...]

MODULES = {
    "embedding": "model.embed_tokens",
    "blocks.attention_norm": "model.layers.{}.input_layernorm",
    "blocks.attention.q": "model.layers.{}.self_attn.q_proj",
    "blocks.attention.k": "model.layers.{}.self_attn.k_proj",
    "blocks.attention.v": "model.layers.{}.self_attn.v_proj",
    "blocks.attention.o": "model.layers.{}.self_attn.o_proj",
    "blocks.attention.q_norm": "model.layers.{}.self_attn.q_norm",
    "blocks.attention.k_norm": "model.layers.{}.self_attn.k_norm",
    "blocks.mlp_norm": "model.layers.{}.post_attention_layernorm",
    "blocks.mlp.gate": "model.layers.{}.mlp.gate_proj",
    "blocks.mlp.up": "model.layers.{}.mlp.up_proj",
    "blocks.mlp.down": "model.layers.{}.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
LEAVES = {"weight": "weight", "scale": "weight", "bias": "bias"}
# Buffers that older files contain, and that are computed here.
COMPUTED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class FileWeight:
    """A weight of a network and its tensor in a file, or its tensor of each layer."""

    path: WeightPath
    name: str  # with {} for the layer
    is_transposed: bool

    @property
    def is_stacked(self) -> bool:
        return "{}" in self.name

    def tensor_name(self, layer: int) -> str:
        return self.name.format(layer)

    def file_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor in the file, given the shape of the weight."""
        one = shape[1:] if self.is_stacked else shape
        return one[::-1] if self.is_transposed else one


def decoder_weights(params: Any) -> Iterator[tuple[FileWeight, Any]]:
    """Each weight of a decoder's parameters, a nested dict, with its leaf."""
    for path, leaf in flatten_dict(params).items():
        *module, kind = path
        name = MODULES[".".join(module)]
        yield FileWeight(path, f"{name}.{LEAVES[kind]}", kind == "weight" and module != ["embedding"]), leaf


def is_ignored(cfg: Decoder, name: str) -> bool:
    """Tensors that a file may contain beside the weights: computed buffers, and the second name of a tied embedding."""
    return name.endswith(COMPUTED) or (cfg.tie_embeddings and name == "lm_head.weight")
