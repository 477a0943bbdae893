"""The matmul by its definition: the complete weight is dequantized to the dtype of x, then multiplied."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxmem.kernels.codes import dynamic_code

from . import MatmulCall, QuantizedScales


def multiply(
    call: MatmulCall, x: Float[Array, "tokens inputs"], codes: jax.Array, scale: Any
) -> Float[Array, "tokens outputs"]:
    return x @ decoded(call, codes, scale, x.dtype)


def of_activations(
    call: MatmulCall, g: Float[Array, "tokens outputs"], codes: jax.Array, scale: Any
) -> Float[Array, "tokens inputs"]:
    return g @ decoded(call, codes, scale, g.dtype).T


def decoded(call: MatmulCall, codes: jax.Array, scale: Any, dtype: DTypeLike) -> Float[Array, "inputs outputs"]:
    """The first `call.inputs` rows of the weight, dequantized."""
    form = call.form
    if form.bits == 4:
        codes = jnp.stack([codes >> 4, codes & 15], axis=1).reshape(-1, codes.shape[1])[: call.inputs]
    if form.listed is not None:
        values = jnp.asarray(form.listed, jnp.float32)[codes]
    else:
        values = (codes.astype(jnp.float32) - (form.steps if form.bits < 8 else 0)) / form.steps
    scales = block_scales(scale)
    short = -call.inputs % call.block
    blocked = jnp.pad(values, ((0, short), (0, 0))).reshape(scales.shape[0], call.block, -1) * scales[:, None]
    return blocked.reshape(-1, values.shape[1])[: call.inputs].astype(dtype)


def block_scales(scale: Any) -> Float[Array, "blocks outputs"]:
    if not isinstance(scale, QuantizedScales):
        return scale
    blocks = scale.codes.shape[0]
    groups = scale.scale.shape[0]
    of_block = jnp.repeat(scale.scale, -(-blocks // groups), axis=0)[:blocks]
    return jnp.asarray(dynamic_code(8, signed=True), jnp.float32)[scale.codes] * of_block + scale.mean
