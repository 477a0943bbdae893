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

`stage` with p devices: a device has P / p of the weights and E / p of the embedding, and sends T D w in each tick after
which a stage receives activations or gradients. For each micro-batch, all-reduces of T D w over p send the output of
the last stage and the gradient of the embedding to all stages, and sum the embeddings and the gradients of the output;
three float32 per token, statistics of the logits, are summed too.
"""

from dataclasses import dataclass, fields

import jax
import numpy as np

from jaxmem.config import Decoder, Rules
from jaxmem.errors import UserError
from jaxmem.models.cross_entropy import max_update_entries, slice_width
from jaxmem.quant.precision import compute_dtype
from jaxmem.sharding.weights import differentiable
from jaxmem.step.programs import Program

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

    p = built.cfg.mesh.stage
    embedding = model.vocab * model.embed / t / p  # and so many for the logits
    head = 0 if model.tie_embeddings else embedding
    layers = built.model.parameter_count / t - p * (embedding + head)
    executed, sends = a * model.layers, 0
    if (pipeline := built.model.execution.pipeline) is not None:
        layers *= pipeline.stored / pipeline.layers / p
        executed, slots = a * pipeline.group * pipeline.rounds, pipeline.timetable.slots
        sends = sum(int(np.any(ring >= 0, axis=1).sum()) for ring in (slots.received, slots.received_gradients))
    every = layers + embedding + head
    most = max_update_entries(cfg.memory.update, model.embed)
    sliced = slice_width(cfg.memory.loss_chunk, round(tokens * t), -(-model.vocab // (t * p)), w, most)
    heads = 2 * a if sliced else a  # the logits' weights: gathered forward only, or in slices again
    split = cfg.zero >= 2
    gathered = {0: 0.0, 1: every * r, 2: every * r, 3: (2 * a * layers + heads * embedding) * sent}[cfg.zero]
    if split:
        reduced = a * (layers + embedding) * _share(n) + 2 * every / n * _share(m)
    elif a == 1:
        reduced = 2 * every * _share(n * m)
    else:
        once = every * (_share(f) + 2 / f * _share(m)) if cfg.zero else 2 * every * _share(f * m)
        reduced = 2 * a * (layers + embedding + head) * _share(c) + once
    over_stages = a * tokens * (4 * model.embed * w + 3 * t * FLOAT32)
    stream = tokens * t * model.embed * w * _share(t)  # one gather or scatter of the time
    keys = tokens * t * 2 * model.kv_heads * model.head_dim / t
    return Volume(
        weights=gathered * _share(n),
        gradients=reduced * w,
        tokens=2 * a * tokens * model.embed * w * _share(n) if split else 0.0,
        tensor=stream * (executed * (11 if full else 8) + 4 * a),
        context=executed * _context(model, keys, tokens * t, c, w, full, built.resolved.mesh.context_method),
        stage=sends * tokens * model.embed * w + 2 * over_stages * _share(p),
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
