"""The families of networks: the fields of `model:`, the activations of a layer and the dimensions of its weights."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field

from jaxmem.config.base import Count, Fraction, Positive, Section

_ATTENTION = (
    "attention_norm", "attention_q", "attention_k", "attention_v", "attention", "attention_out", "mlp_norm",
)  # fmt: skip
SHARDED = ("embed", "vocab", "heads", "kv_heads", "mlp")  # dimensions of weights, as the section `rules` names them


class Family(Section):
    """Base of all families: activations and sharded dimensions."""

    activations: ClassVar[tuple[str, ...]] = ()  # of a layer, for `memory.remat: {save: [names]}` and `memory.offload`

    def dims(self) -> dict[str, dict[str, int]]:
        """For each dimension of weights that can be sharded, the sizes along it, by the fields that give them."""
        return {name: {name: getattr(self, name)} for name in SHARDED if name in type(self).model_fields}


class Rope(Section):
    """Rotary positions: the base frequency and how it is stretched for longer contexts."""

    theta: Positive = 10_000.0
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: Positive = 1.0
    original_length: Count = 8192
    low_frequency: Positive = 1.0  # llama3: wavelengths per original_length, below which all is stretched
    high_frequency: Positive = 4.0  # llama3: above which nothing is
    beta_fast: Positive = 32.0  # yarn: rotations per original_length
    beta_slow: Positive = 1.0
    attention_factor: Positive | None = None  # yarn: on cosine and sine; None: 0.1 ln(factor) + 1


class Decoder(Family):
    """Llama 2/3, Mistral, Qwen 2.5/3: pre-norm attention and a gated MLP."""

    activations = (*_ATTENTION, "mlp_gate", "mlp_up", "mlp_hidden", "mlp_out")
    family: Literal["decoder"] = "decoder"
    preset: str | None = None
    hf: str | None = None  # a Hugging Face directory: the weights, and every field that is not set here
    vocab: Count
    layers: Count
    embed: Count
    mlp: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    rope: Rope = Rope()
    norm_epsilon: Positive = 1e-5
    qk_norm: bool = False
    attention_bias: bool = False  # of queries, keys and values
    output_bias: bool = False  # of the output projection
    mlp_bias: bool = False
    tie_embeddings: bool = False
    window: Count | None = None  # keys a query sees, itself included
    dropout: Fraction = 0.0


class ImageInput(Family):
    """An image of height x width x channels, as numbers or as categories for each pixel."""

    image_size: Count = 8
    channels: Count = 1
    outputs: Count = 10


class Vit(ImageInput):
    """Vision transformer: patches to tokens, learned positions, bidirectional attention."""

    activations = (*_ATTENTION, "mlp_up", "mlp_hidden", "mlp_out")
    family: Literal["vit"] = "vit"
    preset: None = None
    patch: Count = 2
    layers: Count = 4
    embed: Count = 64
    mlp: Count = 128
    heads: Count = 4
    dropout: Fraction = 0.0

    def dims(self) -> dict[str, dict[str, int]]:
        sizes = {"embed": self.embed, "heads": self.heads, "kv_heads": self.heads, "mlp": self.mlp}
        return {name: {name: size} for name, size in sizes.items()}


class Convnet(ImageInput):
    """Residual convolutions with normalisation and pooling between stages."""

    family: Literal["convnet"] = "convnet"
    preset: None = None
    stages: Annotated[tuple[Count, ...], Field(strict=False, min_length=1)] = (32, 64)  # channels of each
    blocks: Count = 2  # residual blocks per stage
    dropout: Fraction = 0.0

    def dims(self) -> dict[str, dict[str, int]]:
        stages = {f"stages[{i}]": channels for i, channels in enumerate(self.stages)}
        return {"embed": stages, "mlp": stages}


class Mlp(ImageInput):
    """Dense layers with residual connections; pixels as numbers, one-hot or embedded categories."""

    activations = ("mlp_up", "mlp_hidden")
    family: Literal["mlp"] = "mlp"
    preset: None = None
    layers: Count = 3
    embed: Count = 128
    mlp: Count = 256
    inputs: Literal["numbers", "one_hot", "embedding"] = "numbers"
    categories: Count = 17  # values a pixel takes, for one_hot and embedding
    dropout: Fraction = 0.0


Model = Annotated[Decoder | Vit | Convnet | Mlp, Field(discriminator="family")]
FAMILIES: dict[str, type[Family]] = {kind.model_fields["family"].default: kind for kind in get_args(get_args(Model)[0])}
