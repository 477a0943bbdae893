"""A checksum is of the bits, wherever they lie, and costs no memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem.checkpoint.record import checksum, sum_bits
from tests.checkpoint.conftest import mesh
from tests.support.tiers import cases


@pytest.mark.parametrize(
    "dtype", cases(["float32", "bfloat16", "int8", "uint4", "bool", "float8_e4m3fn"], "bfloat16", "uint4")
)
def test_checksum(dtype: str) -> None:
    x = jax.random.randint(jax.random.key(0), (8, 16), 0, 2).astype(dtype)
    sums = {checksum(jax.device_put(x, NamedSharding(on, PartitionSpec("fsdp", "tensor")))) for on in MESHES}
    assert len(sums) == 1
    other = x.at[3, 5].set((x[3, 5] == jnp.zeros((), dtype)).astype(dtype))
    swapped = x.at[0].set(x[1]).at[1].set(x[0])
    sums |= {checksum(other), checksum(swapped)}
    assert len(sums) == 3


MESHES = (mesh(1, 1), mesh(2, 2), mesh(8, 1), mesh(4, 2))


def test_checksum_sees_any_one_bit() -> None:
    x = np.random.default_rng(0).integers(0, 2**32, (5, 7), np.uint32)
    whole = checksum(jnp.asarray(x))
    for place, bit in ((0, 0), (17, 31), (34, 16), (6, 30)):
        y = x.copy()
        y.flat[place] ^= np.uint32(1 << bit)
        assert checksum(jnp.asarray(y)) != whole
    assert checksum(jnp.asarray(x.view(np.float32))) == whole  # bits, not values: NaNs have one too


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_checksum_costs_no_memory(dtype: Any) -> None:
    """In compiled bytes: nothing beside the array and the result grows with the array."""
    sharding = NamedSharding(mesh(4, 2), PartitionSpec("fsdp", "tensor"))
    compiled = sum_bits.lower(jax.ShapeDtypeStruct((4096, 1024), dtype, sharding=sharding)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096 * 1024 // 100
