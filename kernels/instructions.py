"""Single instructions of a GPU, for which jax's own operations compile to several: written in PTX where Triton compiles
a kernel, and as what they compute everywhere else, so that a CPU interprets the same kernel.

Pallas' products and sums are never contracted, its powers and roots take four instructions more for numbers below
2^-126, and conversions between bytes and floats go through a unit that does 16 a cycle in place of 64 or 128. None of
these instructions is slower than an addition but `exp2`, `sqrt` and `reciprocal`, which do 16 a cycle.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int8, Shaped, UInt8

Floats = Float[Array, "*shape"]
Bytes = UInt8[Array, "*shape"] | Int8[Array, "*shape"]
Operand = Any  # an array that broadcasts to the first one, or a number

_LIFT = "0x80808080"  # of four int8 makes what are 128 more as uint8, and back

_written: ContextVar[bool] = ContextVar("written", default=False)


@contextmanager
def written(really: bool) -> Iterator[None]:
    """Whether what is traced within is compiled by Triton."""
    token = _written.set(really)
    try:
        yield
    finally:
        _written.reset(token)


def fma(a: Floats, b: Operand, c: Operand) -> Floats:
    """a * b + c, rounded once."""
    return _float("fma.rn.f32", _fused, a, b, c)


def fma_saturated(a: Floats, b: Operand, c: Operand) -> Floats:
    """a * b + c, at least 0 and at most 1."""
    return _float("fma.rn.sat.f32", lambda a, b, c: jnp.clip(_fused(a, b, c), 0.0, 1.0), a, b, c)


def exp2(x: Floats) -> Floats:
    """To 2 units in the last place; 0 below 2^-126."""
    return _float("ex2.approx.ftz.f32", jnp.exp2, x)


def sqrt(x: Floats) -> Floats:
    """To 2^-23 of it; 0 of numbers below 2^-126."""
    return _float("sqrt.approx.ftz.f32", jnp.sqrt, x)


def reciprocal(x: Floats) -> Floats:
    """To 1 unit in the last place; infinite of numbers below 2^-126."""
    return _float("rcp.approx.ftz.f32", lambda x: 1.0 / x, x)


def bits(x: Floats) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def from_bits(x: jax.Array) -> Floats:
    return jax.lax.bitcast_convert_type(x, jnp.float32)


def floats(x: Shaped[Array, "*shape"]) -> Floats:
    """In float32: two numbers of bfloat16 by one instruction each."""
    if not _written.get() or x.dtype != jnp.bfloat16:
        return x.astype(jnp.float32)
    return _asm(["shl.b32 $0, $2, 16;", "and.b32 $1, $2, 0xFFFF0000;"], "=r,=r,r", 2, x)


LARGE = 2.0**23  # from here to 2^24 floats are the whole numbers, their last bits these numbers


def large_down(x: Floats, by: float, plus: int) -> Floats:
    """LARGE + the whole number below x * by + plus, where that is in 0 ... LARGE."""
    return _float("fma.rz.f32", lambda x, by, _: jnp.floor(x * by + plus) + LARGE, x, by, LARGE + plus)


def large_from_bytes(x: Bytes) -> Floats:
    """LARGE + x, or LARGE + 128 + x of an int8: a byte set among those of a float, without converting."""
    signed = x.dtype == jnp.int8
    if not _written.get():
        return x.astype(jnp.float32) + (LARGE + (128 if signed else 0))
    given = [".reg .b32 a;", f"xor.b32 a, $4, {_LIFT if signed else 0};"]
    return _asm([*given, *(f"prmt.b32 ${i}, a, 0x4B000000, 0x744{i};" for i in range(4))], "=r,=r,=r,=r,r", 4, x)


def to_bytes(
    x: Floats,
    scale: int,
    plus: int,
    dtype: Any,
    *,
    down: bool = False,
    last: tuple[Floats, Any] | None = None,
) -> Bytes:
    """scale * x + plus to the nearest of the 256 numbers of a uint8 or an int8, or `down` to the one below. Of a uint8
    those are 255 that have beside them, in `last`, as much as the number there or more; just below that they are 254.

    In units of 2^-149, the least that a float can be, the sum is rounded to a whole number of them, which is the
    float's bits. Packing four bytes saturates: negative ones, whose first bit is set, to 0, and those above 255.
    """
    lift = 128 if dtype == jnp.int8 else 0
    if not _written.get():
        total = scale * x + plus
        total = jnp.floor(total) if down else jnp.round(total)
        total = total if last is None else jnp.where(last[0] >= last[1], 255.0, total)
        return jnp.clip(total, -lift, 255 - lift).astype(jnp.int32).astype(dtype)
    plus += lift
    # A float's bits count its steps: one step below the last number this is 254, and less than what is there before.
    steps = 255 - _word(last[1]) if last else 0
    units = f"0f{scale:08X}, 0f{abs(plus) | (0x80000000 if plus < 0 else 0):08X}"
    lines = [
        ".reg .b32 a, b, c, d, e;",
        *(f"fma.{'rz' if down else 'rn'}.f32 {name}, ${i + 1}, {units};" for i, name in enumerate("abcd")),
        *(f"add.s32 e, ${i + 5}, {steps}; max.s32 {name}, e, {name};" for i, name in enumerate("abcd") if last),
        "cvt.pack.sat.u8.s32.b32 d, d, c, 0;",
        "cvt.pack.sat.u8.s32.b32 d, b, a, d;",
        f"xor.b32 $0, d, {_LIFT if lift else 0};",
    ]
    given = (x, last[0]) if last else (x,)
    said = ",".join(["=r", *(["r"] * 4 * len(given))])
    return _asm(lines, said, 4, *given, dtype=jnp.int8).astype(dtype)  # Pallas takes no unsigned results


def _float(name: str, plain: Callable[..., Any], *operands: Operand) -> jax.Array:
    if not _written.get():
        return plain(*operands)
    shape = operands[0].shape
    arrays = [jnp.broadcast_to(x, shape) for x in operands if isinstance(x, jax.Array)]
    places = iter(range(1, len(arrays) + 1))
    said = [f"${next(places)}" if isinstance(x, jax.Array) else _immediate(x) for x in operands]
    return _asm([f"{name} $0, {', '.join(said)};"], ",".join(["=f"] + ["f"] * len(arrays)), 1, *arrays)


def _asm(lines: list[str], constraints: str, pack: int, *arrays: jax.Array, dtype: Any = jnp.float32) -> jax.Array:
    made = jax.ShapeDtypeStruct(arrays[0].shape, dtype)
    (result,) = plgpu.elementwise_inline_asm(
        "{ " + " ".join(lines) + " }", args=arrays, constraints=constraints, pack=pack, result_shape_dtypes=[made]
    )
    return result


def _immediate(x: float) -> str:
    return f"0f{_word(x):08X}"


def _word(x: float) -> int:
    (word,) = struct.unpack("<I", struct.pack("<f", x))
    return int(word)


def _fused(a: jax.Array, b: Operand, c: Operand) -> jax.Array:
    """With the product's rounding error, which two halves of 12 bits tell exactly, added after the sum."""
    a, b, c = (jnp.asarray(x, jnp.float32) for x in (a, b, c))
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    product = a * b
    missing = ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
    total = product + c
    back = total - product
    lost = (product - (total - back)) + (c - back)
    return total + jnp.where(jnp.isfinite(missing + lost), missing + lost, 0.0)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    high = from_bits(bits(x) & jnp.int32(-4096))
    return high, x - high
