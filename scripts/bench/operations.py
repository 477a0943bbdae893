"""The operations that are measured: their arrays, passes, exact results in float64, and amounts of work."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxmem.kernels import Moments8, adam8_update, attention, int8_add
from jaxmem.kernels.fused_attention import IMPLEMENTATIONS as ATTENTIONS
from jaxmem.kernels.fused_attention import reference
from jaxmem.kernels.fused_attention.arguments import ATTENTION_SHAPES, AttentionShape, check_arguments
from jaxmem.kernels.quantized_update import IMPLEMENTATIONS as UPDATES
from jaxmem.kernels.quantized_update import UPDATE_SHAPES, UpdateShape
from jaxmem.quant import quantize
from jaxmem.typing import JsonDict, Tree
from scripts.bench.work import BenchOperation, BenchPass, BenchWork, Run

EXACT_POSITIONS = 1024  # largest number of positions that are compared with float64
# Largest size in bytes of float32 scores for these implementations, which store all scores several times.
MAX_SCORE_BYTES = {"reference": 2 * 2**30, "jax.nn xla": 8 * 2**30}
JAX_ATTENTIONS = ("jax.nn xla", "jax.nn cudnn")
# As in the papers on FlashAttention: 16,384 tokens of width 2,048, causal.
LENGTHS = (2048, 4096, 8192, 16384)
HEAD_WIDTHS = (64, 128)
PAPER_SHAPES = {
    f"{length}x{dim}": AttentionShape(16384 // length, length, length, 2048 // dim, 2048 // dim, dim)
    for dim in HEAD_WIDTHS
    for length in LENGTHS
}


def _small_attention(shape: AttentionShape) -> AttentionShape:
    window = None if shape.window is None else 16
    return AttentionShape(1, 48, 48, min(shape.heads, 4), min(shape.kv_heads, 2), 16, shape.causal, window)


def attention_work(shape: AttentionShape, dtype: DTypeLike = jnp.bfloat16, **options: Any) -> BenchWork:
    """The work for a shape. `options`: options of attention in addition to those of the shape."""
    queries = (shape.batch, shape.queries, shape.heads, shape.dim)
    keys = (shape.batch, shape.keys, shape.kv_heads, shape.dim)
    q, k, v, d_out = _draws(queries, keys, keys, queries, dtype=dtype)
    options = {"causal": shape.causal, "window": shape.window} | options
    run = partial(_run_attention, shape, options)
    _, checked, extras = check_arguments(q, k, v, **options)

    def exact(q: Any, k: Any, v: Any) -> jax.Array:
        return reference.attend(q, k, v, checked, extras)[0]

    step = float(jnp.finfo(dtype).eps)
    forward = shape.flops / 1e12
    passes = {
        "forward": BenchPass(run, exact, forward, step),
        "backward": BenchPass(run, exact, 2.5 * forward, step, gradients=(0, 1, 2)),
    }
    return BenchWork((q, k, v), passes, "TFLOP/s", d_out)


def attention_checks(shape: AttentionShape) -> Mapping[str, Callable[[], BenchWork]]:
    """The shape itself, and each option with lengths that are not a multiple of any block."""
    row = shape._replace(batch=1, queries=min(shape.queries, EXACT_POSITIONS), keys=min(shape.keys, EXACT_POSITIONS))
    if row.window is not None:
        row = row._replace(window=min(row.window, row.keys // 4))  # the window must mask some keys
    odd = row._replace(queries=row.queries - row.queries // 40 - 1, keys=row.keys - row.keys // 40 - 1)
    ids = jnp.arange(odd.keys, dtype=jnp.int32) * 5 // odd.keys
    options = {"segment_ids": ids[None, -odd.queries :], "kv_segment_ids": ids[None], "max_segments": 5}
    return {
        "as it is": partial(attention_work, row),
        "float16": partial(attention_work, odd, jnp.float16),
        "full": partial(attention_work, odd._replace(causal=False, window=None)),
        "window": partial(attention_work, odd._replace(causal=True, window=odd.keys // 3)),
        "segments": partial(attention_work, odd, **options),
        "soft cap": partial(attention_work, odd, soft_cap=2.0),
    }


def _run_attention(
    shape: AttentionShape, options: JsonDict, implementation: str | None, q: Any, k: Any, v: Any
) -> jax.Array:
    size = 4 * shape.batch * shape.heads * shape.queries * shape.keys
    if implementation is not None and size > MAX_SCORE_BYTES.get(implementation, size):
        raise ValueError(f"{implementation} stores all scores several times, {size / 2**30:.0f} GiB each")
    if implementation in JAX_ATTENTIONS:
        window = None if shape.window is None else (shape.window - 1, 0)
        kernel_options: Any = {
            "is_causal": shape.causal,
            "local_window_size": window,
            "implementation": implementation.split()[1],
        }
        return jax.nn.dot_product_attention(q, k, v, **kernel_options)
    return attention(q, k, v, **options, implementation=implementation)


BF16 = jnp.bfloat16


def random_key() -> jax.Array:
    """A different key at each call, so that errors are measured on different values each time."""
    return jax.random.key(time.time_ns() % 2**31)


def _draws(*shapes: tuple[int, ...], dtype: DTypeLike = BF16) -> Iterator[jax.Array]:
    for key, shape in zip(jax.random.split(random_key(), len(shapes)), shapes, strict=True):
        yield jax.random.normal(key, shape, dtype)


def _calls(operation: Callable[..., Any], **options: Any) -> Run:
    """A pass that calls an operation with these options."""
    return lambda implementation, *arrays: operation(*arrays, implementation=implementation, **options)


def _adam8(shape: UpdateShape) -> BenchWork:
    (g,) = _draws(shape.dims)
    small = 0.1 * g.astype(jnp.float32)
    m, v = (quantize(x, of, shape.block, shape.along) for x, of in ((small, "dynamic8"), (small**2, "udynamic8")))

    def moments(state: Tree) -> Tree:
        """The dequantized moments. Their error is up to half a step of their codes, 0.7 % of the largest value."""
        pairs = (m, state.m, state.m_scale), (v, state.v, state.v_scale)
        return tuple(dataclasses.replace(q, codes=c, scale=s).dequantize(jnp.float32) for q, c, s in pairs)

    def exact(g: Any, state: Tree, unbiased: Any) -> Tree:
        old_m, old_v = (x.astype(jnp.float64) for x in moments(state))
        new_m = 0.9 * old_m + 0.1 * g
        new_v = 0.95 * old_v + 0.05 * g**2
        return new_m / unbiased[0] / (jnp.sqrt(new_v / unbiased[1]) + 1e-8), new_m, new_v

    def dequantized(result: Tree) -> Tree:
        return result[0], *moments(result[1])

    arrays = (g, Moments8(m.codes, v.codes, m.scale, v.scale), jnp.asarray([0.19, 0.0975], jnp.float32))
    run = _calls(adam8_update, axis=shape.along, block_size=shape.block)
    update = BenchPass(run, exact, shape.least_bytes / 1e9, read=dequantized, in_place=((1, 1),))
    return BenchWork(arrays, {"update": update}, "GB/s")


def _int8_add(shape: UpdateShape) -> BenchWork:
    """The update of int8 weights. With stochastic rounding the error is up to one step of the largest block."""
    w, update = _draws(shape.dims, shape.dims)
    q = quantize(w, "int8", shape.block, shape.along)
    update = update * jnp.asarray(0.01, BF16)

    def dequantized(result: Tree) -> Tree:
        codes, scale = result
        steps = jnp.repeat(scale.astype(jnp.float64), shape.block, axis=shape.along) / 127
        return codes.astype(jnp.float64) * jax.lax.slice_in_dim(steps, 0, codes.shape[shape.along], axis=shape.along)

    def exact(codes: Any, scale: Any, update: Any, _: Any) -> Tree:
        return dequantized((codes, scale)) + update

    amount = shape.numbers * (4 + 12 / shape.block) / 1e9
    seeds = jax.random.bits(random_key(), q.scale.shape, jnp.uint32)
    run = _calls(int8_add, axis=shape.along, block_size=shape.block)
    add = BenchPass(run, exact, amount, 2**-7, read=dequantized, in_place=((0, 0), (1, 1)))
    return BenchWork((q.codes, q.scale, update, seeds), {"update": add}, "GB/s")


def _small_blocks(shape: UpdateShape) -> UpdateShape:
    dims = (16, 2 * shape.block)
    return shape._replace(dims=dims if shape.along == -1 else dims[::-1])


# The update of all matrices of Llama at once needs 56 GiB in plain JAX and 74 GiB in float64, so it is no default
# shape.
ONE_MATRIX = ("llama3-8b up", "llama2-7b down")
_update = partial(BenchOperation, UPDATES, UPDATE_SHAPES, _small_blocks, passes=("update",), usual=ONE_MATRIX)
OPERATIONS = {
    "attention": BenchOperation(
        ATTENTIONS,
        ATTENTION_SHAPES | PAPER_SHAPES,
        _small_attention,
        attention_work,
        others=JAX_ATTENTIONS,
        usual=("long", "llama3-8b", "llama3.2-1b", "mistral-7b"),
        plain="blockwise",
        checks=attention_checks,
    ),
    "adam8_update": _update(_adam8),
    "int8_add": _update(_int8_add),
}
