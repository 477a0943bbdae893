"""Bytes and seconds of a step by arithmetic alone, from the config.

The bytes of the state are exact: its shapes are traced once and divided as the sharding rules require. Saved
activations are read from jax's own trace of the layers (`passes.py`), so they are exact for every recompute policy; the
rest of the peak is computed from the sizes of a decoder. Nothing is compiled: the first config of a shape takes half a
second, each further config a millisecond, so a search can compare thousands of configs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np

from jaxmem.config import Config, Decoder
from jaxmem.config.names import is_offloaded
from jaxmem.estimate.passes import loss_chunk, mlp_chunk, passes_in_memory, passes_of
from jaxmem.estimate.seconds import StepTime
from jaxmem.estimate.state import DeviceBytes, StateLeaf, state_of
from jaxmem.kernels.fused_attention import cudnn
from jaxmem.machine.gpus import Gpu
from jaxmem.models.mixture import MAX_LOAD_RATIO
from jaxmem.quant.precision import compute_dtype
from jaxmem.sharding.gathering import MIN_TOKENS_PER_ROW
from jaxmem.sharding.share import DeviceShare, share_of
from jaxmem.sharding.table import Role
from jaxmem.step.batches import batch_spec
from jaxmem.step.categories import COPIES, GATHERED, ROLE_OF_CATEGORY, SAVED
from jaxmem.step.execution import chunking, pipeline_of, repeats_forward
from jaxmem.step.programs import Program

FLOAT32 = 4  # bytes
# Layers whose experts are on the device in the forward pass, if experts are in host memory: this and the next one. From
# jax 0.11 on XLA also copies those of this layer.
EXPERT_BUFFERS = 2 if jax.__version_info__ < (0, 11) else 3


@dataclass(frozen=True)
class Estimate:
    """Bytes of one device in a training step, and the step's time."""

    categories: dict[str, int]
    kinds: dict[str, int]  # bytes of activations at the peak, by kind
    seconds: float | None  # None if the speed of the device is unknown
    host: int = 0  # bytes of host memory per device: offloaded arrays, and a copy of what a checkpoint saves

    @property
    def total(self) -> int:
        return sum(self.categories.values())


def predict(built: Program) -> dict[str, int | None]:
    """Bytes of one device by category; None for categories without a formula."""
    categories = estimate(built.resolved, built.platform).categories
    known: dict[str, int | None] = {**categories, "total": sum(categories.values())}
    if not isinstance(built.cfg.model, Decoder):
        known |= {"activations": None, "total": None}
    return known


def estimate(cfg: Config, platform: str, gpu: Gpu | None = None, per_host: int = 8) -> Estimate:
    """The estimate of a step.

    Args:
        cfg: a config whose mesh is resolved.
        platform: `gpu` or `cpu`.
        gpu: the kind of GPU; None: the time is not estimated.
        per_host: the number of devices that share a host.
    """
    step = _Step(cfg, platform)
    categories, offloaded = step.state_bytes()
    kinds = step.activations()
    activations = sum(kinds.values())
    gradients = step.gradients(activations)
    categories |= {"gradients": gradients, "activations": activations, "batch": step.batch_bytes()}
    seconds = None
    if gpu:
        # Quantized weights are dequantized after the all-gather; others are cast before it.
        gathered = step.state.stored_bytes if cfg.precision.is_quantized else step.width
        traffic = step.size_of.traffic(step.state.weights, step.width, gathered)
        seconds = StepTime(cfg, gpu, per_host, step.passes, traffic, categories, offloaded).seconds
    checkpoint = sum(step.size_of(role, leaves) for role, leaves in step.state.saved.items())
    host = step.of_micro_batch(step.passes.offloaded) + sum(offloaded.values()) + checkpoint
    return Estimate(categories, kinds, seconds, host)


class _Step:
    """The arrays of a training step on one device. `width`: bytes per element of the compute dtype; `saved`: bytes of
    the saved activations of a micro-batch; `decoder`: the sizes of a decoder's arrays."""

    def __init__(self, cfg: Config, platform: str) -> None:
        self.cfg = cfg
        self.passes = passes_of(cfg, platform)
        self.state = state_of(cfg, platform)
        self.size_of = DeviceBytes(cfg)
        dtype = compute_dtype(cfg.precision, platform)
        self.width = dtype.itemsize
        self.saved = self.of_micro_batch(self.passes.saved)
        fetched = self._experts_of_layer() if self._offloads("weights") else 0
        self.decoder = DecoderSizes(cfg, cfg.model, dtype, fetched) if isinstance(cfg.model, Decoder) else None

    def state_bytes(self) -> tuple[dict[str, int], dict[Role, int]]:
        """Bytes of the state: on the device, by category; in host memory, by role."""
        on_device: dict[str, int] = {}
        on_host: dict[Role, int] = {"weights": 0, "optimizer": 0}
        for category, role in ROLE_OF_CATEGORY.items():
            leaves = self.state.categories[category]
            can_leave = [leaf for leaf in leaves if leaf.can_offload and self._offloads(role)]
            on_device[category] = self.size_of(role, leaves) - self.size_of(role, can_leave)
            on_host[role] += self.size_of(role, can_leave)
        return on_device, on_host

    def activations(self) -> dict[str, int]:
        """Bytes of activations and of copied weights at the peak, by kind. `DecoderSizes.layer` has the weights that
        are fetched from host memory."""
        kinds = {SAVED: self.saved}
        if self.decoder:
            kinds |= self.decoder.at_peak(self.saved)
        if not self._offloads("weights"):
            # XLA slices the experts of a layer from the stack, since loops and kernels read them.
            kinds[GATHERED] = self._experts_of_layer()
        if self.cfg.memory.update == "during":
            # A transposed copy exists of each weight that the backward pass updates, if its all-gather is then
            # contiguous.
            transposed = filter(self.size_of.is_transposed, self.state.categories["parameters"])
            kinds[COPIES] = self.size_of("weights", transposed)
        return kinds

    def gradients(self, activations: int) -> int:
        """Bytes of gradients and updates, of which updates may use the memory of the activations."""
        if self.cfg.memory.update == "after":
            return self._update_after(activations)
        if pipeline := pipeline_of(self.cfg):
            return self._update_in_stages(pipeline.stored)
        return self._update_during(activations)

    def batch_bytes(self) -> int:
        shards = self.cfg.mesh.row_shards * self.cfg.mesh.context
        arrays = batch_spec(self.cfg).values()
        return sum(math.prod(shape) * np.dtype(dtype).itemsize // shards for shape, dtype, _ in arrays)

    def of_micro_batch(self, row: int) -> int:
        """Bytes of saved activations of a micro-batch. `row`: bytes of one sequence."""
        return int(row * share_of(self.cfg).rows * passes_in_memory(self.cfg))

    def _offloads(self, role: Role) -> bool:
        """Whether the arrays of the state in a role are in host memory, if they can be offloaded."""
        return is_offloaded(self.cfg.memory.offload, "frozen" if role == "weights" else role)

    def _experts_of_layer(self) -> int:
        """Bytes of the frozen experts of one layer, with their scales."""
        stored = (*self.state.categories["parameters"], *self.state.categories["quantization"])
        return self._one_layer("weights", [leaf for leaf in stored if leaf.can_offload and "expert" in leaf.axes])

    def _one_layer(self, role: Role, leaves: Sequence[StateLeaf], width: int = 0) -> int:
        """Bytes of one layer of the stacked arrays. `width`: bytes per element, by default of the stored dtype."""
        stacked = (leaf for leaf in leaves if leaf.is_stacked)
        return sum(self.size_of(role, [leaf], width) * self.size_of.stages // leaf.shape[0] for leaf in stacked)

    def _update_after(self, activations: int) -> int:
        """The larger of the bytes of gradients, and the bytes by which updates exceed the activations, which are freed
        before the update."""
        size_of = self.size_of
        trainable = self.state.trainable
        gradients = size_of("gradients", trainable)
        if size_of.stages > 1 or self.cfg.batch.accumulate > 1:
            # The gradients of layers are added to float32 sums one by one.
            gradients = max((size_of("gradients", [leaf]) for leaf in trainable if not leaf.is_stacked), default=0)
            if size_of.stages == 1 and size_of.reduces_once:  # the reduced gradients, together with the sums
                gradients = max(gradients, size_of("optimizer", trainable, self.width))
            gradients += size_of("gradients", trainable, FLOAT32)
        # If the optimizer state is sharded over more devices than the weights, shards of all new weights exist; new
        # weights outside of layers are gathered before the old ones are freed.
        width = math.ceil(self.state.stored_bytes)
        stored = size_of("weights", trainable, width)
        shards = size_of("optimizer", trainable, width)
        outside = size_of("weights", (leaf for leaf in trainable if not leaf.is_stacked), width)
        updates = shards + outside if stored > shards else 0
        return max(gradients, updates - activations)

    def _update_during(self, activations: int) -> int:
        """Bytes with `memory.update: during`. During the backward pass of the layers, the gradients of one layer and of
        all parameters outside of layers exist; afterwards the gradients of parameters outside, and the largest
        update."""
        # Embedding and output matrices are updated in slices, unless their complete gradients are needed.
        needs_all = not self.decoder or self.decoder.has_all_logits or self.cfg.optimizer.needs_whole_embedding
        updated = [leaf for leaf in self.state.trainable if needs_all or "vocab" not in leaf.axes]
        outside = [self.size_of("gradients", [leaf]) for leaf in updated if not leaf.is_stacked]
        layer = self._one_layer("gradients", updated)
        widening = FLOAT32 // self.width if self.cfg.batch.accumulate > 1 else 1
        return max((sum(outside) + layer) * widening, sum(outside) + max(outside, default=0) - activations)

    def _update_in_stages(self, layers: int) -> int:
        """Bytes with `memory.update: during` on pipeline stages: the float32 sums, and the largest gradient of a layer
        or of a parameter outside of the stages. With one micro-batch, layers of stages have no sums. `layers`: of all
        stages, with identity layers."""
        trainable = self.state.trainable
        inside = [leaf for leaf in trainable if leaf.is_stacked and leaf.shape[0] == layers]
        outside = [leaf for leaf in trainable if leaf not in inside]
        sums = self.size_of("gradients", outside if self.cfg.batch.accumulate == 1 else trainable, FLOAT32)
        layer = self._one_layer("gradients", inside, FLOAT32)
        return sums + max([layer, *(self.size_of("gradients", [leaf]) for leaf in outside)])


@dataclass(frozen=True)
class DecoderSizes:
    """Bytes of the arrays of a decoder on one device, for one micro-batch, in the compute dtype."""

    cfg: Config
    model: Decoder
    dtype: np.dtype  # the compute dtype
    fetched_experts: int = 0  # bytes of the experts of a layer that are fetched from host memory

    @property
    def width(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize

    @cached_property
    def share(self) -> DeviceShare:
        return share_of(self.cfg)

    @cached_property
    def tokens(self) -> float:
        return self.share.rows * self.cfg.row_length

    @property
    def residual(self) -> float:
        """The residual stream."""
        return self.tokens * self.model.embed * self.width

    @cached_property
    def head_groups(self) -> int:
        """`memory.head_groups`, resolved."""
        model = self.model
        split = self.share.shards("heads")
        if model.kv_heads % split:
            return 1
        mesh = self.cfg.mesh
        context = mesh.context if mesh.context_method == "ulysses" else 1
        return chunking(self.cfg.memory).group_count(
            self.share.stream(self.dtype), model.heads // split, model.kv_heads // split, model.head_dim, context
        )

    @property
    def queries(self) -> float:
        return self._of_heads(self.model.heads)

    @property
    def keys(self) -> float:
        return self._of_heads(self.share.kv_heads * self.share.shards("heads"))

    def _of_heads(self, heads: int) -> float:
        shards = self.share.shards("heads")
        return self.tokens * heads * self.model.head_dim * self.width / shards / self.head_groups

    @cached_property
    def mlp_chunk(self) -> int | None:
        return mlp_chunk(self.cfg.memory, self.share, self.dtype)

    @property
    def hidden(self) -> float:
        """The hidden units of the MLP, or a quarter of what experts need instead."""
        model = self.model
        mesh = self.cfg.mesh
        experts = model.experts
        if experts is None:
            hidden = self.tokens * model.mlp * self.width / mesh.tensor
            chunk = self.mlp_chunk
            return hidden * (chunk * mesh.context * mesh.tensor / self.cfg.data.sequence_length) if chunk else hidden
        if self.cfg.memory.experts == "triton":
            # For each chosen expert of each token, the output, its gradient, and three arrays of hidden units; with
            # `mesh.expert`, for one chunk, plus inputs, outputs and the gradients of both for all tokens.
            chosen = self.tokens * experts.top_k * (MAX_LOAD_RATIO if mesh.expert > 1 else 1)
            hidden = chosen * (3 * model.mlp / self.share.shards("mlp") + 2 * model.embed) * self.width / 4
            hidden += self.tokens * mesh.expert * model.embed * self.width if mesh.expert > 1 else 0
        else:
            # For the tokens of all devices along `expert`, the inputs, and in float32 the gradients of inputs and
            # outputs.
            hidden = self.tokens * model.embed * (self.width + 2 * FLOAT32) * mesh.expert / 4
        if experts.dense_mlp is None:
            return hidden
        return self._of_both_kinds(hidden, self.tokens * experts.dense_mlp * self.width / mesh.tensor)

    @property
    def chunked(self) -> float:
        """Additional bytes of an MLP that is computed in chunks: the residual stream and its gradient before and after
        the MLP; weight gradients, summed in float32."""
        if not self.mlp_chunk:
            return 0.0
        weights = 3 * self.model.embed * self.model.mlp / self.share.shards("mlp")
        sums = 0 if self.cfg.trainable_patterns else weights * FLOAT32
        return sums + 3 * self.residual / self.cfg.mesh.tensor

    @property
    def units(self) -> float:
        """The hidden units whose weights a device multiplies with."""
        experts = self.model.experts
        units = self.model.mlp / self.share.shards("mlp")
        if experts is None:
            return units
        units *= 1 if self.cfg.trainable_patterns else experts.count / self.cfg.mesh.expert
        if experts.dense_mlp is None:
            return units
        return self._of_both_kinds(units, experts.dense_mlp / self.share.shards("mlp"))

    def _of_both_kinds(self, sparse: float, dense: float) -> float:
        """The gradients of a group of layers of both kinds are computed together."""
        return sparse + dense if len(self.model.stacks[-1]) > 1 else max(sparse, dense)

    @cached_property
    def loss_chunk(self) -> int:
        """The vocabulary entries whose logits exist together."""
        return loss_chunk(self.cfg.memory, self.share, self.dtype) or 0

    @property
    def has_all_logits(self) -> bool:
        return self.loss_chunk == self.share.vocab

    @property
    def is_scattered(self) -> bool:
        """Whether gradients are reduce-scattered."""
        return self.cfg.zero >= 2 and self.cfg.mesh.fsdp * self.cfg.mesh.context > 1

    @property
    def in_order(self) -> bool:
        """Whether the gradients of each layer are communicated in order (`sharding.gather_with_input`)."""
        has_many_tokens = self.tokens >= MIN_TOKENS_PER_ROW * self.model.embed
        return self.is_scattered and self.cfg.mesh.tensor == 1 and has_many_tokens

    @property
    def head_waits(self) -> bool:
        """Whether XLA computes the gradient of the output matrix after the gradients of the layers. It does if this
        gradient and the gradient of the features are both communicated: with ring attention, with logits in slices, or
        with offloaded optimizer state and one micro-batch (observed with fsdp)."""
        cfg = self.cfg
        mesh = cfg.mesh
        fetched = is_offloaded(cfg.memory.offload, "optimizer") and cfg.batch.accumulate == 1 and mesh.fsdp > 1
        sliced = self.loss_chunk < self.model.vocab
        return self.is_scattered and not self.in_order and (sliced or mesh.context > 1 or fetched)

    def at_peak(self, saved: int) -> dict[str, int]:
        """Bytes by kind at the larger of two moments: the loss, or the backward pass of one layer. Activations that are
        fetched from host memory count as intermediates of that layer. `saved`: bytes of the saved activations."""
        mesh = self.cfg.mesh
        layer = self.layer
        if self.chunked and saved and mesh.tensor == mesh.stage == 1 and repeats_forward(self.cfg.memory.remat):
            # Before the first backward pass of a layer, XLA transposes the saved activations of all layers into the
            # order that the matmuls of the chunks prefer, unless they are gathered before their use (`tensor`).
            layer = max(layer, saved + 2 * self.residual)
        vocab_shards = self.share.shards("vocab")
        is_wide = self.has_all_logits and self.model.logit_soft_cap is not None  # the cap is computed in float32
        width = FLOAT32 if is_wide else self.width
        logits = self.tokens * vocab_shards / mesh.tensor * self.loss_chunk * width
        head = self.model.embed * self.loss_chunk * self.width  # the part of the output matrix for these logits
        # The logits and the weight of a slice, their gradients, and the gradient of the features in float32.
        if not self.has_all_logits:
            features = self.residual * vocab_shards / mesh.tensor  # the input of the output projection
            logits += 2 * head + FLOAT32 / self.width * features + (features - self.residual)
            return {"logits": int(logits)} if logits > layer else {"intermediates": int(layer)}
        if mesh.stage > 1:  # in a pipeline logits are recomputed for their gradient, with a float32 copy
            logits += FLOAT32 / self.width * logits
        # With one micro-batch, logits and the intermediates of a layer coexist too, unless the MLP runs in chunks and
        # nothing is saved on the device, or pipeline stages compute the loss in a tick.
        is_single = self.cfg.batch.accumulate == mesh.stage == 1
        waits = is_single and not self.in_order and (saved > 0 or not self.chunked)
        if waits or self.head_waits:
            return {"logits": int(logits + head), "intermediates": int(layer)}
        if logits > layer:
            return {"logits": int(logits + head)}
        return {"logits": int(head), "intermediates": int(layer)}

    @property
    def layer(self) -> float:
        """The backward pass of one layer: arrays that exist throughout it, and the larger of the additional arrays of
        the MLP and of attention. While a layer computes, the experts of the next one are fetched from host memory
        (`sharding.host`); the memory of its own experts is free once the backward pass of the MLP is complete."""
        model = self.model
        shards = self.share.shards("heads")
        attention = (2 * model.heads + 2 * model.kv_heads) * model.head_dim
        weights = model.embed * (attention / shards + 3 * self.units) * self.width
        largest_matrix = model.embed * max(model.heads * model.head_dim / shards, self.units) * self.width
        wide = FLOAT32 / self.width
        throughout = weights + (largest_matrix if self.cfg.mesh.fsdp > 1 else 0) + 6 * self.residual
        throughout += (1 + 2 * wide) * self.queries + 2 * (1 + wide) * self.keys + self.fetched_experts
        mlp = 4 * self.hidden + self.chunked + self.fetched_experts
        backward = throughout + max(mlp, self.context_attention, self.cudnn_workspace)
        return max(backward, EXPERT_BUFFERS * self.fetched_experts + self.residual)

    @property
    def cudnn_workspace(self) -> float:
        """What cuDNN allocates in the backward pass of attention."""
        cfg = self.cfg
        model = self.model
        if cfg.memory.attention != "cudnn":
            return 0
        is_ring = cfg.mesh.context > 1 and cfg.mesh.context_method != "ulysses"
        split = self.head_groups * (1 if is_ring else cfg.mesh.context)
        heads = max(1, self.share.heads // split)
        kv_heads = max(1, self.share.kv_heads // split)
        segments = cfg.data.max_segments if cfg.data.packing else 1
        length = cfg.row_length // (cfg.mesh.context if is_ring else 1)
        rows = math.ceil(self.share.rows * cfg.mesh.context)
        call = cudnn.CudnnCall(rows, length, length, heads, kv_heads, model.head_dim, 1.0, True, model.window, segments)
        return cudnn.workspace(cudnn.backward_part(call), self.width)

    @property
    def context_attention(self) -> float:
        """What attention over `context` adds. With `ulysses` these are the shards of the heads; otherwise keys, values
        and their gradients that are being sent, and the queries, the output and their gradients."""
        mesh = self.cfg.mesh
        if mesh.context == 1:
            return 0
        if mesh.context_method == "ulysses":
            return 4 * self.queries + 2 * self.keys + self.cudnn_workspace
        wide = FLOAT32 / self.width
        return 0 if self.model.window else 2 * (1 + wide) * self.keys + (3 + wide) * self.queries
