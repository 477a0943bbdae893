"""Weights that other tools quantized, against the values that those tools decode."""

import jax.numpy as jnp
import numpy as np

from jaxmem.hf.quantized import mxfp4_weight

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def test_mxfp4_blocks_of_experts_become_a_weight_of_in_by_out():
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 3, 4, 16)).astype(np.uint8)  # experts, out, blocks, bytes
    scales = rng.integers(100, 140, (2, 3, 4)).astype(np.uint8)
    q = mxfp4_weight(jnp.asarray(blocks), jnp.asarray(scales))
    values = E2M1[np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(2, 3, 4, 32)]
    values = values * 2.0 ** (scales[..., None].astype(int) - 127)
    np.testing.assert_array_equal(q.dequantize(jnp.float32), values.reshape(2, 3, 128).swapaxes(1, 2))
    assert (q.shape, q.nbytes * 8 / np.prod(q.shape)) == ((2, 128, 3), 4.25)
