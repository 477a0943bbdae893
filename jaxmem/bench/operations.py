"""The kernels beside attention as they are measured: their arrays, what each pass of an implementation runs, what it
should give in float64, how much work that is, and which implementation a call picks by itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem.bench import attention as attention_bench
from jaxmem.bench import torch_kernels
from jaxmem.bench.blocks import Tried
from jaxmem.bench.contest import REFUSALS, Call, Contestant, largest_error, rates, take_turns
from jaxmem.bench.torch_kernels import wait
from jaxmem.kernels import (
    Constants,
    Moments8,
    adam8_update,
    attention,
    cross_entropy,
    dequant_matmul,
    int8_add,
    rms_norm,
    sliding_max,
)
from jaxmem.kernels.adam8_update import IMPLEMENTATIONS as ADAM8
from jaxmem.kernels.adam8_update import shapes as adam8_shapes
from jaxmem.kernels.attention import IMPLEMENTATIONS as ATTENTION
from jaxmem.kernels.attention import shapes as attention_shapes
from jaxmem.kernels.choice import Choice, choices
from jaxmem.kernels.cross_entropy import IMPLEMENTATIONS as LOSS
from jaxmem.kernels.cross_entropy import shapes as loss_shapes
from jaxmem.kernels.dequant_matmul import IMPLEMENTATIONS as PRODUCTS
from jaxmem.kernels.dequant_matmul import shapes as product_shapes
from jaxmem.kernels.rms_norm import IMPLEMENTATIONS as NORMS
from jaxmem.kernels.rms_norm import shapes as norm_shapes
from jaxmem.kernels.sliding_max import IMPLEMENTATIONS as WINDOWS
from jaxmem.quant import QTensor, quantize

Run = Callable[..., Any]
BF16 = jnp.bfloat16


@dataclass(frozen=True)
class Pass:
    run: Callable[[str | None], Run]  # of an implementation's name, on the work's arrays
    exact: Run  # the same in float64
    amount: float  # TFLOP or GB
    error: float  # what counts as one step of error, as a share of the largest value
    read: Run = lambda made: made  # what of the result is compared, outside of the time
    in_place: tuple[tuple[int, int], ...] = ()  # which argument's memory which result takes, as in a run

    def compiled(self, way: str, arrays: tuple[Any, ...]) -> Call:
        """By an implementation; what is updated in place goes on from call to call."""
        own = [place for place, _ in self.in_place]
        run = jax.jit(self.run(way), donate_argnums=own).lower(*arrays).compile()
        held = [jax.tree.map(jnp.copy, x) if i in own else x for i, x in enumerate(arrays)]

        def call() -> Any:
            made = run(*held)
            for place, result in self.in_place:
                held[place] = made[result]
            return made

        return call

    def far(self, made: Any, arrays: tuple[Any, ...]) -> float:
        """Steps of error."""
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            return largest_error(self.read(made), self.exact(*arrays), self.error)


@dataclass(frozen=True)
class Work:
    arrays: tuple[Any, ...]
    passes: dict[str, Pass]
    unit: str
    beside: dict[str, dict[str, Run]] = field(default_factory=dict)  # what else there is to compare with


@dataclass(frozen=True)
class Operation:
    implementations: Mapping[str, Any]
    shapes: Mapping[str, Any]
    small: Callable[[Any], Any]  # of a shape one that shows without a GPU that all of it works
    work: Callable[[Any], Work]
    tuned: tuple[str, ...] = ()  # shapes on which kernels are cut in all ways: one of each kind
    peers: Mapping[str, Callable[[Any], Mapping[str, Call]]] = field(default_factory=dict)  # of other libraries

    def shape(self, name: str, *, dry: bool) -> Any:
        return self.small(self.shapes[name]) if dry else self.shapes[name]


def measured(operation: str, name: str, seconds: float, *, dry: bool) -> Iterator[dict[str, Any]]:
    """Right first, in memory that was filled with NaN before; then the contestants take turns."""
    own = OPERATIONS[operation]
    shape = own.shape(name, dry=dry)
    work = own.work(shape)
    errors: dict[tuple[str, str], float] = {}
    contestants = []
    for way in own.implementations:
        try:
            calls = {of: one.compiled(way, work.arrays) for of, one in work.passes.items()}
            for of, one in work.passes.items():
                errors[way, of] = _error(one, calls[of], work.arrays)
        except REFUSALS as error:
            yield {"operation": operation, "shape": name, "contestant": way, "why_not": _said(error)}
            continue
        contestants.append(Contestant(way, calls))
    for other, passes in work.beside.items():
        runs = {of: jax.jit(run).lower(*work.arrays).compile() for of, run in passes.items()}
        contestants.append(Contestant(other, {of: _call(run, work.arrays) for of, run in runs.items()}))
    for other, make in own.peers.items():
        try:
            theirs = make(shape)
            for call in theirs.values():
                call()
        except (*REFUSALS, ImportError, AssertionError) as error:
            yield {"operation": operation, "shape": name, "contestant": other, "why_not": _said(error)}
            continue
        contestants.append(Contestant(other, dict(theirs), wait))
    take_turns(contestants, seconds)
    for contestant in contestants:
        for of, taken in contestant.seconds.items():
            yield {
                "operation": operation,
                "shape": name,
                "contestant": contestant.name,
                "pass": of,
                "unit": work.unit,
                **rates(work.passes[of].amount, taken),
                "error": errors.get((contestant.name, of)),
            }


def tried(operation: str, name: str, *, dry: bool) -> Iterator[Tried]:
    """Its passes, to measure how kernels are best cut."""
    own = OPERATIONS[operation]
    shape = own.shape(name, dry=dry)
    if operation == "attention":
        yield from attention_bench.tried(shape)
        return
    work = own.work(shape)
    for of, one in work.passes.items():
        yield Tried(of, partial(one.compiled, arrays=work.arrays), partial(one.far, arrays=work.arrays))


def _said(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _call(run: Run, arrays: tuple[Any, ...]) -> Call:
    return lambda: run(*arrays)


def _error(one: Pass, call: Call, arrays: tuple[Any, ...]) -> float:
    poison = [jnp.full(x.shape, jnp.nan, x.dtype) for x in jax.tree.leaves(arrays) if jnp.issubdtype(x.dtype, float)]
    jax.block_until_ready(poison)
    del poison
    return one.far(call(), arrays)


def explained(operation: str, name: str) -> Choice:
    """What a call of this shape picks on this device, and why; nothing is computed."""
    own = OPERATIONS[operation]

    def traced() -> Any:
        work = own.work(own.shapes[name])
        return next(iter(work.passes.values())).run(None)(*work.arrays)

    with choices() as made:
        jax.eval_shape(traced)
    return made[-1]


def _draws(*shapes: tuple[int, ...], dtype: Any = BF16) -> Iterator[jax.Array]:
    for key, shape in zip(jax.random.split(jax.random.key(time.time_ns() % 2**31), len(shapes)), shapes, strict=True):
        yield jax.random.normal(key, shape, dtype)


def _product(shape: product_shapes.Shape) -> Work:
    x, g, w = _draws((shape.tokens, shape.inputs), (shape.tokens, shape.outputs), (shape.inputs, shape.outputs))
    q = quantize(w, shape.format, shape.block, -2, double=shape.double)
    double = isinstance(q.scale, QTensor)
    scale = Constants(q.scale.codes, q.scale.scale, q.scale.offset) if double else q.scale

    options: dict[str, Any] = {"format": shape.format, "block_size": shape.block, "inputs": shape.inputs}

    def run(way: str | None, transposed: bool) -> Run:
        def product(x: Any, g: Any, codes: Any, scale: Any, _: Any) -> Any:
            given = g if transposed else x
            return dequant_matmul(given, codes, scale, transposed=transposed, implementation=way, **options)

        return product

    wide = lambda a: a.astype(jnp.float64)  # noqa: E731
    passes = {
        "forward": Pass(lambda way: run(way, False), lambda x, _g, _c, _s, w: wide(x) @ wide(w), 0.0, 2**-8),
        "backward": Pass(lambda way: run(way, True), lambda _x, g, _c, _s, w: wide(g) @ wide(w).T, 0.0, 2**-8),
    }
    amount = shape.flops / 1e12
    passes = {of: Pass(one.run, one.exact, amount, one.error) for of, one in passes.items()}
    decoded = {"forward": lambda x, _g, _c, _s, w: x @ w, "backward": lambda _x, g, _c, _s, w: g @ w.T}
    return Work((x, g, q.codes, scale, q.dequantize(BF16)), passes, "TFLOP/s", {"decoded before": decoded})


def _adam8(shape: adam8_shapes.Shape) -> Work:
    (g,) = _draws(shape.dims)
    small = 0.1 * g.astype(jnp.float32)
    m, v = (quantize(x, of, shape.block, shape.along) for x, of in ((small, "dynamic8"), (small**2, "udynamic8")))
    unbiased = jnp.asarray([0.19, 0.0975], jnp.float32)

    def run(way: str | None) -> Run:
        def update(g: Any, state: Any, unbiased: Any) -> Any:
            return adam8_update(g, state, unbiased, axis=shape.along, block_size=shape.block, implementation=way)

        return update

    def exact(g: Any, _: Any, unbiased: Any) -> Any:
        wide = jnp.asarray(g, jnp.float64)
        new_m = 0.9 * m.dequantize(jnp.float32).astype(jnp.float64) + 0.1 * wide
        new_v = 0.95 * v.dequantize(jnp.float32).astype(jnp.float64) + 0.05 * wide**2
        return new_m / unbiased[0] / (jnp.sqrt(new_v / unbiased[1]) + 1e-8)

    state = Moments8(m.codes, v.codes, m.scale, v.scale)
    update = Pass(run, exact, shape.least_bytes / 1e9, 2**-8, lambda made: made[0], ((1, 1),))
    return Work((g, state, unbiased), {"update": update}, "GB/s")


def _int8(shape: adam8_shapes.Shape) -> Work:
    """Rounded stochastically: up to a step away, of the largest block's at most."""
    w, update = _draws(shape.dims, shape.dims)
    q, update = quantize(w, "int8", shape.block, shape.along), update * jnp.asarray(0.01, BF16)

    def run(way: str | None) -> Run:
        def add(codes: Any, scale: Any, update: Any, seeds: Any) -> Any:
            given: dict[str, Any] = {"axis": shape.along, "block_size": shape.block, "implementation": way}
            return int8_add(codes, scale, update, seeds, **given)

        return add

    def wide(made: Any) -> Any:
        codes, scale = made
        steps = jnp.repeat(scale.astype(jnp.float64), shape.block, axis=shape.along) / 127
        return codes.astype(jnp.float64) * jax.lax.slice_in_dim(steps, 0, codes.shape[shape.along], axis=shape.along)

    def exact(codes: Any, scale: Any, update: Any, _: Any) -> Any:
        return wide((codes, scale)) + update.astype(jnp.float64)

    amount = shape.numbers * (4 + 12 / shape.block) / 1e9
    seeds = jax.random.bits(jax.random.key(time.time_ns() % 2**31), q.scale.shape, jnp.uint32)
    arrays = (q.codes, q.scale, update, seeds)
    return Work(arrays, {"update": Pass(run, exact, amount, 2**-7, wide, ((0, 0), (1, 1)))}, "GB/s")


def _norm(shape: norm_shapes.Shape) -> Work:
    x, branch, d_normal, d_sum = _draws(*[(shape.rows, shape.size)] * 4)
    scale = jnp.linspace(0.5, 1.5, shape.size, dtype=jnp.float32)

    def forward(way: str | None) -> Run:
        return lambda x, branch, scale, *_: rms_norm(x, scale, residual=branch, implementation=way)

    def both(way: str | None) -> Run:
        def run(x: Any, branch: Any, scale: Any, *cotangents: Any) -> Any:
            return jax.vjp(lambda x, scale: forward(way)(x, branch, scale), x, scale)[1](cotangents)

        return run

    def exact(x: Any, branch: Any, scale: Any, *_: Any) -> Any:
        total = jnp.asarray(x, jnp.float64) + jnp.asarray(branch, jnp.float64)
        mean = jnp.mean(total * total, axis=1, keepdims=True) + 1e-5
        return total * jax.lax.rsqrt(mean) * jnp.asarray(scale, jnp.float64), total

    def exact_gradients(x: Any, branch: Any, scale: Any, *cotangents: Any) -> Any:
        given = [jnp.asarray(a, jnp.float64) for a in (x, scale)]
        return jax.vjp(lambda x, scale: exact(x, branch, scale), *given)[1](tuple(map(jnp.float64, cotangents)))

    passes = {
        "forward": Pass(forward, exact, shape.least_bytes / 1e9, 2**-8),
        "backward": Pass(both, exact_gradients, 5 / 4 * shape.least_bytes / 1e9, 2**-8),  # two more read, one written
    }
    return Work((x, branch, scale, d_normal, d_sum), passes, "GB/s")


def _loss(shape: loss_shapes.Shape) -> Work:
    x, w = _draws((shape.tokens, shape.embed), (shape.embed, shape.vocab))
    x = x * jnp.asarray(shape.embed**-0.5, x.dtype)
    labels = jnp.arange(shape.tokens, dtype=jnp.int32) % shape.vocab

    def forward(way: str | None) -> Run:
        return lambda x, w, labels: cross_entropy(x, w, labels, implementation=way)

    def both(way: str | None) -> Run:
        return jax.grad(lambda x, w, labels: jnp.sum(forward(way)(x, w, labels)), (0, 1))

    def exact(x: Any, w: Any, labels: Any) -> Any:
        logits = jnp.asarray(x, jnp.float64) @ jnp.asarray(w, jnp.float64)
        return jax.nn.logsumexp(logits, axis=1) - jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]

    def exact_gradients(x: Any, w: Any, labels: Any) -> Any:
        wide = (jnp.asarray(a, jnp.float64) for a in (x, w))
        return jax.grad(lambda x, w: jnp.sum(exact(x, w, labels)), (0, 1))(*wide)

    passes = {
        "forward": Pass(forward, exact, shape.flops / 1e12, 2**-8),
        "backward": Pass(both, exact_gradients, 4 * shape.flops / 1e12, 2**-8),  # with the forward pass before it
    }
    return Work((x, w, labels), passes, "TFLOP/s")


class Windows(NamedTuple):
    numbers: int
    window: int


def _windows(shape: Windows) -> Work:
    (x,) = _draws((shape.numbers,), dtype=jnp.float32)

    def exact(x: Any) -> Any:
        wide = jnp.asarray(x, jnp.float64)
        return jax.lax.reduce_window(wide, -jnp.inf, jax.lax.max, (shape.window,), (1,), "VALID")

    run = lambda way: lambda x: sliding_max(x, shape.window, implementation=way)  # noqa: E731
    return Work((x,), {"forward": Pass(run, exact, 2 * x.nbytes / 1e9, 2**-24)}, "GB/s")


def _attention(shape: attention_shapes.Shape) -> Work:
    """To be explained; it is measured by `bench/attention.py`."""
    q = jnp.zeros((shape.batch, shape.queries, shape.heads, shape.dim), BF16)
    k = jnp.zeros((shape.batch, shape.keys, shape.kv_heads, shape.dim), BF16)
    options: dict[str, Any] = {"causal": shape.causal, "window": shape.window}
    run = lambda way: lambda q, k, v: attention(q, k, v, implementation=way, **options)  # noqa: E731
    return Work((q, k, k), {"forward": Pass(run, run("reference"), math.nan, math.nan)}, "TFLOP/s")


def _with(**sizes: int) -> Callable[[Any], Any]:
    return lambda shape: shape._replace(**sizes)


def _small_product(shape: product_shapes.Shape) -> product_shapes.Shape:
    return shape._replace(tokens=16, inputs=2 * shape.block, outputs=32)


def _small_blocks(shape: adam8_shapes.Shape) -> adam8_shapes.Shape:
    return shape._replace(dims=(shape.block, 2 * shape.block))


BY_LIBRARIES = {
    "bitsandbytes": torch_kernels.product_by_bitsandbytes,
    "bitsandbytes, decoded": torch_kernels.product_decoded_by_bitsandbytes,
    "torchao": torch_kernels.product_by_torchao,
}
OPERATIONS = {
    "attention": Operation(
        ATTENTION, attention_shapes.SHAPES, attention_bench.cut, _attention, ("long", "llama3.2-1b")
    ),
    "dequant_matmul": Operation(
        PRODUCTS,
        product_shapes.SHAPES,
        _small_product,
        _product,
        ("llama3-8b up", "llama3-8b up, long", "llama2-7b int8"),
        BY_LIBRARIES,
    ),
    "adam8_update": Operation(
        ADAM8,
        adam8_shapes.SHAPES,
        _small_blocks,
        _adam8,
        ("llama3-8b up", "llama2-7b down"),
        {"bitsandbytes": torch_kernels.adam8_by_bitsandbytes},
    ),
    "int8_add": Operation(ADAM8, adam8_shapes.SHAPES, _small_blocks, _int8, ("llama3-8b up", "llama2-7b down")),
    "rms_norm": Operation(NORMS, norm_shapes.SHAPES, _with(rows=16, size=64), _norm, ("llama3-8b",)),
    "cross_entropy": Operation(LOSS, loss_shapes.SHAPES, _with(tokens=16, embed=32, vocab=96), _loss, ("llama3-8b",)),
    "sliding_max": Operation(WINDOWS, {"256 of 64 M": Windows(1 << 26, 256)}, _with(numbers=2000), _windows),
}
