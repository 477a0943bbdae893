"""The same bytes and seconds by arithmetic alone, from the config: what one would write on a blackboard.

State is exact: its shapes are traced once and divided as the table of axes says. What the layers keep for the
backward pass is read from jax's own trace of it (`passes.py`), so that any recomputation policy counts as what it
keeps; what lies beside it at the fullest moment is arithmetic on a decoder's sizes. Nothing is compiled: the first
config of a shape takes half a second, each further one a millisecond, so that a search can look at thousands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxmem.config import Config, Decoder
from jaxmem.config.names import is_offloaded
from jaxmem.kernels.fused_attention.blockwise import SHORT
from jaxmem.machine.gpus import Gpu
from jaxmem.planning.breakdown import SAVED
from jaxmem.planning.pace import seconds_of
from jaxmem.planning.passes import passes_of
from jaxmem.planning.share import head_groups, held_vocabulary, loss_chunk, mlp_chunk, passes_held, rows_of
from jaxmem.planning.state import Held, Leaf, state_of
from jaxmem.quant.precision import compute_dtype
from jaxmem.sharding import MIN_TOKENS_PER_ROW
from jaxmem.step import Program
from jaxmem.step.batches import batch_spec

STATE = ("parameters", "quantization", "master", "optimizer")


@dataclass(frozen=True)
class Estimate:
    """Bytes of one device in a training step, and how long the step takes on it."""

    parts: dict[str, int]
    kinds: dict[str, int]  # what the largest moment beside the state consists of
    seconds: float | None  # None where nothing is known of the device's speed
    host: int = 0  # of its share of host memory: what waits there, and the state's copy while it is saved

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def predict(built: Program) -> dict[str, int | None]:
    """Bytes of one device; None where no formula is known."""
    parts = estimate(built.cfg, _platform(built)).parts
    known: dict[str, int | None] = {**parts, "total": sum(parts.values())}
    if not isinstance(built.cfg.model, Decoder):
        known |= {"activations": None, "total": None}
    return known


def estimate(cfg: Config, platform: str, gpu: Gpu | None = None, per_host: int = 8) -> Estimate:
    """Of a config whose mesh is filled in, on devices of which `per_host` share a host."""
    passes, state = passes_of(cfg, platform), state_of(cfg, platform)
    sizes, held = _Sizes(cfg, platform), Held(cfg)
    one_pass = held("gradients", state.trained)
    if cfg.mesh.stage > 1:  # layers' join their sums one by one
        one_pass = max(held("gradients", [leaf]) for leaf in state.trained if leaf.axes[:1] != ("layer",))
    during, several = cfg.memory.update == "during", cfg.batch.accumulate > 1
    summed = held("gradients", state.trained, 4) if several and not during else 0  # in float32
    # Weights that the backward pass changes lie as they are gathered best; others are turned a layer at a time.
    copies = held("weights", filter(held.is_turned, state.params)) if during else 0
    kinds = sizes.fullest(passes.saved) | {"weights: copies": copies}
    # Where the optimizer holds only a part of the weights, the new ones are whole before they replace the old ones.
    width = math.ceil(state.rest)
    resting = held("weights", state.trained, width)
    updates = resting if resting > held("optimizer", state.trained, width) else 0
    whole_state = sum(held("weights", part) for part in (state.params, state.constants))
    whole_state += held("optimizer", (*state.master, *state.optimizer))
    if is_offloaded(cfg.memory.offload, "optimizer"):
        state = replace(state, optimizer=_staying(state.optimizer), master=_staying(state.master))
    frozen, rest = 0, state.rest
    if is_offloaded(cfg.memory.offload, "frozen"):
        away = [leaf for leaf in (*state.params, *state.constants) if leaf.may_wait]
        frozen = held("weights", away)
        layers = [(held("weights", [leaf]), leaf.shape[0]) for leaf in away if leaf.axes[:1] == ("layer",)]
        kinds["weights: from the host"] = 2 * sum(size // count for size, count in layers)  # this layer's and the next
        state = replace(state, params=_staying(state.params), constants=_staying(state.constants))
    in_passes = sum(kinds.values())
    if during:
        whole = sizes.is_whole or (cfg.optimizer.project_embeddings and "galore" in cfg.optimizer.name)
        one_pass, updates = _during(held, [leaf for leaf in state.trained if whole or "vocab" not in leaf.axes])
        one_pass *= 4 // sizes.width if several else 1
    parts = {
        "parameters": held("weights", state.params),
        "quantization": held("weights", state.constants),
        "master": held("optimizer", state.master),
        "optimizer": held("optimizer", state.optimizer),
        "gradients": max(one_pass + summed, updates - in_passes),
        "activations": in_passes,
        "batch": sizes.batch,
    }
    # Codes are decoded where they arrive, other weights cast before they leave.
    weights = held.by_message(state.weights, sizes.width, rest if cfg.precision.quantized else sizes.width)
    waiting = whole_state - sum(parts[name] for name in STATE)
    seconds = seconds_of(cfg, passes, weights, parts, waiting - frozen, frozen, gpu, per_host) if gpu else None
    return Estimate(parts, kinds, seconds, sizes.kept(passes.hosted) + waiting + whole_state)


def _staying(leaves: Sequence[Leaf]) -> tuple[Leaf, ...]:
    """What does not wait in host memory."""
    return tuple(leaf for leaf in leaves if not leaf.may_wait)


def _during(held: Held, params: Sequence[Leaf]) -> tuple[int, int]:
    """Gradients beside a layer's passes: those of all that is no layer, and one layer's. And when the layers are done:
    the largest has its update beside it. Without those of tables that are updated in slices."""
    sizes = [(held("gradients", [leaf]), leaf) for leaf in params]
    outside = [size for size, leaf in sizes if leaf.axes[:1] != ("layer",)]
    layer = sum(size // leaf.shape[0] for size, leaf in sizes if leaf.axes[:1] == ("layer",))
    return sum(outside) + layer, sum(outside) + max(outside, default=0)


class _Sizes:
    """Of one device and one micro-batch of a decoder, in bytes of the compute dtype."""

    def __init__(self, cfg: Config, platform: str) -> None:
        mesh, model = cfg.mesh, cfg.model
        self.cfg = cfg
        self.rows, self.is_whole = rows_of(cfg), True
        self.width = compute_dtype(cfg.precision, platform).itemsize
        split = mesh.replica * mesh.fsdp * mesh.context
        spec = batch_spec(cfg).values()
        self.batch = sum(math.prod(size) * np.dtype(dtype).itemsize // split for size, dtype, _ in spec)
        if isinstance(model, Decoder):
            tokens, width, tensor = self.rows * cfg.time, self.width, mesh.tensor
            heads, mlp, vocab = (
                tensor if "tensor" in over else 1 for over in (cfg.rules.heads, cfg.rules.mlp, cfg.rules.vocab)
            )
            groups = head_groups(cfg, platform)
            self.residual = tokens * model.embed * width
            self.queries = tokens * model.heads * model.head_dim * width / heads / groups
            self.keys = tokens * model.kv_heads * model.head_dim * width / heads / groups
            self.hidden = tokens * model.mlp * width / tensor
            self.pieces = 0.0  # beside an MLP in pieces
            if piece := mlp_chunk(cfg, platform):
                self.hidden *= piece * mesh.context * tensor / cfg.data.sequence_length
                # The stream and its gradients before and after; its weights' gradients, added up in float32.
                learns = 0 if cfg.learns else 3 * model.embed * model.mlp / mlp * 4
                self.pieces = learns + 3 * self.residual / tensor
            self.chunk = loss_chunk(cfg, platform) or 0
            self.is_whole = self.chunk == held_vocabulary(cfg)
            # Where the features' gradient and the head's both travel, XLA makes the head's after the layers' gradients.
            # So it does where keys go round; where state comes from the host, in a step of one micro-batch, seen where
            # fsdp splits it; and from jax 0.11 on, where layers run again, on a lone device too.
            # Not where a layer's gradients come in order (`sharding.gather_with_input`): nothing is left for later.
            travels = cfg.zero >= 2 and mesh.fsdp * mesh.context > 1
            self.in_order = travels and tensor == 1 and tokens >= MIN_TOKENS_PER_ROW * model.embed
            fetched = is_offloaded(cfg.memory.offload, "optimizer") and cfg.batch.accumulate == 1 and mesh.fsdp > 1
            alone = jax.__version_info__ >= (0, 11) and cfg.memory.remat != "none" and split * tensor * mesh.stage == 1
            late = travels and not self.in_order
            self.head_waits = (late and (self.chunk < model.vocab or mesh.context > 1 or fetched)) or alone
            self.logits = tokens / (tensor // vocab) * self.chunk * width
            self.head = model.embed * self.chunk * width
            attention = (2 * model.heads + 2 * model.kv_heads) * model.head_dim
            self.layer = model.embed * (attention / heads + 3 * model.mlp / mlp) * width
            self.matrix = (
                model.embed * max(model.heads * model.head_dim / heads, model.mlp / mlp) * width
            )  # the largest

    def kept(self, row: int) -> int:
        """Of a micro-batch, what is kept of one row for the backward pass."""
        return int(row * self.rows * passes_held(self.cfg))

    def fullest(self, saved: int) -> dict[str, int]:
        """The larger of two moments: the loss, or one layer's backward pass. What comes back from host memory is among
        that layer's intermediates."""
        kept = {SAVED: self.kept(saved)}
        model = self.cfg.model
        if not isinstance(model, Decoder):
            return kept
        layer = self._layer(model)
        alone = self.cfg.mesh.tensor == self.cfg.mesh.stage == 1
        if self.pieces and saved and alone and self.cfg.memory.remat != "none":
            # XLA turns what all layers keep into the order that the pieces' products like, before the first layer's
            # backward pass. Not where it is gathered between them.
            layer = max(layer, sum(kept.values()) + 2 * self.residual)
        logits, head = self.logits, self.head
        if self.is_whole and self.cfg.mesh.stage > 1:  # made again for their gradient, in float32 too
            logits += 4 / self.width * logits
        if not self.is_whole:  # a slice's logits, its weight and their gradients, and the features' gradient in float32
            logits += 2 * head + 4 / self.width * self.residual
            return kept | ({"logits": int(logits)} if logits > layer else {"intermediates": int(layer)})
        # Of one micro-batch they wait too; not beside layers in pieces that keep nothing here.
        waits = self.cfg.batch.accumulate == 1 and not self.in_order and (saved > 0 or not self.pieces)
        if waits or self.head_waits:
            return kept | {"logits": int(logits + head), "intermediates": int(layer)}
        if logits > layer:
            return kept | {"logits": int(logits + head)}
        return kept | {"logits": int(head), "intermediates": int(layer)}

    def _layer(self, model: Decoder) -> float:
        """Of one layer's backward pass: the MLP's, with what attention's will need, or then attention's."""
        wide = 4 / self.width  # float32
        lasting = (
            self.layer + (self.matrix if self.cfg.mesh.fsdp > 1 else 0)
            + 6 * self.residual + (1 + 2 * wide) * self.queries + 2 * (1 + wide) * self.keys
        )  # fmt: skip
        mlp = 4 * self.hidden + self.pieces
        return lasting + max(mlp, self._ring(model, wide, mlp))

    def _ring(self, model: Decoder, wide: float, mlp: float) -> float:
        """What devices that pass keys round have beside their own attention: keys and their gradients on the way, of
        two halves of the queries q, output and both gradients. Where blocks are written out one after the other XLA
        makes all blocks' scores before it uses the first, probabilities and their gradients in float32, and rounded;
        the gradients of the MLP's weights after them; and what devices of `tensor` gather is turned round twice."""
        cfg = self.cfg
        half = cfg.data.sequence_length // (2 * cfg.mesh.context)
        if cfg.mesh.context == 1 or model.window:
            return 0
        moving = 2 * (1 + wide) * self.keys + (3 + wide) * self.queries
        if half * half > SHORT:
            return moving
        scores = (2 * wide + 1) * self.queries / model.head_dim * half
        later = 0 if self.in_order else mlp
        return moving + scores + later + (2 * self.residual if cfg.mesh.tensor > 1 else 0)


def _platform(built: Program) -> str:
    return built.layout.mesh.devices.flat[0].platform


def ideal_flops(built: Program) -> float:
    """Of an update, without any recomputation: 2 for each weight of a product and token forward, twice that backward,
    and causal attention's two products, of which half is empty. Pictures: the weights once for each pixel's place
    is not counted, so this is a lower bound there."""
    cfg, model = built.cfg, built.cfg.model
    if model.family != "decoder":
        return 6.0 * built.model.parameters * cfg.batch.global_size
    length = cfg.time
    looked_up = 0 if model.tie_embeddings else model.vocab * model.embed
    seen = min(model.window or length, length)
    pairs = seen * length - seen * (seen - 1) / 2  # (query, key) that see each other
    attention = 4 * model.layers * model.heads * model.head_dim * pairs
    products = built.model.parameters - looked_up
    frozen = built.model.parameters - built.model.trainable if cfg.learns else 0  # has no gradient to make
    return cfg.batch.global_size * (3.0 * (2.0 * products * length + attention) - 2.0 * frozen * length)


def held(tree: Any) -> int:
    """Bytes that one device holds of placed arrays (or their shapes)."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
