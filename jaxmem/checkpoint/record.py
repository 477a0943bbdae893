"""The record that a checkpoint contains besides its arrays: step, data position, config, metrics, and the shape, dtype
and checksum of each array.

The record has its own checksum. The checksum of an array does not depend on how the array is sharded. It is computed on
the device, so it also detects errors of the transfer from the device to the disk and back. It costs one read of the
array on the device, no temporary array, and eight bytes of result.
"""

import json
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from jaxtyping import Array, Shaped, UInt32

from jaxmem.checkpoint.orbax_errors import ORBAX_EXCEPTIONS, root_cause
from jaxmem.errors import UserError, abridge
from jaxmem.typing import JsonDict, JsonView, Tree


class DamagedError(UserError):
    """A checkpoint that does not read back as it was written."""


def damaged(checkpoint: epath.Path, reason: str) -> DamagedError:
    return DamagedError(f"checkpoint {checkpoint} is damaged: {reason}")


def make_record(leaves: Mapping[str, jax.Array], **sections: Any) -> JsonDict:
    saved = {name: [x.shape, str(x.dtype), checksum(x)] for name, x in leaves.items()}
    record = json.loads(json.dumps({**sections, "leaves": saved}))
    return {**record, "crc32": _crc(record)}


def read_record(checkpoint: epath.Path) -> JsonDict:
    try:
        record = json.loads(_file(checkpoint).read_text())
    except ORBAX_EXCEPTIONS as error:
        raise damaged(checkpoint, root_cause(error)) from error
    if not isinstance(record, dict) or record.pop("crc32", None) != _crc(record):
        raise damaged(checkpoint, "its data position and config do not match their checksum")
    if record.get("step", int(checkpoint.name)) != int(checkpoint.name):
        raise damaged(checkpoint, f"it is a copy of the checkpoint of step {record['step']}")
    return record


def add_metrics(checkpoint: epath.Path, metrics: Mapping[str, float]) -> None:
    """Adds the metrics of an evaluation to the record of a checkpoint that was saved before it."""
    record = read_record(checkpoint)
    record["metrics"] |= metrics
    file = _file(checkpoint)
    unfinished = file.with_name("metadata.part")
    unfinished.write_text(json.dumps({**record, "crc32": _crc(record)}))
    unfinished.replace(file)


def _file(checkpoint: epath.Path) -> epath.Path:
    """Where Orbax's JsonSave stores `run`."""
    return checkpoint / "run" / "metadata"


def _crc(record: JsonView) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())


def named_leaves(tree: Tree) -> dict[str, Any]:
    """The arrays of a tree by path, such as params.layers.q.weight."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def check_savable(leaves: Mapping[str, Any]) -> None:
    """Refuses leaves that a checkpoint cannot contain."""
    for name, leaf in leaves.items():
        if not isinstance(leaf, jax.Array):
            raise UserError(
                f"cannot save {name}, a {type(leaf).__name__}; use jax.numpy.asarray to make it a jax array"
            )
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise UserError(
                f"cannot save {name}, a random key; use jax.random.key_data, and wrap_key_data after a restore"
            )
        is_wide_float = jnp.issubdtype(leaf.dtype, jnp.floating) and jnp.finfo(leaf.dtype).bits >= 8
        is_number = is_wide_float or leaf.dtype == jnp.bool_ or jnp.issubdtype(leaf.dtype, jnp.integer)
        if not is_number or leaf.size == 0:
            given = f"{leaf.dtype}{list(leaf.shape)}"
            raise UserError(
                f"cannot save {name}, {given}; use integers, booleans or floats of at least 8 bits, and arrays that are"
                " not empty"
            )


def check_leaves(checkpoint: epath.Path, saved: JsonView, expected: JsonView) -> None:
    """Refuses a checkpoint whose arrays have other names, shapes or dtypes than those of the run."""
    if unplaced := [name for name, leaf in expected.items() if leaf.sharding is None]:
        # Orbax would use the sharding that the array was saved with.
        raise ValueError(f"no sharding to restore to: {abridge(unplaced)}")
    wrong = []
    for name in {**saved, **expected}:
        there = f"{saved[name][1]}{list(saved[name][0])}" if name in saved else "absent"
        here = f"{expected[name].dtype}{list(expected[name].shape)}" if name in expected else "absent"
        if there != here:
            wrong.append(f"{name} is {there} in the checkpoint and {here} in this run")
    if wrong:
        mismatch = f"checkpoint {checkpoint} is from another model or optimizer"
        raise UserError(
            f"{mismatch}: {abridge(wrong, 3, '; ')}; use the config with which it was saved, and in a script"
            " the same arguments (model, layers, axes, optimizer)"
        )


Sums = tuple[UInt32[Array, ""], UInt32[Array, ""]]


def checksum(leaf: jax.Array) -> int:
    """The checksum of an array. Waits for the result, since simulated CPU devices deadlock with more than 32 running
    programs."""
    plain, weighted = (int(value.addressable_data(0)) for value in sum_bits(to_device(leaf)))  # a scalar is replicated
    return plain | weighted << 32


def to_device(leaf: jax.Array) -> jax.Array:
    """The array, copied to the device if it is offloaded."""
    if leaf.sharding.memory_kind != "pinned_host":
        return leaf
    return jax.device_put(leaf, leaf.sharding.with_memory_kind("device"))


@jax.jit
def sum_bits(x: Shaped[Array, "*shape"]) -> Sums:
    """Two sums modulo 2^32: of the bits of all elements as integers, and of these integers times an odd number that
    depends on the position of the element.

    Integer sums do not depend on their order, so they are the same on any mesh. One changed bit always changes
    both sums: an odd multiple of 2^k, k < 32, is not 0 modulo 2^32. Elements that swap positions change the second sum.
    Both sums are one reduction, which XLA fuses with its operand; on CPUs it would split a single sum into windows over
    a materialized array.
    """
    bits = _bits(x)
    place = jnp.zeros(bits.shape, jnp.uint32)
    for dim in range(bits.ndim):
        place = place * jnp.uint32(0x9E3779B1) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
    products = bits * (place * jnp.uint32(2) + jnp.uint32(1))
    zero = jnp.uint32(0)
    plain, weighted = jax.lax.reduce((bits, products), (zero, zero), _add, tuple(range(bits.ndim)))
    return plain, weighted


def _add(a: Sums, b: Sums) -> Sums:
    return a[0] + b[0], a[1] + b[1]


def _bits(x: Shaped[Array, "*shape"]) -> UInt32[Array, "*words"]:
    """64-bit elements become two words; types narrower than a byte are widened."""
    if x.dtype == jnp.bool_ or jnp.dtype(x.dtype).name in ("int2", "int4", "uint2", "uint4"):
        return x.astype(jnp.int32).astype(jnp.uint32)
    width = min(jnp.dtype(x.dtype).itemsize, 4)
    words = jax.lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[width])
    return words.astype(jnp.uint32)
