"""The optimizers: one line each, with the class of its hyperparameters, whose defaults are those of its paper.

Each line names the function in `jaxmem.optim` that makes its transformation, `module:function`; that module is imported
when the optimizer is used. Imports no jax.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from jaxmem.config.base import Count, Fraction, NotNegative, Positive, Section


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
    rank: int | None = None  # None: a quarter of each matrix's smaller side
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class GaLoreSettings(ApolloSettings):
    scale: float = 0.25
    residual: bool = False


@dataclass(frozen=True, kw_only=True)
class QGaLoreSettings(GaLoreSettings):
    similarity: float = 0.4


class Entry(NamedTuple):
    settings: type
    implementation: str  # module:function in jaxmem.optim
    summary: str  # state per parameter

    @property
    def fields(self) -> dict[str, Any]:
        """The hyperparameters and their defaults."""
        return {field.name: field.default for field in dataclasses.fields(self.settings)}


OPTIMIZERS = {
    "adamw": Entry(AdamWSettings, "plain:scale_by_adam", "Two moments in the weights' dtype: 8 bytes in float32."),
    "adam": Entry(AdamSettings, "plain:scale_by_adam", "AdamW without weight decay."),
    "sgd": Entry(SgdSettings, "plain:trace", "No state; with momentum one number in the weights' dtype."),
    "lion": Entry(
        LionSettings, "plain:scale_by_lion", "One moment; updates are signs: a third of Adam's rate or less."
    ),
    "adafactor": Entry(AdafactorSettings, "adafactor:scale_by_adafactor", "Row and column sums: next to nothing."),
    "adam_mini": Entry(AdamWSettings, "adam_mini:scale_by_adam_mini", "One second moment per neuron: 4 bytes."),
    "muon": Entry(MuonSettings, "muon:scale_by_muon", "Orthogonalized momentum for hidden matrices: 4 bytes."),
    "adamw8bit": Entry(AdamW8bitSettings, "quantized:scale_by_adam8bit", "AdamW in 8 bits: 2.03 bytes."),
    "adamw4bit": Entry(AdamWSettings, "quantized:scale_by_adam4bit", "AdamW in 4 bits: 1.06 bytes."),
    "lion8bit": Entry(LionSettings, "quantized:scale_by_lion8bit", "Lion in 8 bits: 1.02 bytes."),
    "momentum8bit": Entry(MomentumSettings, "quantized:trace8bit", "SGD with momentum in 8 bits: 1.02 bytes."),
    "galore_adamw": Entry(GaLoreSettings, "galore:scale_by_galore", "AdamW on low-rank projections of gradients."),
    "galore_adamw8bit": Entry(GaLoreSettings, "galore:scale_by_galore8bit", "GaLore with moments in 8 bits."),
    "qgalore": Entry(QGaLoreSettings, "galore:scale_by_qgalore", "GaLore with moments in 8 bits and bases in 4."),
    "apollo": Entry(ApolloSettings, "apollo:scale_by_apollo", "Gradients scaled by Adam on a random projection."),
    "apollo_mini": Entry(ApolloMiniSettings, "apollo:scale_by_apollo_mini", "APOLLO of rank 1: SGD's memory."),
}


class Optimizer(Section):
    """Hyperparameters that are None take the named optimizer's own default, or do not exist for it: `OPTIMIZERS`."""

    name: Literal[tuple(OPTIMIZERS)] = "adamw"  # type: ignore[valid-type]
    learning_rate: Positive = 3e-4
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: Annotated[int, Field(ge=0)] = 0  # updates
    min_lr_ratio: Fraction = 0.1  # the last learning rate, as a share of the peak
    clip: Positive | None = 1.0  # largest norm of the gradients
    trainable: Annotated[tuple[str, ...], Field(strict=False)] = ()  # patterns of trainable parameters; none: all
    clip_by: Literal["global", "previous", "weight"] = "global"  # norm of all gradients, of the last update's, of each
    kernel: Literal["none", "triton"] = "none"  # fused update on GPUs: the state of adamw8bit, weights in int8
    beta1: Fraction | None = None
    beta2: Fraction | None = None
    epsilon: Positive | None = None
    momentum: Fraction | None = None
    rank: Count | None = None  # of projections; by default a quarter of each matrix's smaller side
    refresh_every: Count | None = None  # updates between two bases
    scale: Positive | None = None  # of the projected update
    project_embeddings: bool | None = None  # embedding and output matrices too
    similarity: Fraction | None = None  # qgalore: share of the old basis in the new from which both count as the same
    residual: bool | None = None  # GaLore: add the gradient's part outside of the basis, scaled alike (Fira)
    weight_decay: NotNegative | None = None  # of matrices, not of norms and biases

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, fields: Any) -> Any:
        """With the named optimizer's own defaults."""
        if not isinstance(fields, dict):
            return fields
        entry = OPTIMIZERS.get(str(fields.get("name", cls.model_fields["name"].default)))
        own = {} if entry is None else entry.fields
        return {**own, **{field: value for field, value in fields.items() if value is not None or field not in own}}

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The fields that the named optimizer has."""
        return {field: getattr(self, field) for field in OPTIMIZERS[self.name].fields}

    @property
    def needs_whole_embedding(self) -> bool:
        """Whether an embedding cannot be updated in slices: GaLore decomposes its whole gradient."""
        return bool(self.project_embeddings) and issubclass(OPTIMIZERS[self.name].settings, GaLoreSettings)
