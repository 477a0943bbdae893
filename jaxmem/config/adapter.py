"""The section `adapter`, and the rank and the scale of the low-rank adapter of each layer."""

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator

from jaxmem.config.base import Count, Fraction, Positive, Section, StoredFormat, Texts, setting
from jaxmem.config.names import split_layers, split_stack
from jaxmem.config.networks import Convnet, Decoder, Family
from jaxmem.typing import JsonDict

LOW_RANK = ("lora", "dora", "qlora")  # kinds of adapters that add low-rank matrices
LORA_WEIGHTS = "*.lora.[abm]*"  # their trainable parameters; `layer_scale` is a constant


class HashableDict(JsonDict):
    """A dict that is never changed, so that the section that contains it is hashable. Its order has a meaning: the
    first pattern that matches applies."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, dict) and [*self.items()] == [*other.items()]

    def __ne__(self, other: object) -> bool:  # that of dict ignores the order
        return not self == other

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


Ranks = Annotated[dict[str, Count], AfterValidator(HashableDict)]
Alphas = Annotated[dict[str, Positive], AfterValidator(HashableDict)]


class Adapter(Section):
    """Parameter-efficient fine-tuning: trains added parameters, or some parameters of the model; freezes the others."""

    kind: Literal["none", "lora", "dora", "qlora", "prompt", "head", "last_layers", "patterns"] = setting(
        "none", "what is trained; none: all parameters"
    )
    rank: Count = setting(16, "rank of the added matrices")
    alpha: Positive = setting(16.0, "the output of an adapter is scaled by alpha / rank")
    alpha_pattern: Alphas | None = setting(None, "alpha of some layers, {pattern: alpha}; the first match applies")
    rslora: bool = setting(False, "scale by alpha / sqrt(rank) (rsLoRA)")
    lora_bias: bool = setting(False, "add a trainable bias to the output of B")
    shared_a: bool = setting(False, "the experts of a layer share A; each has its own B")
    targets: Texts | Ranks = setting(
        ("blocks.*",),
        "patterns of layers (blocks[-2:].*: the last two), or {pattern: rank}, where the first match applies;"
        " with adapter.kind=patterns: patterns of weight names",
    )
    dropout: Fraction = setting(0.0, "dropout of the inputs of adapters in blocks; adapters of other layers have none")
    base: StoredFormat | None = setting(
        None,
        "stored format of the frozen weights; null: with qlora the format of model.hf if it is quantized, else nf4;"
        " with other kinds precision.parameters",
    )
    experts: StoredFormat | None = setting(None, "stored format of frozen experts, e.g. mxfp4; null: as base")
    embeddings: StoredFormat | None = setting(
        None, "stored format of frozen embeddings and output projection, e.g. bfloat16 as in peft; null: as in base"
    )
    double_quant: bool = setting(True, "quantize the scales of a quantized base to 8 bits")
    hf: str | None = setting(
        None, "a PEFT directory; sets the initial adapters, and the fields of this section that are not set"
    )
    lora_plus_ratio: Positive = setting(1.0, "learning rate of B divided by the learning rate of A (LoRA+)")
    virtual_tokens: Count = setting(20, "trainable tokens before each sequence")
    layers: Count = setting(1, "number of last layers to train")
    base_run: str | None = setting(None, "a run with the frozen weights; null: model.hf, or random weights")

    def trainable_patterns(self, model: Family) -> tuple[str, ...]:
        """Patterns of the names of the parameters of a model that `kind` trains; empty: all."""
        match self.kind:
            case "none":
                return ()
            case "patterns":
                return tuple(self.targets)
            case "prompt" | "head":
                return (f"{self.kind}.*",)
            case "last_layers":  # the weights after the layers are trainable too
                stack = f"stage_{len(model.stages) - 1}.blocks" if isinstance(model, Convnet) else "blocks"
                tied = isinstance(model, Decoder) and model.tie_embeddings
                return (f"{stack}[-{self.layers}:].*", "norm.*", *(() if tied else ("head.*",)))
            case _:
                return (LORA_WEIGHTS,)


class LowRank(NamedTuple):
    """The adapter of one layer: y = x W + scale (x A) B."""

    rank: int
    alpha: float
    scale: float


def low_rank_layers(settings: Adapter, name: str, layers: int | None, total: int = 0) -> tuple[LowRank | None, ...]:
    """The adapter of each layer of a stack, or of a single layer (`layers`=None); None for a layer without adapter.
    `total`: the layers of the model, if `name` contains the layers of a stack."""
    alphas = settings.alpha_pattern or {}
    name, stack = split_stack(name)
    total_layers = layers if stack is None else total

    def adapter_of(layer: int) -> LowRank | None:
        pattern = _first(settings.targets, name, layer, total_layers)
        if pattern is None:
            return None
        rank = settings.targets[pattern] if isinstance(settings.targets, Mapping) else settings.rank
        matched = _first(alphas, name, layer, total_layers)
        alpha = settings.alpha if matched is None else alphas[matched]
        return LowRank(rank, alpha, alpha / (math.sqrt(rank) if settings.rslora else rank))

    return tuple(map(adapter_of, range(layers or 1) if stack is None else stack))


def is_match(pattern: str, name: str, layer: int, layers: int | None) -> bool:
    """Whether a pattern of layers matches this layer of a stack, or a single layer (`layers`=None).

    >>> is_match("blocks[-1:].*.q", "blocks.attention.q", 3, 4), is_match("head", "head", 0, None)
    (True, True)
    """
    names, selected = split_layers(pattern)
    is_selected = selected is None or (layers is not None and layer in range(layers)[selected])
    return is_selected and fnmatchcase(name, names)


def _first(patterns: Iterable[str], name: str, layer: int, layers: int | None) -> str | None:
    return next((pattern for pattern in patterns if is_match(pattern, name, layer, layers)), None)
