"""Every implementation of attention against float64, forward and gradients."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.kernels import attention
from jaxmem.kernels.fused_attention import IMPLEMENTATIONS, arguments
from jaxmem.kernels.fused_attention.arguments import check_arguments
from tests.kernels.exact import CASES, TOLERANCE, WAYS, assert_close, drawn, exact, run, with_segments
from tests.support.tiers import cases, exhaustive

SHOWN_BY_EVERY_WAY = ("odd lengths", "everything")
FAST = [*(("blockwise", case) for case in CASES), *((way, case) for way in WAYS for case in SHOWN_BY_EVERY_WAY)]
# Of a loop over tiles: those that are left out, and those in which a query sees nothing.
TILED = ("window", "segments of other lengths, some unseen", "more queries than keys: the first see nothing")
OTHERS = [*(("triton", case) for case in CASES), *(("blockwise, small tiles", case) for case in TILED)]


@pytest.mark.parametrize(("way", "case"), cases(dict.fromkeys([*FAST, *OTHERS]), *FAST))
def test_forward_and_gradients_equal_float64(way, case):
    shape, options = CASES[case]
    options = with_segments(shape, options)
    arrays = drawn(shape)
    wanted, _ = exact(*arrays, **options)
    got = run(way, arrays, options)
    assert got[0].dtype == jnp.float32
    assert_close(got, wanted, TOLERANCE)


@pytest.mark.exhaustive
@settings(max_examples=3)
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
            },
        )
    )
    seed = draw(st.integers(0, 99))
    options = with_segments(shape, options, seed)
    arrays = drawn(shape, seed)
    wanted, _ = exact(*arrays, **options)
    assert_close(run(way, arrays, options), wanted, 1.5 * TOLERANCE)


@pytest.mark.parametrize("way", cases([way for way in WAYS if "," not in way], "blockwise", "triton"))
@pytest.mark.parametrize("applies", [True, False])
def test_a_window_that_applies_in_some_calls(way, applies):
    """Two programs in one, of which the flag on the device selects one."""
    q, k, v, d_out = drawn((1, 40, 40, 2, 1, 8))

    def both(has_window, **options):
        out, pull = jax.vjp(lambda *x: attention(*x, causal=True, implementation=way, **options, **has_window), q, k, v)
        return out, *pull(d_out)

    found = jax.jit(lambda flag: both({"has_window": flag}, window=9))(applies)
    wanted = jax.jit(lambda: both({}, window=9 if applies else None))()
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (x, y)), atol=1e-6)


@pytest.mark.parametrize("way", cases(WAYS, "blockwise", "triton"))
def test_scores_of_ten_thousand(way):
    """Whole numbers, so that the scores themselves are exact: 10,000 and a little, in every row."""
    shape = (1, 80, 80, 2, 1, 8)
    rng = np.random.default_rng(1)
    q, k, v, d_out = drawn(shape)
    q = jnp.asarray(rng.integers(0, 2, q.shape), q.dtype).at[..., 0].set(100.0)
    k = jnp.asarray(rng.integers(-1, 2, k.shape), k.dtype).at[..., 0].set(100.0)
    arrays = (q, k, v, d_out)
    options = {"causal": True, "scale": 1.0}
    got = run(way, arrays, options)
    wanted, lse = exact(*arrays, **options)
    assert lse.min() > 9_000
    np.testing.assert_allclose(got[0], wanted[0], rtol=TOLERANCE / 2, atol=TOLERANCE / 2)
    for x, y in zip(got, wanted, strict=True):  # float32 holds a log-sum-exp of 10,000 to 0.0005, and so p
        np.testing.assert_allclose(x, y, atol=1e-3 * np.abs(y).max())


@pytest.mark.parametrize("way", cases(WAYS, "blockwise", "triton"))
@pytest.mark.parametrize("dtype", ["bfloat16", exhaustive("float16")])
def test_half_precision_is_as_good_as_its_rounding(way, dtype):
    shape = (1, 96, 96, 2, 1, 16)
    arrays = drawn(shape, dtype=dtype)
    got = run(way, arrays, {"causal": True})
    wanted, _ = exact(*arrays, causal=True)
    assert got[0].dtype == got[1].dtype == jnp.dtype(dtype)
    step = float(jnp.finfo(dtype).eps)
    for x, y in zip(got, wanted, strict=True):
        error = np.abs(np.asarray(x, np.float64) - y)
        assert error.max() < 4 * step * max(1.0, np.abs(y).max())
        assert error.mean() < step * np.abs(y).mean()


@pytest.mark.parametrize("way", [name for name in IMPLEMENTATIONS if name != "cudnn"])
@pytest.mark.parametrize("case", ["everything", "more queries than keys: the first see nothing"])
def test_the_log_sum_exp_by_which_parts_of_the_keys_merge(way, case):
    """-inf for a query without keys, in float32 whatever the dtype of q."""
    shape, options = CASES[case]
    options = with_segments(shape, options)
    arrays = drawn(shape, dtype=jnp.float16)
    _, wanted = exact(*arrays, **options)
    module = importlib.import_module(IMPLEMENTATIONS[way])
    lse = jax.jit(lambda q, k, v: module.attend(q, k, v, *check_arguments(q, k, v, **options)[1:])[1])(*arrays[:3])
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(lse, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.exhaustive
def test_within_jit_scan_remat_and_vmap():
    q, k, v, _ = drawn((3, 70, 70, 2, 1, 8))

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


def test_operations_of_the_named_shapes():
    for shape in arguments.ATTENTION_SHAPES.values():
        distance = np.arange(shape.queries)[:256, None] + shape.keys - shape.queries - np.arange(shape.keys)
        seen = np.ones(distance.shape, bool)
        if shape.causal:
            seen &= distance >= 0
        if shape.window is not None:
            seen &= distance < shape.window
        some = shape._replace(
            queries=min(shape.queries, 256), keys=shape.keys - shape.queries + min(shape.queries, 256)
        )
        visible = arguments.pairs(some.queries, some.keys, causal=some.causal, window=some.window)
        assert visible == seen.sum()
    assert arguments.AttentionShape(2, 10, 10, 3, 3, 4, causal=False).flops == 4 * 2 * 3 * 100 * 4
