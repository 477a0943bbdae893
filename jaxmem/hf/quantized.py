"""Weights that another tool quantized, as the arrays of a QTensor; their values are not decoded."""

import jax
from jaxtyping import Array, UInt8

from jaxmem.quant import QTensor


@jax.jit
def mxfp4_weight(blocks: UInt8[Array, "*stack out blocks 16"], scales: UInt8[Array, "*stack out blocks"]) -> QTensor:
    """The weight [*stack, in, out] of the MXFP4 tensors NAME_blocks and NAME_scales of a file, in the format `mxfp4`.

    A file has 32 E2M1 values along `in` in 16 bytes, the first value of a byte in the low bits, and an E8M0 scale for
    them. In a QTensor the first value of a byte is in the high bits, and the dimension before the last is `in`.
    """
    codes = (blocks << 4 | blocks >> 4).reshape(*blocks.shape[:-2], -1).mT
    return QTensor(codes, scales.mT, None, "mxfp4", -2, 32, 2 * codes.shape[-2], "bfloat16")
