"""How many machine instructions a kernel takes for each number, which is what keeps it from the memory's bandwidth; and
that what is compiled for a GPU, where kernels are written in single instructions, computes what the reference does."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.errors import UserError
from jaxmem.kernels import Moments8, adam8_update, int8_add
from tests.kernels import ptx

spec = importlib.util.spec_from_file_location(
    "kernel_instructions", Path(__file__).parents[2] / "scripts/kernel_instructions.py"
)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
HOPPER = "h200-141gb"
ROWS, SIZE = 8, 256  # what a program has


@functools.cache
def compiled(name):
    case = next(case for case in script.cases() if case.name == name)
    return case, script.ptx(case, HOPPER)


def drawn(rng):
    g = rng.standard_normal((ROWS, SIZE)) * 10.0 ** rng.integers(-6, 1, (ROWS, SIZE))
    g[3] = 0
    g[5, 7] = np.nan
    return g.astype(jnp.bfloat16)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("adam8_update along columns", 73),
        ("adam8_update along rows", 84),
        ("int8_add along columns", 36),
        ("int8_add along rows", 42),
        ("rms_norm", 14),
    ],
)
def test_instructions_of_a_number_on_hopper(name, most):
    found = script.counted(*compiled(name), HOPPER)
    assert most / 2 < found.instructions <= most
    assert found.slots >= found.instructions


def test_adam8_update_as_compiled():
    rng = np.random.default_rng(0)
    g, m, v = drawn(rng), *(rng.integers(0, 256, (ROWS, SIZE)).astype(np.uint8) for _ in range(2))
    scales = [rng.random(ROWS).astype(np.float32) * (np.arange(ROWS) != 3) for _ in range(2)]
    unbiased = np.asarray([1 - 0.9**3, 1 - 0.95**3], np.float32)
    made = [np.zeros_like(g), m.copy(), v.copy(), *(scale.copy() for scale in scales)]
    ptx.run(compiled("adam8_update along columns")[1], [g, m.copy(), v.copy(), *scales, unbiased, *made], (0, 0))

    state = Moments8(*map(jnp.asarray, (m, v, *(scale[:, None] for scale in scales))))
    u, new = jax.jit(lambda *a: adam8_update(*a, implementation="reference"))(g, state, unbiased)
    np.testing.assert_allclose(made[0].astype(np.float32), np.asarray(u, np.float32), rtol=2.0**-8, atol=1e-6)
    assert np.isnan(new.v_scale).sum() == 1
    there = ~np.isnan(np.asarray(new.v_scale)[:, 0])  # codes of a block with a NaN stand for NaN, whatever they are
    np.testing.assert_array_equal(made[1][there], new.m[there])
    np.testing.assert_array_equal(made[2][there], new.v[there])
    np.testing.assert_allclose(made[3], new.m_scale[:, 0], rtol=1e-6)
    np.testing.assert_allclose(made[4], new.v_scale[:, 0], rtol=1e-6)


def test_int8_add_as_compiled():
    rng = np.random.default_rng(1)
    update, codes = drawn(rng), rng.integers(-127, 128, (ROWS, SIZE)).astype(np.int8)
    scale, seeds = rng.random(ROWS).astype(np.float32), rng.integers(0, 2**32, ROWS, np.uint32)
    made = [np.zeros_like(codes), np.zeros_like(scale)]
    ptx.run(compiled("int8_add along columns")[1], [codes.copy(), scale, update, seeds, *made], (0, 0))

    add = jax.jit(lambda *a: int8_add(*a, axis=-1, implementation="reference"))
    wanted, most = add(codes, scale[:, None], update, seeds[:, None])
    there = ~np.isnan(np.asarray(most)[:, 0])
    assert there.sum() == ROWS - 1
    np.testing.assert_array_equal(made[0][there], wanted[there])
    np.testing.assert_allclose(made[1], most[:, 0], rtol=1e-6)


def test_a_missing_disassembler_is_said(monkeypatch):
    monkeypatch.setattr(script, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="nvdisasm, which comes with the wheel triton, is not installed"):
        script.tool("nvdisasm")
