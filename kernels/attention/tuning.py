"""The sizes of the kernels' blocks: which there are, which a GPU has room for, which were measured to be the fastest.

`jaxmem bench tune` measures them and keeps the winners in `tuned.json`, as "attention blocks". Where nothing was
measured, the sizes that stand beside each kernel are taken, which fit every GPU from Ampere on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax

from jaxmem.kernels.choice import device_kind, fastest, tuned

from .block import Blocks

OPERATION = "attention blocks"
PASSES = ("forward", "d_queries", "d_keys")
# Bytes of shared memory that a block may have, by compute capability (CUDA programming guide).
SHARED = {"8.0": 166912, "8.6": 101376, "8.9": 101376, "9.0": 232448, "10.0": 232448, "12.0": 101376}
REGISTERS = 224  # numbers that a thread may hold of sums and scores, of its 255 registers

_forced: ContextVar[dict[str, Blocks]] = ContextVar("forced", default={})  # noqa: B039  (never written to)


def space(of: str, wide: int, itemsize: int, shared: int) -> list[Blocks]:
    """What may be measured for a pass of heads of `wide`: what has room in shared memory and in registers."""
    stages = (2, 3) if of == "forward" else (1, 2)
    sizes = itertools.product((32, 64, 128), (32, 64, 128), (4, 8), stages)
    return [blocks for blocks in itertools.starmap(Blocks, sizes) if _fits(of, blocks, wide, itemsize, shared)]


def _fits(of: str, blocks: Blocks, wide: int, itemsize: int, shared: int) -> bool:
    queries, keys, warps, stages = blocks
    stays, comes, sums, scores = {
        "forward": (queries, 2 * keys, queries, queries * keys),
        "d_queries": (2 * queries, 2 * keys, queries, 2 * queries * keys),
        "d_keys": (2 * keys, 2 * queries, 2 * keys, 2 * queries * keys),
    }[of]
    held = (stays + comes * stages) * wide * itemsize
    threads = 32 * warps
    return held <= shared and (sums * wide + scores) / threads <= REGISTERS and queries * keys >= 8 * threads


def kind(implementation: str, of: str, dtype: str, wide: int) -> str:
    return f"{implementation} {of} {dtype} {wide}"


@contextmanager
def forced(of: str, blocks: Blocks) -> Iterator[None]:
    """Calls within are cut so: to measure them."""
    token = _forced.set({**_forced.get(), of: blocks})
    try:
        yield
    finally:
        _forced.reset(token)


def measured(implementation: str, of: str, q: jax.Array, k: jax.Array, wide: int) -> Blocks | None:
    """What was the fastest on this kind of device, of the nearest lengths."""
    if of in _forced.get():
        return _forced.get()[of]
    if not tuned().get(OPERATION):
        return None
    sizes = (q.shape[1], k.shape[1])
    entry = fastest(tuned(), OPERATION, device_kind(), kind(implementation, of, q.dtype.name, wide), sizes)
    return None if entry is None else Blocks(*entry["blocks"])
