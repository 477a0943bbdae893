"""Which sizes of blocks are the fastest for each pass of the attention kernels: all that a GPU has room for take turns,
each held against the result of plain JAX first."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.bench.attention import REFUSALS, arrays, cut
from jaxmem.bench.contest import Contestant, largest_error, take_turns
from jaxmem.kernels import attention
from jaxmem.kernels.attention import tuning
from jaxmem.kernels.attention.shapes import SHAPES, Shape

KERNELS = ("pallas", "triton")
SHAPES_OF_EACH_WIDTH = ("long", "llama3.2-1b")
RIGHT = 8.0  # steps of error beyond which a size wins nothing
SOME = 2  # are enough to see that it works, where nothing is measured
GRADIENTS = {"d_queries": (0,), "d_keys": (1, 2)}


def winners(name: str, seconds: float, *, dry: bool) -> Iterator[dict[str, Any]]:
    """For a shape the entries of the table of winners: one a kernel and pass that could be measured."""
    shape = cut(SHAPES[name]) if dry else SHAPES[name]
    device = jax.devices()[0]
    shared = tuning.SHARED.get(getattr(device, "compute_capability", ""), min(tuning.SHARED.values()))
    given = arrays(shape)
    dtype = given[0].dtype
    wide = 1 << max(4, (shape.dim - 1).bit_length())
    for implementation in KERNELS:
        for of in tuning.PASSES:
            space = tuning.space(of, wide, dtype.itemsize, shared)
            contestants = list(_right(shape, implementation, of, space[:SOME] if dry else space, given))
            take_turns(contestants, seconds)
            taken = {one.name: min(one.seconds[of]) for one in contestants}
            if taken:
                best = min(taken, key=lambda key: taken[key])
                yield {
                    "kind": tuning.kind(implementation, of, dtype.name, 1 << (shape.dim - 1).bit_length()),
                    "sizes": [shape.queries, shape.keys],
                    "blocks": [int(size) for size in best.split("x")],
                    "of": len(taken),
                    "milliseconds": 1e3 * taken[best],
                }


def _right(shape: Shape, implementation: str, of: str, space: Any, given: Any) -> Iterator[Contestant]:
    """Those that compile and give what plain JAX gives."""
    wanted = _call(shape, "blockwise", of, given)()
    for blocks in space:
        try:
            with tuning.forced(of, blocks):
                call = _call(shape, implementation, of, given)
            made = call()
        except REFUSALS:
            continue
        with jax.enable_x64(True):
            exact = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), wanted)
            error = largest_error(made, exact, float(jnp.finfo(given[0].dtype).eps))
        if error <= RIGHT:
            yield Contestant("x".join(map(str, blocks)), {of: call})


def _call(shape: Shape, implementation: str, of: str, given: Any) -> Any:
    """A pass alone, compiled."""
    q, k, v, d_out = given
    run = partial(attention, causal=shape.causal, window=shape.window, implementation=implementation)
    if of == "forward":
        forward = jax.jit(run).lower(q, k, v).compile()
        return lambda: forward(q, k, v)
    _, pull = jax.jit(lambda q, k, v: jax.vjp(run, q, k, v))(q, k, v)
    chosen = GRADIENTS[of]
    backward = jax.jit(lambda pull, d: [pull(d)[i] for i in chosen]).lower(pull, d_out).compile()
    return lambda: backward(pull, d_out)
