"""What a decoder's weights are called in a Hugging Face file, for every family: one table, read in both directions.

Here the weights of all layers are one array [layer, in, out]; there each layer has its own [out, in].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flax.traverse_util import flatten_dict

Path = tuple[str, ...]

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
# Buffers that older files hold, and that are computed here.
COMPUTED = ("rotary_emb.inv_freq",)


@dataclass(frozen=True)
class Weight:
    """One weight here, and the tensor, or the tensor of each layer, that it is there."""

    path: Path
    name: str  # with {} for the layer
    stacked: bool
    transposed: bool

    def of_layer(self, layer: int) -> str:
        return self.name.format(layer)

    def there(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a tensor there, of a weight's here."""
        one = shape[1:] if self.stacked else shape
        return one[::-1] if self.transposed else one


def weights(params: Any) -> Iterator[tuple[Weight, Any]]:
    """Each weight of a decoder's parameters, a nested dict, with its leaf."""
    for path, leaf in flatten_dict(params).items():
        *module, kind = path
        name = MODULES[".".join(module)]
        weight = Weight(path, f"{name}.{LEAVES[kind]}", "{}" in name, kind == "weight" and name != MODULES["embedding"])
        yield weight, leaf
