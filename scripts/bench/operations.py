"""The operations that are measured: their arrays, their passes by any implementation, exact results in float64, and
amounts of work."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

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
from jaxmem.typing import JsonDict, JsonView, Tree
from scripts.bench.contest import Call

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
BF16 = jnp.bfloat16
Run = Callable[..., Any]


# ---------------------------------------------------------------- any operation


@dataclass(frozen=True)
class BenchPass:
    """A pass that is measured. `exact` computes the result of `run` from the same arrays in float64."""

    run: Run  # (an implementation's name, *arrays of the work) -> result
    exact: Run
    amount: float  # TFLOP or GB
    step: float = 2**-8  # the unit of errors, relative to the largest value
    read: Run = lambda result: result  # returns the part of the result that is compared; not timed
    in_place: tuple[tuple[int, int], ...] = ()  # (argument, result) pairs that share memory, as in a training step
    is_backward: bool = False  # whether the result is the gradients with respect to all arrays

    def compiled(self, implementation: str, work: BenchWork) -> Call:
        """The compiled pass. Arrays that it updates in place are passed on to the next call."""
        with jax.numpy_dtype_promotion("standard"):  # jax.nn's attention needs it
            run, arrays = self._timed(implementation, work)
            donated = [place for place, _ in self.in_place]
            executable = jax.jit(run, donate_argnums=donated).lower(*arrays).compile()
        current = [jax.tree.map(jnp.copy, x) if i in donated else x for i, x in enumerate(arrays)]

        def call() -> Tree:
            results = executable(*current)
            for place, result in self.in_place:
                current[place] = results[result]
            return results

        return call

    def expected(self, work: BenchWork) -> Tree:
        """The exact result."""
        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            arrays, cotangents = jax.tree.map(_as_float64, (work.arrays, work.cotangents))
            if self.is_backward:
                return jax.jit(lambda arrays, d: jax.vjp(self.exact, *arrays)[1](d))(arrays, cotangents)
            return jax.jit(self.exact)(*arrays)

    def error(self, implementation: str, work: BenchWork, expected: Tree) -> float:
        """The largest error of all arrays, in steps relative to the largest value of each; infinite for NaN. Outputs
        are initialized with NaN or the largest integer, so that missing writes are found."""
        run, arrays = self._timed(implementation, work)
        poison = [poisoned(x) for x in jax.tree.leaves(jax.eval_shape(run, *arrays))]
        into = jax.jit(lambda _, *arrays: run(*arrays), donate_argnums=0, keep_unused=True)
        result = into.lower(poison, *arrays).compile()(poison, *arrays)

        @jax.jit
        def error(x: jax.Array, y: jax.Array) -> jax.Array:
            difference = jnp.abs(x.astype(jnp.float64) - y)
            steps = jnp.max(difference) / (jnp.max(jnp.abs(y)) * self.step)
            known = jnp.all(jnp.isfinite(difference)) & jnp.isfinite(steps)  # on a CPU a maximum may ignore NaN
            return jnp.where(known, steps, jnp.inf)

        with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
            leaves = jax.tree.leaves(self.read(result)), jax.tree.leaves(jax.tree.map(_as_float64, expected))
            return max(float(error(x, y)) for x, y in zip(*leaves, strict=True))

    def _timed(self, implementation: str, work: BenchWork) -> tuple[Run, tuple[Any, ...]]:
        """The function that is timed, and its arguments. For a backward pass, the forward pass is computed first."""
        run = partial(self.run, implementation)
        if not self.is_backward:
            return run, work.arrays
        pull = jax.jit(lambda arrays: jax.vjp(run, *arrays)[1])(work.arrays)
        return lambda pull, d: pull(d), (pull, work.cotangents)


class BenchWork(NamedTuple):
    """The arrays of an operation, and its passes by name."""

    arrays: tuple[Tree, ...]
    passes: Mapping[str, BenchPass]
    unit: str
    cotangents: Tree = None  # shaped like the result, for passes that compute gradients


Checks = Mapping[str, Callable[[], BenchWork]]


@dataclass(frozen=True)
class BenchOperation:
    """`checks(shape)`: the works whose results are checked, one per option and the first without options."""

    implementations: JsonView
    shapes: JsonView
    small: Callable[[Any], Any]  # returns a tiny shape, for a dry run without a GPU
    work: Callable[[Any], BenchWork]
    checks: Callable[[Any], Checks]
    passes: tuple[str, ...] = ("forward", "backward")
    others: tuple[str, ...] = ()  # other functions of jax that compute a pass, to compare with
    usual: tuple[str, ...] = ()  # the default shapes, if a command names none
    plain: str = "reference"  # the implementation in plain JAX to compare with

    def shape(self, name: str, *, dry: bool) -> Tree:
        return self.small(self.shapes[name]) if dry else self.shapes[name]

    @property
    def contestants(self) -> tuple[str, ...]:
        return (*self.implementations, *self.others)


def poisoned(x: Any) -> jax.Array:
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    return jnp.full(x.shape, jnp.nan if floating else jnp.iinfo(x.dtype).max, x.dtype)


def _as_float64(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def random_key() -> jax.Array:
    """A different key at each call, so that errors are measured on different values each time."""
    return jax.random.key(time.time_ns() % 2**31)


def _draws(*shapes: tuple[int, ...], dtype: DTypeLike = BF16) -> Iterator[jax.Array]:
    for key, shape in zip(jax.random.split(random_key(), len(shapes)), shapes, strict=True):
        yield jax.random.normal(key, shape, dtype)


# ---------------------------------------------------------------- attention


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
        "backward": BenchPass(run, exact, 2.5 * forward, step, is_backward=True),
    }
    return BenchWork((q, k, v), passes, "TFLOP/s", d_out)


def attention_checks(shape: AttentionShape) -> Checks:
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


def _run_attention(shape: AttentionShape, options: JsonDict, implementation: str, q: Any, k: Any, v: Any) -> jax.Array:
    size = 4 * shape.batch * shape.heads * shape.queries * shape.keys
    if size > MAX_SCORE_BYTES.get(implementation, size):
        raise ValueError(f"{implementation} stores all scores several times, {size / 2**30:.0f} GiB each")
    if implementation in JAX_ATTENTIONS:
        window = None if shape.window is None else (shape.window - 1, 0)
        kernel: Any = implementation.split()[1]
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=shape.causal, local_window_size=window, implementation=kernel
        )
    return attention(q, k, v, **options, implementation=implementation)


# ---------------------------------------------------------------- updates


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


def _update(work: Callable[[UpdateShape], BenchWork]) -> BenchOperation:
    # The update of all matrices of Llama at once needs 56 GiB in plain JAX and 74 GiB in float64, so it is no default
    # shape.
    return BenchOperation(
        UPDATES,
        UPDATE_SHAPES,
        _small_blocks,
        work,
        lambda shape: {"as it is": partial(work, shape)},
        passes=("update",),
        usual=("llama3-8b up", "llama2-7b down"),
    )


OPERATIONS = {
    "attention": BenchOperation(
        ATTENTIONS,
        ATTENTION_SHAPES | PAPER_SHAPES,
        _small_attention,
        attention_work,
        attention_checks,
        others=JAX_ATTENTIONS,
        usual=("long", "llama3-8b", "llama3.2-1b", "mistral-7b"),
        plain="blockwise",
    ),
    "adam8_update": _update(_adam8),
    "int8_add": _update(_int8_add),
}
