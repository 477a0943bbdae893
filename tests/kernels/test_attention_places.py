"""What attention holds beside its arguments, and how it splits over devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmem.kernels import attention
from jaxmem.kernels.fused_attention import IMPLEMENTATIONS, blockwise
from tests.kernels.exact import TOLERANCE, WAYS, drawn, with_segments

# ---------------------------------------------------------------- what it holds


def temporaries(shape, **options):
    """Bytes that the compiled gradient allocates beside arguments and results."""
    batch, queries, keys, heads, kv_heads, dim = shape
    q = jax.ShapeDtypeStruct((batch, queries, heads, dim), jnp.float32)
    k = jax.ShapeDtypeStruct((batch, keys, kv_heads, dim), jnp.float32)

    def loss(q, k, v):
        return jnp.sum(attention(q, k, v, **options) ** 2)

    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", [way for way in WAYS if way.startswith("blockwise")])
def test_batch_and_heads_are_sharded(way, monkeypatch):
    """GSPMD: the same values as on one device, and not one element moves between devices."""
    for constant, value in WAYS[way].items():
        monkeypatch.setattr(blockwise, constant, value)
    shape, options = (4, 96, 96, 4, 2, 8), {"causal": True, "segments": 3}
    options = with_segments(shape, options)
    ids = options.pop("segment_ids")
    del options["kv_segment_ids"]
    arrays = drawn(shape)

    def both(q, k, v, d_out, ids):
        name = way.split(",")[0]
        run = lambda q, k, v: attention(q, k, v, segment_ids=ids, implementation=name, **options)  # noqa: E731
        out, pull = jax.vjp(run, q, k, v)
        return (out, *pull(out), *pull(d_out))

    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))
    by_head = NamedSharding(mesh, PartitionSpec("fsdp", None, "tensor", None))
    places = *[by_head] * 4, NamedSharding(mesh, PartitionSpec("fsdp"))
    given_ = (*arrays, ids)
    compiled = jax.jit(both, in_shardings=places).lower(*given_).compile()
    for x, y in zip(jax.jit(both)(*given_), compiled(*map(jax.device_put, given_, places)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    moved = re.findall(r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter", compiled.as_text())
    assert not moved
    assert all(x.is_equivalent_to(by_head, 4) for x in compiled.output_shardings[:4])


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", [name for name in IMPLEMENTATIONS if name != "cudnn"])
def test_each_device_its_own_batch_and_heads(way):
    """What XLA cannot cut by itself is called on each device's part."""
    shape = (4, 40, 40, 4, 2, 8)
    arrays = drawn(shape)
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))
    by_head = PartitionSpec("fsdp", None, "tensor", None)

    def both(q, k, v, d_out):
        out, pull = jax.vjp(lambda q, k, v: attention(q, k, v, causal=True, implementation=way), q, k, v)
        return (out, *pull(d_out))

    cut = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=(by_head,) * 4, out_specs=(by_head,) * 4, check_vma=False))
    for x, y in zip(jax.jit(both)(*arrays), cut(*arrays), strict=True):
        np.testing.assert_allclose(x, y, rtol=TOLERANCE / 2, atol=TOLERANCE / 2)
