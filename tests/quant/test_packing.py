import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.quant.formats import pack, unpack

BITS = (2, 3, 4, 5, 6, 8)
GROUP = {2: 4, 3: 8, 4: 2, 5: 8, 6: 4, 8: 1}  # codes that end on a byte


@pytest.mark.exhaustive
@settings(max_examples=20)  # each is two programs to compile
@given(st.sampled_from(BITS), st.integers(0, 40), st.sampled_from([-1, -2, -3]), st.integers(0, 2**32 - 1))
def test_unpack_inverts_pack_in_the_fewest_bytes(bits, size, axis, seed):
    shape = [2, 3, 2]
    shape[axis] = size
    codes = np.random.default_rng(seed).integers(0, 2**bits, shape, np.uint8)
    packed = jax.jit(pack, static_argnums=(1, 2))(codes, bits, axis)
    assert packed.dtype == np.uint8
    assert packed.shape[axis] == -(-size // GROUP[bits]) * GROUP[bits] * bits // 8
    np.testing.assert_array_equal(jax.jit(unpack, static_argnums=(1, 2, 3))(packed, bits, axis, size), codes)


@pytest.mark.exhaustive
def test_the_first_code_has_the_highest_bits():
    assert pack(jnp.asarray([0xA, 0x3, 0x0, 0xF], jnp.uint8), 4, -1).tolist() == [0xA3, 0x0F]
    assert pack(jnp.asarray([1, 2, 3, 0], jnp.uint8), 2, -1).tolist() == [0b01101100]
    assert pack(jnp.asarray([0b101, 0b110, 0b011, 0, 0, 0, 0, 1], jnp.uint8), 3, -1).tolist() == [
        0b10111001,
        0b10000000,
        1,
    ]
