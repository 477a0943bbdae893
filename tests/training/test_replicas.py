"""Replicas that should be equal, and one that is not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.errors import UserError
from jaxmem.training.restore import check_replicas


def laid(values, *axes):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("replica", "fsdp"))
    return jax.device_put(jnp.asarray(values), NamedSharding(mesh, P(*axes)))


def with_one_wrong(x, device):
    """The same, but for one bit of what one device holds."""
    parts = [np.array(shard.data) for shard in x.addressable_shards]
    parts[device].view(np.uint32).flat[0] ^= 1 << 9
    placed = [jax.device_put(part, shard.device) for part, shard in zip(parts, x.addressable_shards, strict=True)]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, placed)


def test_one_bit_on_one_device_is_found():
    w = laid(np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32), "fsdp")
    norm = laid(np.ones(6, np.float32))
    check_replicas({"w": w, "norm": norm}, 4)
    with pytest.raises(UserError, match=r"norm differs .* after step 4: device 5 of process 0 .* of 8 copies"):
        check_replicas({"w": w, "norm": with_one_wrong(norm, 5)}, 4)
    with pytest.raises(UserError, match=r"w differs .*: device [26] of process 0 .* of 2 copies"):  # either is wrong
        check_replicas({"w": with_one_wrong(w, 2), "norm": norm}, 4)
