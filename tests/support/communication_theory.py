"""Bytes that a device sends for an update, by theory: what the communication of a compiled step must come to.

For a decoder with P weights in its matrix multiplications and E in its embedding, of w bytes each in the compute dtype
and r as stored; a micro-batches of T tokens per device, of width D. n devices along `fsdp` x `context` shard the
weights, m along `replica` replicate them. A collective over n devices counts (n - 1) / n of its array.

    zero 0       2 (P + E) w            sums of gradients all-reduced over all n m, once per update
    zero 1       (P + E) (w + r)        sums of gradients reduce-scattered, new weights gathered
    zero 2       a P w + (P + E) r      gradients reduce-scattered, new weights gathered
    zero 3       a (3 P - H) w          weights gathered forward and backward, gradients reduce-scattered; the H
                                        weights of the output matrix are gathered once, twice where the loss slices
                                        them; quantized weights are gathered as stored: r for w
    from zero 2  2 a T D w              rows of the embedding, and their gradients, by all-to-all
    from zero 1  2 (P + E) w / n        shards of the gradients all-reduced over m, once per update
    to zero 1    2 a (P + E) w          gradients all-reduced over `context`, whose devices share rows

`tensor` shards P and E and, among its t devices, communicates the residual stream of t T tokens: gathered and
reduce-scattered twice per layer forward and twice backward, with memory.remat=full once more without the last scatter;
and once each for the embedding and for the logits. `context` with c devices sends, by ulysses, Q numbers of queries per
token and K of keys and values: 2 Q + K forward, for queries and output, and 4 Q + 2 K backward, and with full recompute
Q more, for the output. A ring sends keys and values c - 1 times forward and backward (and once more with full
recompute, where c = 2 finds both to be the same message), and c times their gradients, of which the first and the last
are sent in w bytes and the others in float32; with a window those of min(window - 1, (c - 1) T) tokens forward and
back.

`stage` with p devices runs all micro-batches in s ticks, in each of which a device runs a v-th of its P / p weights,
with v rounds: where a passes through P and the layers are counted above, there are s. A tick sends 4 T D w from stage
to stage, and the input of the first 3 of these. Embedding and output matrix are on every stage, which processes
k = a / p micro-batches of them, so that their a is k. Their gradients are all-reduced over p, the embedding's in w and
the output matrix's in 4 bytes; from zero 2 on the latter's k times, and over n too. The output matrix is gathered k + 1
times, and what `tensor` gathers for the logits once more, since they are recomputed for their gradients.
"""

from dataclasses import dataclass, fields

import jax

from jaxmem.config import Decoder, Rules
from jaxmem.errors import UserError
from jaxmem.models.cross_entropy import max_update_entries, slice_width
from jaxmem.quant.precision import compute_dtype
from jaxmem.sharding.weights import differentiable
from jaxmem.step import Program

FLOAT32 = 4


@dataclass(frozen=True)
class Volume:
    """Bytes that one device sends for one update, by what they are for."""

    weights: float  # gathered
    gradients: float  # reduced
    tokens: float  # looked up in the embedding
    tensor: float
    context: float
    stage: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def volume(built: Program) -> Volume:
    cfg, mesh = built.cfg, built.layout.mesh.shape
    model = cfg.model
    if not isinstance(model, Decoder):
        raise UserError(f"model.family={model.family} has no theory of communication; use a decoder")
    if cfg.rules != Rules():
        raise UserError("rules have no theory of communication; leave them out")
    if built.model.pipeline is not None and cfg.batch.accumulate == 1:
        raise UserError("batch.accumulate=1 has no theory of communication in a pipeline; use 2 or more")
    n, m, t = mesh["fsdp"] * mesh["context"], mesh["replica"], mesh["tensor"]
    a, c, f = cfg.batch.accumulate, mesh["context"], mesh["fsdp"]
    w = compute_dtype(cfg.precision, built.layout.mesh.devices.flat[0].platform).itemsize
    at_rest, weights = (
        jax.tree.leaves(built.spec.state.params),
        jax.tree.leaves(jax.eval_shape(differentiable, built.spec.state.params)),
    )
    r = sum(x.size * x.dtype.itemsize for x in at_rest) / sum(x.size for x in weights)
    sent = r if cfg.precision.is_quantized else w  # quantized weights are gathered as stored
    tokens = cfg.batch.global_size // a // (f * m) * cfg.data.sequence_length // c / t
    full = cfg.memory.remat == "full"

    embedding = model.vocab * model.embed / t  # and so many for the logits
    head = 0 if model.tie_embeddings else embedding
    layers = built.model.parameters / t - embedding - head
    passes, micro, executed, shifts, p = float(a), float(a), a * model.layers, 0, 1
    if (pipeline := built.model.pipeline) is not None:
        p = pipeline.stages
        layers *= pipeline.stored / pipeline.layers / p
        passes, micro = pipeline.ticks / pipeline.rounds, pipeline.slots / p
        executed, shifts = pipeline.ticks * pipeline.group, 4 * pipeline.ticks + 3
    every = layers + embedding + head
    most = max_update_entries(cfg.memory.update, model.embed)
    sliced = slice_width(cfg.memory.loss_chunk, round(tokens * t), -(-model.vocab // t), w, most)
    # The logits' weights: gathered forward only, or in slices again; on stages once for all, and again each time.
    heads = micro + 1 if p > 1 else 2 * micro if sliced else micro
    split = cfg.zero >= 2
    gathered = {0: 0.0, 1: every * r, 2: every * r, 3: (2 * passes * layers + heads * embedding) * sent}[cfg.zero]
    if split:
        of_logits = micro * embedding * (2 if p > 1 else 1)
        reduced = (passes * layers + of_logits) * _share(n) + 2 * every / n * _share(m)
    elif a == 1:
        reduced = 2 * every * _share(n * m)
    else:
        once = every * (_share(f) + 2 / f * _share(m)) if cfg.zero else 2 * every * _share(f * m)
        reduced = 2 * (passes * layers + micro * (embedding + head)) * _share(c) + once
    over_stages = embedding * (FLOAT32 * micro + w / n if split else FLOAT32 + w)
    stream = tokens * t * model.embed * w * _share(t)  # one gather or scatter of the time
    keys = tokens * t * 2 * model.kv_heads * model.head_dim / t
    return Volume(
        weights=gathered * _share(n),
        gradients=reduced * w,
        tokens=2 * micro * tokens * model.embed * w * _share(n) if split else 0.0,
        tensor=stream * (executed * (11 if full else 8) + micro * (5 if p > 1 else 4)),
        context=executed * _context(model, keys, tokens * t, c, w, full, built.resolved.mesh.context_method),
        stage=shifts * tokens * model.embed * w + 2 * over_stages * _share(p),
    )


def _context(model: Decoder, keys: float, time: float, c: int, w: int, full: bool, method: str) -> float:
    """Of one layer's attention."""
    if c == 1:
        return 0.0
    if method == "ulysses":
        queries = keys / 2 * model.heads / model.kv_heads
        return ((7 if full else 6) * queries + 3 * keys) * w * _share(c)
    forward = (c - 1) * keys * w
    if model.window is None:
        return forward * (3 if full and c > 2 else 2) + keys * (2 * w + (c - 2) * FLOAT32)
    return min(forward, keys / time * (model.window - 1) * w) * (3 if full else 2)


def _share(devices: int) -> float:
    return (devices - 1) / devices
