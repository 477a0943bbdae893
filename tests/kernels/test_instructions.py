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
from jaxmem.kernels.adam8_update.arguments import Adam
from jaxmem.kernels.adam8_update.pallas import divisor
from tests.kernels import ptx

spec = importlib.util.spec_from_file_location(
    "kernel_instructions", Path(__file__).parents[2] / "scripts/measure/kernel_instructions.py"
)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
HOPPER = "h200-141gb"
ROWS, SIZE = 16, 256  # what a program has


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
        ("adam8_update along columns", 66),
        ("adam8_update along rows", 69),
        ("int8_add along columns", 22),
        ("int8_add along rows", 28),
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
    below = np.asarray(divisor(Adam(0.9, 0.95, 1e-8), jnp.asarray(unbiased)))
    made = [np.zeros_like(g), m.copy(), v.copy(), *(scale.copy() for scale in scales)]
    ptx.run(compiled("adam8_update along columns")[1], [g, m.copy(), v.copy(), *scales, below, *made], (0, 0))

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


def test_int8_add_along_rows_as_compiled():
    """A program of some columns in the middle: its neighbours are half of the rows apart in its registers."""
    columns, first = 14336, 3 * 32
    rng = np.random.default_rng(2)
    codes = rng.integers(-127, 128, (SIZE, columns)).astype(np.int8)
    update = (0.3 * rng.standard_normal((SIZE, columns))).astype(jnp.bfloat16)
    scale, seeds = rng.random(columns).astype(np.float32), rng.integers(0, 2**32, columns, np.uint32)
    made = [np.zeros_like(codes), np.zeros_like(scale)]
    ptx.run(compiled("int8_add along rows")[1], [codes, scale, update, seeds, *made], (first // 32, 0))

    own = slice(first, first + 32)
    add = jax.jit(lambda *a: int8_add(*a, implementation="reference"))
    wanted, most = add(codes[:, own], scale[None, own], update[:, own], seeds[None, own])
    np.testing.assert_array_equal(made[0][:, own], wanted)
    np.testing.assert_allclose(made[1][own], most[0], rtol=1e-6)
    assert not made[0][:, : own.start].any()
    assert not made[0][:, own.stop :].any()


def test_a_missing_disassembler_is_said(monkeypatch):
    monkeypatch.setattr(script, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="nvdisasm, which comes with the wheel triton, is not installed"):
        script.tool("nvdisasm")
