"""Attention beside what else there is: jax.nn's own, by XLA and cuDNN, and PyTorch's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.bench.blocks import Tried
from jaxmem.bench.contest import REFUSALS, Call, Contestant, largest_error, rates, take_turns
from jaxmem.bench.torch_kernels import needed, wait
from jaxmem.kernels import attention
from jaxmem.kernels.attention import IMPLEMENTATIONS
from jaxmem.kernels.attention.shapes import SHAPES, Shape

DEFAULT = ("long", "llama3-8b", "llama3.2-1b", "mistral-7b")
EXACT = 1024  # positions at most that are held against float64


def measured(name: str, seconds: float, *, dry: bool) -> Iterator[dict[str, Any]]:
    shape = cut(SHAPES[name]) if dry else SHAPES[name]
    errors, whys = {}, {}
    for implementation in IMPLEMENTATIONS:
        try:
            errors[implementation] = _error(shape, implementation)
        except REFUSALS as error:
            whys[implementation] = str(error).splitlines()[0]
    contestants = []
    makers = {i: partial(_of_jax, partial(attention, implementation=i)) for i in errors if i != "reference"}
    makers |= {f"jax.nn {i}": partial(_of_jax, partial(_jax_nn, i)) for i in ("xla", "cudnn")}
    makers |= {f"torch {i}": partial(_of_torch, i) for i in ("flash", "cudnn")}
    for contestant, make in makers.items():
        try:
            with jax.numpy_dtype_promotion("standard"):  # jax's own needs it
                forward, backward, wait = make(shape)
                contestants.append(Contestant(contestant, {"forward": forward, "backward": backward}, wait))
        except REFUSALS as error:
            whys[contestant] = str(error).splitlines()[0]
    take_turns(contestants, seconds)
    for one in contestants:
        for direction, taken in one.seconds.items():
            work = shape.flops * (1.0 if direction == "forward" else 2.5) / 1e12
            yield {
                "operation": "attention",
                "shape": name,
                "sizes": shape._asdict(),
                "contestant": one.name,
                "pass": direction,
                "unit": "TFLOP/s",
                **rates(work, taken),
                "error": errors.get(one.name),
            }
    for contestant, why in whys.items():
        yield {"operation": "attention", "shape": name, "contestant": contestant, "why_not": why}


def cut(shape: Shape) -> Shape:
    window = None if shape.window is None else 16
    return Shape(1, 48, 48, min(shape.heads, 4), min(shape.kv_heads, 2), 16, shape.causal, window)


def arrays(shape: Shape, dtype: Any = jnp.bfloat16) -> list[jax.Array]:
    sizes = [(shape.queries, shape.heads), *[(shape.keys, shape.kv_heads)] * 2, (shape.queries, shape.heads)]
    keys = jax.random.split(jax.random.key(time.time_ns() % 2**31), 4)
    return [
        jax.random.normal(key, (shape.batch, length, heads, shape.dim), dtype)
        for key, (length, heads) in zip(keys, sizes, strict=True)
    ]


# ---------------------------------------------------------------- right


def _error(shape: Shape, implementation: str) -> float:
    """Largest distance to float64 of output and gradients, in units of the largest value times bfloat16's step."""
    shape = shape._replace(batch=1, queries=min(shape.queries, EXACT), keys=min(shape.keys, EXACT))
    q, k, v, d_out = arrays(shape)
    run = partial(attention, causal=shape.causal, window=shape.window, implementation=implementation)

    @jax.jit
    def both(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> Any:
        out, pull = jax.vjp(run, q, k, v)
        return (out, *pull(d_out))

    compiled = both.lower(q, k, v, d_out).compile()
    poison = [jnp.full_like(x, jnp.nan) for x in (q, k, v, d_out) for _ in range(4)]
    jax.block_until_ready(poison)
    del poison
    found = compiled(q, k, v, d_out)
    step = float(jnp.finfo(q.dtype).eps)
    with jax.enable_x64(True):
        wanted = _exact(shape, *(jnp.asarray(x, jnp.float64) for x in (q, k, v, d_out)))
        return largest_error(found, wanted, step)


def _exact(shape: Shape, q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> Any:
    distance = jnp.arange(shape.queries)[:, None] + shape.keys - shape.queries - jnp.arange(shape.keys)
    seen = jnp.ones_like(distance, bool)
    if shape.causal or shape.window is not None:
        seen &= distance >= 0
    if shape.window is not None:
        seen &= distance < shape.window

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (jnp.repeat(x, shape.heads // shape.kv_heads, axis=2) for x in (k, v))
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * shape.dim**-0.5
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, s, -jnp.inf), axis=-1), v)

    out, pull = jax.vjp(run, q, k, v)
    return (out, *pull(d_out))


# ---------------------------------------------------------------- by its passes

GRADIENTS = {"d_queries": (0,), "d_keys": (1, 2)}


def tried(shape: Shape) -> Iterator[Tried]:
    """Each kernel's pass by itself, held against plain JAX."""
    given = arrays(shape)
    for of in ("forward", *GRADIENTS):
        wanted = _pass(shape, of, given, "blockwise")()

        def error(made: Any, wanted: Any = wanted) -> float:
            with jax.enable_x64(True):
                exact = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), wanted)
                return largest_error(made, exact, float(jnp.finfo(given[0].dtype).eps))

        yield Tried(of, partial(_pass, shape, of, given), error)


def _pass(shape: Shape, of: str, given: Any, implementation: str) -> Call:
    q, k, v, d_out = given
    run = partial(attention, causal=shape.causal, window=shape.window, implementation=implementation)
    if of == "forward":
        forward = jax.jit(run).lower(q, k, v).compile()
        return lambda: forward(q, k, v)
    _, pull = jax.jit(lambda q, k, v: jax.vjp(run, q, k, v))(q, k, v)
    chosen = GRADIENTS[of]
    backward = jax.jit(lambda pull, d: [pull(d)[i] for i in chosen]).lower(pull, d_out).compile()
    return lambda: backward(pull, d_out)


# ---------------------------------------------------------------- fast


def _of_jax(function: Callable[..., jax.Array], shape: Shape) -> tuple[Call, Call, Callable[[Any], Any]]:
    q, k, v, d_out = arrays(shape)
    run = partial(function, causal=shape.causal, window=shape.window)
    forward = jax.jit(run).lower(q, k, v).compile()
    _, pull = jax.jit(lambda q, k, v: jax.vjp(run, q, k, v))(q, k, v)
    backward = jax.jit(lambda pull, d: pull(d)).lower(pull, d_out).compile()
    return lambda: forward(q, k, v), lambda: backward(pull, d_out), jax.block_until_ready


def _jax_nn(implementation: Any, q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool, window: int | None) -> Any:
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=causal,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )


def _of_torch(backend: str, shape: Shape) -> tuple[Call, Call, Callable[[Any], Any]]:
    """Without windows: torch's fused kernels know none."""
    torch, kinds = needed("torch.nn.attention")
    if shape.window is not None:
        raise ValueError("torch's fused kernels know no window")
    kind = {"flash": kinds.SDPBackend.FLASH_ATTENTION, "cudnn": kinds.SDPBackend.CUDNN_ATTENTION}[backend]

    def drawn(length: int, heads: int) -> Any:
        size = (shape.batch, heads, length, shape.dim)
        return torch.randn(size, dtype=torch.bfloat16, device="cuda", requires_grad=True)

    q, k, v = drawn(shape.queries, shape.heads), drawn(shape.keys, shape.kv_heads), drawn(shape.keys, shape.kv_heads)

    def forward() -> Any:
        with kinds.sdpa_kernel(kind):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=True)

    out = forward()
    d_out = torch.randn_like(out)

    def backward() -> Any:
        return torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)

    return forward, backward, wait
