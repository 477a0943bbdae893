"""The Triton programs of the updates; `triton.py` launches them. `s`: `triton.UpdateTiling`, known at compile time."""

import triton.language as tl
from triton.language import core  # noqa: F401  (the interpreter replaces functions of this module)

from jaxmem.kernels.triton_functions import dynamic8_code, dynamic8_value, float_bits, program, uniform


@program
def tile(s: tl.constexpr):
    """For the elements of this program: each element's position in its block, the offset of the first element (64
    bits), the offsets of the others from it, and their mask. For its blocks: the first block, the offsets, and their
    mask."""
    if s.along_columns:
        block = tl.program_id(0) * s.count + tl.arange(0, s.count)
        place = tl.arange(0, s.padded)[None, :]
        first_block = (tl.program_id(0) * s.count).to(tl.int64)
        first = first_block * s.size
        block_offset = tl.arange(0, s.count)
        offset = block_offset[:, None] * s.size + place
        block_mask = block < s.blocks
        mask = (place < s.size) & block_mask[:, None]
    else:
        across = (s.columns + s.count - 1) // s.count
        row = tl.program_id(0) // across
        column = tl.program_id(0) % across * s.count + tl.arange(0, s.count)
        place = tl.arange(0, s.padded)[:, None]
        first_block = row.to(tl.int64) * s.columns
        first = first_block * s.size
        block_offset = column
        offset = place * s.columns + column[None, :]
        block_mask = column < s.columns
        mask = (place < s.size) & block_mask[None, :]
    return place, first, offset, mask, first_block, block_offset, block_mask


@program
def over_block(x, s: tl.constexpr):
    """A value per block, broadcast over the elements of the block."""
    if s.along_columns:
        x = x[:, None]
    else:
        x = x[None, :]
    return x


@program
def largest(x, steps: tl.constexpr, s: tl.constexpr):
    """The absmax of each block, and the factor (at most 2^126) that scales its elements to -steps ... steps. The
    maximum is that of the bits as integers, with NaN above all numbers: a GPU's maximum of floats ignores NaN."""
    most = tl.max(float_bits(tl.abs(x)), axis=1 if s.along_columns else 0).to(tl.float32, bitcast=True)
    return most, tl.minimum(steps / most, 8.507059173023462e37)


@program
def adam8_update(
    g_ptr, m_ptr, v_ptr, m_scale_ptr, v_scale_ptr, factors_ptr, u_ptr, _m_ptr, _v_ptr, _m_scale_ptr, _v_scale_ptr,
    s: tl.constexpr,
):  # fmt: skip
    """m is in units of 1 - beta1 and v in units of 1 - beta2, so that g and its square are added without a factor."""
    _, first, offset, mask, first_block, block_offset, block_mask = tile(s)
    g = tl.load(g_ptr + first + offset, mask=mask, other=0.0).to(tl.float32)
    # Elements outside of the mask have the code of zero.
    old_m = dynamic8_value(tl.load(m_ptr + first + offset, mask=mask, other=127), True)
    old_v = dynamic8_value(tl.load(v_ptr + first + offset, mask=mask, other=0), False)
    m_scale = tl.load(m_scale_ptr + first_block + block_offset, mask=block_mask, other=0.0)
    v_scale = tl.load(v_scale_ptr + first_block + block_offset, mask=block_mask, other=0.0)
    m = old_m * over_block(m_scale * (s.beta1 / s.m_unit), s) + g
    v = old_v * over_block(v_scale * (s.beta2 / s.v_unit), s) + g * g
    u = m / (tl.sqrt(v) * tl.load(factors_ptr) + tl.load(factors_ptr + 1))
    m_most, m_inverse = largest(m, 1.0, s)
    v_most, v_inverse = largest(v, 1.0, s)
    tl.store(u_ptr + first + offset, u.to(u_ptr.dtype.element_ty), mask=mask)
    tl.store(m_ptr + first + offset, dynamic8_code(m, over_block(m_inverse, s), True, True), mask=mask)
    tl.store(v_ptr + first + offset, dynamic8_code(v, over_block(v_inverse, s), False, False), mask=mask)
    tl.store(m_scale_ptr + first_block + block_offset, m_most * s.m_unit, mask=block_mask)
    tl.store(v_scale_ptr + first_block + block_offset, v_most * s.v_unit, mask=block_mask)


@program
def int8_add(codes_ptr, scale_ptr, u_ptr, seeds_ptr, _codes_ptr, _scale_ptr, s: tl.constexpr):
    place, first, offset, mask, first_block, block_offset, block_mask = tile(s)
    scale = tl.load(scale_ptr + first_block + block_offset, mask=block_mask, other=0.0) * 0.007874015748031496  # 1/127
    old = tl.load(codes_ptr + first + offset, mask=mask, other=0).to(tl.float32)
    w = old * over_block(scale, s) + tl.load(u_ptr + first + offset, mask=mask, other=0.0).to(tl.float32)
    most, inverse = largest(w, 127.0, s)
    seeds = tl.load(seeds_ptr + first_block + block_offset, mask=block_mask, other=0)
    steps = tl.floor(w * over_block(inverse, s) + uniform(over_block(seeds, s), place))
    codes = tl.minimum(tl.maximum(steps, -127.0), 127.0).to(tl.int32).to(tl.int8)
    tl.store(codes_ptr + first + offset, codes, mask=mask)
    tl.store(scale_ptr + first_block + block_offset, most, mask=block_mask)
