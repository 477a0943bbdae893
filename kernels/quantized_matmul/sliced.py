"""The matmul in plain JAX, one slice of the weight at a time, for every device of XLA.

Each slice of 8 M elements is dequantized and used at once: 16 MiB in bfloat16, which fit in the second-level cache of a
large GPU, instead of the complete weight (896 MiB for 16384 x 28672). A slice is a range of outputs (backward: of
inputs), so each slice computes one part of the result. x (backward: the gradient of the output) is read once per
slice."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmem.kernels.typing import Index

from . import MatmulCall, QuantizedScales
from .reference import block_scales, decoded

SLICE_ELEMENTS = 1 << 23  # elements of a slice


def multiply(
    call: MatmulCall, x: Float[Array, "tokens inputs"], codes: jax.Array, scale: Any
) -> Float[Array, "tokens outputs"]:
    width = min(call.outputs, max(1, SLICE_ELEMENTS // call.inputs))

    def part(first: jax.Array) -> jax.Array:
        def cut(a: jax.Array) -> jax.Array:
            return a if a.shape[1] == 1 else jax.lax.dynamic_slice_in_dim(a, first, width, axis=1)

        return x @ decoded(call, cut(codes), jax.tree.map(cut, scale), x.dtype)

    if width == call.outputs:
        return part(jnp.zeros((), jnp.int32))

    def step(i: jax.Array, result: jax.Array) -> jax.Array:
        # If the last slice would extend beyond the end, it begins earlier, and computes some values a second time.
        first = jnp.minimum(i * width, call.outputs - width)
        return jax.lax.dynamic_update_slice_in_dim(result, part(first), first, axis=1)

    empty = jnp.zeros((x.shape[0], call.outputs), x.dtype)
    return jax.lax.fori_loop(0, -(-call.outputs // width), step, empty)


def of_activations(
    call: MatmulCall, g: Float[Array, "tokens outputs"], codes: jax.Array, scale: Any
) -> Float[Array, "tokens inputs"]:
    blocks = max(1, SLICE_ELEMENTS // call.outputs // call.block)
    blocks += blocks * call.block % call.form.together  # slices begin at complete bytes
    height = blocks * call.block
    if height >= call.inputs:
        return g @ decoded(call, codes, scale, g.dtype).T
    scales = block_scales(scale) if isinstance(scale, QuantizedScales) else scale  # 1/64 of the weight's elements

    def put(result: jax.Array, first: Index, count: int) -> jax.Array:
        some = replace(call, inputs=count)
        together = call.form.together
        rows = jax.lax.dynamic_slice_in_dim(codes, first // together, -(-count // together))
        lines = jax.lax.dynamic_slice_in_dim(scales, first // call.block, -(-count // call.block))
        part = g @ decoded(some, rows, lines, g.dtype).T
        return jax.lax.dynamic_update_slice_in_dim(result, part, first, axis=1)

    slices, remainder = divmod(call.inputs, height)
    result = jnp.zeros((g.shape[0], call.inputs), g.dtype)
    result = jax.lax.fori_loop(0, slices, lambda i, result: put(result, i * height, height), result)
    return put(result, slices * height, remainder) if remainder else result
