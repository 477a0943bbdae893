"""cuDNN's attention without cuDNN: an emulation of its two calls, which reads documents by offsets and lengths as cuDNN
does, against plain JAX; the calls as XLA compiles them for each GPU; and what is refused before that."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmem.kernels import attention
from jaxmem.kernels.fused_attention import cudnn
from jaxmem.kernels.fused_attention.arguments import pairs
from jaxmem.kernels.support import Request, attention_refusal
from jaxmem.planning.compile import compile_elsewhere, without_cache
from jaxmem.planning.hlo import read_module, total_flops
from jaxmem.planning.targets import parse_target, target_devices
from jaxmem.step.kernel_choice import attention_for_call
from tests.support.tiers import exhaustive

# One GPU of each compute capability.
TARGETS = {
    80: "a100-40gb",
    86: "a6000-48gb",
    89: "rtx4090-24gb",
    90: "h100-80gb",
    100: "b200-180gb",
    120: "rtx5090-32gb",
}


def emulated(target, call, arrays):
    """Numbers are found in flat memory: the document's offset, then its positions a stride apart."""
    backward = target.endswith("Backward")
    q, k, v, *rest = arrays
    stats, d_out, out = rest[:3] if backward else (None, None, None)
    packed = rest[3 if backward else 0 :]
    if packed:
        lengths, kv_lengths, offsets, kv_offsets = packed
        assert (lengths.shape, offsets.shape) == (kv_lengths.shape, kv_offsets.shape)
        lengths, kv_lengths = lengths.reshape(-1), kv_lengths.reshape(-1)
        offsets, kv_offsets = (x.reshape(-1)[: call.slots] for x in (offsets, kv_offsets))
        assert lengths.shape == offsets.shape == (call.slots,)
    else:
        lengths = jnp.full(call.batch, call.length)
        kv_lengths = jnp.full(call.batch, call.keys)
        offsets, kv_offsets = (jnp.arange(call.batch) * x[0].size for x in (q, k))

    def places(x, offsets):
        stride = x.shape[2] * x.shape[3]
        inner = jnp.arange(x.shape[1])[:, None] * stride + jnp.arange(stride)
        return offsets[:, None, None] + inner

    def read(x, offsets, lengths):
        """[documents, time, heads, dim]: NaN, as of memory that was never written, behind a document's end."""
        values = x.reshape(-1).at[places(x, offsets)].get(mode="fill", fill_value=jnp.nan)
        values = values.reshape(len(offsets), x.shape[1], *x.shape[2:]).astype(jnp.float32)
        return jnp.where((jnp.arange(x.shape[1]) < lengths[:, None])[:, :, None, None], values, 0.0)

    def write(x, like, offsets, lengths):
        at = jnp.where((jnp.arange(like.shape[1]) < lengths[:, None])[:, :, None], places(like, offsets), like.size)
        empty = jnp.full(like.size, jnp.nan, jnp.float32)
        values = empty.at[at.reshape(len(offsets), -1)].set(x.reshape(len(offsets), -1), mode="drop")
        return values.reshape(like.shape).astype(like.dtype)

    groups = call.heads // call.kv_heads
    qs = read(q, offsets, lengths)
    ks, vs = (jnp.repeat(read(x, kv_offsets, kv_lengths), groups, axis=2) for x in (k, v))
    time, key = jnp.arange(call.length)[:, None], jnp.arange(call.keys)
    seen = (key < kv_lengths[:, None, None]) & (time < lengths[:, None, None])
    if call.masked:
        seen &= time >= key
    if call.window is not None:
        seen &= time - key < call.window
    s = jnp.einsum("bqnd,bknd->bnqk", qs, ks) * call.scale
    s = jnp.where(seen[:, None], s, -jnp.inf)
    if not backward:
        lse = jax.nn.logsumexp(s, axis=-1)
        p = jnp.where(seen[:, None], jnp.exp(s - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None]), 0.0)
        return [write(jnp.einsum("bnqk,bknd->bqnd", p, vs), q, offsets, lengths), lse]
    out, d_out = (read(x, offsets, lengths) for x in (out, d_out))
    p = jnp.where(seen[:, None], jnp.exp(s - stats[..., None]), 0.0)
    ds = p * (jnp.einsum("bqnd,bknd->bnqk", d_out, vs) - jnp.sum(out * d_out, -1).swapaxes(1, 2)[..., None])
    ds *= call.scale

    def sum_groups(x):
        return x.reshape(*x.shape[:2], call.kv_heads, groups, -1).sum(3)

    dk, dv = (sum_groups(jnp.einsum("bnqk,bqnd->bknd", a, b)) for a, b in ((ds, qs), (p, d_out)))
    dq = jnp.einsum("bnqk,bknd->bqnd", ds, ks)
    return [write(dq, q, offsets, lengths), *(write(x, k, kv_offsets, kv_lengths) for x in (dk, dv))]


def drawn(shape, seed=0):
    batch, time, heads, kv_heads, dim = shape
    rng = np.random.default_rng(seed)
    return [
        jnp.asarray(rng.standard_normal((batch, time, n, dim)), jnp.float16) for n in (heads, kv_heads, kv_heads, heads)
    ]


def both(implementation, arrays, **options):
    """Output and gradients."""

    @jax.jit
    def run(q, k, v, g):
        call = functools.partial(attention, implementation=implementation, **options)
        out, pull = jax.vjp(call, q, k, v)
        return out, *pull(g)

    return run(*arrays)


# Rows of 24 positions: documents of other lengths, one document alone, padding at the end, documents of one position.
ROWS = np.array([[1] * 5 + [2] * 11 + [3] * 8, [1] * 24, [1] * 3 + [2] * 9 + [0] * 12, [*range(5), *[5] * 19]])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("heads", "options", "workspace"),
    [
        ((4, 2), {"causal": True}, 50_000),  # a key head and its query heads at once
        ((4, 2), {"causal": True}, 1),  # a query head at once
        ((2, 1), {"causal": True, "window": 4}, 2**30),
        ((2, 2), {"scale": 0.2}, 2**30),
    ],
)
def test_documents_by_offsets_equal_documents_by_mask(heads, options, workspace, monkeypatch):
    monkeypatch.setattr(cudnn, "ON_CPU", emulated)
    monkeypatch.setattr(cudnn, "WORKSPACE", workspace)
    arrays = drawn((len(ROWS), ROWS.shape[1], *heads, 8))
    options = options | {"segment_ids": ROWS, "max_segments": 6}
    for x, y in zip(both("cudnn", arrays, **options), both("reference", arrays, **options), strict=True):
        np.testing.assert_allclose(x, y, atol=4e-3)


@pytest.mark.exhaustive
def test_rows_without_documents_and_other_keys(monkeypatch):
    monkeypatch.setattr(cudnn, "ON_CPU", emulated)
    arrays = drawn((2, 16, 4, 2, 8))
    for options in ({"causal": True}, {"window": 5}, {}):
        for x, y in zip(both("cudnn", arrays, **options), both("reference", arrays, **options), strict=True):
            np.testing.assert_allclose(x, y, atol=4e-3)


@pytest.mark.exhaustive
def test_more_documents_than_there_is_room_for_give_nan(monkeypatch):
    monkeypatch.setattr(cudnn, "ON_CPU", emulated)
    arrays = drawn((1, 24, 2, 2, 8))
    ids = jnp.arange(24)[None] // 4
    right, wrong = (both("cudnn", arrays, causal=True, segment_ids=ids, max_segments=n)[0] for n in (6, 5))
    assert jnp.isfinite(right).all()
    assert jnp.isnan(wrong).any()


def test_a_cpu_is_refused():
    q, k, v, _ = drawn((1, 8, 2, 2, 8))
    with pytest.raises(Exception, match="the cudnn implementation needs an NVIDIA GPU"):
        jax.block_until_ready(attention(q, k, v, implementation="cudnn"))


CALL = Request("bfloat16", 4096, 4096, 32, 128)
PACKED = Request("bfloat16", 4096, 4096, 32, 128, has_segments=True, max_segments=32)


@pytest.mark.parametrize(
    ("change", "capability", "words"),
    [
        ({"dtype": "float32"}, 90, "q is float32"),
        ({"dim": 136}, 80, "q has dim 136"),
        ({"dim": 264}, 90, "q has dim 264"),
        ({"dim": 100}, 90, "multiples of 8"),
        ({"soft_cap": True}, 90, "soft_cap"),
        ({"deterministic": True}, 90, "deterministic"),
        ({"keys": 8192}, 90, "as many queries as keys"),
        ({}, 75, "compute capability is 7.5"),
        ({"has_segments": True, "max_segments": 9}, 89, "needs 9.0 or 10.0 for segments"),
        ({"has_segments": True}, 90, "max_segments"),
        ({"has_segments": True, "max_segments": 1}, 90, "needs at least 2 with segment_ids"),
        ({"has_segments": True, "max_segments": 9, "keys_have_own": True}, 90, "kv_segment_ids"),
        ({"has_segments": True, "max_segments": 9, "batch": 128}, 90, "2^31"),
        ({"has_segments": True, "max_segments": 9, "queries": 2**20, "keys": 2**20, "heads": 8}, 90, "GiB"),
    ],
)
def test_refusals_are_known_before_compiling(change, capability, words):
    call = Request(**{**vars(CALL), **change})
    why = attention_refusal("cudnn", call, capability)
    assert why is not None
    assert words in why
    assert attention_for_call(call, "auto", capability).implementation != "cudnn"


def test_wide_heads_are_compiled_for_a_gpu_that_is_not_installed():
    call = Request("bfloat16", 4096, 4096, 8, 256)
    assert attention_for_call(call, "auto", 90).implementation == "cudnn"
    assert attention_refusal("cudnn", call, None) is None


@pytest.mark.parametrize(
    ("call", "chosen"),
    [
        (CALL, {80: "cudnn", 86: "cudnn", 89: "cudnn", 90: "cudnn", 100: "cudnn", 120: "cudnn"}),
        (PACKED, {80: "triton", 86: "triton", 89: "triton", 90: "cudnn", 100: "cudnn", 120: "triton"}),
        (Request("float32", 64, 64, 2, 64), dict.fromkeys(TARGETS, "triton")),
        (Request("bfloat16", 64, 64, 2, 64, soft_cap=True), dict.fromkeys(TARGETS, "triton")),
        (Request("bfloat16", 64, 64, 2, 512), dict.fromkeys(TARGETS, "blockwise")),
        (CALL, {None: "blockwise", 75: "blockwise"}),
    ],
)
def test_the_choice_of_each_gpu(call, chosen):
    assert {capability: attention_for_call(call, "auto", capability).implementation for capability in chosen} == chosen


def test_an_implementation_that_failed_its_check_is_replaced_by_the_next():
    chosen = attention_for_call(CALL, "auto", 90, {"cudnn": "it is off by 3"})
    assert (chosen.implementation, "it is off by 3" in chosen.why) == ("triton", True)


@pytest.mark.parametrize(
    ("capability", "packed"),
    [exhaustive(89, False), (90, True), exhaustive(100, True)],
)
def test_it_compiles_for_each_gpu(capability, packed):
    """Without cuDNN: XLA's two calls, their FLOPs, and the workspace of the backward pass."""
    batch, time, heads, kv_heads, dim = 2, 512, 4, 2, 128
    mesh = Mesh(np.array(target_devices(parse_target(TARGETS[capability]), 8 * 2**30)[:1]), ("one",))
    place = NamedSharding(mesh, PartitionSpec())
    q, k = (jax.ShapeDtypeStruct((batch, time, n, dim), jnp.bfloat16, sharding=place) for n in (heads, kv_heads))
    ids = jax.ShapeDtypeStruct((batch, time), jnp.int32, sharding=place)

    def gradient(q, k, v, ids):
        options = {"segment_ids": ids, "max_segments": 8} if packed else {}
        run = lambda *a: attention(*a, causal=True, implementation="cudnn", **options).astype(jnp.float32)  # noqa: E731
        return jax.grad(lambda *a: (run(*a) ** 2).sum(), (0, 1, 2))(q, k, v)

    cut = jax.shard_map(gradient, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    with without_cache():
        module = read_module(compile_elsewhere(jax.jit(cut).lower(q, k, k, ids))[0])
    calls = {one.proto.custom_call_target: one for one in module.walk() if one.opcode == "custom-call"}
    assert set(calls) == {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
    seen = pairs(time, time, causal=True, window=None)
    assert total_flops(module) == pytest.approx(14 * batch * heads * seen * dim, rel=1e-6)
    call = cudnn.backward_part(
        cudnn.CudnnCall(batch, time, time, heads, kv_heads, dim, 1.0, True, None, 8 if packed else 1)
    )
    assert calls["__cudnn$fmhaSoftmaxBackward"].shape.parts[-1].bytes == cudnn.workspace(call, 2)
