"""The tensors of a quantized matrix in the files of each tool, as the arrays of a QTensor.

A file has [out, in], and a QTensor [in, out], with blocks along `in`. Where the blocks of a file are not along `in` (in
bitsandbytes, if a row is not a multiple of a block; inputs reordered by act-order), the values are decoded.
"""

import json
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt8

from jaxmem.config.hf_quantized import HfScheme
from jaxmem.hf.tensors import DTYPES
from jaxmem.kernels.codes import FP4, NF4, dynamic_code
from jaxmem.quant import FORMATS, QTensor
from jaxmem.quant.packing import pack

Parts = dict[str, Any]  # the arrays of a matrix, by the end of their names
Expected = dict[str, tuple[tuple[int, ...], tuple[str, ...]]]  # shapes and dtypes, by the end of the names
FLOATS = tuple(DTYPES)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the position in an int32 of each of 8 consecutive codes
STATE = "weight.quant_state.bitsandbytes__"


def quantized_weight(codes: Any, scale: Any, offset: Any, form: str, block: int) -> QTensor:
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
    first: ClassVar = "weight"  # the end of the name of the codes
    optional: ClassVar[tuple[str, ...]] = ()

    @property
    def parts(self) -> Expected:
        """The tensors of a matrix."""
        size, group = self.rows * self.columns, self.scheme.scale_group
        blocks = -(-size // self.block)
        found: Expected = {"weight": ((-(-size // 2), 1), ("U8",))}
        if group is None:
            return found | {"weight.absmax": ((blocks,), ("F32",))}
        return found | {
            "weight.absmax": ((blocks,), ("U8",)),
            "weight.nested_absmax": ((-(-blocks // group),), ("F32",)),
        }

    def prepare(self, parts: Parts, more: Parts) -> None:
        """Checks the tables of values, and adds the mean of the scales, which a file has in JSON."""
        name, scheme = f"{STATE}{self.scheme.listed}", self.scheme
        try:
            state = json.loads(bytes(more[name]))
            sizes, mean = (state["blocksize"], state.get("nested_blocksize")), state.get("nested_offset", 0.0)
            parts["mean"] = np.full((1, 1), mean, np.float32)
        except (KeyError, TypeError, ValueError, RecursionError):
            raise ValueError(f"{name} is missing or damaged") from None
        if sizes != (self.block, scheme.scale_group):
            expected = self.block, scheme.scale_group
            raise ValueError(f"blocks and groups of scales have sizes {sizes}, but quantization_config {expected}")
        tables = {
            "quant_map": {"nf4": NF4, "fp4": FP4}[scheme.format],
            "nested_quant_map": dynamic_code(8, signed=True),
        }
        for end, values in tables.items():
            found = more.get(f"weight.{end}", np.asarray(values))
            if not (found.shape == (len(values),) and np.allclose(found, values, atol=1e-7)):
                raise ValueError(f"{end} has other values than {scheme.format} of bitsandbytes")

    def weight(self, parts: Parts) -> Any:
        """The weight [in, out]."""
        block, form, group = self.block, self.scheme.format, self.scheme.scale_group
        codes, scale = parts["weight"].reshape(-1), parts["weight.absmax"]
        if self.columns % block:  # blocks continue in the next row
            if group is not None:
                mean, size = parts["mean"].reshape(1), scale.size
                scale = QTensor(scale, parts["weight.nested_absmax"], mean, "dynamic8", -1, group, size, "float32")
            flat = QTensor(codes, scale, None, form, -1, block, self.rows * self.columns, "float32")
            return flat.dequantize().reshape(self.rows, self.columns).T
        own = self.columns // block  # blocks of a row
        scale = scale.reshape(self.rows, own).T
        if group is not None:
            # Groups of a file may continue in the next row; the largest groups that do not are parts of them.
            part = math.gcd(own, group)
            first = np.arange(self.rows)[:, None] * own + np.arange(0, own, part)
            of_groups = parts["weight.nested_absmax"][first // group].T
            scale = QTensor(scale, of_groups, parts["mean"], "dynamic8", -2, part, own, "float32")
        return quantized_weight(codes.reshape(self.rows, -1).T, scale, None, form, block)


class Bitsandbytes8(Bitsandbytes4):
    """LLM.int8: codes of 8 bits, and the absmax of each row."""

    @property
    def parts(self) -> Expected:
        return {"weight": ((self.rows, self.columns), ("I8",)), "SCB": ((self.rows,), ("F32",))}

    def prepare(self, parts: Parts, more: Parts) -> None:
        del parts
        if more.get("weight_format", np.zeros(1)).any():
            raise ValueError("weight_format is not 0 (rows); save the model again with a recent bitsandbytes")

    def weight(self, parts: Parts) -> Any:
        return quantized_weight(parts["weight"].T, parts["SCB"][None], None, "int8", self.columns)


@dataclass(frozen=True)
class Evenly:
    """Evenly spaced values, (code - zero point) * scale, in 4 or 8 bits; the base of the other layouts."""

    scheme: HfScheme
    rows: int
    columns: int
    block: int
    first: ClassVar[str]
    optional: ClassVar[tuple[str, ...]] = ()
    order: ClassVar[tuple[int, ...]] = tuple(range(8))  # the position in an int32 of each of the consecutive codes

    @property
    def words(self) -> int:
        """Codes in an int32."""
        return 32 // self.scheme.bits

    @property
    def groups(self) -> int:
        return -(-self.columns // self.block)

    def prepare(self, parts: Parts, more: Parts) -> None:
        """Checks the order of the inputs, and removes it if it is the usual one."""
        del more
        order = parts.pop("g_idx", parts.pop("weight_g_idx", None))
        if order is None and self.scheme.is_reordered:
            raise ValueError("g_idx is missing, which act-order requires")
        if order is None or np.array_equal(order, np.arange(self.columns) // self.block):
            return
        if order.min() < 0 or order.max() >= self.groups:
            raise ValueError("g_idx contains a group that does not exist")
        if not self.scheme.is_reordered:
            raise ValueError("g_idx is not in order, but quantization_config has no act-order")
        parts["order"] = order.astype(np.int32)

    def unpack(self, words: Int32[Array, "a b"], axis: int) -> UInt8[Array, "..."]:
        """The codes in words of 32 bits along `axis`."""
        bits = self.scheme.bits
        shifts = jnp.asarray(self.order[: self.words], jnp.uint32) * bits
        wide = jnp.expand_dims(jax.lax.bitcast_convert_type(words, jnp.uint32), axis + 1)
        codes = wide >> (shifts[:, None] if axis == 0 else shifts) & jnp.uint32(2**bits - 1)
        shape = [size * (self.words if dim == axis else 1) for dim, size in enumerate(words.shape)]
        return codes.astype(jnp.uint8).reshape(shape)

    def combine(self, parts: Parts, codes: Array, scales: Array, zeros: Array | None) -> Any:
        """The weight [in, out] of codes [in, out], scales and zero points [groups, out]; without zero points, the zero
        is the middle of the codes."""
        bits, form, scales = self.scheme.bits, self.scheme.format, scales.astype(jnp.float32)
        block = min(self.block, self.columns)
        if (order := parts.get("order")) is not None:
            middle = 1 << bits - 1 if zeros is None else zeros[order]
            return (codes.astype(jnp.int32) - middle).astype(jnp.float32) * scales[order]
        if zeros is not None:
            offset = -zeros.astype(jnp.float32) * scales
            return quantized_weight(pack(codes, bits, -2), scales * (2**bits - 1), offset, form, block)
        if bits == 8:
            return quantized_weight(_shifted(codes, jnp.int8), scales * 127, None, form, block)
        # int4 has its zero at code 7 of 15, and files at code 8: codes in descending order, with negative scales.
        return quantized_weight(pack(15 - codes, bits, -2), scales * -7, None, form, block)


class Gptq(Evenly):
    """GPTQ: int32 words along `in`, zero points along `out`, less one in the first version of the format."""

    first = "qweight"
    optional = ("g_idx",)

    @property
    def parts(self) -> Expected:
        return {
            "qweight": ((self.columns // self.words, self.rows), ("I32",)),
            "qzeros": ((self.groups, self.rows // self.words), ("I32",)),
            "scales": ((self.groups, self.rows), FLOATS),
            "g_idx": ((self.columns,), ("I32",)),
        }

    def prepare(self, parts: Parts, more: Parts) -> None:
        super().prepare(parts, more)
        bits = self.scheme.bits
        if self.scheme.is_symmetric:
            zeros = np.unpackbits(parts.pop("qzeros").view(np.uint8), bitorder="little").reshape(-1, bits)
            if (zeros @ (1 << np.arange(bits)) + self.scheme.zero_offset != 1 << bits - 1).any():
                raise ValueError("zero points are not symmetric, but quantization_config has sym=true")

    def weight(self, parts: Parts) -> Any:
        zeros = None
        if not self.scheme.is_symmetric:
            zeros = self.unpack(parts["qzeros"], 1).astype(jnp.int32) + self.scheme.zero_offset
        return self.combine(parts, self.unpack(parts["qweight"], 0), parts["scales"], zeros)


class Awq(Evenly):
    """AWQ (gemm): int32 words along `out`, their codes interleaved."""

    first = "qweight"
    order = AWQ_ORDER

    @property
    def parts(self) -> Expected:
        return {
            "qweight": ((self.columns, self.rows // self.words), ("I32",)),
            "qzeros": ((self.groups, self.rows // self.words), ("I32",)),
            "scales": ((self.groups, self.rows), FLOATS),
        }

    def weight(self, parts: Parts) -> Any:
        zeros = self.unpack(parts["qzeros"], 1).astype(jnp.int32)
        return self.combine(parts, self.unpack(parts["qweight"], 1), parts["scales"], zeros)


class IntQuantized(Evenly):
    """compressed-tensors, int-quantized: codes of 8 bits with a sign."""

    first = "weight"
    optional = ("weight_g_idx",)

    @property
    def parts(self) -> Expected:
        found: Expected = {
            self.first: ((self.rows, self.columns), ("I8",)),
            "weight_scale": ((self.rows, self.groups), FLOATS),
            "weight_g_idx": ((self.columns,), ("I32", "I64")),
        }
        return found if self.scheme.is_symmetric else found | {"weight_zero_point": ((self.rows, self.groups), ("I8",))}

    def codes(self, x: Array, axis: int) -> UInt8[Array, "..."]:
        """Codes from 0."""
        del axis
        return _shifted(x, jnp.uint8)

    def weight(self, parts: Parts) -> Any:
        zeros = None
        if not self.scheme.is_symmetric:
            zeros = self.codes(parts["weight_zero_point"], 0)[: self.rows].T.astype(jnp.int32)
        codes = self.codes(parts[self.first], 1)[:, : self.columns].T
        return self.combine(parts, codes, parts["weight_scale"].T, zeros)


class PackQuantized(IntQuantized):
    """compressed-tensors, pack-quantized: int32 words along `in`, and along `out` for zero points."""

    first = "weight_packed"

    @property
    def parts(self) -> Expected:
        found = super().parts | {self.first: ((self.rows, -(-self.columns // self.words)), ("I32",))}
        if not self.scheme.is_symmetric:
            found["weight_zero_point"] = ((-(-self.rows // self.words), self.groups), ("I32",))
        return found

    def codes(self, x: Array, axis: int) -> UInt8[Array, "..."]:
        return self.unpack(x, axis)


def _shifted(codes: Array, dtype: Any) -> Array:
    """Codes from -128 to 127 as codes from 0 to 255, and back."""
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(codes, jnp.uint8) ^ jnp.uint8(128), dtype)


LAYOUTS: dict[str, Any] = {
    "bitsandbytes 4": Bitsandbytes4,
    "bitsandbytes 8": Bitsandbytes8,
    "gptq": Gptq,
    "awq": Awq,
    "int-quantized": IntQuantized,
    "pack-quantized": PackQuantized,
}
