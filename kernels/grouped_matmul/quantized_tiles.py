"""Tiles of quantized matrices for the Triton kernels, which dequantize codes in registers.

In the forward pass a program reads, at each step, a tile of x and a tile of codes. The two codes of a byte are
neighbours along the sum: the first codes of the bytes are multiplied with the even columns of x and the second codes
with the odd columns, in two matmuls that move no values. For this, x is copied with its even columns first. In the
backward pass the sum is along the outputs, and even and odd columns are separate results.
"""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxmem.kernels.codes import KernelFormat
from jaxmem.kernels.triton_launch import block_size


class TileSizes(NamedTuple):
    """Tile sizes of a program: powers of two, at least 16 for the tensor cores."""

    tokens: int
    rows: int  # rows of codes
    outputs: int
    warps: int
    stages: int


MIN_TILE = 16
FORWARD = TileSizes(64, 32, 128, 8, 3)
BACKWARD = TileSizes(64, 32, 64, 8, 3)


class QuantizedScales(NamedTuple):
    """Quantized block scales (double quantization): block scale = value(code) * scale + mean, with the value of a
    signed 8-bit dynamic code."""

    codes: UInt8[Array, "experts blocks outputs"]
    scale: Float[Array, "experts groups outputs"]  # one per group of blocks
    mean: Float[Array, "experts 1 1"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedMatrices:
    """Frozen quantized matrices w = value(codes) * scale of all groups, e.g. experts."""

    codes: Any  # an array [experts, inputs / codes per byte, outputs]
    scale: Any  # an array, float32 or uint8 (E8M0), [experts, blocks, outputs], or QuantizedScales
    form: KernelFormat = field(metadata={"static": True})
    block: int = field(metadata={"static": True})  # inputs that share a scale
    inputs: int = field(metadata={"static": True})
    outputs: int = field(metadata={"static": True})

    @property
    def unit(self) -> int:
        """Rows of codes that share a scale."""
        return self.block // self.form.together

    def arrays(self) -> tuple[list[jax.Array], dict[str, Any]]:
        """The arrays that a program reads, and the properties of `GroupedTiling` that they determine."""
        double = isinstance(self.scale, QuantizedScales)
        unused = jnp.zeros((1, 1), jnp.float32)  # passed for pointers that the program does not read
        scales, groups, mean = self.scale if double else (self.scale, unused, unused)
        properties = {
            "outputs": self.outputs,
            "code_rows": self.codes.shape[-2],
            "blocks": scales.shape[-2],
            "blocks_of_group": -(-scales.shape[-2] // groups.shape[-2]),
            "unit": self.unit,
            "together": self.form.together,
            "steps": self.form.steps,
            "listed": self.form.listed is not None,
            "double": double,
        }
        listed = unused if self.form.listed is None else jnp.asarray(self.form.listed, jnp.float32)
        return [self.codes, scales, groups, mean, listed], properties

    def tile_sizes(self, most: TileSizes) -> TileSizes:
        """Sizes up to `most`. A tile of codes is inside one block, or has a power of two of blocks, unless this leaves
        too few rows for the tensor cores."""
        together = self.form.together
        rows = block_size(most.rows, -(-self.inputs // together))
        if self.unit >= rows or self.unit & (self.unit - 1):
            even = math.gcd(rows, self.unit)
            rows = even if even >= MIN_TILE else rows
        for value, size in (("block_size is", self.block), ("the number of inputs is", self.inputs)):
            if size % together:
                raise ValueError(f"grouped_matmul: {value} {size}; the triton implementation needs an even number")
        return most._replace(rows=rows, outputs=block_size(most.outputs, self.outputs))
