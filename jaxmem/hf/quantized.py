"""Matrices that another tool quantized. Their values are decoded only if a QTensor cannot store them as they are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jaxtyping import Array, Float, UInt8

from jaxmem.config.hf_quantized import HfScheme
from jaxmem.errors import UserError
from jaxmem.hf.quantized_layouts import LAYOUTS, QUANT_STATE, Parts, quantized_weight
from jaxmem.hf.tensors import DTYPES, TensorEntry, Tensors
from jaxmem.quant import QTensor

# Tensors that repeat what the config and the other tensors say.
REDUNDANT = (
    "weight_format", "weight_shape", "weight.quant_map", "weight.nested_quant_map",
    f"{QUANT_STATE}nf4", f"{QUANT_STATE}fp4",
)  # fmt: skip
REMEDY = "use the weights and config.json of the same model"


@jax.jit
def mxfp4_weight(blocks: UInt8[Array, "*stack out blocks 16"], scales: UInt8[Array, "*stack out blocks"]) -> QTensor:
    """The weight [*stack, in, out] of the MXFP4 tensors NAME_blocks and NAME_scales of a file, in the format `mxfp4`.

    A file has 32 E2M1 values along `in` in 16 bytes, the first value of a byte in the low bits, and an E8M0 scale for
    them. In a QTensor the first value of a byte is in the high bits, and the dimension before the last is `in`.
    """
    codes = (blocks << 4 | blocks >> 4).reshape(*blocks.shape[:-2], -1).mT
    return quantized_weight(codes, scales.mT, None, "mxfp4", 32)


@jax.jit
def mxfp4_tensors(q: QTensor) -> tuple[UInt8[Array, "*stack out blocks 16"], UInt8[Array, "*stack out blocks"]]:
    """The tensors NAME_blocks and NAME_scales for a weight in the format `mxfp4`: the inverse of `mxfp4_weight`."""
    codes = (q.codes << 4 | q.codes >> 4).mT
    return codes.reshape(*codes.shape[:-1], -1, 16), q.scale.mT


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Encoded:
    """The arrays of a quantized matrix as a file stores them."""

    parts: Parts
    layout: Any = field(metadata={"static": True})  # one of LAYOUTS

    def weight(self) -> QTensor | Float[Array, "in out"]:
        """The weight [in, out], decoded only if its blocks are not along `in`."""
        weight: QTensor | jax.Array = self.layout.weight(self.parts)
        return weight


def take_quantized(
    tensors: Tensors, scheme: HfScheme, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Callable[[], Encoded]]:
    """Removes the tensors of quantized matrices from `tensors`. Returns, by the name of the weight, functions that read
    them into host memory. `shapes`: the shape of each weight's tensor, by name."""
    readers: dict[str, Callable[[], Encoded]] = {}
    if scheme.method not in LAYOUTS:
        return readers
    for name, shape in shapes.items():
        module = name.removesuffix("weight")
        weight = tensors.entries.get(name)
        is_plain = weight is not None and weight.dtype in DTYPES
        if len(shape) != 2 or is_plain:
            continue
        layout = LAYOUTS[scheme.method](scheme, *shape, scheme.block_size or shape[1])
        if module + layout.first not in tensors.entries:
            continue
        parts = {}
        for end, expected in layout.parts.items():
            part = tensors.entries.pop(module + end, None)
            if part is None and end not in layout.optional:
                raise UserError(f"{tensors.directory}: tensor {module}{end} is missing; {REMEDY}")
            if part is not None:
                parts[end] = part
                _check_part(part, *expected)
        redundant = {end: part for end in REDUNDANT if (part := tensors.entries.pop(module + end, None)) is not None}
        readers[name] = _reader(tensors, layout, parts, redundant)
    return readers


def _check_part(part: TensorEntry, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if part.shape != shape or part.dtype not in dtypes:
        given = f"{part.dtype} {list(part.shape)}"
        expected = f"{' or '.join(dtypes)} {list(shape)}"
        raise UserError(f"{part.file}: {part.name} is {given}, but config.json requires {expected}; {REMEDY}")


def _reader(
    tensors: Tensors, layout: Any, parts: Mapping[str, TensorEntry], redundant: Mapping[str, TensorEntry]
) -> Callable[[], Encoded]:
    def read() -> Encoded:
        arrays = {end: tensors.read_entry(entry) for end, entry in parts.items()}
        try:
            layout.prepare(arrays, {end: tensors.read_entry(entry) for end, entry in redundant.items()})
        except ValueError as error:
            entry = parts[layout.first]
            raise UserError(f"{entry.file}: {entry.name}: {error}; {REMEDY}") from None
        return Encoded(arrays, layout)

    return read
