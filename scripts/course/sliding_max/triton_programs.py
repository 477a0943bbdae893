"""The Triton programs of the sliding maximum. `s` is `sliding_max.WindowStatic`.

They compare integers in the order of the floats, with NaN above all numbers, since a GPU's maximum of NaN and a number
is the number.
"""

import triton.language as tl
from triton.language import core  # noqa: F401  (the interpreter replaces functions of this module)

from jaxmem.kernels.triton_functions import float_bits, program


@program
def ordered(x):
    bits = tl.where(x != x, 0x7FC00000, float_bits(x))
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@program
def store_maximum(out_ptr, place, most, s: tl.constexpr):
    bits = tl.where(most < 0, most ^ 0x7FFFFFFF, most)
    tl.store(out_ptr + place, bits.to(tl.float32, bitcast=True), mask=place <= s.numbers - s.window)


@program
def sliding_max_straight(x_ptr, out_ptr, s: tl.constexpr):
    place = tl.program_id(0) * s.outputs + tl.arange(0, s.outputs)
    most = tl.full((s.outputs,), -(2**31), tl.int32)
    for k in range(s.window):
        x = tl.load(x_ptr + place + k, mask=place + k < s.numbers, other=-float("inf"))
        most = tl.maximum(most, ordered(x))
    store_maximum(out_ptr, place, most, s)


@program
def sliding_max_shared(x_ptr, out_ptr, s: tl.constexpr):
    """Triton moves an array between threads through shared memory when it is broadcast along a new dimension."""
    first = tl.program_id(0) * s.outputs
    place = first + tl.arange(0, s.outputs)
    most = tl.full((s.outputs,), -(2**31), tl.int32)
    for start in range(0, s.outputs + s.window - 1, s.strip):
        at = first + start + tl.arange(0, s.strip)
        x = ordered(tl.load(x_ptr + at, mask=at < s.numbers, other=-float("inf")))
        distance = at[None, :] - place[:, None]
        inside = (distance >= 0) & (distance < s.window)
        most = tl.maximum(most, tl.max(tl.where(inside, x[None, :], -(2**31)), axis=1))
    store_maximum(out_ptr, place, most, s)
