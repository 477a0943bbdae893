"""Estimates the seconds of a step without compiling it: matmuls and the operations between them, exposed
communication, and the update.

The estimates compare configs before any is compiled; `timeline.py` estimates the time from a compiled program.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from jaxmem.config import Config, Decoder
from jaxmem.config.names import BOUNDARY, offloaded_activations
from jaxmem.estimate.passes import TRAFFIC_PER_MATMUL, Matmul, TracedPasses, layers_per_pass, passes_per_update
from jaxmem.machine.gpus import LAUNCH_SECONDS, MATMUL_SECONDS, Gpu
from jaxmem.machine.links import latency, link_rate
from jaxmem.models.dispatch import share_of_devices, uses_all_to_all
from jaxmem.sharding.share import DeviceShare, share_of
from jaxmem.sharding.table import Role
from jaxmem.step.context_methods import context_traffic
from jaxmem.step.execution import repeats_forward

_MIN_EXPOSED_SHARE = 0.3  # least share of the communication that is exposed
_EXPOSED_COPY_SHARE = 0.8  # of copies between a device and its host, from compiled decoders with remat=dots


@dataclass(frozen=True)
class StepTime:
    """The time of a step of a config on GPUs, `per_host` of them on each host."""

    cfg: Config
    gpu: Gpu
    per_host: int
    passes: TracedPasses
    weights: Mapping[str, float]  # bytes of weights that are communicated, by `state.TRAFFIC`
    categories: Mapping[str, int]  # bytes of one device by category
    offloaded: Mapping[Role, int]  # bytes of its frozen weights and of its optimizer state in host memory

    @property
    def seconds(self) -> float:
        gpu = self.gpu
        categories = self.categories
        micro = self.cfg.batch.accumulate
        compute = self._compute() * passes_per_update(self.cfg) / micro
        communication = self._weights()
        if isinstance(model := self.cfg.model, Decoder):
            communication += self._tensor(model)
            communication += self._context()
            communication += self._features(model)
            communication += self._experts(model)
        exposed = max(_MIN_EXPOSED_SHARE * communication, communication - compute)
        # Offloaded frozen weights are copied in both passes, one layer ahead.
        copies = 2 * self.offloaded["weights"] / gpu.host_rate
        exposed += max(_MIN_EXPOSED_SHARE * copies, copies - compute)
        memory = 3 * categories["gradients"] / gpu.memory_rate
        micro_batch = compute + exposed + self._offloaded_activations(compute) + memory
        # Copies for an update after the backward pass are not overlapped, nor those of a stage with several
        # micro-batches; both directions are used at the same time.
        moved = self.offloaded["optimizer"] / gpu.host_rate
        is_overlapped = self.cfg.memory.update == "during" and (self.cfg.mesh.stage == 1 or micro == 1)
        exposed_state = max(0.0, moved - compute) if is_overlapped else moved
        state = sum(categories[name] for name in ("parameters", "master", "optimizer", "gradients"))
        state += sum(self.offloaded.values())
        return micro * micro_batch + exposed_state + self._per_update() + 3 * state / gpu.memory_rate

    @property
    def _split(self) -> int:
        """The number of devices over which the weights of a replica are sharded."""
        return self.cfg.mesh.fsdp * self.cfg.mesh.expert * self.cfg.mesh.context

    @cached_property
    def _share(self) -> DeviceShare:
        return share_of(self.cfg)

    @property
    def _tokens(self) -> float:
        return self._share.tokens

    @property
    def _width(self) -> int:
        """Bytes per element in the compute dtype."""
        return 4 if self.cfg.precision.compute == "float32" else 2

    def _compute(self) -> float:
        rows = self._share.rows
        seconds = self.passes.kernels * LAUNCH_SECONDS
        for matmul in self.passes.matmuls:
            arithmetic = rows * matmul.flops / self._rate(matmul)
            moved = matmul.weights + rows * matmul.others
            seconds += matmul.times * (TRAFFIC_PER_MATMUL * moved / self.gpu.memory_rate + MATMUL_SECONDS)
            if arithmetic > moved / self.gpu.memory_rate:
                seconds += matmul.times * arithmetic
        return seconds

    def _rate(self, matmul: Matmul) -> float:
        """Attained FLOP/s."""
        if not matmul.is_kernel:
            return self.gpu.matmul_rate(matmul.dtype)
        return self.gpu.attention_rate(matmul.dtype, matmul.keys, matmul.width, backward=matmul.is_backward)

    def _weights(self) -> float:
        """Seconds of the communication of weights for one micro-batch: weights are gathered twice and gradients reduced
        once, layer by layer, in the compute dtype."""
        mesh = self.cfg.mesh
        weights = self.weights
        layers = layers_per_pass(self.cfg)
        gathered = self._ring(2 * weights["gathered"], self._split, mesh.tensor, 2 * layers)
        within = gathered + self._ring(weights["scattered"], self._split, mesh.tensor, layers)
        shared = self._ring(weights["reduced"], mesh.context, mesh.tensor)
        return within + 2 * (shared + self._ring(weights["replicated"], mesh.tensor, 1))

    def _per_update(self) -> float:
        """Seconds of the communication of weights for one update: replicated gradients (all-reduced), shards of the
        other gradients, and updated weights."""
        mesh = self.cfg.mesh
        weights = self.weights
        sides = 1 if self.cfg.zero else 2
        within = self._ring(sides * weights["reduced"], mesh.fsdp, mesh.expert * mesh.context * mesh.tensor)
        between = weights["scattered"] / self._split + weights["reduced"] / (mesh.fsdp if self.cfg.zero else 1)
        replicas = self._ring(between, mesh.replica, mesh.tensor * self._split)
        if self.cfg.rules.optimizer and self.cfg.zero == 3:  # reduce-scattered; new shards of weights are gathered
            return within + replicas + self._ring(weights["renewed"], mesh.replica, mesh.tensor * self._split)
        return within + 2 * replicas + self._ring(weights["renewed"], self._split, mesh.tensor)

    def _tensor(self, model: Decoder) -> float:
        """Seconds of the reductions of the residual stream per layer and pass: one for attention and one for the MLP,
        if `tensor` shards them. Attention that is not sharded over `tensor` still gathers all positions."""
        residual = self._tokens * model.embed * self._width
        halves = (1 if self._share.shards("heads") > 1 else 0.5) + (self._share.shards("mlp") > 1)
        passes = 5 if repeats_forward(self.cfg.memory.remat) else 4
        return halves * passes * layers_per_pass(self.cfg) * self._ring(residual, self.cfg.mesh.tensor, 1)

    def _features(self, model: Decoder) -> float:
        """Seconds in which features are gathered for logits whose vocabulary is sharded over the axes of
        `rules.logits`, and their gradients are reduced."""
        if not self.cfg.rules.logits:
            return 0.0
        mesh = self.cfg.mesh
        group = mesh.fsdp * mesh.expert
        return 2 * self._ring(self._tokens * group * model.embed * self._width, group, mesh.tensor * mesh.context)

    def _context(self) -> float:
        """Seconds of the communication of attention over `context`, which full recompute repeats."""
        mesh = self.cfg.mesh
        if mesh.context == 1:
            return 0.0
        forward, backward = context_traffic(self._share, self.cfg.precision, mesh.context_method)
        passes = 2 if repeats_forward(self.cfg.memory.remat) else 1
        sent = self._share.rows * mesh.context * (passes * forward + backward) * self._width
        kind = "all-to-all" if mesh.context_method == "ulysses" else "collective-permute"
        # The argument of `_ring` is the size of an array of which each device receives all but its own share.
        return layers_per_pass(self.cfg) * self._ring(
            sent * mesh.context / (mesh.context - 1), mesh.context, mesh.tensor, kind=kind
        )

    def _experts(self, model: Decoder) -> float:
        """Seconds in which tokens are sent to the devices of their experts, and results back."""
        devices = self.cfg.mesh.expert
        if model.experts is None or devices == 1:
            return 0.0
        top_k = model.experts.top_k
        share, kind = (
            (share_of_devices(top_k, devices), "all-to-all") if uses_all_to_all(top_k, devices) else (1, "all-gather")
        )
        sent = share * devices * self._tokens * model.embed * self._width
        passes = 5 if repeats_forward(self.cfg.memory.remat) else 4
        stride = self.cfg.mesh.context * self.cfg.mesh.tensor
        return passes * layers_per_pass(self.cfg) * self._ring(sent, devices, stride, kind=kind)

    def _offloaded_activations(self, compute: float) -> float:
        """Seconds of exposed copies of offloaded activations. Only boundaries are fetched one layer ahead; XLA
        schedules most other copies right before their use."""
        each_way = self._share.rows * self.passes.offloaded / self.gpu.host_rate
        ahead = self.cfg.memory.remat == "full" and offloaded_activations(self.cfg.memory.offload) == (BOUNDARY,)
        return max(0.0, each_way - compute / 2) if ahead else _EXPOSED_COPY_SHARE * 2 * each_way

    def _ring(self, size: float, group: int, stride: int, messages: float = 1, *, kind: str = "all-gather") -> float:
        """Seconds in which `group` devices with ids `stride` apart gather `size` bytes in a ring, in so many parts, or
        send as many bytes in another `kind` of collective."""
        if group == 1 or size == 0:
            return 0.0
        neighbours = min(group, max(1, self.per_host // stride))
        sent = size * (group - 1) / group
        waits = messages * latency(self.gpu, "all-gather", group, neighbours)
        return waits + sent / link_rate(self.gpu, kind, group, neighbours)
