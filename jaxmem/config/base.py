"""The base class of all sections of a config, and the types of their values."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]
Texts = Annotated[tuple[str, ...], Field(strict=False)]
StoredFormat = Literal[
    "float32", "bfloat16", "int8", "int6", "int5", "int4", "int3", "int2", "uint8", "uint6", "uint5", "uint4",
    "uint3", "uint2", "nf4", "fp4", "fp8_e4m3", "fp8_e5m2", "dynamic8", "dynamic4",
]  # fmt: skip


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)


def setting(default: Any, description: str) -> Any:
    """A field of a section. `default`: `...` if it is required. `description`: for the schema and docs/config.md."""
    return Field(default, description=description)
