"""The families of networks: the fields of `model:`, the activations of a layer and the dimensions of its weights."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from jaxmem.config.base import (
    Count,
    Fraction,
    Layers,
    ListOf,
    NotNegative,
    Positive,
    Section,
    StoredFormat,
    Texts,
    setting,
)
from jaxmem.config.names import layer_stacks
from jaxmem.errors import UserError

_ATTENTION = (
    "attention_norm", "attention_q", "attention_k", "attention_v", "attention", "attention_out", "mlp_norm",
)  # fmt: skip
_FAMILY = "kind of network"
_DROPOUT = "dropout rate: share of activations set to 0 in training"
SHARDED = ("embed", "vocab", "heads", "kv_heads", "mlp")  # dimensions of weights, as the section `rules` names them


class Family(Section):
    """Base of all families: activations and sharded dimensions."""

    activations: ClassVar[tuple[str, ...]] = ()  # names for `memory.remat: {save: [names]}` and `memory.offload`
    preset: None = setting(None, "only model.family: decoder has presets")

    def dims(self) -> dict[str, dict[str, int]]:
        """For each dimension of weights that can be sharded: {field of the config: size}."""
        return {name: {name: getattr(self, name)} for name in SHARDED if name in type(self).model_fields}


class Rope(Section):
    """Rotary positions: the base frequency, and its scaling for longer contexts."""

    theta: Positive = setting(10_000.0, "base of the frequencies")
    share: Annotated[float, Field(gt=0, le=1)] = setting(1.0, "share of the dimensions of a head that are rotated")
    scaling: Literal["none", "linear", "llama3", "yarn", "longrope"] = setting("none", "how the frequencies are scaled")
    factor: Positive = setting(1.0, "how many times longer the context becomes")
    original_length: Count = setting(8192, "llama3, yarn, longrope: context length before scaling")
    low_frequency: Positive = setting(
        1.0, "llama3: frequencies below this many turns in original_length are divided by factor"
    )
    high_frequency: Positive = setting(4.0, "llama3: frequencies above this many turns in original_length are kept")
    beta_fast: Positive = setting(32.0, "yarn: frequencies above this many turns in original_length are kept")
    beta_slow: Positive = setting(
        1.0, "yarn: frequencies below this many turns in original_length are divided by factor"
    )
    truncate: bool = setting(True, "yarn: round the bounds of interpolated frequencies to integers")
    short_factors: ListOf[Positive] = setting((), "longrope: frequency divisors in documents up to original_length")
    long_factors: ListOf[Positive] = setting((), "longrope: frequency divisors in longer documents")
    attention_factor: Positive | None = setting(
        None,
        "factor on cosine and sine; null: 0.1 ln(factor) + 1 (yarn), "
        "sqrt(1 + ln(factor) / ln(original_length)) (longrope)",
    )
    mscale: Positive | None = setting(
        None,
        "yarn, with mscale_all_dim: the factor on cosine and sine is m(mscale) / m(mscale_all_dim), where m(s) is"
        " 0.1 * s * ln(factor) + 1",
    )
    mscale_all_dim: Positive | None = setting(None, "scores of model.latent are multiplied by m(mscale_all_dim)^2")

    def magnitude(self, mscale: float) -> float:
        """m(mscale): the factor by which YaRN sharpens the softmax."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


class Latent(Section):
    """Multi-head latent attention (DeepSeek-V2): keys and values of all heads from one vector per token."""

    kv_rank: Count = setting(..., "size of the vector from which keys and values are computed")
    q_rank: Count | None = setting(None, "size of the vector from which queries are computed; null: model.embed")
    rope_dim: Count = setting(..., "rotated dimensions at the end of queries and keys; heads share those of keys")
    value_dim: Count = setting(..., "width of the values of a head; model.head_dim is the width of queries and keys")


class Experts(Section):
    """A mixture of experts instead of one MLP; `model.mlp` is the hidden width of an expert."""

    count: Count = setting(..., "number of experts per layer")
    top_k: Count = setting(..., "number of experts per token")
    renormalize: bool = setting(True, "divide the weights of the chosen experts by their sum")
    balance_loss: NotNegative = setting(0.0, "weight of the load-balance loss; 0.001 to 0.02 in published models")
    z_loss: NotNegative = setting(0.0, "weight of the squared log of the softmax normalizer of the router")
    shared: Count | None = setting(None, "hidden width of a shared expert, which computes every token; null: none")
    shared_gate: bool = setting(True, "multiply the output of the shared expert by the sigmoid of a linear layer")
    scale: Positive = setting(1.0, "factor on the weights of the chosen experts")
    groups: Count = setting(1, "number of groups of experts; a token uses only experts of its top_groups groups")
    top_groups: Count = setting(1, "number of groups per token: those whose best expert is the most probable")
    every: Count = setting(1, "every n-th layer has experts: layers n - 1, 2 n - 1, ..., where the first layer is 0")
    dense_layers: ListOf[Annotated[int, Field(ge=0)]] = setting((), "further layers without experts; the first is 0")
    dense_mlp: Count | None = setting(None, "hidden width of the MLP of layers without experts")

    def in_layers(self, layers: int) -> tuple[bool, ...]:
        """Whether each layer of a model has experts."""
        return tuple((n + 1) % self.every == 0 and n not in self.dense_layers for n in range(layers))


class Quantization(Section):
    """How the files of `model.hf` store quantized matrices. The config.json of the directory sets it."""

    format: StoredFormat | None = setting(None, "format of the codes; null: they are decoded when they are read")
    block_size: Count = setting(64, "weights per scale")
    scale_group: Count | None = setting(None, "scales that share a scale (double quantization); null: float32 scales")
    layers: Texts = setting((), "layers with quantized weights")
    others: Literal["float32", "bfloat16"] = setting("bfloat16", "stored format of the other frozen weights")


class Decoder(Family):
    """Llama, Mistral, Qwen, Gemma 2/3, OLMo 2, Phi-3/4, Mixtral, gpt-oss, DeepSeek-V2: attention and a gated MLP, or
    experts."""

    activations = (*_ATTENTION, "mlp_gate", "mlp_up", "mlp_hidden", "mlp_out")
    family: Literal["decoder"] = setting("decoder", "kind of network; may be left out")
    preset: str | None = setting(  # type: ignore[assignment]
        None, "a published architecture and size, with random weights; sets the fields below that are not set"
    )
    hf: str | None = setting(
        None, "a Hugging Face directory, or org/name of the hub; sets the weights, and the fields that are not set"
    )
    vocab: Count = setting(..., "entries of the vocabulary")
    layers: Layers = setting(..., "number of layers")
    embed: Count = setting(..., "width of the residual stream")
    mlp: Count = setting(..., "hidden width of the MLP, or of each expert")
    heads: Count = setting(..., "query heads")
    kv_heads: Count = setting(..., "key and value heads, each shared by heads / kv_heads query heads")
    head_dim: Count = setting(..., "width of a head")
    rope: Rope = Rope()
    norm_epsilon: Positive = setting(1e-5, "epsilon of RMSNorm: added to the mean square")
    activation: Literal["silu", "gelu_tanh", "swiglu_clamped"] = setting(
        "silu", "activation of the gate; gelu_tanh: approximate GELU; swiglu_clamped: as in gpt-oss"
    )
    norms: Literal["pre", "post", "both"] = setting("pre", "norms before, after, or around attention and MLP")
    norm_offset: bool = setting(False, "norms multiply by 1 + weight, as in Gemma")
    qk_norm: bool | Literal["all_heads"] = setting(False, "normalize queries and keys per head, or all_heads together")
    query_pre_attn_scalar: Count | None = setting(
        None, "attention scores are divided by the square root of this value; null: of head_dim"
    )
    attention_soft_cap: Positive | None = setting(None, "attention scores s become c tanh(s / c); null: no cap")
    logit_soft_cap: Positive | None = setting(None, "logits y become c tanh(y / c); null: no cap")
    scale_embeddings: bool = setting(False, "multiply embeddings by the square root of embed")
    attention_sinks: bool = setting(
        False, "attention sinks: a trained logit per head in the softmax of attention, without a value"
    )
    attention_bias: bool = setting(False, "biases of queries, keys and values")
    output_bias: bool = setting(False, "bias of the output projection of attention")
    mlp_bias: bool = setting(False, "biases of the MLP, or of experts and router")
    tie_embeddings: bool = setting(False, "use one matrix for the embedding and the output projection")
    window: Count | None = setting(
        None, "sliding window: number of keys that a query attends to, including its own; null: all previous keys"
    )
    layer_types: ListOf[Literal["sliding_attention", "full_attention"]] = setting(
        (),
        "kind of each layer; a shorter list is repeated; only sliding_attention uses model.window; []: all layers do",
    )
    latent: Latent | None = setting(None, "multi-head latent attention instead of keys and values per head")
    sliding_rope: Rope | None = setting(None, "rotary positions of layers with sliding_attention; null: those of rope")
    experts: Experts | None = setting(None, "a mixture of experts instead of one MLP, in all or some layers")
    quantization: Quantization | None = setting(None, "how model.hf stores quantized matrices; set by its config.json")
    dropout: Fraction = setting(0.0, _DROPOUT)

    def dims(self) -> dict[str, dict[str, int]]:
        dims = super().dims()
        for name in ("shared", "dense_mlp"):
            if (width := getattr(self.experts, name, None)) is not None:
                dims["mlp"][f"experts.{name}"] = width
        return dims

    @property
    def has_experts(self) -> tuple[bool, ...]:
        """Whether each layer is a mixture of experts."""
        return (False,) * self.layers if self.experts is None else self.experts.in_layers(self.layers)

    @property
    def stacks(self) -> tuple[tuple[range, ...], ...]:
        """The layers as groups of stacks, see `layer_stacks`."""
        return layer_stacks(self.has_experts)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        pattern = self.layer_types or ("sliding_attention",)
        kinds = (pattern[layer % len(pattern)] for layer in range(self.layers))
        return tuple(self.window if kind == "sliding_attention" else None for kind in kinds)

    @property
    def windows_differ(self) -> bool:
        return len(set(self.windows)) > 1

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary positions of all layers; if layers differ, those of layers without and with a window."""
        has_window = [window is not None for window in self.windows]
        sliding = self.sliding_rope or self.rope
        if all(has_window):
            return (sliding,)
        return (self.rope,) if sliding == self.rope or not any(has_window) else (self.rope, sliding)


class ImageInput(Family):
    """An image of height x width x channels; the value of a pixel is a number or a category."""

    image_size: Count = setting(8, "height and width in pixels")
    channels: Count = setting(1, "channels of a pixel")
    outputs: Count = setting(10, "width of the output: number of classes, or 1 for a scalar")


class Vit(ImageInput):
    """Vision transformer: patches to tokens, learned positions, bidirectional attention."""

    activations: ClassVar[tuple[str, ...]] = (*_ATTENTION, "mlp_up", "mlp_hidden", "mlp_out")
    family: Literal["vit"] = setting("vit", _FAMILY)
    patch: Count = setting(2, "height and width of a patch in pixels")
    layers: Layers = setting(4, "number of layers")
    embed: Count = setting(64, "width of the residual stream")
    mlp: Count = setting(128, "hidden width of the MLP")
    heads: Count = setting(4, "attention heads")
    dropout: Fraction = setting(0.0, _DROPOUT)

    @property
    def patches(self) -> int:
        """The tokens of an image."""
        return (self.image_size // self.patch) ** 2

    def dims(self) -> dict[str, dict[str, int]]:
        sizes = {"embed": self.embed, "heads": self.heads, "kv_heads": self.heads, "mlp": self.mlp}
        return {name: {name: size} for name, size in sizes.items()}


class Convnet(ImageInput):
    """Residual convolutions with normalization and pooling between stages."""

    family: Literal["convnet"] = setting("convnet", _FAMILY)
    stages: Annotated[tuple[Count, ...], Field(strict=False, min_length=1)] = setting((32, 64), "channels per stage")
    blocks: Count = setting(2, "residual blocks per stage")
    dropout: Fraction = setting(0.0, _DROPOUT)

    def dims(self) -> dict[str, dict[str, int]]:
        stages = {f"stages[{i}]": channels for i, channels in enumerate(self.stages)}
        return {"embed": stages, "mlp": stages}


class Mlp(ImageInput):
    """Dense layers with residual connections. A pixel is encoded as a number, one-hot or by an embedding."""

    activations = ("mlp_up", "mlp_hidden")
    family: Literal["mlp"] = setting("mlp", _FAMILY)
    layers: Layers = setting(3, "number of layers")
    embed: Count = setting(128, "width of the residual stream")
    mlp: Count = setting(256, "hidden width of a layer")
    inputs: Literal["numbers", "one_hot", "embedding"] = setting("numbers", "encoding of a pixel")
    categories: Count = setting(17, "values that a pixel can have, for one_hot and embedding")
    dropout: Fraction = setting(0.0, _DROPOUT)


class UserModel(Family):
    """A module that a script passes: `jaxmem.train(cfg, model=...)` (Flax NNX) or `network=...` (jaxmem's layers)."""

    family: Literal["own"] = setting("own", _FAMILY)


class InFamilies:
    """The field `model`: a section of `FAMILIES`, selected by its field `family` when a config is read, so that a
    script can add families."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._read, json_schema_input_schema=handler(source))

    @staticmethod
    def _read(value: object) -> Family:
        if isinstance(value, Family):
            return value
        name = str(value.get("family", "decoder")) if isinstance(value, Mapping) else "decoder"
        if name not in FAMILIES:
            expected = ", ".join(f"'{known}'" for known in FAMILIES)
            tags = {"discriminator": "'family'", "tag": name, "expected_tags": expected}
            raise PydanticKnownError("union_tag_invalid", tags)
        return FAMILIES[name].model_validate(value)


def pipelined_layers(model: Family) -> int:
    """The layers that pipeline stages share; layers of several kinds in a repeated pattern count as one."""
    return len(model.stacks[-1][0]) if isinstance(model, Decoder) else getattr(model, "layers", 0)


Network = Decoder | Vit | Convnet | Mlp | UserModel
Model = Annotated[Network, Field(discriminator="family"), InFamilies()]
FAMILIES: dict[str, type[Family]] = {kind.model_fields["family"].default: kind for kind in get_args(Network)}


def register_family(section: type[Family]) -> str:
    """Adds a section for `model` to this process. Returns the name of the family: the default of `family`."""
    name = section.model_fields["family"].default
    if not isinstance(name, str):
        raise UserError(f"register_family: {section.__name__} must have a field `family: Literal[NAME] = NAME`")
    FAMILIES[name] = section
    return name
