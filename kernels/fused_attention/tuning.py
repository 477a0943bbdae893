"""Block sizes of the attention kernels: defaults that fit every GPU from Ampere on, and the sizes to measure."""

import functools
import itertools

import jax

from jaxmem.kernels import tuning

from .block import Blocks

PASSES = ("forward", "d_queries", "d_keys")  # those of `triton`; `mosaic` has "forward" and "gradients"

# (largest bytes per element, largest head_dim) -> block sizes. A forward block stores
# (queries + 2 x keys x stages) x head_dim elements in shared memory, of which a consumer GPU has 99 KB. d_keys
# keeps two sums of keys x head_dim in registers, which would spill with larger blocks of queries.
USUAL = {
    "forward": {
        (2, 64): Blocks(128, 64, 8, 3),
        (2, 128): Blocks(128, 64, 8, 2),
        (2, 256): Blocks(64, 32, 8, 2),
        (4, 64): Blocks(32, 32, 4, 2),
        (4, 256): Blocks(32, 16, 4, 2),
    },
    "d_queries": {
        (2, 64): Blocks(64, 64, 4, 2),
        (2, 128): Blocks(64, 64, 8, 1),
        (2, 256): Blocks(32, 32, 4, 1),
        (4, 128): Blocks(32, 32, 4, 1),
        (4, 256): Blocks(16, 16, 4, 1),
    },
    "d_keys": {
        (2, 64): Blocks(32, 128, 8, 2),
        (2, 128): Blocks(32, 64, 8, 1),
        (2, 256): Blocks(32, 32, 8, 1),
        (4, 128): Blocks(32, 32, 4, 1),
        (4, 256): Blocks(16, 16, 4, 1),
    },
}
# The two computing warpgroups of `mosaic` are 8 warps.
MOSAIC = {
    ("forward", 2, 64): Blocks(128, 128, 8, 3),
    ("forward", 2, 128): Blocks(128, 128, 8, 2),
    ("forward", 2, 256): Blocks(128, 64, 8, 2),
    ("gradients", 2, 64): Blocks(64, 128, 8, 2),
    ("gradients", 2, 128): Blocks(64, 128, 8, 2),
}


def space(implementation: str, of: str, wide: int, itemsize: int, shared: int) -> list[Blocks]:
    """The block sizes to measure for a pass with heads of width `wide`: those that fit in shared memory and
    registers."""
    if implementation == "mosaic":  # two warpgroups of 64 rows
        own, others = (128,), (64, 128, 192)
        sizes = itertools.product(*((others, own) if of == "gradients" else (own, others)), (8,), (2, 3, 4))
    else:
        stages = (2, 3) if of == "forward" else (1, 2)
        sizes = itertools.product((32, 64, 128), (32, 64, 128), (4, 8), stages)
    return [blocks for blocks in itertools.starmap(Blocks, sizes) if _fits(of, blocks, wide, itemsize, shared)]


def _fits(of: str, blocks: Blocks, wide: int, itemsize: int, shared: int) -> bool:
    queries, keys, warps, stages = blocks
    # In shared memory: rows of `wide` elements that stay, and rows that are streamed. In registers: rows of the sums,
    # and the number of scores.
    stays, streamed, sums, scores = {
        "forward": (queries, 2 * keys, queries, queries * keys),
        "d_queries": (2 * queries, 2 * keys, queries, 2 * queries * keys),
        "d_keys": (2 * keys, 2 * queries, 2 * keys, 2 * queries * keys),
        # Shared memory also has the gradient of the scores, twice, and dq in float32.
        "gradients": (2 * keys + 2 * keys * queries // wide + 2 * queries, 2 * queries, 2 * keys, 2 * queries * keys),
    }[of]
    held = (stays + streamed * stages) * wide * itemsize
    threads = 32 * warps
    return held <= shared and (sums * wide + scores) / threads <= tuning.REGISTERS and queries * keys >= 8 * threads


def usual(implementation: str, of: str, wide: int, itemsize: int) -> Blocks:
    """
    >>> usual("triton", "forward", 128, 2), usual("triton", "forward", 32, 4)
    (Blocks(queries=128, keys=64, warps=8, stages=2), Blocks(queries=32, keys=32, warps=4, stages=2))
    """
    usual = USUAL["d_keys" if of == "gradients" else of]
    size, most = min(key for key in usual if key >= (itemsize, wide))
    return (MOSAIC if implementation == "mosaic" else {}).get((of, size, most), usual[size, most])


def blocks(implementation: str, of: str, q: jax.Array, k: jax.Array, wide: int) -> Blocks:
    """The block sizes of a pass."""
    itemsize = q.dtype.itemsize
    room = functools.partial(space, implementation, of, wide, itemsize)
    request = tuning.KernelCall(f"{implementation} {of}", f"{q.dtype.name} {wide}", (q.shape[1], k.shape[1]), room)
    return tuning.blocks("attention", request, usual(implementation, of, wide, itemsize))
