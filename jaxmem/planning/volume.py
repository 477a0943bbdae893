"""How many bytes a device sends for an update, by arithmetic: what a compiled step's messages must come to.

For a decoder with P weights in its products and E in its embedding, in numbers of w bytes where it computes and r
where they rest; a micro-batches of T tokens a device, of width D. n devices along `fsdp` x `context` share weights,
m along `replica` copy them. Where n devices take part a message counts (n - 1) / n of its array.

    zero 0       2 (P + E) w            sums of gradients all-reduced over all n m, once an update
    zero 1       (P + E) (w + r)        sums of gradients reduce-scattered, new weights gathered
    zero 2       a P w + (P + E) r      gradients reduce-scattered, new weights gathered
    zero 3       a (3 P - H) w          weights gathered forward and backward, gradients reduce-scattered; the H
                                        weights of the logits are gathered once, where the loss takes them in
                                        slices twice; codes travel as they rest: r for w
    from zero 2  2 a T D w              rows of the embedding, and their gradients, exchanged
    from zero 1  2 (P + E) w / n        parts of the gradients all-reduced over m, once an update
    to zero 1    2 a (P + E) w          gradients all-reduced over `context`, whose devices share rows

`tensor` splits P, E and, between its t devices, sends the residual stream of a token group of t T tokens: gathered
and reduce-scattered twice a layer forward and twice backward, with memory.remat=full once more but for the last
scatter; and once each for the embedding and for the logits. `context` with c devices sends keys and values of K
numbers a token: c - 1 times forward and backward (and once more with full remat, where c = 2 finds both to be the same
message), and c times their gradients, of which the first and the last travel in w bytes and the others in float32; with
a window those of min(window - 1, (c - 1) T) tokens forward and back.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import jax

from jaxmem import vocabulary
from jaxmem.config import Decoder, Rules
from jaxmem.errors import UserError
from jaxmem.precision import compute_dtype
from jaxmem.program import Program

FLOAT32 = 4


@dataclass(frozen=True)
class Volume:
    """Bytes that one device sends for one update, by what they are for."""

    weights: float  # gathered
    gradients: float  # reduced
    tokens: float  # looked up in the embedding
    tensor: float
    context: float

    @property
    def total(self) -> float:
        return sum(getattr(self, field.name) for field in fields(self))


def volume(built: Program) -> Volume:
    cfg, mesh = built.cfg, built.layout.mesh.shape
    model = cfg.model
    if not isinstance(model, Decoder):
        raise UserError(f"model.family: the messages of a {model.family} are not derived; a decoder's are")
    if cfg.rules != Rules():
        raise UserError("rules: messages are derived for the usual table; leave rules out")
    n, m, t = mesh["fsdp"] * mesh["context"], mesh["replica"], mesh["tensor"]
    a, c = cfg.batch.accumulate, mesh["context"]
    w = compute_dtype(cfg.precision, built.layout.mesh.devices.flat[0].platform).itemsize
    r = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(built.state.params)) / built.parameters  # at rest
    sent = r if cfg.precision.quantized else w  # codes are decoded where they arrive, other weights cast before
    tokens = cfg.batch.global_size // a // (mesh["fsdp"] * m) * cfg.data.sequence_length // c / t
    full = cfg.memory.remat == "full"

    embedding = model.vocab * model.embed / t  # and so many for the logits
    products = built.parameters / t - (0 if model.tie_embeddings else embedding)
    every = products + (0 if model.tie_embeddings else embedding)
    most = vocabulary.entries_at_once(cfg.memory.update, model.embed)
    sliced = vocabulary.width(cfg.memory.loss_chunk, round(tokens * t), -(-model.vocab // t), w, most)
    again = 0 if sliced else embedding  # gathered forward only
    split = cfg.zero >= 2
    gathered = {0: 0.0, 1: every * r, 2: every * r, 3: a * (2 * products - again) * sent}[cfg.zero] * _share(n)
    f, rows = mesh["fsdp"], _share(mesh["fsdp"])  # devices with rows of their own
    if split:
        reduced = a * products * _share(n) + 2 * every / n * _share(m)
    elif a == 1:
        reduced = 2 * every * _share(n * m)
    else:
        once = every * (rows + 2 / f * _share(m)) if cfg.zero else 2 * every * _share(f * m)
        reduced = 2 * a * every * _share(c) + once
    stream = tokens * t * model.embed * w * _share(t)  # one gather or scatter of the time
    keys = tokens * t * 2 * model.kv_heads * model.head_dim / t
    return Volume(
        weights=gathered,
        gradients=reduced * w,
        tokens=2 * a * tokens * model.embed * w * _share(n) if split else 0.0,
        tensor=a * stream * (model.layers * (11 if full else 8) + 4),
        context=a * model.layers * _context(model, keys, tokens * t, c, w, full),
    )


def _context(model: Decoder, keys: float, time: float, c: int, w: int, full: bool) -> float:
    """Of one layer's keys and values."""
    if c == 1:
        return 0.0
    forward = (c - 1) * keys * w
    if model.window is None:
        return forward * (3 if full and c > 2 else 2) + keys * (2 * w + (c - 2) * FLOAT32)
    return min(forward, keys / time * (model.window - 1) * w) * (3 if full else 2)


def _share(devices: int) -> float:
    return (devices - 1) / devices
