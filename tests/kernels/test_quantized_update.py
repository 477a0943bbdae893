"""The 8-bit updates against float64 and against the reference, in any cut; what they refuse."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxmem.kernels import Moments8, adam8_update, int8_add
from jaxmem.kernels.codes import dynamic_code
from jaxmem.kernels.quantized_update import IMPLEMENTATIONS
from jaxmem.quant import quantize

# name: shape, axis, block. Blocks that are powers of two and not, several programs and ends that fill none.
CASES = {"along columns": ((3, 8, 512), -1, 256), "along rows": ((2, 86, 45), -2, 43)}
RAN: set[tuple[str, str]] = set()
UNBIASED = jnp.asarray([1 - 0.9**3, 1 - 0.95**3], jnp.float32)


def drawn(case):
    """A gradient, with a block of zeros, and a state that earlier ones left."""
    shape, axis, block = CASES[case]
    rng = np.random.default_rng(0)
    g = rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 1, shape)
    g.reshape(-1)[:] = np.where(np.arange(g.size) < 600, 0, g.reshape(-1))
    m, v = (
        quantize(jnp.asarray(x, jnp.float32), form, block, axis)
        for x, form in ((0.3 * g, "dynamic8"), (0.1 * g * g, "udynamic8"))
    )
    return jnp.asarray(g, jnp.float32), Moments8(m.codes, v.codes, m.scale, v.scale), m, v


def both(case, way, g, state, weight, seeds):
    _, axis, block = CASES[case]
    options = {"axis": axis, "block_size": block, "implementation": way}
    return adam8_update(g, state, UNBIASED, **options), int8_add(weight.codes, weight.scale, g, seeds, **options)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_both_updates_equal_float64(case):
    g, state, m, v = drawn(case)
    _, axis, block = CASES[case]
    weight = quantize(0.2 * jax.random.normal(jax.random.key(1), g.shape), "int8", block, axis)
    seeds = jax.random.bits(jax.random.key(2), weight.scale.shape, jnp.uint32)
    run = jax.jit(lambda *a: {way: both(case, way, *a) for way in IMPLEMENTATIONS})
    found = run(g, state, weight, seeds)

    wide = np.asarray(g, np.float64)
    new_m = 0.9 * np.asarray(m.dequantize(jnp.float32), np.float64) + 0.1 * wide
    new_v = 0.95 * np.asarray(v.dequantize(jnp.float32), np.float64) + 0.05 * wide**2
    u = new_m / float(UNBIASED[0]) / (np.sqrt(new_v / float(UNBIASED[1])) + 1e-8)
    summed = np.asarray(weight.dequantize(jnp.float32), np.float64) + wide
    for way, ((got_u, new), (codes, scale)) in found.items():
        np.testing.assert_allclose(got_u, u, rtol=1e-4, atol=1e-6, err_msg=way)
        for name, number, signed in (("m", new_m, True), ("v", new_v, False)):
            most = spread(np.asarray(getattr(new, f"{name}_scale")), axis, block)
            listed = np.asarray(dynamic_code(8, signed=signed))
            inside = np.where(most > 0, number / np.where(most > 0, most, 1), 0)
            place = np.asarray(getattr(new, name)).astype(int)
            middle = (listed[1:] + listed[:-1]) / 2
            nearest = np.searchsorted(middle, inside)
            nearest = nearest if signed else np.maximum(nearest, 1)
            error, least = np.abs(listed[place] - inside), np.abs(listed[nearest] - inside)
            assert np.all(error <= least * (1 + 1e-4) + 1e-9), (way, name)
        step = spread(np.asarray(scale, np.float64), axis, block) / 127
        kept = np.asarray(codes, np.float64) * step
        assert np.all(np.abs(kept - summed) <= step * 1.001 + 1e-12), way
        # Up or down as a coin says that knows how far each way it is.
        moved = np.where(step > 0, (kept - summed) / np.where(step > 0, step, 1), 0)
        assert abs(moved.mean()) < 4 * 0.5 / np.sqrt(moved.size), way
        RAN.add((way, case))
    np.testing.assert_array_equal(found["triton"][1][0], found["reference"][1][0])  # the same draws


@pytest.mark.exhaustive
def test_every_implementation_ran():
    """An update that was skipped does not count as passed."""
    assert {(way, case) for way in IMPLEMENTATIONS for case in CASES} == RAN


def spread(scale, axis, block):
    return np.repeat(scale, block, axis=axis)


@pytest.mark.parametrize("way", IMPLEMENTATIONS)
def test_nan_is_not_hidden(way):
    """In one place of a gradient: its block's constants are NaN, in this step and all that follow; no other's."""
    case = "along rows"
    g, state, *_ = drawn(case)
    _, axis, block = CASES[case]
    weight = quantize(0.2 * jax.random.normal(jax.random.key(1), g.shape), "int8", block, axis)
    seeds = jnp.zeros(weight.scale.shape, jnp.uint32)
    run = jax.jit(lambda *a: both(case, way, *a))
    (u, new), (codes, scale) = run(g.at[1, 2, 3].set(jnp.nan), state, weight, seeds)
    wanted = np.zeros(weight.scale.shape, bool)
    wanted[1, 0, 3] = True
    assert np.isnan(u).sum() == 1
    weight = dataclasses.replace(weight, codes=codes, scale=scale)
    (_, later), (_, later_scale) = run(g, new, weight, seeds)
    for one in (new.m_scale, new.v_scale, scale, later.m_scale, later.v_scale, later_scale):
        np.testing.assert_array_equal(np.isnan(one), wanted)


def test_each_device_its_own_blocks():
    """Under shard_map: the same, and nothing is sent."""
    g, state, *_ = drawn("along columns")
    run = lambda g, state: adam8_update(g, state, UNBIASED, implementation="triton")  # noqa: E731
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    split = PartitionSpec(None, None, "d")
    cut = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))
    compiled = cut.lower(g, state).compile()
    assert not re.findall(r"all-gather|all-reduce|all-to-all|collective-permute", compiled.as_text())
    wanted = jax.jit(lambda *a: adam8_update(*a, UNBIASED, implementation="reference"))(g, state)
    np.testing.assert_allclose(compiled(g, state)[0], wanted[0], rtol=1e-5, atol=1e-6)

    weight = quantize(0.2 * jax.random.normal(jax.random.key(1), g.shape), "int8", 256, -1)
    arrays = weight.codes, weight.scale, g, jax.random.bits(jax.random.key(2), weight.scale.shape, jnp.uint32)
    add = lambda way: lambda *arrays: int8_add(*arrays, axis=-1, implementation=way)  # noqa: E731
    cut = jax.jit(jax.shard_map(add("triton"), mesh=mesh, in_specs=split, out_specs=split, check_vma=False))
    compiled = cut.lower(*arrays).compile()
    assert not re.findall(r"all-gather|all-reduce|all-to-all|collective-permute", compiled.as_text())
    wanted = jax.jit(add("triton"))(*arrays)
    np.testing.assert_array_equal(compiled(*arrays)[0], wanted[0])  # the same draws
    np.testing.assert_array_equal(compiled(*arrays)[1], wanted[1])
