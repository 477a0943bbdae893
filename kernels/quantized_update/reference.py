"""The updates by their definition, in plain JAX: dequantize, step, quantize.

XLA reads and writes about 30 bytes per element, because the absmax of a block is known only after its last element.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.kernels.codes import absmax, dynamic_code
from jaxmem.kernels.draws import uniform

from . import AdamHyperparameters, Moments8, ScaleBlocks, blocked, lines

STEPS = 127  # quantization steps of int8 from 0 to 1


def adam8(
    adam: AdamHyperparameters, blocks: ScaleBlocks, g: jax.Array, state: Moments8, unbiased: jax.Array
) -> tuple[jax.Array, Moments8]:
    old_m, old_v = (
        _values(signed)[blocked(codes, blocks)] * _over_block(lines(scale, blocks), blocks)
        for signed, codes, scale in ((True, state.m, state.m_scale), (False, state.v, state.v_scale))
    )
    wide = blocked(g, blocks).astype(jnp.float32)
    m = adam.beta1 * old_m + (1 - adam.beta1) * wide
    v = adam.beta2 * old_v + (1 - adam.beta2) * wide * wide
    u = m / unbiased[0] / (jnp.sqrt(v / unbiased[1]) + adam.epsilon)
    m_codes, m_scale = _encoded(m, blocks, lambda x: _nearest(x, signed=True))
    v_codes, v_scale = _encoded(v, blocks, lambda x: jnp.maximum(_nearest(x, signed=False), 1))
    new = (
        m_codes.astype(jnp.uint8).reshape(g.shape),
        v_codes.astype(jnp.uint8).reshape(g.shape),
        m_scale.reshape(state.m_scale.shape),
        v_scale.reshape(state.v_scale.shape),
    )
    return u.astype(g.dtype).reshape(g.shape), Moments8(*new)


def int8_add(
    blocks: ScaleBlocks, codes: jax.Array, scale: jax.Array, u: jax.Array, seeds: jax.Array
) -> tuple[jax.Array, jax.Array]:
    old = blocked(codes, blocks).astype(jnp.float32) * (_over_block(lines(scale, blocks), blocks) * (1 / STEPS))
    draws = uniform(_over_block(lines(seeds, blocks), blocks), jax.lax.broadcasted_iota(jnp.int32, old.shape, 1))

    def encode(x: jax.Array) -> jax.Array:
        return jnp.clip(jnp.floor(x * STEPS + draws), -STEPS, STEPS)

    new, new_scale = _encoded(old + blocked(u, blocks).astype(jnp.float32), blocks, encode)
    return new.astype(jnp.int8).reshape(codes.shape), new_scale.reshape(scale.shape)


def _encoded(
    x: jax.Array, blocks: ScaleBlocks, encode: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    most = absmax(x, 1)
    inverse = jnp.where(most > 0, 1 / jnp.where(most > 0, most, 1), 0)
    return encode(x * _over_block(inverse, blocks)), most


def _over_block(scales: jax.Array, blocks: ScaleBlocks) -> jax.Array:
    return scales[:, None] if blocks.along == -1 else scales[:, None, :]


def _nearest(x: jax.Array, *, signed: bool) -> jax.Array:
    code = np.asarray(dynamic_code(8, signed=signed), np.float32)
    return jnp.searchsorted(
        jnp.asarray((code[1:] + code[:-1]) / 2), x, method="compare_all" if x.size < 4096 else "scan"
    )


def _values(signed: bool) -> jax.Array:
    return jnp.asarray(dynamic_code(8, signed=signed), jnp.float32)
