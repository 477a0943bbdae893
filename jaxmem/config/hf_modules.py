"""The names of the modules of a decoder in a Hugging Face model, for every family; used in both directions."""

from typing import NamedTuple

from jaxmem.config.networks import Decoder

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
BIASES = {"attention_bias": ("q", "k", "v"), "output_bias": ("o",), "mlp_bias": ("gate", "up", "down")}


class HfModule(NamedTuple):
    """A module of one layer."""

    path: str  # in a network of jaxmem: blocks.attention.q
    name: str  # in a Hugging Face model
    layer: int | None
    has_bias: bool

    @property
    def is_matrix(self) -> bool:
        return not self.path.endswith("norm")


def modules_of(model: Decoder) -> list[HfModule]:
    """All modules with weights."""
    biased = {name for field, names in BIASES.items() if getattr(model, field) for name in names}
    found = []
    for path, name in MODULES.items():
        last = path.rpartition(".")[2]
        if (path == "head" and model.tie_embeddings) or (last in ("q_norm", "k_norm") and not model.qk_norm):
            continue
        layers = range(model.layers) if "{}" in name else (None,)
        found += [HfModule(path, name.format(layer), layer, last in biased) for layer in layers]
    return found
