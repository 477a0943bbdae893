"""Matrices that another tool quantized, in the layouts of each tool. Their values are decoded only if a QTensor cannot
store them as they are.

A file has [out, in], and a QTensor [in, out], with blocks along `in`. Where the blocks of a file are not along `in` (in
bitsandbytes, if a row is not a multiple of a block; inputs reordered by act-order), the values are decoded.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from jaxmem.config.hf_quantized import HfScheme
from jaxmem.errors import UserError
from jaxmem.hf.tensors import DTYPES, TensorEntry, Tensors
from jaxmem.kernels.codes import FP4, NF4, dynamic_code
from jaxmem.quant import FORMATS, QTensor
from jaxmem.quant.formats import pack
from jaxmem.typing import Tree

Parts = dict[str, Any]  # the arrays of a matrix, by the end of their names
Expected = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]  # shapes and dtypes, by the end of the names
FLOATS = tuple(DTYPES)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the position in an int32 of each of 8 consecutive codes
QUANT_STATE = "weight.quant_state.bitsandbytes__"
# Tensors that repeat what the config and the other tensors say.
REDUNDANT = (
    "weight_format", "weight_shape", "weight.quant_map", "weight.nested_quant_map",
    f"{QUANT_STATE}nf4", f"{QUANT_STATE}fp4",
)  # fmt: skip
REMEDY = "use the weights and config.json of the same model"


def quantized_weight(codes: Tree, scale: Tree, offset: Tree, form: str, block: int) -> QTensor:
    """A weight [*stack, in, out] of these arrays, its blocks along `in`."""
    return QTensor(codes, scale, offset, form, -2, block, codes.shape[-2] * 8 // FORMATS[form].bits, "bfloat16")


@dataclass(frozen=True)
class Bitsandbytes4:
    """nf4 or fp4: codes and absmax of the matrix as one row. With double quantization the absmax have 8 bits, a scale
    for each group of them, and a mean."""

    scheme: HfScheme
    rows: int
    columns: int
    block: int  # inputs that share a scale
    optional: ClassVar = ""  # the tensor that a file may lack

    @property
    def parts(self) -> Expected:
        """The tensors of a matrix, the codes first."""
        size = self.rows * self.columns
        group = self.scheme.scale_group
        blocks = -(-size // self.block)
        expected: Expected = {"weight": ((-(-size // 2), 1), ("U8",))}
        if group is None:
            return expected | {"weight.absmax": ((blocks,), ("F32",))}
        return expected | {
            "weight.absmax": ((blocks,), ("U8",)),
            "weight.nested_absmax": ((-(-blocks // group),), ("F32",)),
        }

    def prepare(self, parts: Parts, redundant: Parts) -> None:
        """Checks the tables of values, and adds the mean of the scales, which a file has in JSON."""
        name = f"{QUANT_STATE}{self.scheme.listed}"
        try:
            state = json.loads(bytes(redundant[name]))
            sizes = (state["blocksize"], state.get("nested_blocksize"))
            mean = state.get("nested_offset", 0.0)
            parts["mean"] = np.full((1, 1), mean, np.float32)
        except (KeyError, TypeError, ValueError, RecursionError):
            raise ValueError(f"{name} is missing or damaged") from None
        expected = self.block, self.scheme.scale_group
        if sizes != expected:
            raise ValueError(f"blocks and groups of scales have sizes {sizes}, but quantization_config {expected}")
        tables = {
            "quant_map": {"nf4": NF4, "fp4": FP4}[self.scheme.format],
            "nested_quant_map": dynamic_code(8, signed=True),
        }
        for end, values in tables.items():
            saved = redundant.get(f"weight.{end}", np.asarray(values))
            if not (saved.shape == (len(values),) and np.allclose(saved, values, atol=1e-7)):
                raise ValueError(f"{end} has other values than {self.scheme.format} of bitsandbytes")

    def weight(self, parts: Parts) -> Tree:
        """The weight [in, out]."""
        block = self.block
        form = self.scheme.format
        group = self.scheme.scale_group
        codes = parts["weight"].reshape(-1)
        scale = parts["weight.absmax"]
        if self.columns % block:  # blocks continue in the next row
            if group is not None:
                mean = parts["mean"].reshape(1)
                size = scale.size
                scale = QTensor(scale, parts["weight.nested_absmax"], mean, "dynamic8", -1, group, size, "float32")
            flat = QTensor(codes, scale, None, form, -1, block, self.rows * self.columns, "float32")
            return flat.dequantize().reshape(self.rows, self.columns).T
        row_blocks = self.columns // block  # blocks of a row
        scale = scale.reshape(self.rows, row_blocks).T
        if group is not None:
            # Groups of a file may continue in the next row. They are divided into the largest equal parts that do not.
            part = math.gcd(row_blocks, group)
            first = np.arange(self.rows)[:, None] * row_blocks + np.arange(0, row_blocks, part)
            of_groups = parts["weight.nested_absmax"][first // group].T
            scale = QTensor(scale, of_groups, parts["mean"], "dynamic8", -2, part, row_blocks, "float32")
        return quantized_weight(codes.reshape(self.rows, -1).T, scale, None, form, block)


class Bitsandbytes8(Bitsandbytes4):
    """LLM.int8: codes of 8 bits, and the absmax of each row."""

    @property
    def parts(self) -> Expected:
        return {"weight": ((self.rows, self.columns), ("I8",)), "SCB": ((self.rows,), ("F32",))}

    def prepare(self, parts: Parts, redundant: Parts) -> None:
        del parts
        if redundant.get("weight_format", np.zeros(1)).any():
            raise ValueError("weight_format is not 0 (rows); save the model again with a recent bitsandbytes")

    def weight(self, parts: Parts) -> Tree:
        return quantized_weight(parts["weight"].T, parts["SCB"][None], None, "int8", self.columns)


class SpacedTensors(NamedTuple):
    """The names and the form of the tensors of evenly spaced codes."""

    codes: str
    scales: str
    zeros: str  # the zero point of each block
    order: str  # the block of each input; empty: always in order
    packed: int | None  # the dimension of [in, out] along which int32 words have several codes; None: one code in int8
    is_transposed: bool  # whether tensors are [out, in]
    positions: tuple[int, ...] = tuple(range(8))  # positions of consecutive codes in a word


SPACED = {
    "gptq": SpacedTensors("qweight", "scales", "qzeros", "g_idx", 0, is_transposed=False),
    "awq": SpacedTensors("qweight", "scales", "qzeros", "", 1, is_transposed=False, positions=AWQ_ORDER),
    "pack-quantized": SpacedTensors(
        "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", 0, is_transposed=True
    ),
    "int-quantized": SpacedTensors(
        "weight", "weight_scale", "weight_zero_point", "weight_g_idx", None, is_transposed=True
    ),
}


@dataclass(frozen=True)
class EvenlySpaced:
    """GPTQ, AWQ (gemm) and compressed-tensors: (code - zero point) * scale, in 4 or 8 bits."""

    scheme: HfScheme
    rows: int
    columns: int
    block: int

    @property
    def tensors(self) -> SpacedTensors:
        return SPACED[self.scheme.method]

    @property
    def optional(self) -> str:
        return self.tensors.order

    @property
    def words(self) -> int:
        """Codes in an int32."""
        return 32 // self.scheme.bits

    @property
    def zero_offset(self) -> np.int32:
        """What is added to a word of zero points: `zero_offset` of the scheme at each of its codes, with carries."""
        ones = sum(1 << self.scheme.bits * n for n in range(self.words))
        return np.int32(self.scheme.zero_offset * ones)

    @property
    def groups(self) -> int:
        return -(-self.columns // self.block)

    @property
    def parts(self) -> Expected:
        """The tensors of a matrix, the codes first."""
        names = self.tensors
        dtypes = ("I8",) if self.tensors.packed is None else ("I32",)

        def shape(inputs: int, packed: int | None) -> tuple[int, ...]:
            sizes = [-(-size // self.words) if dim == packed else size for dim, size in enumerate((inputs, self.rows))]
            return tuple(sizes[::-1] if names.is_transposed else sizes)

        expected: Expected = {names.codes: (shape(self.columns, names.packed), dtypes)}
        expected[names.scales] = shape(self.groups, None), FLOATS
        if names.order:
            expected[names.order] = (self.columns,), ("I32", "I64")
        if not self.scheme.is_symmetric or self.scheme.method == "gptq":
            expected[names.zeros] = shape(self.groups, None if names.packed is None else 1), dtypes
        return expected

    def prepare(self, parts: Parts, redundant: Parts) -> None:
        """Checks the order of the inputs and symmetric zero points, and removes them if they are the usual ones."""
        del redundant
        bits = self.scheme.bits
        order = parts.pop(self.tensors.order, None)
        if self.scheme.is_symmetric and (packed := parts.pop(self.tensors.zeros, None)) is not None:
            middle = sum(1 << bits * n + bits - 1 for n in range(self.words))
            if ((packed + self.zero_offset).view(np.uint32) != middle).any():
                raise ValueError("zero points are not symmetric, but quantization_config has sym=true")
        if order is None and self.scheme.is_reordered:
            raise ValueError("g_idx is missing, which act-order requires")
        if order is None or np.array_equal(order, np.arange(self.columns) // self.block):
            return
        if order.min() < 0 or order.max() >= self.groups:
            raise ValueError("g_idx contains a group that does not exist")
        if not self.scheme.is_reordered:
            raise ValueError("g_idx is not in order, but quantization_config has no act-order")
        parts["order"] = order.astype(np.int32)

    def codes(self, x: Array, size: int, packed: int | None) -> UInt8[Array, "a b"]:
        """Codes from 0, as [in, out]. `size`: of the dimension along which they are packed."""
        x = x.T if self.tensors.is_transposed else x
        if packed is None:
            return _shifted(x, jnp.uint8)
        shifts = jnp.asarray(self.tensors.positions[: self.words], jnp.uint32) * self.scheme.bits
        wide = jnp.expand_dims(jax.lax.bitcast_convert_type(x, jnp.uint32), packed + 1)
        codes = wide >> (shifts[:, None] if packed == 0 else shifts) & jnp.uint32(2**self.scheme.bits - 1)
        shape = [count * (self.words if dim == packed else 1) for dim, count in enumerate(x.shape)]
        return jax.lax.slice_in_dim(codes.astype(jnp.uint8).reshape(shape), 0, size, axis=packed)

    def weight(self, parts: Parts) -> Tree:
        """The weight [in, out]."""
        names = self.tensors
        bits = self.scheme.bits
        form = self.scheme.format
        zeros = None
        codes = self.codes(parts[names.codes], (self.columns, self.rows)[names.packed or 0], names.packed)
        scales = (parts[names.scales].T if names.is_transposed else parts[names.scales]).astype(jnp.float32)
        if names.zeros in parts:
            packed = parts[names.zeros] + self.zero_offset if self.scheme.zero_offset else parts[names.zeros]
            zeros = self.codes(packed, self.rows, None if names.packed is None else 1).astype(jnp.int32)
        if (order := parts.get("order")) is not None:
            middle = 1 << bits - 1 if zeros is None else zeros[order]
            return (codes.astype(jnp.int32) - middle).astype(jnp.float32) * scales[order]
        block = min(self.block, self.columns)
        if zeros is not None:
            offset = -zeros.astype(jnp.float32) * scales
            return quantized_weight(pack(codes, bits, -2), scales * (2**bits - 1), offset, form, block)
        if bits == 8:
            return quantized_weight(_shifted(codes, jnp.int8), scales * 127, None, form, block)
        # int4 has its zero at code 7 of 15, and files at code 8: codes in descending order, with negative scales.
        return quantized_weight(pack(15 - codes, bits, -2), scales * -7, None, form, block)


def _shifted(codes: Array, dtype: DTypeLike) -> Array:
    """Codes from -128 to 127 as codes from 0 to 255, and back."""
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(codes, jnp.uint8) ^ jnp.uint8(128), dtype)


Layout: TypeAlias = Bitsandbytes4 | EvenlySpaced
LAYOUTS: dict[str, type[Layout]] = {
    "bitsandbytes 4": Bitsandbytes4,
    "bitsandbytes 8": Bitsandbytes8,
    **dict.fromkeys(SPACED, EvenlySpaced),
}


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
    layout: Layout = field(metadata={"static": True})

    def weight(self) -> QTensor | Float[Array, "in out"]:
        """The weight [in, out], decoded only if its blocks are not along `in`."""
        return self.layout.weight(self.parts)


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
        all_parts = layout.parts
        if module + next(iter(all_parts)) not in tensors.entries:
            continue
        parts = {}
        for end, expected in all_parts.items():
            part = tensors.entries.pop(module + end, None)
            if part is None and end != layout.optional:
                raise UserError(f"{tensors.directory}: tensor {module}{end} is missing; {REMEDY}")
            if part is not None:
                parts[end] = part
                _check_part(part, *expected)
        redundant = {end: part for end in REDUNDANT if (part := tensors.entries.pop(module + end, None)) is not None}
        readers[name] = partial(_read, tensors, layout, parts, redundant)
    return readers


def _check_part(part: TensorEntry, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if part.shape != shape or part.dtype not in dtypes:
        given = f"{part.dtype} {list(part.shape)}"
        expected = f"{' or '.join(dtypes)} {list(shape)}"
        raise UserError(f"{part.file}: {part.name} is {given}, but config.json requires {expected}; {REMEDY}")


def _read(
    tensors: Tensors, layout: Layout, parts: Mapping[str, TensorEntry], redundant: Mapping[str, TensorEntry]
) -> Encoded:
    arrays = {end: tensors.read_entry(entry) for end, entry in parts.items()}
    try:
        layout.prepare(arrays, {end: tensors.read_entry(entry) for end, entry in redundant.items()})
    except ValueError as error:
        codes = next(iter(parts.values()))
        raise UserError(f"{codes.file}: {codes.name}: {error}; {REMEDY}") from None
    return Encoded(arrays, layout)
