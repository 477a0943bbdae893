"""Every implementation of the product with a weight in codes against float64, forward and backward, whole and cut."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxmem.kernels import QuantizedScales, dequant_matmul
from jaxmem.kernels.quantized_matmul import FORMS, IMPLEMENTATIONS, MATMUL_SHAPES, sliced
from jaxmem.quant import QTensor, quantize

# name: (tokens, inputs, outputs), format, block, double, dtype. Between them: several tiles along each dimension, ends
# that fill none, a tile of one block of constants and of several, groups of constants, blocks that inputs do not fill.
CASES = {
    "nf4": ((37, 256, 150), "nf4", 64, True, "float32"),
    "nf4, small blocks": ((5, 200, 33), "nf4", 8, True, "float32"),
    "fp4": ((16, 96, 40), "fp4", 32, False, "bfloat16"),
    "mxfp4": ((12, 96, 33), "mxfp4", 32, False, "float32"),
    "int4": ((10, 128, 70), "int4", 128, False, "float32"),
    "int8": ((20, 130, 65), "int8", 65, False, "float32"),
}
RAN: set[tuple[str, str]] = set()


def drawn(case):
    """x, the output's cotangent, and a weight in codes."""
    (tokens, inputs, outputs), form, block, double, dtype = CASES[case]
    rng = np.random.default_rng(0)
    x, g, w = (
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape in ((tokens, inputs), (tokens, outputs), (inputs, outputs))
    )
    return x, g, quantize(w, form, block, -2, double_quant=double)


def arguments(q):
    double = isinstance(q.scale, QTensor)
    scale = QuantizedScales(q.scale.codes, q.scale.scale, q.scale.offset) if double else q.scales
    return (q.codes, scale), {"format": q.format, "block_size": q.block_size}


def both(way, options, **more):
    def run(x, g, codes, scale):
        y, pull = jax.vjp(lambda x: dequant_matmul(x, codes, scale, implementation=way, **options, **more), x)
        return y, *pull(g)

    return run


@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward_equal_float64(case, monkeypatch):
    monkeypatch.setattr(sliced, "SLICE_ELEMENTS", 3000)
    x, g, q = drawn(case)
    arrays, options = arguments(q)
    run = jax.jit(lambda *a: {way: both(way, options)(*a) for way in IMPLEMENTATIONS})
    w = np.asarray(q.dequantize(x.dtype), np.float64)  # each value rounded once
    wanted = np.asarray(x, np.float64) @ w, np.asarray(g, np.float64) @ w.T
    tolerance = 2e-5 if x.dtype == jnp.float32 else 2**-8
    for way, got in run(x, g, *arrays).items():
        for one, other in zip(got, wanted, strict=True):
            assert one.dtype == x.dtype
            error = np.abs(np.asarray(one, np.float64) - other).max()
            assert error < tolerance * np.abs(other).max(), way
        RAN.add((way, case))


def test_every_implementation_ran_every_case():
    every = {(way, case) for way in IMPLEMENTATIONS for case in CASES}
    assert every == RAN
    assert {form for _, form, *_ in CASES.values()} == set(FORMS)


def test_each_device_its_own_tokens():
    """Codes whole on each device, tokens split: the same numbers, and nothing is sent."""
    x, g, q = drawn("int4")
    arrays, options = arguments(q)
    mesh = Mesh(np.array(jax.devices()[:2]), ("d",))
    split, same = PartitionSpec("d"), PartitionSpec()
    run = both("sliced", options)
    cut = jax.shard_map(run, mesh=mesh, in_specs=(split, split, same, same), out_specs=split, check_vma=False)
    compiled = jax.jit(cut).lower(x, g, *arrays).compile()
    assert not re.findall(r"all-gather|all-reduce|all-to-all|collective-permute", compiled.as_text())
    y, of_x = compiled(x, g, *arrays)
    w = q.dequantize(x.dtype)
    np.testing.assert_allclose(y, x @ w, atol=1e-4)
    np.testing.assert_allclose(of_x, g @ w.T, atol=1e-4)


@pytest.mark.parametrize(("form", "block", "inputs"), [("nf4", 16, 100), ("nf4", 5, 90), ("int8", 7, 66)])
def test_slices_take_blocks_of_any_size(form, block, inputs, monkeypatch):
    """Odd ones, whose bytes hold values of two, and some that inputs do not fill."""
    monkeypatch.setattr(sliced, "SLICE_ELEMENTS", 400)
    rng = np.random.default_rng(0)
    x, g = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((3, inputs), (3, 20)))
    low, high = (0, 256) if form == "nf4" else (-127, 128)
    codes = jnp.asarray(
        rng.integers(low, high, (inputs // 2 if form == "nf4" else inputs, 20)).astype(
            "uint8" if form == "nf4" else "int8"
        )
    )
    scale = jnp.asarray(rng.random((-(-inputs // block), 20)), jnp.float32)
    options = {"format": form, "block_size": block}
    run = jax.jit(lambda *a: [both(way, options)(*a) for way in ("sliced", "reference")])
    for one, other in zip(*run(x, g, codes, scale), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_a_slice_of_the_weight_is_all_that_is_held():
    shape = MATMUL_SHAPES["llama3-8b up"]
    q = jax.eval_shape(lambda: quantize(jnp.zeros((shape.inputs, shape.outputs)), "nf4", 64, -2, double_quant=True))
    (codes, scale), options = arguments(q)
    x, g = (jax.ShapeDtypeStruct((1, size), jnp.bfloat16) for size in (shape.inputs, shape.outputs))

    def held(way):
        made = jax.jit(both(way, options)).lower(x, g, codes, scale).compile()
        return made.memory_analysis().temp_size_in_bytes

    whole = shape.inputs * shape.outputs * 2
    assert held("reference") > whole
    assert held("sliced") < 0.8 * whole  # in float32 for a moment, which a GPU fuses
