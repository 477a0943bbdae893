"""What evaluates Mosaic's kernels on a CPU notices what would go wrong on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxmem.kernels.mosaic_launch import THREAD, MosaicKernel, launch
from tests.kernels import warpgroups

ROWS = 64
TILES = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)


def summed(x, *, waits=1, given_back_before=False):
    """The products of blocks of x with themselves: one warpgroup copies them to the same place, another multiplies."""
    blocks = -(-x.shape[0] // ROWS)

    def program(x_ref, out_ref, memory):
        held, here, free, made = memory

        def multiply(sums):
            @pl.loop(0, blocks)
            def _(_):
                for _ in range(waits):
                    plgpu.barrier_wait(here)
                if given_back_before:
                    plgpu.barrier_arrive(free)
                plgpu.wgmma(sums, held, held.transpose((1, 0)))
                if not given_back_before:
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(free)

            return sums[...]

        @pl.when(lax.axis_index(THREAD) == 0)
        def _():
            made[...] = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((ROWS, ROWS), jnp.float32))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(made, out_ref)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(lax.axis_index(THREAD) == 1)
        def _():
            @pl.loop(0, blocks)
            def _(i):
                pl.when(i > 0)(lambda: plgpu.barrier_wait(free))
                plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(i * ROWS, ROWS)], held, here)

    held = plgpu.SMEM((ROWS, ROWS), x.dtype, transforms=TILES)
    memory = held, plgpu.Barrier(), plgpu.Barrier(), plgpu.SMEM((ROWS, ROWS), jnp.float32)
    out = jax.ShapeDtypeStruct((ROWS, ROWS), jnp.float32)
    (made,) = launch(MosaicKernel("summed", program, {"mosaic_block": 1}, 2, memory), [x], [out])
    return made


@pytest.mark.parametrize("length", [64, 192, 150])
def test_asynchronous_copies_and_matmuls(length):
    """Of the last block, which reaches beyond the end, the rest is zeros."""
    x = jax.random.normal(jax.random.key(0), (length, ROWS), jnp.float16)
    blocks = np.zeros((-(-length // ROWS), ROWS, ROWS))
    blocks.reshape(-1, ROWS)[:length] = np.asarray(x, np.float64)
    np.testing.assert_allclose(summed(x), sum(b @ b.T for b in blocks), rtol=1e-4, atol=1e-4)


def test_a_buffer_released_before_its_matmul_is_an_error():
    x = jax.random.normal(jax.random.key(0), (192, ROWS), jnp.float16)
    assert not np.allclose(summed(x, given_back_before=True), summed(x), atol=0.1)


def test_warpgroups_that_wait_for_each_other(monkeypatch):
    monkeypatch.setattr(warpgroups, "PATIENCE", 0.5)
    x = jnp.zeros((64, ROWS), jnp.float16)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"the warpgroups of a kernel wait for each other"):
        jax.block_until_ready(summed(x, waits=2))
