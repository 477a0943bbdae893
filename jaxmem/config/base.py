"""The base class of all sections of a config, and the types of their values."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, ErrorDetails, PydanticKnownError, core_schema

from jaxmem.errors import one_of
from jaxmem.typing import JsonDict

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]  # arrays are indexed with int32
Total = Annotated[int, Field(ge=1, lt=2**63)]
Length = Annotated[int, Field(ge=1, le=2**26)]  # tokens of a row, ten times the longest that have been trained
Layers = Annotated[int, Field(ge=1, le=10_000)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0)]
NotNegative = Annotated[float, Field(ge=0.0)]
Item = TypeVar("Item")
ListOf = Annotated[tuple[Item, ...], Field(strict=False)]  # a list in YAML
Texts = ListOf[str]
StoredFormat = Literal[
    "float32", "bfloat16", "int8", "int6", "int5", "int4", "int3", "int2", "uint8", "uint6", "uint5", "uint4",
    "uint3", "uint2", "nf4", "fp4", "mxfp4", "fp8_e4m3", "fp8_e5m2", "dynamic8", "dynamic4",
]  # fmt: skip
RUNS = "runs"  # the default of `output`, the directory of all runs
Scaling = Literal["tensor", "row", "mxfp8"]  # the scales of matmuls in FP8


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # PyYAML may lack its parser in C, which is ten times as fast


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)

    def replace(self, **values: Any) -> Self:
        """A copy with these values, which are not validated. A dict replaces fields of a nested section:
        `cfg.replace(memory={"remat": "full"})`."""
        for name, value in values.items():
            if isinstance(value, dict):
                values[name] = getattr(self, name).replace(**value)
        return self.model_copy(update=values)


def setting(default: object, description: str) -> Any:
    """A field of a section. `default`: `...` if it is required. `description`: for the schema and docs/config.md."""
    return Field(default, description=description)


# Words of pydantic, and the words for users, who write YAML.
WORDS = (
    (r"Input should be (?:a valid )?", ""),
    (r"dictionary.*", "a mapping"),
    (r"integer.*|an integer", "a whole number"),
    (r"^number", "a number"),
    (r"finite number", "a finite number"),
    (r"(?:tuple|list)$", "a list"),
    (r"boolean", "true or false"),
    (r"string", "text"),
    (r"None", "null"),
    (r"greater than or equal to", "at least"),
    (r"less than or equal to", "at most"),
    (r"greater than", "above"),
    (r"less than", "below"),
    (r"\w+ should have", "have"),
)


@dataclass(frozen=True, eq=False)
class NameIn:
    """A field that is a name of this table, which is read with each config, so that a script can add entries."""

    table: Mapping[str, object]

    def __get_pydantic_core_schema__(self, _source: Any, _handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> JsonDict:
        return {"enum": list(self.table), "type": "string"}

    def _check(self, value: object) -> str:
        if str(value) not in self.table:
            raise PydanticKnownError("literal_error", {"expected": ", ".join(f"'{name}'" for name in self.table)})
        return str(value)


def must_be(errors: Iterable[ErrorDetails]) -> str:
    """What pydantic expected in place of a value: the alternatives, if several types were tried.

    >>> from pydantic import TypeAdapter, ValidationError
    >>> try: TypeAdapter(Literal["auto", "none"] | Count).validate_python(0, strict=True)
    ... except ValidationError as error: must_be(error.errors())
    'auto, none or at least 1'
    """
    choices: list[str] = []
    for error in errors:
        text = error["msg"]
        for pattern, words in WORDS:
            text = re.sub(pattern, words, text)
        choices += literals(error) or [text]
    return one_of(dict.fromkeys(choices))


def literals(error: ErrorDetails) -> list[str]:
    """The texts of which a value must be one; empty for other errors."""
    keys = {"literal_error": "expected", "union_tag_invalid": "expected_tags"}
    return re.findall(r"'([^']*)'", error["ctx"][keys[error["type"]]]) if error["type"] in keys else []


def read_table(name: str) -> Any:
    """A table of this package, from its YAML file."""
    text = files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, _LOADER)  # noqa: S506, a safe loader
