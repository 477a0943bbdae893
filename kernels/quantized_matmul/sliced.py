"""The matmul in plain JAX, a slice of the weight at a time: runs wherever XLA does.

A slice of 8 M numbers is dequantized and used at once: 16 MiB in bfloat16, which the second-level caches of large GPUs
hold, in place of the whole weight (896 MiB of a 16384 x 28672 one). Forward a slice is some of the outputs, backward
some of the inputs, so that each slice makes its own part of the result and nothing is summed in memory. x
(backward, the output's gradient) is read once for each slice.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .arguments import Call, QuantizedScales
from .reference import block_scales, decoded

SLICE = 1 << 23  # numbers that are dequantized at once


def multiply(
    call: Call, x: Float[Array, "tokens inputs"], codes: jax.Array, scale: Any
) -> Float[Array, "tokens outputs"]:
    width = min(call.outputs, max(1, SLICE // call.inputs))

    def part(first: jax.Array) -> jax.Array:
        def cut(a: jax.Array) -> jax.Array:
            return a if a.shape[1] == 1 else jax.lax.dynamic_slice_in_dim(a, first, width, axis=1)

        return x @ decoded(call, cut(codes), jax.tree.map(cut, scale), x.dtype)

    return _in_slices(part, call.outputs, width, jnp.zeros((x.shape[0], call.outputs), x.dtype))


def of_activations(
    call: Call, g: Float[Array, "tokens outputs"], codes: jax.Array, scale: Any
) -> Float[Array, "tokens inputs"]:
    blocks = max(1, SLICE // call.outputs // call.block)
    blocks += blocks * call.block % call.form.together  # bytes are not cut
    height = blocks * call.block
    if height >= call.inputs:
        return g @ decoded(call, codes, scale, g.dtype).T
    own = block_scales(scale) if isinstance(scale, QuantizedScales) else scale  # a 64th of the weight's numbers

    def put(made: jax.Array, first: Any, count: int) -> jax.Array:
        some, together = replace(call, inputs=count), call.form.together
        rows = jax.lax.dynamic_slice_in_dim(codes, first // together, -(-count // together))
        lines = jax.lax.dynamic_slice_in_dim(own, first // call.block, -(-count // call.block))
        part = g @ decoded(some, rows, lines, g.dtype).T
        return jax.lax.dynamic_update_slice_in_dim(made, part, first, axis=1)

    slices, rest = divmod(call.inputs, height)
    made = jnp.zeros((g.shape[0], call.inputs), g.dtype)
    made = jax.lax.fori_loop(0, slices, lambda i, made: put(made, i * height, height), made)
    return put(made, slices * height, rest) if rest else made


def _in_slices(part: Callable[[jax.Array], jax.Array], size: int, width: int, empty: jax.Array) -> jax.Array:
    """`part(first)` where it belongs. The last slice begins earlier where it would reach beyond the end, and
    computes some values twice."""
    if width == size:
        return part(jnp.zeros((), jnp.int32))

    def step(i: jax.Array, made: jax.Array) -> jax.Array:
        first = jnp.minimum(i * width, size - width)
        return jax.lax.dynamic_update_slice_in_dim(made, part(first), first, axis=1)

    return jax.lax.fori_loop(0, -(-size // width), step, empty)
