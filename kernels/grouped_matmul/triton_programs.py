"""The Triton programs of the matmuls; `triton.py` launches them. `s`: `triton.GroupedTiling`, known at compile time.

`tiles_ptr` is the table [3, tiles] of `blocks.block_table`: the first row of each tile, the row after its last, and its
group. The group `s.groups` has the rows that belong to no group; their results are zeros. `s.together` is the number of
codes per byte of a quantized weight. `listed_ptr`: the values of a format with a codebook, e.g. nf4."""

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
    scales = tl.load(scale_ptr + block[:, None] * s.outputs + output[None, :], mask=real, other=0)
    if s.double:
        group = tl.minimum(block, s.blocks - 1) // s.blocks_of_group
        of_group = tl.load(groups_ptr + group[:, None] * s.outputs + output[None, :], mask=real, other=0.0)
        scales = dynamic8_value(scales, True) * of_group + tl.load(mean_ptr)
    elif scales.dtype == tl.uint8:  # E8M0: exponents of two
        scales = (scales.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    if several > 1 and not s.reads_each_row:
        scales = tl.broadcast_to(scales[:, None, :], (several, s.rows // several, s.tile_outputs))
        scales = tl.reshape(scales, (s.rows, s.tile_outputs))
    return scales


@program
def rows_of_tile(tiles_ptr, tile, s: tl.constexpr):
    """The rows of a tile, which of them are real, and their group."""
    row = tl.load(tiles_ptr + tile) + tl.arange(0, s.tile_tokens)
    return row, row < tl.load(tiles_ptr + s.tiles + tile), tl.load(tiles_ptr + 2 * s.tiles + tile)


@program
def row_tile(ptr, row, real, column, width: tl.constexpr):
    """A tile of a matrix [rows, width]."""
    mask = real[:, None] & (column < width)[None, :]
    return tl.load(ptr + row.to(tl.int64)[:, None] * width + column[None, :], mask=mask, other=0.0)


@program
def weight_tile(step, output, group, w_ptr, scale_ptr, groups_ptr, mean_ptr, listed_ptr, s: tl.constexpr):
    """A tile of the matrix of a group. Of a quantized matrix: in float32, as the values of the first and of the second
    code of each byte; rows and columns beyond its end have arbitrary finite values. With one code per byte, and for
    weights that are not quantized, both arrays are the same."""
    at = group.to(tl.int64)
    w_ptr += at * (s.code_rows * s.outputs)
    row = step * s.rows + tl.arange(0, s.rows)
    if s.quantized:
        scale_ptr += at * (s.blocks * s.outputs)
        groups_ptr += at * (s.scale_groups * s.outputs)
        mean_ptr += at * s.means
        real = (row < s.code_rows)[:, None] & (output < s.outputs)[None, :]
        w_ptr += row.to(tl.int64)[:, None] * s.outputs + output[None, :]
        codes = tl.load(w_ptr, mask=real, other=0).to(tl.int32)
        scale = scales_of(step, output, scale_ptr, groups_ptr, mean_ptr, s)
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
    else:
        first = row_tile(w_ptr, row, row < s.code_rows, output, s.outputs)
        second = first
    return first, second


@program
def grouped_matmul(
    x_ptr, source_ptr, tiles_ptr, w_ptr, scale_ptr, groups_ptr, mean_ptr, listed_ptr, bias_ptr, shares_ptr, out_ptr,
    s: tl.constexpr,
):  # fmt: skip
    """x[source] @ w[group] + shares * bias[group]: [sorted rows, outputs]. x is [together, tokens, rows of codes]."""
    row, real, group = rows_of_tile(tiles_ptr, tl.program_id(0), s)
    if tl.max(real.to(tl.int32), 0) > 0:
        output = tl.program_id(1) * s.tile_outputs + tl.arange(0, s.tile_outputs)
        source = tl.load(source_ptr + row, mask=real, other=0) if s.gathers else row
        total = tl.zeros((s.tile_tokens, s.tile_outputs), tl.float32)
        if group < s.groups:
            for step in range((s.code_rows + s.rows - 1) // s.rows):
                inner = step * s.rows + tl.arange(0, s.rows)
                first, second = weight_tile(
                    step, output, group, w_ptr, scale_ptr, groups_ptr, mean_ptr, listed_ptr, s
                )  # fmt: skip
                x = row_tile(x_ptr, source, real, inner, s.code_rows)
                total = tl.dot(x, first.to(x.dtype), total, input_precision="ieee")
                if s.together == 2:
                    x = row_tile(x_ptr + s.tokens * s.code_rows, source, real, inner, s.code_rows)
                    total = tl.dot(x, second.to(x.dtype), total, input_precision="ieee")
            if s.has_bias:
                bias = tl.load(bias_ptr + group * s.outputs + output, mask=output < s.outputs, other=0.0).to(tl.float32)
                if s.has_shares:
                    shares = tl.load(shares_ptr + row, mask=real, other=0.0).to(tl.float32)
                    total += shares[:, None] * bias[None, :]
                else:
                    total += bias[None, :]
        mask = real[:, None] & (output < s.outputs)[None, :]
        at = row.to(tl.int64)[:, None] * s.outputs + output[None, :]
        tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)


@program
def grouped_matmul_of_inputs(
    g_ptr, tiles_ptr, w_ptr, scale_ptr, groups_ptr, mean_ptr, listed_ptr, out_ptr, s: tl.constexpr
):  # fmt: skip
    """The gradient of the sorted inputs, g @ w[group].T: [together, sorted rows, rows of codes]."""
    row, real, group = rows_of_tile(tiles_ptr, tl.program_id(0), s)
    if tl.max(real.to(tl.int32), 0) > 0:
        step = tl.program_id(1)
        of_first = tl.zeros((s.tile_tokens, s.rows), tl.float32)
        of_second = tl.zeros((s.tile_tokens, s.rows), tl.float32)
        if group < s.groups:
            for j in range((s.outputs + s.tile_outputs - 1) // s.tile_outputs):
                output = j * s.tile_outputs + tl.arange(0, s.tile_outputs)
                first, second = weight_tile(
                    step, output, group, w_ptr, scale_ptr, groups_ptr, mean_ptr, listed_ptr, s
                )  # fmt: skip
                g = row_tile(g_ptr, row, real, output, s.outputs)
                of_first = tl.dot(g, tl.trans(first.to(g.dtype)), of_first, input_precision="ieee")
                if s.together == 2:
                    of_second = tl.dot(g, tl.trans(second.to(g.dtype)), of_second, input_precision="ieee")
        inner = step * s.rows + tl.arange(0, s.rows)
        mask = real[:, None] & (inner < s.code_rows)[None, :]
        at = row.to(tl.int64)[:, None] * s.code_rows + inner[None, :]
        tl.store(out_ptr + at, of_first.to(out_ptr.dtype.element_ty), mask=mask)
        if s.together == 2:
            at += s.sorted * s.code_rows
            tl.store(out_ptr + at, of_second.to(out_ptr.dtype.element_ty), mask=mask)


@program
def grouped_matmul_of_weights(x_ptr, source_ptr, g_ptr, edges_ptr, out_ptr, s: tl.constexpr):
    """The gradient of the weights, x[source].T @ g over the rows of each group: [groups, inputs, outputs]. `edges_ptr`:
    the first row of each group, and the row after its last, [2, groups]."""
    group = tl.program_id(2)
    inner = tl.program_id(0) * s.rows + tl.arange(0, s.rows)
    output = tl.program_id(1) * s.tile_outputs + tl.arange(0, s.tile_outputs)
    start = tl.load(edges_ptr + group)
    stop = tl.load(edges_ptr + s.groups + group)
    total = tl.zeros((s.rows, s.tile_outputs), tl.float32)
    for first in range(start, stop, s.tile_tokens):
        row = first + tl.arange(0, s.tile_tokens)
        real = row < stop
        source = tl.load(source_ptr + row, mask=real, other=0) if s.gathers else row
        x = row_tile(x_ptr, source, real, inner, s.code_rows)
        g = row_tile(g_ptr, row, real, output, s.outputs)
        total = tl.dot(tl.trans(x), g, total, input_precision="ieee")
    mask = (inner < s.code_rows)[:, None] & (output < s.outputs)[None, :]
    at = (group.to(tl.int64) * s.code_rows + inner)[:, None] * s.outputs + output[None, :]
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=mask)
