"""The Triton programs of the matmul; `triton.py` launches them. `s` is `triton.MatmulTiling`, which is known at compile
time; `s.together` is the number of codes per byte. `listed_ptr`: the values of a format with a codebook, e.g. nf4."""

import triton.language as tl
from triton.language import core  # noqa: F401  (the interpreter replaces functions of this module)

from jaxmem.kernels.triton_functions import dynamic8_value, program


@program
def scales_of(tile, output, scale_ptr, groups_ptr, mean_ptr, s: tl.constexpr):
    """The block scales of a tile of codes, [rows, outputs]. The tile is inside one block or has several; if its rows
    begin and end within blocks, a scale is read for each row."""
    several: tl.constexpr = s.blocks_of_tile
    if s.reads_each_row:
        block = (tile * s.rows + tl.arange(0, several)) // s.unit
    else:
        block = tile * s.rows // s.unit + tl.arange(0, several)
    real = (block < s.blocks)[:, None] & (output < s.outputs)[None, :]
    own = tl.load(scale_ptr + block[:, None] * s.outputs + output[None, :], mask=real, other=0)
    if s.double:
        group = tl.minimum(block, s.blocks - 1) // s.blocks_of_group
        of_group = tl.load(groups_ptr + group[:, None] * s.outputs + output[None, :], mask=real, other=0.0)
        own = dynamic8_value(own, True) * of_group + tl.load(mean_ptr)
    elif own.dtype == tl.uint8:  # E8M0: exponents of two
        own = (own.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    if several > 1 and not s.reads_each_row:
        own = tl.broadcast_to(own[:, None, :], (several, s.rows // several, s.tile_outputs))
        own = tl.reshape(own, (s.rows, s.tile_outputs))
    return own


@program
def decoded(tile, output, codes_ptr, scale_ptr, groups_ptr, mean_ptr, listed_ptr, s: tl.constexpr):
    """A tile of the weight in float32, as two arrays: the values of the first and of the second code of each byte. For
    int8, with one code per byte, both are the same. Rows and columns beyond the end of the weight have arbitrary finite
    values."""
    row = tile * s.rows + tl.arange(0, s.rows)
    real = (row < s.code_rows)[:, None] & (output < s.outputs)[None, :]
    codes_ptr += row.to(tl.int64)[:, None] * s.outputs + output[None, :]
    codes = tl.load(codes_ptr, mask=real, other=0).to(tl.int32)
    scale = scales_of(tile, output, scale_ptr, groups_ptr, mean_ptr, s)
    if s.together == 1:
        first = codes.to(tl.float32) * (scale * (1.0 / s.steps))
        second = first
    else:
        high = (codes >> 4) & 15
        low = codes & 15
        if s.listed:
            first = tl.load(listed_ptr + high) * scale
            second = tl.load(listed_ptr + low) * scale
        else:
            first = (high - s.steps).to(tl.float32) * (scale * (1.0 / s.steps))
            second = (low - s.steps).to(tl.float32) * (scale * (1.0 / s.steps))
    return first, second


@program
def tokens_of(ptr, token, column, width: tl.constexpr, s: tl.constexpr):
    """A tile of a matrix [tokens, width]."""
    mask = (token < s.tokens)[:, None] & (column < width)[None, :]
    return tl.load(ptr + token.to(tl.int64)[:, None] * width + column[None, :], mask=mask, other=0.0)


@program
def write_tokens(ptr, x, token, column, width: tl.constexpr, s: tl.constexpr):
    mask = (token < s.tokens)[:, None] & (column < width)[None, :]
    tl.store(ptr + token.to(tl.int64)[:, None] * width + column[None, :], x.to(ptr.dtype.element_ty), mask=mask)


@program
def dequant_matmul(
    x_ptr, codes_ptr, scale_ptr, groups_ptr, mean_ptr, listed_ptr, out_ptr, s: tl.constexpr
):  # fmt: skip
    """x @ w: [tokens, outputs]. x is [together, tokens, rows of codes]."""
    token = tl.program_id(0) * s.tile_tokens + tl.arange(0, s.tile_tokens)
    output = tl.program_id(1) * s.tile_outputs + tl.arange(0, s.tile_outputs)
    plane: tl.constexpr = s.tokens * s.code_rows
    total = tl.zeros((s.tile_tokens, s.tile_outputs), tl.float32)
    for tile in range((s.code_rows + s.rows - 1) // s.rows):
        row = tile * s.rows + tl.arange(0, s.rows)
        first, second = decoded(tile, output, codes_ptr, scale_ptr, groups_ptr, mean_ptr, listed_ptr, s)
        x = tokens_of(x_ptr, token, row, s.code_rows, s)
        total = tl.dot(x, first.to(x.dtype), total, input_precision="ieee")
        if s.together == 2:
            x = tokens_of(x_ptr + plane, token, row, s.code_rows, s)
            total = tl.dot(x, second.to(x.dtype), total, input_precision="ieee")
    write_tokens(out_ptr, total, token, output, s.outputs, s)


@program
def dequant_matmul_of_activations(
    g_ptr, codes_ptr, scale_ptr, groups_ptr, mean_ptr, listed_ptr, out_ptr, s: tl.constexpr
):  # fmt: skip
    """The gradient of x, g @ w.T: [together, tokens, rows of codes]. g is [tokens, outputs]."""
    token = tl.program_id(0) * s.tile_tokens + tl.arange(0, s.tile_tokens)
    tile = tl.program_id(1)
    plane: tl.constexpr = s.tokens * s.code_rows
    of_first = tl.zeros((s.tile_tokens, s.rows), tl.float32)
    of_second = tl.zeros((s.tile_tokens, s.rows), tl.float32)
    for j in range((s.outputs + s.tile_outputs - 1) // s.tile_outputs):
        output = j * s.tile_outputs + tl.arange(0, s.tile_outputs)
        g = tokens_of(g_ptr, token, output, s.outputs, s)
        first, second = decoded(tile, output, codes_ptr, scale_ptr, groups_ptr, mean_ptr, listed_ptr, s)
        of_first = tl.dot(g, tl.trans(first.to(g.dtype)), of_first, input_precision="ieee")
        if s.together == 2:
            of_second = tl.dot(g, tl.trans(second.to(g.dtype)), of_second, input_precision="ieee")
    row = tile * s.rows + tl.arange(0, s.rows)
    write_tokens(out_ptr, of_first, token, row, s.code_rows, s)
    if s.together == 2:
        write_tokens(out_ptr + plane, of_second, token, row, s.code_rows, s)
