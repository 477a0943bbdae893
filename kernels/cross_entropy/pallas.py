"""The loss with Pallas kernels, compiled by Triton: logits are made in registers and never leave them.

Forward, a program makes tiles of logits of its tokens, one after the other of its part of the vocabulary, and keeps a
running maximum and sum, the label's logit and the sum of all: four numbers a token and part (Wijmans et al.,
arXiv:2411.09009). The vocabulary has as many parts as fill a large GPU.

Backward, a kernel makes the gradient of a slice's logits, [tokens, entries] in the dtype of x, and two matrix
products of XLA's make of it what belongs to x and to the weight. One kernel for all of that would have to add up
[tokens, embed] numbers in memory from all over the GPU, in an order that changes from run to run, or to make the
logits once for each part of the embedding: the first is not deterministic, the second takes several times as long. So
a slice is held, 32 MiB.

On a CPU the same kernels run interpreted, for tests.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxmem.kernels import tuning
from jaxmem.kernels.launch import launch, up_to

from .arguments import Statistics, Terms, of_logits
from .sliced import Features, Labels, PerToken, Weight, by_parts

PROGRAMS = 512  # forward, at least: four for each multiprocessor of the largest GPUs


class Blocks(NamedTuple):
    """How a kernel is cut: powers of two, at least 16 for the tensor cores."""

    tokens: int
    entries: int
    embed: int
    warps: int
    stages: int


USUAL = {2: Blocks(128, 128, 32, 8, 3), 4: Blocks(64, 64, 32, 4, 2)}  # by the bytes of a number


def losses(terms: Terms, x: Features, weight: Weight, labels: Labels) -> PerToken:
    return by_parts(Kernels(), terms, x, weight, labels)


class Kernels:
    def statistics(self, x: Features, weight: Weight, labels: Labels) -> Statistics:
        (tokens, embed), vocab = x.shape, weight.shape[1]
        blocks = _blocks("forward", x, weight)
        tiles, rows = pl.cdiv(vocab, blocks.entries), pl.cdiv(tokens, blocks.tokens)
        each = pl.cdiv(tiles, min(tiles, pl.cdiv(PROGRAMS, rows)))  # tiles of a part
        parts = pl.cdiv(tiles, each)
        row = pl.BlockSpec((None, blocks.tokens), lambda i, p: (p, i))
        most, total, chosen, summed = launch(
            "cross_entropy",
            functools.partial(_statistics, blocks, (tokens, embed), vocab, each),
            (x, weight, labels),
            grid=(rows, parts),
            in_specs=[
                pl.BlockSpec((blocks.tokens, embed), lambda i, _: (i, 0)),
                pl.BlockSpec((embed, vocab), lambda *_: (0, 0)),
                pl.BlockSpec((blocks.tokens,), lambda i, _: (i,)),
            ],
            out_specs=[row] * 4,
            out_shape=[jax.ShapeDtypeStruct((parts, tokens), jnp.float32)] * 4,
            warps=blocks.warps,
            stages=blocks.stages,
            flops=2.0 * embed * vocab / parts,
        )
        top = jnp.max(most, axis=0)
        partition = top + jnp.log(jnp.sum(total * jnp.exp(most - top), axis=0))
        return Statistics(partition, jnp.sum(chosen, axis=0), jnp.sum(summed, axis=0) / vocab)

    def gradient(
        self, terms: Terms, x: Features, weight: Weight, labels: Labels, partition: PerToken, wanted: PerToken,
        first: jax.Array, width: int,
    ) -> jax.Array:  # fmt: skip
        (tokens, embed), vocab = x.shape, weight.shape[1]
        blocks = _blocks("backward", x, weight)
        row = pl.BlockSpec((blocks.tokens,), lambda i, _: (i,))
        (g,) = launch(
            "cross_entropy_of_logits",
            functools.partial(_gradient, blocks, (tokens, embed), vocab, width, terms),
            (x, weight, labels, partition, wanted, first.reshape(1)),
            grid=(pl.cdiv(tokens, blocks.tokens), pl.cdiv(width, blocks.entries)),
            in_specs=[
                pl.BlockSpec((blocks.tokens, embed), lambda i, _: (i, 0)),
                pl.BlockSpec((embed, vocab), lambda *_: (0, 0)),
                row,
                row,
                row,
                pl.BlockSpec((1,), lambda *_: (0,)),
            ],
            out_specs=[pl.BlockSpec((blocks.tokens, blocks.entries), lambda i, j: (i, j))],
            out_shape=[jax.ShapeDtypeStruct((tokens, width), x.dtype)],
            warps=blocks.warps,
            stages=blocks.stages,
            flops=2.0 * embed,
        )
        return g


def _blocks(of: str, x: Features, weight: Weight) -> Blocks:
    room = functools.partial(space, x.dtype.itemsize)
    asked = tuning.Asked(f"pallas {of}", x.dtype.name, (x.shape[0], *weight.shape), room)
    most = tuning.blocks("cross_entropy", asked, USUAL[x.dtype.itemsize])
    return most._replace(
        tokens=up_to(most.tokens, x.shape[0]),
        entries=up_to(most.entries, weight.shape[1]),
        embed=up_to(most.embed, x.shape[1]),
    )


def space(itemsize: int, shared: int) -> list[Blocks]:
    """What may be measured: what has room in shared memory and, logits and their exponentials, in registers."""

    def fits(blocks: Blocks) -> bool:
        tokens, entries, embed, warps, stages = blocks
        held = stages * embed * (tokens + entries) * itemsize
        return held <= shared and 32 <= tokens * entries / (32 * warps) <= tuning.REGISTERS / 2

    sizes = itertools.product((64, 128), (64, 128, 256), (32, 64), (4, 8), (2, 3))
    return [blocks for blocks in itertools.starmap(Blocks, sizes) if fits(blocks)]


def _statistics(
    blocks: Blocks,
    shape: tuple[int, int],
    vocab: int,
    each: int,
    x_ref: Any,
    weight_ref: Any,
    labels_ref: Any,
    *out_refs: Any,
) -> None:
    real = pl.program_id(0) * blocks.tokens + jnp.arange(blocks.tokens, dtype=jnp.int32) < shape[0]
    label = plgpu.load(labels_ref, mask=real, other=0)
    start = pl.program_id(1) * each

    def visit(t: jax.Array, found: Any) -> Any:
        most, total, chosen, summed = found
        first = (start + t) * blocks.entries
        entry = first + jnp.arange(blocks.entries, dtype=jnp.int32)
        inside = (entry < vocab)[None, :]
        logits = _tile(blocks, shape, vocab, x_ref, weight_ref, first, real)
        higher = jnp.maximum(most, jnp.max(jnp.where(inside, logits, -jnp.inf), axis=1))
        exponentials = jnp.where(inside, jnp.exp(logits - higher[:, None]), 0.0)
        return (
            higher,
            total * jnp.exp(most - higher) + jnp.sum(exponentials, axis=1),
            chosen + jnp.sum(jnp.where(entry[None, :] == label[:, None], logits, 0.0), axis=1),
            summed + jnp.sum(logits, axis=1),  # of entries beyond the last they are zeros
        )

    empty = jnp.zeros((blocks.tokens,), jnp.float32)
    count = jnp.minimum(each, pl.cdiv(vocab, blocks.entries) - start)
    found = jax.lax.fori_loop(0, count, visit, (empty - jnp.inf, empty, empty, empty))
    for ref, one in zip(out_refs, found, strict=True):
        plgpu.store(ref, one, mask=real)


def _gradient(
    blocks: Blocks,
    shape: tuple[int, int],
    vocab: int,
    width: int,
    terms: Terms,
    x_ref: Any,
    weight_ref: Any,
    labels_ref: Any,
    partition_ref: Any,
    wanted_ref: Any,
    first_ref: Any,
    g_ref: Any,
) -> None:
    real = pl.program_id(0) * blocks.tokens + jnp.arange(blocks.tokens, dtype=jnp.int32) < shape[0]
    label = plgpu.load(labels_ref, mask=real, other=0)[:, None]
    partition, wanted = (plgpu.load(ref, mask=real, other=0.0)[:, None] for ref in (partition_ref, wanted_ref))
    within = pl.program_id(1) * blocks.entries
    first = first_ref[0] + within
    entry = first + jnp.arange(blocks.entries, dtype=jnp.int32)
    logits = _tile(blocks, shape, vocab, x_ref, weight_ref, first, real)
    g = of_logits(logits, entry[None, :], label, partition, wanted, vocab, terms)
    inside = within + jnp.arange(blocks.entries, dtype=jnp.int32) < width
    plgpu.store(g_ref, g.astype(g_ref.dtype), mask=real[:, None] & inside[None, :])


def _tile(
    blocks: Blocks, shape: tuple[int, int], vocab: int, x_ref: Any, weight_ref: Any, first: jax.Array, real: jax.Array
) -> jax.Array:
    """Logits of this program's tokens and the entries from `first` on; of what is beyond the ends zeros."""
    columns = pl.ds(first, blocks.entries)
    inside = first + jnp.arange(blocks.entries, dtype=jnp.int32) < vocab
    precision = jax.lax.Precision.HIGHEST if x_ref.dtype == jnp.float32 else None

    def step(e: jax.Array, total: jax.Array) -> jax.Array:
        here = pl.ds(e * blocks.embed, blocks.embed)
        of_embed = e * blocks.embed + jnp.arange(blocks.embed, dtype=jnp.int32) < shape[1]
        x = plgpu.load(x_ref.at[:, here], mask=real[:, None] & of_embed[None, :], other=0.0)
        w = plgpu.load(weight_ref.at[here, columns], mask=of_embed[:, None] & inside[None, :], other=0.0)
        return total + plgpu.dot(x, w, precision=precision).astype(jnp.float32)

    empty = jnp.zeros((blocks.tokens, blocks.entries), jnp.float32)
    return jax.lax.fori_loop(0, pl.cdiv(shape[1], blocks.embed), step, empty)
