"""Functions of the Triton programs of attention: blocks of rows, masks, and the blocks that a program visits.

Queries, keys and outputs are [batch, sequence, heads, dim] in memory. `s` has the compile-time values
(`triton.Static`), so each branch on it is decided when the program is compiled.
"""

import triton.language as tl
from triton.language import core  # noqa: F401  (the interpreter replaces functions of this module)

from jaxmem.kernels.triton_functions import program


@program
def capped_scores(raw, s: tl.constexpr):
    """Scores in units of `s.unit`, and the derivative of soft-capping. exp2 may overflow to infinity or underflow to 0;
    tanh is then correctly 1 or -1."""
    if s.tanh_factor is None:
        score, slope = raw * s.factor, raw
    else:
        score = 1.0 - 2.0 / (tl.exp2(raw * s.tanh_factor) + 1.0)
        slope = 1.0 - score * score
    return score, slope


@program
def seen_in_block(query, key, mine, theirs, s: tl.constexpr):
    seen = key < s.keys
    if s.causal:
        seen = seen & (query + s.offset >= key)
    if s.window is not None:
        seen = seen & (query + s.offset - key < s.window)
    if s.segments:
        seen = seen & (mine == theirs)
    return seen


@program
def load_block(ptr, first, size: tl.constexpr, limit: tl.constexpr, stride: tl.constexpr, s: tl.constexpr):
    """Rows from `first` on of a matrix with this stride. The offset of the first row needs 64 bits."""
    row, column = tl.arange(0, size), tl.arange(0, s.wide)
    mask = (first + row < limit)[:, None] & (column < s.dim)[None, :]
    ptr += first.to(tl.int64) * stride
    return tl.load(ptr + row[:, None] * stride + column[None, :], mask=mask, other=0.0)


@program
def store_block(ptr, x, first, size: tl.constexpr, limit: tl.constexpr, stride: tl.constexpr, s: tl.constexpr):
    row, column = tl.arange(0, size), tl.arange(0, s.wide)
    mask = (first + row < limit)[:, None] & (column < s.dim)[None, :]
    ptr += first.to(tl.int64) * stride
    tl.store(ptr + row[:, None] * stride + column[None, :], x.to(ptr.dtype.element_ty), mask=mask)


@program
def load_ids(ptr, at, limit, s: tl.constexpr):
    if s.segments:
        ids = tl.load(ptr + at, mask=at < limit, other=-1)
    else:
        ids = at
    return ids


@program
def visited_blocks(block, batch, begin_ptr, end_ptr, by_keys: tl.constexpr, s: tl.constexpr):
    """The ends of the ranges of blocks that a block of queries (with `by_keys`, a block of keys) visits, as in
    `block.visited_blocks`: partly masked blocks, unmasked blocks, partly masked blocks."""
    own: tl.constexpr = s.columns if by_keys else s.rows
    size: tl.constexpr = s.rows if by_keys else s.columns
    length: tl.constexpr = s.queries if by_keys else s.keys
    first = block * own - s.offset if by_keys else block * own + s.offset
    last = first + own - 1
    low = first * 0
    unmasked_low = first * 0
    high = first * 0 + length
    # Rows beyond the end of the last block of queries add zero, so this block needs no mask.
    unmasked_high = first * 0 + ((length + size - 1) // size * size if by_keys else length)
    if s.causal:
        if by_keys:
            low = tl.maximum(first, 0)
            unmasked_low = tl.maximum(last, 0)
        else:
            high = tl.minimum(tl.maximum(last + 1, 0), length)
            unmasked_high = tl.minimum(tl.maximum(first + 1, 0), length)
    if s.window is not None:
        if by_keys:
            high = tl.minimum(tl.maximum(last + s.window, 0), length)
            unmasked_high = tl.minimum(tl.maximum(first + s.window, 0), length)
        else:
            low = tl.maximum(first - s.window + 1, 0)
            unmasked_low = tl.maximum(last - s.window + 1, 0)
    begin = low // size
    end = (high + size - 1) // size
    if s.segments:
        here = batch * tl.num_programs(0) + block
        begin = tl.maximum(begin, tl.load(begin_ptr + here))
        end = tl.minimum(end, tl.load(end_ptr + here))
        unmasked_begin, unmasked_end = end, end
    else:
        unmasked_begin = tl.minimum(tl.maximum((unmasked_low + size - 1) // size, begin), tl.maximum(begin, end))
        unmasked_end = tl.minimum(tl.maximum(unmasked_high // size, unmasked_begin), tl.maximum(unmasked_begin, end))
    return begin, unmasked_begin, unmasked_end, end
