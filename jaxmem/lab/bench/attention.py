"""The measurement of attention, compared with jax.nn (by XLA and by cuDNN) and with PyTorch."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.kernels import attention
from jaxmem.kernels.fused_attention import IMPLEMENTATIONS, reference
from jaxmem.kernels.fused_attention.arguments import check_arguments
from jaxmem.kernels.fused_attention.shapes import SHAPES, Shape
from jaxmem.lab.bench.work import BenchOperation, BenchPass, BenchWork

EXACT = 1024  # largest number of positions that are compared with float64
# Largest size in bytes of float32 scores for these implementations, which store all scores several times.
SCORES = {"reference": 2 * 2**30, "jax.nn xla": 8 * 2**30}
OTHERS = ("jax.nn xla", "jax.nn cudnn")


def small(shape: Shape) -> Shape:
    window = None if shape.window is None else 16
    return Shape(1, 48, 48, min(shape.heads, 4), min(shape.kv_heads, 2), 16, shape.causal, window)


def work(shape: Shape, dtype: Any = jnp.bfloat16, **options: Any) -> BenchWork:
    """The work for a shape. `options`: options of attention in addition to those of the shape."""
    keys = jax.random.split(jax.random.key(time.time_ns() % 2**31), 4)
    sizes = [(shape.queries, shape.heads), *[(shape.keys, shape.kv_heads)] * 2, (shape.queries, shape.heads)]
    q, k, v, d_out = (
        jax.random.normal(key, (shape.batch, length, heads, shape.dim), dtype)
        for key, (length, heads) in zip(keys, sizes, strict=True)
    )
    options = {"causal": shape.causal, "window": shape.window} | options
    run = partial(_run, shape, options)
    _, checked, extras = check_arguments(q, k, v, **options)

    def exact(q: Any, k: Any, v: Any) -> jax.Array:
        return reference.attend(q, k, v, checked, extras)[0]

    step, forward = float(jnp.finfo(dtype).eps), shape.flops / 1e12
    passes = {
        "forward": BenchPass(run, exact, forward, step),
        "backward": BenchPass(run, exact, 2.5 * forward, step, gradients=(0, 1, 2)),
    }
    return BenchWork((q, k, v), passes, "TFLOP/s", d_out)


def checks(shape: Shape) -> Mapping[str, Callable[[], BenchWork]]:
    """The shape itself, and each option with lengths that are not a multiple of any block."""
    row = shape._replace(batch=1, queries=min(shape.queries, EXACT), keys=min(shape.keys, EXACT))
    if row.window is not None:
        row = row._replace(window=min(row.window, row.keys // 4))  # the window must mask some keys
    odd = row._replace(queries=row.queries - row.queries // 40 - 1, keys=row.keys - row.keys // 40 - 1)
    ids = jnp.arange(odd.keys, dtype=jnp.int32) * 5 // odd.keys
    options = {"segment_ids": ids[None, -odd.queries :], "kv_segment_ids": ids[None], "max_segments": 5}
    return {
        "as it is": partial(work, row),
        "float16": partial(work, odd, jnp.float16),
        "full": partial(work, odd._replace(causal=False, window=None)),
        "window": partial(work, odd._replace(causal=True, window=odd.keys // 3)),
        "segments": partial(work, odd, **options),
        "soft cap": partial(work, odd, soft_cap=5.0),
        "deterministic": partial(work, odd, deterministic=True),
    }


def _run(shape: Shape, options: dict[str, Any], implementation: str | None, q: Any, k: Any, v: Any) -> jax.Array:
    size = 4 * shape.batch * shape.heads * shape.queries * shape.keys
    if implementation is not None and size > SCORES.get(implementation, size):
        raise ValueError(f"{implementation} stores all scores several times, {size / 2**30:.0f} GiB each")
    if implementation in OTHERS:
        window = None if shape.window is None else (shape.window - 1, 0)
        own: Any = {"is_causal": shape.causal, "local_window_size": window, "implementation": implementation.split()[1]}
        return jax.nn.dot_product_attention(q, k, v, **own)
    return attention(q, k, v, **options, implementation=implementation)


OPERATION = BenchOperation(
    IMPLEMENTATIONS,
    SHAPES,
    small,
    work,
    others=OTHERS,
    usual=("long", "llama3-8b", "llama3.2-1b", "mistral-7b"),
    plain="blockwise",
    checks=checks,
)
