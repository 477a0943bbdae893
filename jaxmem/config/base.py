"""The base class of all sections of a config, and the types of their values."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from jaxmem.errors import as_yaml, one_of

Count = Annotated[int, Field(ge=1)]
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


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, allow_inf_nan=False)

    def replace(self, **values: Any) -> Self:
        """A copy with these values, which are not validated. A dict replaces fields of a nested section:
        `cfg.replace(memory={"remat": "full"})`."""
        nested = {name: getattr(self, name) for name, value in values.items() if isinstance(value, dict)}
        return self.model_copy(update=values | {name: one.replace(**values[name]) for name, one in nested.items()})


def setting(default: Any, description: str) -> Any:
    """A field of a section. `default`: `...` if it is required. `description`: for the schema and docs/config.md."""
    return Field(default, description=description)


NOUNS = {
    "boolean": "true or false", "integer": "a whole number", "number": "a number", "string": "text", "null": "null",
}  # fmt: skip
LIMITS = {"minimum": "of at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}


def allowed(schema: Mapping[str, Any]) -> str:
    """The values that a JSON schema allows, in words.

    >>> allowed({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 1}, {"type": "null"}]})
    'auto, a whole number of at least 1 or null'
    """
    return one_of(dict.fromkeys(_alternatives(schema)))


def _alternatives(schema: Mapping[str, Any]) -> Iterator[str]:
    match schema:
        case {"anyOf": parts}:
            for part in parts:
                yield from [part["description"]] if "description" in part else _alternatives(part)
        case {"enum": words}:
            yield from map(str, words)
        case {"const": word}:
            yield str(word)
        case {"type": "array", "prefixItems": items}:
            yield f"a list [{', '.join(map(allowed, items))}]"
        case {"type": "array", "items": item}:
            yield f"a {'non-empty ' if 'minItems' in schema else ''}list whose values are {allowed(item)}"
        case {"type": "object", "additionalProperties": dict() as value}:
            yield f"a mapping {{text: {allowed(value)}}}"
        case {"type": kind} if kind in NOUNS:
            limits = [f"{text} {as_yaml(schema[key])}" for key, text in LIMITS.items() if key in schema]
            if "minimum" in schema and "maximum" in schema:
                limits = [f"from {as_yaml(schema['minimum'])} to {as_yaml(schema['maximum'])}"]
            yield " ".join([NOUNS[kind], *" and ".join(limits).split()])
        case _:
            yield "a mapping of keys to values"
