"""The optimizers: one line each, with the class of their hyperparameters, whose defaults are those of the paper.

Each line has the function in `jaxmem.optim.rules` that scales the gradients, `module:function`. The module also has the
optimizer, a function with its name, and is imported when the optimizer is used. Imports no jax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from jaxmem.config.base import Count, Fraction, NameIn, NotNegative, Positive, Section, Texts, setting
from jaxmem.errors import UserError
from jaxmem.typing import JsonDict

if TYPE_CHECKING:
    import optax


@dataclass(frozen=True, kw_only=True)
class AdamSettings:
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8


@dataclass(frozen=True, kw_only=True)
class AdamWSettings(AdamSettings):
    weight_decay: float = 0.1


@dataclass(frozen=True, kw_only=True)
class AdamW8bitSettings(AdamWSettings):
    kernel: str = "none"


@dataclass(frozen=True, kw_only=True)
class MomentumSettings:
    momentum: float = 0.9
    weight_decay: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SgdSettings(MomentumSettings):
    momentum: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LionSettings:
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.1


@dataclass(frozen=True, kw_only=True)
class AdafactorSettings:
    weight_decay: float = 0.0


@dataclass(frozen=True, kw_only=True)
class MuonSettings(AdamWSettings):
    momentum: float = 0.95


@dataclass(frozen=True, kw_only=True)
class ApolloMiniSettings(AdamWSettings):
    refresh_every: int = 200
    scale: float = 128.0
    project_embeddings: bool = False


@dataclass(frozen=True, kw_only=True)
class ApolloSettings(ApolloMiniSettings):
    rank: int | None = None  # None: a quarter of the smaller dimension of each matrix
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class GaLoreSettings(ApolloSettings):
    scale: float = 0.25
    residual: bool = False


@dataclass(frozen=True, kw_only=True)
class QGaLoreSettings(GaLoreSettings):
    similarity: float = 0.4


@dataclass(frozen=True)
class Entry:
    settings: type
    implementation: str | Callable[..., optax.GradientTransformation]  # module:function in optim.rules, or a function
    summary: str  # the method, and bytes of state per parameter
    learning_rate: float = 3e-4  # the largest one, if the config has none

    @cached_property  # a search checks thousands of configs
    def fields(self) -> JsonDict:
        """The hyperparameters and their defaults."""
        return {field.name: field.default for field in dataclasses.fields(self.settings)}


OPTIMIZERS = {
    "adamw": Entry(AdamWSettings, "plain:scale_by_adam", "Two moments in the weights' dtype: 8 bytes in float32."),
    "adam": Entry(AdamSettings, "plain:scale_by_adam", "AdamW without weight decay."),
    "sgd": Entry(SgdSettings, "plain:trace", "No state; with momentum one value in the dtype of the weights.", 1e-2),
    "lion": Entry(LionSettings, "plain:scale_by_lion", "One moment; updates are signs.", 1e-4),
    "adafactor": Entry(
        AdafactorSettings,
        "adafactor:scale_by_adafactor",
        "Sums of rows and columns: almost no state. The learning rate is relative to the size of the weights.",
        1e-2,
    ),
    "adam_mini": Entry(AdamWSettings, "adam_mini:scale_by_adam_mini", "AdamW, one second moment per neuron: 4 bytes."),
    "muon": Entry(MuonSettings, "muon:scale_by_muon", "Orthogonalized momentum for hidden matrices: 4 bytes."),
    "adamw8bit": Entry(AdamW8bitSettings, "quantized:scale_by_adam8bit", "AdamW in 8 bits: 2.03 bytes."),
    "adamw4bit": Entry(AdamWSettings, "quantized:scale_by_adam4bit", "AdamW in 4 bits: 1.06 bytes."),
    "lion8bit": Entry(LionSettings, "quantized:scale_by_lion8bit", "Lion in 8 bits: 1.02 bytes.", 1e-4),
    "momentum8bit": Entry(MomentumSettings, "quantized:trace8bit", "SGD with momentum in 8 bits: 1.02 bytes.", 1e-2),
    "galore_adamw": Entry(
        GaLoreSettings, "galore:scale_by_galore", "AdamW on low-rank projections of gradients.", 1e-3
    ),
    "galore_adamw8bit": Entry(GaLoreSettings, "galore:scale_by_galore8bit", "GaLore with moments in 8 bits.", 1e-3),
    "qgalore": Entry(QGaLoreSettings, "galore:scale_by_qgalore", "GaLore with moments in 8 bits and bases in 4.", 1e-3),
    "apollo": Entry(ApolloSettings, "apollo:scale_by_apollo", "Gradients scaled by Adam on a random projection.", 1e-3),
    "apollo_mini": Entry(ApolloMiniSettings, "apollo:scale_by_apollo_mini", "APOLLO of rank 1: almost no state.", 1e-3),
}


class Optimizer(Section):
    """The optimizer, its learning rate and clipping. A hyperparameter that is null has the default of the optimizer;
    one that the optimizer does not have is an error."""

    name: Annotated[str, NameIn(OPTIMIZERS)] = setting("adamw", "the optimizer")
    learning_rate: Positive = setting(
        3e-4,
        "largest learning rate; by default that of the optimizer; with model.hf 1/30 of it, for low-rank adapters 2/3",
    )
    schedule: Literal["cosine", "linear", "constant"] = setting("cosine", "shape of the learning rate after the warmup")
    warmup: Annotated[int, Field(ge=0)] = setting(0, "updates in which the learning rate increases linearly from 0")
    min_lr_ratio: Fraction = setting(0.1, "final learning rate divided by the largest")
    clip: Positive | None = setting(1.0, "largest norm of the gradients; null: not clipped")
    trainable: Texts = setting((), "patterns of trainable parameters; empty: all")
    clip_by: Literal["global", "previous", "weight"] = setting(
        "global",
        "the norm that clip limits; global: norm of all gradients together; previous: the global norm of the previous"
        " update; weight: norm of each weight's gradient",
    )
    kernel: Literal["auto", "none", "triton"] = setting(
        "auto", "fused update for adamw8bit or int8 weights; none: plain JAX; auto: triton on GPUs, else none"
    )
    beta1: Fraction | None = setting(None, "decay of the first moment")
    beta2: Fraction | None = setting(None, "decay of the second moment")
    epsilon: Positive | None = setting(None, "added to the root of the second moment")
    momentum: Fraction | None = setting(None, "decay of the momentum")
    rank: Count | None = setting(None, "rank of projections; null: a quarter of each matrix's smaller side")
    refresh_every: Count | None = setting(None, "updates between two refreshes of the projection")
    scale: Positive | None = setting(None, "factor on the projected update")
    project_embeddings: bool | None = setting(None, "whether embedding and output matrices are projected too")
    similarity: Fraction | None = setting(None, "the interval doubles if a new basis contains this share of the old")
    residual: bool | None = setting(None, "add the gradient outside of the basis, scaled like that inside (Fira)")
    weight_decay: NotNegative | None = setting(None, "weight decay of matrices, not of norms and biases")

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, fields: object) -> object:
        """Adds the defaults of the named optimizer."""
        if not isinstance(fields, dict):
            return fields
        entry = OPTIMIZERS.get(str(fields.get("name", cls.model_fields["name"].default)))
        defaults = {} if entry is None else {key: value for key, value in entry.fields.items() if key != "kernel"}
        rate = {} if entry is None else {"learning_rate": entry.learning_rate}
        return {
            **rate,
            **defaults,
            **{field: value for field, value in fields.items() if value is not None or field not in defaults},
        }

    @property
    def hyperparameters(self) -> JsonDict:
        """The hyperparameters of the named optimizer."""
        return {field: getattr(self, field) for field in OPTIMIZERS[self.name].fields}

    @property
    def needs_whole_embedding(self) -> bool:
        """Whether an embedding cannot be updated in slices, since GaLore decomposes its complete gradient."""
        return bool(self.project_embeddings) and issubclass(OPTIMIZERS[self.name].settings, GaLoreSettings)


HYPERPARAMETERS = tuple(
    name for name in Optimizer.model_fields if any(name in entry.fields for entry in OPTIMIZERS.values())
)  # the keys of which some optimizer has a default


def register_optimizer(
    name: str,
    scale: Callable[..., optax.GradientTransformation],
    settings: type = AdamWSettings,
    summary: str = "",
) -> None:
    """Adds an optimizer to this process, which `optimizer.name` can then select.

    Args:
        name: The value of `optimizer.name`.
        scale: `scale(settings, axes=...)` returns the transformation of gradients, without weight decay and learning
            rate. `axes`: the names of the dimensions of each weight.
        settings: A frozen dataclass of hyperparameters with their defaults.
        summary: One line, with the bytes of state per parameter.
    """
    unknown = sorted({field.name for field in dataclasses.fields(settings)} - {*HYPERPARAMETERS})
    if unknown:
        known = ", ".join(sorted(HYPERPARAMETERS))
        raise UserError(f"register_optimizer: {', '.join(unknown)} is not a hyperparameter; expected one of {known}")
    OPTIMIZERS[name] = Entry(settings, scale, summary)
