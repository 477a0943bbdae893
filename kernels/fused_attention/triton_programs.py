"""The Triton programs of attention, for one block of queries or of keys. `triton.py` launches them.

A program visits up to three ranges of blocks: partly masked, unmasked, and partly masked (`flash.block_ranges`).
With segments there is one range, and all of its blocks are computed with a mask. Triton overlaps the loads of the next
blocks with the matmuls of the current block: with cp.async on Ampere and Ada, asynchronous wgmma on Hopper, tcgen05 on
Blackwell.

Queries, keys and outputs are [batch, sequence, heads, dim] in memory. `s` has the compile-time values
(`triton.AttentionStatic`), so each branch on it is decided when the program is compiled.
"""

import triton.language as tl
from triton.language import core  # noqa: F401  (the interpreter replaces functions of this module)

from jaxmem.kernels.triton_functions import program


@program
def capped_scores(raw, s: tl.constexpr):
    """Scores in units of `s.unit`, and the derivative of soft-capping. exp2 may overflow to infinity or underflow to 0;
    tanh is then correctly 1 or -1."""
    if s.tanh_factor is None:
        score = raw * s.factor
        slope = raw
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
    row = tl.arange(0, size)
    column = tl.arange(0, s.wide)
    mask = (first + row < limit)[:, None] & (column < s.dim)[None, :]
    ptr += first.to(tl.int64) * stride
    return tl.load(ptr + row[:, None] * stride + column[None, :], mask=mask, other=0.0)


@program
def store_block(ptr, x, first, size: tl.constexpr, limit: tl.constexpr, stride: tl.constexpr, s: tl.constexpr):
    row = tl.arange(0, size)
    column = tl.arange(0, s.wide)
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
def masked_scores(left, right, query, key, mine, theirs, masked: tl.constexpr, s: tl.constexpr):
    """`capped_scores` of left @ right.T, -inf where they are masked."""
    scores, slope = capped_scores(tl.dot(left, tl.trans(right), input_precision="ieee"), s)
    if masked:
        scores = tl.where(seen_in_block(query, key, mine, theirs, s), scores, -float("inf"))
    return scores, slope


@program
def attention_forward(
    q_ptr, k_ptr, v_ptr, ids_ptr, kv_ids_ptr, ranges_ptr, out_ptr, lse_ptr, s: tl.constexpr
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # causal: the last blocks take longest and start first
    head = tl.program_id(1)
    batch = tl.program_id(2)
    row = batch * s.heads + head
    first = block * s.rows
    at = first + tl.arange(0, s.rows)
    place = (batch.to(tl.int64) * s.queries * s.heads + head) * s.dim
    kv_place = (batch.to(tl.int64) * s.keys * s.kv_heads + head // s.groups) * s.dim
    q = load_block(q_ptr + place, first, s.rows, s.queries, s.stride, s)
    mine = load_ids(ids_ptr + batch * s.queries, at, s.queries, s)
    kv_ids_ptr += batch * s.keys
    k_ptr += kv_place
    v_ptr += kv_place
    out = tl.zeros((s.rows, s.wide), tl.float32)
    top = tl.full((s.rows,), -float("inf"), tl.float32)
    total = tl.zeros((s.rows,), tl.float32)
    ranges_ptr += (batch * tl.num_programs(0) + block) * 4
    for part in tl.static_range(1 if s.segments else 3):
        for j in range(tl.load(ranges_ptr + part), tl.load(ranges_ptr + part + 1)):
            first_key = j * s.columns
            key = first_key + tl.arange(0, s.columns)
            k = load_block(k_ptr, first_key, s.columns, s.keys, s.kv_stride, s)
            theirs = load_ids(kv_ids_ptr, key, s.keys, s)
            scores, _ = masked_scores(q, k, at[:, None], key[None, :], mine[:, None], theirs[None, :], part != 1, s)
            higher = tl.maximum(top, tl.max(scores, axis=1))
            # A row without visible keys so far has a maximum of -inf, and -inf minus -inf is NaN.
            level = tl.where(higher == -float("inf"), 0.0, higher)
            p = tl.exp2((scores - level[:, None]) * s.base)
            shrink = tl.exp2((top - level) * s.base)
            total = total * shrink + tl.sum(p, axis=1)
            v = load_block(v_ptr, first_key, s.columns, s.keys, s.kv_stride, s)
            out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            top = higher
    seen = total > 0
    safe = tl.where(seen, total, 1.0)
    store_block(out_ptr + place, out / safe[:, None], first, s.rows, s.queries, s.stride, s)
    lse = tl.where(seen, top * s.unit + tl.log2(safe) * 0.6931471805599453, -float("inf"))
    tl.store(lse_ptr + row.to(tl.int64) * s.queries + at, lse, mask=at < s.queries)


@program
def attention_d_queries(
    q_ptr, k_ptr, v_ptr, d_out_ptr, rows_ptr, inner_ptr, ids_ptr, kv_ids_ptr, ranges_ptr, dq_ptr,
    s: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    row = batch * s.heads + head
    first = block * s.rows
    at = first + tl.arange(0, s.rows)
    place = (batch.to(tl.int64) * s.queries * s.heads + head) * s.dim
    kv_place = (batch.to(tl.int64) * s.keys * s.kv_heads + head // s.groups) * s.dim
    q = load_block(q_ptr + place, first, s.rows, s.queries, s.stride, s)
    d_out = load_block(d_out_ptr + place, first, s.rows, s.queries, s.stride, s)
    first_row = row.to(tl.int64) * s.queries
    lse = tl.load(rows_ptr + first_row + at, mask=at < s.queries, other=0.0)
    inner = tl.load(inner_ptr + first_row + at, mask=at < s.queries, other=0.0)
    mine = load_ids(ids_ptr + batch * s.queries, at, s.queries, s)
    kv_ids_ptr += batch * s.keys
    k_ptr += kv_place
    v_ptr += kv_place
    dq = tl.zeros((s.rows, s.wide), tl.float32)
    ranges_ptr += (batch * tl.num_programs(0) + block) * 4
    for part in tl.static_range(1 if s.segments else 3):
        for j in range(tl.load(ranges_ptr + part), tl.load(ranges_ptr + part + 1)):
            first_key = j * s.columns
            key = first_key + tl.arange(0, s.columns)
            k = load_block(k_ptr, first_key, s.columns, s.keys, s.kv_stride, s)
            v = load_block(v_ptr, first_key, s.columns, s.keys, s.kv_stride, s)
            theirs = load_ids(kv_ids_ptr, key, s.keys, s)
            scores, slope = masked_scores(
                q, k, at[:, None], key[None, :], mine[:, None], theirs[None, :], part != 1, s
            )  # fmt: skip
            p = tl.exp2((scores - lse[:, None]) * s.base)
            dp = tl.dot(d_out, tl.trans(v), input_precision="ieee")
            ds = p * (dp - inner[:, None])
            if s.tanh_factor is not None:
                ds = ds * slope
            dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    store_block(dq_ptr + place, dq * s.scale, first, s.rows, s.queries, s.stride, s)


@program
def attention_d_keys(
    q_ptr, k_ptr, v_ptr, d_out_ptr, rows_ptr, inner_ptr, ids_ptr, kv_ids_ptr, ranges_ptr, dk_ptr,
    dv_ptr, s: tl.constexpr,
):  # fmt: skip
    """The scores are transposed, [keys, queries], as both matmuls read them. Rows beyond the last query are zeros in q
    and d_out, so they add zero."""
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    batch = tl.program_id(2)
    first = block * s.columns
    key = first + tl.arange(0, s.columns)
    kv_place = (batch.to(tl.int64) * s.keys * s.kv_heads + kv_head) * s.dim
    k = load_block(k_ptr + kv_place, first, s.columns, s.keys, s.kv_stride, s)
    v = load_block(v_ptr + kv_place, first, s.columns, s.keys, s.kv_stride, s)
    theirs = load_ids(kv_ids_ptr + batch * s.keys, key, s.keys, s)
    ids_ptr += batch * s.queries
    dk = tl.zeros((s.columns, s.wide), tl.float32)
    dv = tl.zeros((s.columns, s.wide), tl.float32)
    ranges_ptr += (batch * tl.num_programs(0) + block) * 4
    for g in range(s.groups):
        head = kv_head * s.groups + g
        place = (batch.to(tl.int64) * s.queries * s.heads + head) * s.dim
        first_row = (batch * s.heads + head).to(tl.int64) * s.queries
        for part in tl.static_range(1 if s.segments else 3):
            for i in range(tl.load(ranges_ptr + part), tl.load(ranges_ptr + part + 1)):
                first_query = i * s.rows
                at = first_query + tl.arange(0, s.rows)
                q = load_block(q_ptr + place, first_query, s.rows, s.queries, s.stride, s)
                d_out = load_block(d_out_ptr + place, first_query, s.rows, s.queries, s.stride, s)
                lse = tl.load(rows_ptr + first_row + at, mask=at < s.queries, other=0.0)
                inner = tl.load(inner_ptr + first_row + at, mask=at < s.queries, other=0.0)
                mine = load_ids(ids_ptr, at, s.queries, s)
                scores, slope = masked_scores(
                    k, q, at[None, :], key[:, None], mine[None, :], theirs[:, None], part != 1, s
                )  # fmt: skip
                p = tl.exp2((scores - lse[None, :]) * s.base)
                dp = tl.dot(v, tl.trans(d_out), input_precision="ieee")
                ds = p * (dp - inner[None, :])
                if s.tanh_factor is not None:
                    ds = ds * slope
                dv += tl.dot(p.to(d_out.dtype), d_out, input_precision="ieee")
                dk += tl.dot(ds.to(q.dtype), q, input_precision="ieee")
    store_block(dk_ptr + kv_place, dk * s.scale, first, s.columns, s.keys, s.kv_stride, s)
    store_block(dv_ptr + kv_place, dv, first, s.columns, s.keys, s.kv_stride, s)
