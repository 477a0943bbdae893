"""The values of the codes of quantized weights. The values of a block are scaled to [-1, 1] (E2M1: to [-6, 6])."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# The 16 quantiles of a normal distribution: Dettmers et al., arXiv:2305.14314, appendix E, in float32.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4 = (0.0, 0.0052083333, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25)  # three lower bits; the highest is the sign
FP4 = (*_FP4, *(-value for value in _FP4))
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_E2M1, *(-value for value in _E2M1))  # 1 sign, 2 exponent, 1 mantissa bit (OCP Microscaling Formats 1.0)


def absmax(
    x: Float[Array, "*shape"], over: int | tuple[int, ...], *, keepdims: bool = False
) -> Float[Array, "*reduced"]:
    """The largest absolute value of float32 values, 0 of none, and NaN if any is NaN. They are compared as integers,
    where NaN is above all numbers: XLA's maximum of floats ignores NaN on a CPU."""
    bits = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    return jax.lax.bitcast_convert_type(jnp.max(bits, axis=over, keepdims=keepdims, initial=0), jnp.float32)


@dataclass(frozen=True)
class KernelFormat:
    """How a kernel decodes the values of a block."""

    bits: int
    listed: tuple[float, ...] | None = None  # the value of each code; None: evenly spaced

    @property
    def together(self) -> int:
        """Codes per byte: neighbours along `inputs`, the first in the high bits."""
        return 8 // self.bits

    @property
    def steps(self) -> int:
        """Steps from 0 to 1 of evenly spaced values."""
        return 2 ** (self.bits - 1) - 1


KERNEL_FORMATS = {
    "nf4": KernelFormat(4, NF4),
    "fp4": KernelFormat(4, FP4),
    "mxfp4": KernelFormat(4, E2M1),
    "int4": KernelFormat(4),
    "int8": KernelFormat(8),
}  # the formats that kernels dequantize


def dynamic_code(bits: int, *, signed: bool) -> tuple[float, ...]:
    """Dynamic codes (Dettmers et al., arXiv:2110.02861): each decade from 10^-(bits - 2) to 1 is divided evenly, into
    twice as many codes as the decade before.

    >>> [round(value, 4) for value in dynamic_code(3, signed=False)]
    [0.0, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875, 1.0]
    """
    values = [np.float32(0), np.float32(1)]
    for decade in range(bits - 1):
        parts = 2 ** (decade + (0 if signed else 1))
        # Interpolation from both ends with one rounding each is bitwise equal to the codes of other libraries.
        step = float(np.float32(0.9) / np.float32(parts))
        low = float(np.float32(0.1)) + step * np.arange(parts + 1)
        high = 1 - step * np.arange(parts + 1)[::-1]
        edges = np.concatenate([low[: (parts + 1) // 2], high[(parts + 1) // 2 :]]).astype(np.float32)
        middle = (edges[1:] + edges[:-1]) / np.float32(2) * np.float32(10.0 ** (decade - bits + 2))
        values += [*middle, *(-middle if signed else ())]
    return tuple(float(value) for value in sorted(values))
