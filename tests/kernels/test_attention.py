"""Every implementation of attention against float64, forward and gradients; what it holds; where it runs."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmem.kernels import attention
from jaxmem.kernels.attention import IMPLEMENTATIONS, blockwise, flash, shapes
from jaxmem.kernels.attention.block import Blocks
from jaxmem.kernels.attention.mask import kept, seed_of

KEY = jax.random.key(7)
BLOCKS = Blocks(queries=64, keys=64, warps=4, stages=1)
# Blockwise has two ways: everything written out, and a loop over tiles. Small tiles make small cases cross many. Mosaic
# goes backward in one pass or in two.
WAYS = {
    **{name: {} for name in IMPLEMENTATIONS},
    "blockwise, looping": {"SHORT": 0, "LONG_BLOCK": 32},
    "mosaic, deterministic": {},
}
# In float32, but for what takes 16 bits only: there it is as good as the rounding of p and of the results.
TAKES = {way: ("float16", 4e-3) if way.startswith("mosaic") else ("float32", 2e-5) for way in WAYS}

# name: (batch, queries, keys, heads, kv_heads, dim), options
CASES = {
    "causal": ((2, 96, 96, 2, 2, 16), {"causal": True}),
    "full": ((2, 80, 80, 2, 2, 16), {}),
    "grouped": ((2, 64, 64, 6, 2, 8), {"causal": True}),
    "one key head": ((1, 64, 64, 4, 1, 8), {}),
    "odd lengths": ((1, 71, 71, 2, 1, 8), {"causal": True}),
    "one position": ((2, 1, 1, 2, 2, 8), {"causal": True}),
    "one query, many keys": ((2, 1, 133, 4, 2, 8), {"causal": True}),
    "more keys than queries": ((1, 40, 90, 2, 2, 8), {"causal": True}),
    "more queries than keys: the first see nothing": ((1, 90, 40, 2, 1, 8), {"causal": True}),
    "window": ((1, 150, 150, 2, 1, 8), {"causal": True, "window": 37}),
    "window of one": ((1, 70, 70, 2, 2, 8), {"window": 1}),
    "window, more keys than queries": ((1, 66, 160, 2, 2, 8), {"window": 20}),
    "segments": ((2, 100, 100, 2, 1, 8), {"causal": True, "segments": 4}),
    "segments of other lengths, some unseen": ((2, 50, 120, 2, 2, 8), {"segments": 5}),
    "soft cap": ((1, 72, 72, 2, 2, 8), {"causal": True, "soft_cap": 2.0}),
    "scale": ((1, 72, 72, 2, 2, 8), {"scale": 0.9}),
    "dropout": ((2, 90, 90, 2, 1, 8), {"causal": True, "dropout": (KEY, 0.3)}),  # of one mask, whatever the tiles
    "heads of 64": ((1, 20, 20, 2, 1, 64), {"causal": True}),
    "everything": (
        (2, 70, 130, 2, 1, 8),
        {"window": 33, "segments": 3, "soft_cap": 3.0, "scale": 0.5, "dropout": (KEY, 0.1)},
    ),
}
RAN: set[tuple[str, str]] = set()


def drawn(shape, seed=0, dtype=jnp.float32):
    """q, k, v and the cotangents of output and log-sum-exp."""
    batch, queries, keys, heads, kv_heads, dim = shape
    rng = np.random.default_rng(seed)
    sizes = [(batch, queries, heads, dim), *[(batch, keys, kv_heads, dim)] * 2, (batch, queries, heads, dim)]
    arrays = [jnp.asarray(rng.standard_normal(size), dtype) for size in sizes]
    return (*arrays, jnp.asarray(rng.standard_normal((batch, heads, queries)), jnp.float32))


def with_segments(shape, options, seed=0):
    """Options with ids drawn, sorted as packing makes them where there are as many keys as queries."""
    options = dict(options)
    count = options.pop("segments", None)
    if count is None:
        return options
    batch, queries, keys = shape[:3]
    rng = np.random.default_rng(seed)
    mine = np.sort(rng.integers(0, count + 1, (batch, queries)), axis=1)
    theirs = mine if keys == queries else rng.integers(0, count, (batch, keys))
    return options | {"segment_ids": jnp.asarray(mine), "kv_segment_ids": jnp.asarray(theirs)}


def exact(
    q,
    k,
    v,
    d_out,
    d_lse,
    *,
    causal=False,
    window=None,
    segment_ids=None,
    kv_segment_ids=None,
    scale=None,
    soft_cap=None,
    dropout=None,
):
    """Output, log-sum-exp, dq, dk, dv, in float64 and by hand."""
    kinds = [np.asarray(x, np.float64) for x in (q, k, v, d_out, d_lse)]
    q, k, v, d_out, d_lse = kinds
    batch, queries, heads, dim = q.shape
    keys, kv_heads = k.shape[1:3]
    groups = heads // kv_heads
    k, v = np.repeat(k, groups, axis=2), np.repeat(v, groups, axis=2)
    scale = dim**-0.5 if scale is None else scale
    s = np.einsum("bqhd,bkhd->bhqk", q, k) * scale
    bend = np.ones_like(s)
    if soft_cap is not None:
        bend = 1 - np.tanh(s / soft_cap) ** 2
        s = soft_cap * np.tanh(s / soft_cap)
    distance = np.arange(queries)[:, None] + keys - queries - np.arange(keys)
    seen = np.ones((batch, 1, queries, keys), bool)
    if causal or window is not None:
        seen &= distance >= 0
    if window is not None:
        seen &= distance < window
    if segment_ids is not None:
        seen &= (np.asarray(segment_ids)[:, :, None] == np.asarray(kv_segment_ids)[:, None, :])[:, None]
    s = np.where(seen, s, -np.inf)
    top = np.max(s, axis=-1, keepdims=True)
    e = np.exp(s - np.where(np.isinf(top), 0, top))
    total = e.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (top + np.log(total))[..., 0]
    p = e / np.where(total > 0, total, 1)
    factor = np.ones_like(p)
    if dropout is not None:
        key, rate = dropout
        row = jnp.arange(batch * heads).reshape(batch, heads, 1, 1)
        factor = np.asarray(kept(seed_of(key), row, jnp.arange(queries)[:, None], jnp.arange(keys), rate)) / (1 - rate)
    out = np.einsum("bhqk,bkhd->bqhd", p * factor, v)
    dv = np.einsum("bhqk,bqhd->bkhd", p * factor, d_out)
    dp = np.einsum("bqhd,bkhd->bhqk", d_out, v) * factor
    ds = p * (dp - (p * dp).sum(-1, keepdims=True) + d_lse[..., None]) * bend * scale
    dq = np.einsum("bhqk,bkhd->bqhd", ds, k)
    dk = np.einsum("bhqk,bqhd->bkhd", ds, q)
    dk, dv = (x.reshape(batch, keys, kv_heads, groups, dim).sum(3) for x in (dk, dv))
    return out, lse, dq, dk, dv


def run(way, arrays, options):
    """Output, log-sum-exp, dq, dk, dv of an implementation, compiled. A log-sum-exp of -inf gets no cotangent."""
    name, deterministic = way.split(",")[0], way.endswith("deterministic")
    options = options | {"implementation": name, "deterministic": deterministic}
    calls = []

    def counted(*args):
        calls.append(name)
        return implementation(*args)

    implementation = IMPLEMENTATIONS[name]

    @jax.jit
    def both(q, k, v, d_out, d_lse):
        (out, lse), pull = jax.vjp(lambda q, k, v: attention(q, k, v, return_lse=True, **options), q, k, v)
        return (out, lse, *pull((d_out, jnp.where(jnp.isneginf(lse), 0.0, d_lse))))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(IMPLEMENTATIONS, name, counted)
        for constant, value in WAYS[way].items():
            patch.setattr(blockwise, constant, value)
        if name == "triton":  # its interpreter takes milliseconds a block, of any size
            patch.setattr(flash, "blocks", lambda *_: BLOCKS)
        results = both(*arrays)
    assert calls == [name]
    return results


def assert_close(got, wanted, tolerance):
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), got, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(x, np.float64), y, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_forward_and_gradients_equal_float64(way, case):
    shape, options = CASES[case]
    options = with_segments(shape, options)
    dtype, tolerance = TAKES[way]
    arrays = drawn(shape, dtype=dtype)
    wanted = exact(*arrays, **options)
    got = run(way, arrays, options)
    assert got[0].dtype == arrays[0].dtype
    assert got[1].dtype == jnp.float32
    assert_close(got, wanted, tolerance)
    RAN.add((way, case))


def test_every_implementation_ran_every_case():
    """A gradient test that was skipped, or an implementation that the table forgot, does not count as passed."""
    assert {(way, case) for way in WAYS for case in CASES} == RAN
    assert {way.split(",")[0] for way in WAYS} == set(IMPLEMENTATIONS)


@settings(max_examples=5)
@given(st.data())
@pytest.mark.parametrize("way", [way for way in WAYS if way != "reference"])
def test_drawn_calls_equal_float64(way, data):
    draw = data.draw
    kv_heads, groups = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    lengths = st.integers(1, 100)
    queries = draw(lengths)
    keys = draw(st.one_of(st.just(queries), lengths))
    shape = (draw(st.integers(1, 2)), queries, keys, kv_heads * groups, kv_heads, draw(st.sampled_from([4, 8])))
    options = draw(
        st.fixed_dictionaries(
            {"causal": st.booleans()},
            optional={
                "window": st.integers(1, 120),
                "segments": st.integers(1, 4),
                "soft_cap": st.floats(1.0, 9.0),
                "scale": st.floats(-1.0, 1.0),
                "dropout": st.floats(0.0, 0.9).map(lambda rate: (KEY, rate)),
            },
        )
    )
    seed = draw(st.integers(0, 99))
    options = with_segments(shape, options, seed)
    dtype, tolerance = TAKES[way]
    arrays = drawn(shape, seed, dtype)
    # A kept probability grows by 1 / (1 - rate), and rounding with it.
    tolerance *= 1.5 / (1.0 - options.get("dropout", (KEY, 0.0))[1])
    assert_close(run(way, arrays, options), exact(*arrays, **options), tolerance)


@pytest.mark.parametrize("way", WAYS)
def test_scores_of_ten_thousand(way):
    """Whole numbers, so that the scores themselves are exact: 10,000 and a little, in every row."""
    shape = (1, 80, 80, 2, 1, 8)
    rng = np.random.default_rng(1)
    dtype, tolerance = TAKES[way]
    q, k, v, d_out, d_lse = drawn(shape, dtype=dtype)
    q = jnp.asarray(rng.integers(0, 2, q.shape), dtype).at[..., 0].set(100.0)
    k = jnp.asarray(rng.integers(-1, 2, k.shape), dtype).at[..., 0].set(100.0)
    arrays = (q, k, v, d_out, d_lse)
    options = {"causal": True, "scale": 1.0}
    got, wanted = run(way, arrays, options), exact(*arrays, **options)
    assert wanted[1].min() > 9_000
    np.testing.assert_allclose(got[0], wanted[0], rtol=tolerance / 2, atol=tolerance / 2)
    for x, y in zip(got, wanted, strict=True):  # float32 holds a log-sum-exp of 10,000 to 0.0005, and so p
        np.testing.assert_allclose(x, y, atol=(1e-3 + tolerance / 4) * np.abs(y).max())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_good_as_its_rounding(way, dtype):
    shape = (2, 96, 96, 4, 2, 16)
    arrays = drawn(shape, dtype=dtype)
    got, wanted = run(way, arrays, {"causal": True}), exact(*arrays, causal=True)
    assert got[0].dtype == got[2].dtype == jnp.dtype(dtype)
    step = float(jnp.finfo(dtype).eps)
    for x, y in zip(got, wanted, strict=True):
        error = np.abs(np.asarray(x, np.float64) - y)
        assert error.max() < 4 * step * max(1.0, np.abs(y).max())
        assert error.mean() < step * np.abs(y).mean()


def test_dropout_keeps_its_share_and_nothing_repeats():
    row, query, key = np.ix_(np.arange(6), np.arange(64), np.arange(256))
    mask = np.asarray(kept(seed_of(KEY), jnp.asarray(row), jnp.asarray(query), jnp.asarray(key), 0.25))
    count = mask.size
    deviation = (0.25 * 0.75 / count) ** 0.5
    assert abs(mask.mean() - 0.75) < 4 * deviation
    # Neighbours along each dimension are independent: both kept in 0.75^2 of the pairs.
    for axis in range(3):
        both = np.take(mask, np.arange(1, mask.shape[axis]), axis) & np.take(
            mask, np.arange(mask.shape[axis] - 1), axis
        )
        assert abs(both.mean() - 0.75**2) < 6 * deviation
    other = np.asarray(kept(seed_of(jax.random.key(8)), jnp.asarray(row), jnp.asarray(query), jnp.asarray(key), 0.25))
    assert abs((mask == other).mean() - (0.75**2 + 0.25**2)) < 6 * deviation


def test_parts_of_the_keys_merge_by_their_log_sum_exp():
    """What ring attention does: gradients flow through the log-sum-exp."""
    q, k, v, d_out, _ = drawn((1, 48, 96, 2, 2, 8))

    def whole(q, k, v):
        return attention(q, k, v)

    def merged(q, k, v):
        parts = [attention(q, k[:, i : i + 48], v[:, i : i + 48], return_lse=True) for i in (0, 48)]
        outs, lses = zip(*parts, strict=True)
        weights = jax.nn.softmax(jnp.stack(lses), axis=0)
        return sum(w.swapaxes(1, 2)[..., None] * out for w, out in zip(weights, outs, strict=True))

    for function in (lambda f: jax.jit(f)(q, k, v), lambda f: jax.jit(jax.vjp(f, q, k, v)[1])(d_out)):
        for x, y in zip(jax.tree.leaves(function(whole)), jax.tree.leaves(function(merged)), strict=True):
            np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


def test_within_jit_scan_remat_and_vmap():
    q, k, v, *_ = drawn((3, 70, 70, 2, 1, 8))

    def layers(q, k, v):
        layer = jax.checkpoint(lambda x, _: (x + attention(x, k, v, causal=True), None), prevent_cse=False)
        return jnp.sum(jax.lax.scan(layer, q, None, length=3)[0] ** 2)

    def one_by_one(q, k, v):
        for _ in range(3):
            q = q + attention(q, k, v, causal=True, implementation="reference")
        return jnp.sum(q**2)

    wanted = jax.jit(jax.grad(one_by_one, (0, 1, 2)))(q, k, v)
    got = jax.jit(jax.grad(layers, (0, 1, 2)))(q, k, v)
    rows = [x[:, None] for x in (q, k, v)]
    mapped = jax.jit(jax.vmap(jax.grad(layers, (0, 1, 2))))(*rows)
    for x, y, z in zip(wanted, got, mapped, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(x, z[:, 0], rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- what it holds


def temporaries(shape, **options):
    """Bytes that the compiled gradient allocates beside arguments and results."""
    batch, queries, keys, heads, kv_heads, dim = shape
    q = jax.ShapeDtypeStruct((batch, queries, heads, dim), jnp.float32)
    k = jax.ShapeDtypeStruct((batch, keys, kv_heads, dim), jnp.float32)

    def loss(q, k, v):
        return jnp.sum(attention(q, k, v, **options) ** 2)

    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k).compile().memory_analysis().temp_size_in_bytes


def test_bytes_grow_with_the_sequence_not_with_its_square():
    lengths = [1024, 2048, 4096, 8192]
    blocks = [temporaries((1, n, n, 2, 1, 16), causal=True, implementation="blockwise") for n in lengths]
    rows = 2 * 16 * 4  # bytes a position, of one array of all heads
    for length, following, bytes_, more in zip(lengths, lengths[1:], blocks, blocks[1:], strict=False):
        assert more - bytes_ < 16 * rows * (following - length)
    scores = 2 * lengths[-1] ** 2 * 4
    assert blocks[-1] < 0.1 * scores
    assert temporaries((1, 1024, 1024, 2, 1, 16), causal=True, implementation="reference") > 2 * 1024**2 * 4


def test_the_program_does_not_grow_with_the_sequence():
    def size(length):
        q = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
        return len(
            jax.jit(jax.grad(lambda q: jnp.sum(attention(q, q, q, causal=True)))).lower(q).as_text().splitlines()
        )

    assert size(65536) <= 1.02 * size(2048)


# ---------------------------------------------------------------- on several devices


@pytest.mark.parametrize("way", [way for way in WAYS if way.startswith("blockwise")])
def test_batch_and_heads_split_over_devices(way, monkeypatch):
    """GSPMD: the same values as on one device, and not one element moves between devices."""
    for constant, value in WAYS[way].items():
        monkeypatch.setattr(blockwise, constant, value)
    shape, options = (4, 96, 96, 4, 2, 8), {"causal": True, "segments": 3, "dropout": (KEY, 0.2)}
    options = with_segments(shape, options)
    ids = options.pop("segment_ids")
    del options["kv_segment_ids"]
    *arrays, d_lse = drawn(shape)

    def both(q, k, v, d_out, d_lse, ids):
        (out, lse), pull = jax.vjp(
            lambda q, k, v: attention(
                q, k, v, segment_ids=ids, return_lse=True, implementation=way.split(",")[0], **options
            ),
            q,
            k,
            v,
        )
        return (out, lse, *pull((out, lse)), *pull((d_out, d_lse)))

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))
    by_head = NamedSharding(mesh, PartitionSpec("fsdp", None, "tensor", None))
    places = (
        *[by_head] * 4,
        NamedSharding(mesh, PartitionSpec("fsdp", "tensor")),
        NamedSharding(mesh, PartitionSpec("fsdp")),
    )
    given_ = (*arrays, d_lse, ids)
    compiled = jax.jit(both, in_shardings=places).lower(*given_).compile()
    for x, y in zip(jax.jit(both)(*given_), compiled(*map(jax.device_put, given_, places)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    moved = re.findall(r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter", compiled.as_text())
    assert not moved
    assert all(x.is_equivalent_to(by_head, 4) for x in (compiled.output_shardings[0], *compiled.output_shardings[2:5]))


@pytest.mark.parametrize("way", IMPLEMENTATIONS)
def test_each_device_its_own_batch_and_heads(way):
    """What XLA cannot cut by itself is called on each device's part."""
    shape = (4, 40, 40, 4, 2, 8)
    *arrays, _ = drawn(shape, dtype=TAKES[way][0])
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))
    by_head = PartitionSpec("fsdp", None, "tensor", None)

    def both(q, k, v, d_out):
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, causal=True, implementation=way), q, k, v)
        return (out, *pull(d_out))

    cut = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=(by_head,) * 4, out_specs=(by_head,) * 4, check_vma=False))
    tolerance = TAKES[way][1] / 2
    for x, y in zip(jax.jit(both)(*arrays), cut(*arrays), strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------- what it refuses


def test_mosaic_says_what_it_does_not_take(monkeypatch):
    q = jnp.zeros((1, 4, 1, 4))
    with pytest.raises(ValueError, match=r"q is float32; the mosaic implementation takes bfloat16 and float16"):
        attention(q, q, q, implementation="mosaic")
    wide = jnp.zeros((1, 4, 1, 264), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"q has dim 264; the mosaic implementation takes at most 256"):
        attention(wide, wide, wide, implementation="mosaic")
    monkeypatch.setattr(flash, "capability", lambda: 80)
    half = q.astype(jnp.float16)
    with pytest.raises(ValueError, match=r"has compute capability 8.0; the mosaic implementation is for 9.0"):
        attention(half, half, half, implementation="mosaic")


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("way", [way for way in WAYS if way.startswith("mosaic")])
def test_mosaic_takes_heads_of_every_width(way, dim):
    """Each as it lies in shared memory, and several blocks of keys; of the backward pass the widest is another's."""
    shape, options = (1, 130, 260, 2, 1, dim), {"causal": True}
    arrays = drawn(shape, dtype="float16")
    assert_close(run(way, arrays, options), exact(*arrays, **options), 4e-3)


@pytest.mark.parametrize("way", WAYS)
def test_only_one_way_adds_in_an_order_that_may_change(way):
    """Its kernel adds to memory what programs give, as they come; all others sum in registers, or in XLA's order."""
    q = jax.ShapeDtypeStruct((1, 256, 2, 64), TAKES[way][0])
    options = {"implementation": way.split(",")[0], "deterministic": way.endswith("deterministic")}
    loss = lambda q: jnp.sum(attention(q, q, q, **options).astype(jnp.float32))  # noqa: E731
    assert ("reduction_op=add" in str(jax.make_jaxpr(jax.grad(loss))(q))) == (way == "mosaic")


def test_operations_of_the_named_shapes():
    for shape in shapes.SHAPES.values():
        distance = np.arange(shape.queries)[:256, None] + shape.keys - shape.queries - np.arange(shape.keys)
        seen = np.ones(distance.shape, bool)
        if shape.causal:
            seen &= distance >= 0
        if shape.window is not None:
            seen &= distance < shape.window
        some = shape._replace(
            queries=min(shape.queries, 256), keys=shape.keys - shape.queries + min(shape.queries, 256)
        )
        assert some.pairs == seen.sum()
    assert shapes.Shape(2, 10, 10, 3, 3, 4, causal=False).flops == 4 * 2 * 3 * 100 * 4
