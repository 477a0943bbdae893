"""The sizes of the kernels' blocks: the usual ones fit every GPU from Ampere on; others, where there is room."""

import functools
import itertools

import jax

from jaxmem.kernels import tuning

from .block import Blocks

PASSES = ("forward", "d_queries", "d_keys")  # of `triton`; `mosaic` has forward and "gradients"

# By the bytes of a number and the width of a head, up to which they hold. A forward block takes (queries + 2 keys
# stages) width numbers of shared memory: a consumer GPU gives it 99 KB. d_keys keeps two sums of keys x width in
# registers, so its blocks of queries are small: more, and they spill.
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
# The two warpgroups of `mosaic` that compute are 8 warps.
MOSAIC = {
    ("forward", 2, 64): Blocks(128, 128, 8, 3),
    ("forward", 2, 128): Blocks(128, 128, 8, 2),
    ("forward", 2, 256): Blocks(128, 64, 8, 2),
    ("gradients", 2, 64): Blocks(64, 128, 8, 2),
    ("gradients", 2, 128): Blocks(64, 128, 8, 2),
}


def space(implementation: str, of: str, wide: int, itemsize: int, shared: int) -> list[Blocks]:
    """What may be measured for a pass of heads of `wide`: what has room in shared memory and in registers."""
    if implementation == "mosaic":  # two warpgroups of 64 rows
        own, others = (128,), (64, 128, 192)
        sizes = itertools.product(*((others, own) if of == "gradients" else (own, others)), (8,), (2, 3, 4))
    else:
        stages = (2, 3) if of == "forward" else (1, 2)
        sizes = itertools.product((32, 64, 128), (32, 64, 128), (4, 8), stages)
    return [blocks for blocks in itertools.starmap(Blocks, sizes) if _fits(of, blocks, wide, itemsize, shared)]


def _fits(of: str, blocks: Blocks, wide: int, itemsize: int, shared: int) -> bool:
    queries, keys, warps, stages = blocks
    stays, comes, sums, scores = {
        "forward": (queries, 2 * keys, queries, queries * keys),
        "d_queries": (2 * queries, 2 * keys, queries, 2 * queries * keys),
        "d_keys": (2 * keys, 2 * queries, 2 * keys, 2 * queries * keys),
        # The gradient of the scores too stays, twice, and dq, in float32, on its way.
        "gradients": (2 * keys + 2 * keys * queries // wide + 2 * queries, 2 * queries, 2 * keys, 2 * queries * keys),
    }[of]
    held = (stays + comes * stages) * wide * itemsize
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
    """What a pass is cut into."""
    itemsize = q.dtype.itemsize
    room = functools.partial(space, implementation, of, wide, itemsize)
    asked = tuning.Asked(f"{implementation} {of}", f"{q.dtype.name} {wide}", (q.shape[1], k.shape[1]), room)
    return tuning.blocks("attention", asked, usual(implementation, of, wide, itemsize))
