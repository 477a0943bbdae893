"""Seconds of a step by arithmetic alone: products and what lies around them, messages that these do not hide, the
update. For comparing configs before any is compiled; `timeline.py` reads the same from a compiled program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxmem.config import Config, Decoder
from jaxmem.config.names import BOUNDARY, offloaded_activations
from jaxmem.machine.gpus import ATTAINED_BANDWIDTH, ATTAINED_FLOPS, ATTAINED_LINK, Gpu
from jaxmem.planning.passes import AROUND, Passes
from jaxmem.planning.share import passes_run, rows_of
from jaxmem.planning.timeline import LAUNCH, RATES


@dataclass(frozen=True)
class Weights:
    """Bytes of all weights as one device computes with them, by what happens to them."""

    gathered: float  # they rest in parts: zero 3
    scattered: float  # their gradients end in parts: from zero 2
    reduced: float  # their gradients end whole
    beside: float  # whole on each device of `tensor`, which see other tokens: gradients are summed over these as well
    renewed: float  # as they rest: updated in parts and then gathered: zero 1 and 2


def seconds_of(
    cfg: Config,
    passes: Passes,
    weights: Weights,
    parts: Mapping[str, int],
    waiting: int,
    frozen: int,
    gpu: Gpu,
    per_host: int,
) -> float:
    """Of a step of one device; `parts` are the bytes that it holds, `waiting` those of the optimizer's state and
    `frozen` those of weights in host memory."""
    return _Pace(cfg, gpu, per_host).step(passes, weights, parts, waiting, frozen)


class _Pace:
    def __init__(self, cfg: Config, gpu: Gpu, per_host: int) -> None:
        self.cfg, self.gpu, self.per_host = cfg, gpu, per_host
        self.memory = gpu.bandwidth_gb_s * 1e9 * ATTAINED_BANDWIDTH
        self.width = 4 if cfg.precision.compute == "float32" else 2
        self.host_link = gpu.host_link_gb_s * 1e9 * ATTAINED_LINK
        self.split = cfg.mesh.fsdp * cfg.mesh.context

    def step(self, passes: Passes, weights: Weights, parts: Mapping[str, int], waiting: int, frozen: int) -> float:
        micro = self.cfg.batch.accumulate
        computing = self._computing(passes) * passes_run(self.cfg) / micro
        messages = self._split_messages(weights) + self._tensor_messages() + self._ring()
        exposed = max(_EXPOSED * messages, messages - computing)
        state = parts["parameters"] + parts["master"] + parts["optimizer"] + parts["gradients"]
        exposed += max(0.0, 2 * frozen / self.host_link - computing)  # to both passes, a layer ahead
        each = computing + exposed + self._waiting(passes, computing) + 3 * parts["gradients"] / self.memory
        # An update after the passes has nothing else to do meanwhile; the link carries state both ways at once.
        moved = waiting / self.host_link
        late = max(0.0, moved - computing) if self.cfg.memory.update == "during" else moved
        return micro * each + late + self._once(weights) + 3 * (state + waiting) / self.memory

    def _computing(self, passes: Passes) -> float:
        rows = rows_of(self.cfg)
        seconds = passes.kernels * LAUNCH
        for one in passes.products:
            arithmetic = rows * one.flops / (self.gpu.flops * ATTAINED_FLOPS * RATES.get(one.dtype, 1.0))
            moved = one.weights + rows * one.others
            seconds += one.times * AROUND * moved / self.memory
            if arithmetic > moved / self.memory:
                seconds += one.times * arithmetic
        return seconds

    def _split_messages(self, weights: Weights) -> float:
        """What data parallelism sends for one micro-batch: weights twice, gradients once, each as one computes."""
        mesh = self.cfg.mesh
        within = self._seconds(2 * weights.gathered + weights.scattered, self.split, mesh.tensor)
        shared = self._seconds(weights.reduced, mesh.context, mesh.tensor) + self._seconds(
            weights.beside, mesh.tensor, 1
        )
        return within + 2 * shared

    def _once(self, weights: Weights) -> float:
        """What it sends for an update: sums of whole gradients, parts of the others, new weights."""
        mesh, sides = self.cfg.mesh, 1 if self.cfg.zero else 2
        within = self._seconds(sides * weights.reduced, mesh.fsdp, mesh.tensor * mesh.context)
        between = weights.scattered / self.split + weights.reduced / (mesh.fsdp if self.cfg.zero else 1)
        replicas = 2 * self._seconds(between, mesh.replica, mesh.tensor * self.split)
        return within + replicas + self._seconds(weights.renewed, self.split, mesh.tensor)

    def _tensor_messages(self) -> float:
        """Two sums of the residual stream a layer and pass, one for each half that `tensor` splits. Attention that it
        does not split still sees the time whole."""
        model, split = self.cfg.model, self.cfg.rules
        if not isinstance(model, Decoder):
            return 0.0
        residual = self._tokens() * model.embed * self.width
        halves = (1 if "tensor" in split.heads else 0.5) + ("tensor" in split.mlp)
        passes = 4 if self.cfg.memory.remat == "none" else 5
        return halves * passes * model.layers * self._seconds(residual, self.cfg.mesh.tensor, 1)

    def _ring(self) -> float:
        """Keys and values, round the devices along `context`: forward, again backward and with every forward pass that
        is done anew, and their gradients in float32."""
        model, mesh = self.cfg.model, self.cfg.mesh
        if not isinstance(model, Decoder):
            return 0.0
        heads = mesh.tensor if "tensor" in self.cfg.rules.heads else 1
        keys = self._tokens() * 2 * model.kv_heads * model.head_dim / heads
        rounds = 2 if self.cfg.memory.remat == "none" else 3
        sent = mesh.context * keys * (rounds * self.width + 4)
        return model.layers * self._seconds(sent, mesh.context, mesh.tensor)

    def _waiting(self, passes: Passes, computing: float) -> float:
        """For what goes to host memory and comes back. Boundaries alone are fetched a layer ahead; of all else XLA puts
        most copies where they are needed."""
        each_way = rows_of(self.cfg) * passes.hosted / self.host_link
        ahead = self.cfg.memory.remat == "full" and offloaded_activations(self.cfg.memory.offload) == (BOUNDARY,)
        return max(0.0, each_way - computing / 2) if ahead else _WAITED * 2 * each_way

    def _tokens(self) -> float:
        return rows_of(self.cfg) * self.cfg.data.sequence_length

    def _seconds(self, size: float, group: int, stride: int) -> float:
        """A ring of `group` devices, each `stride` from the next, that gathers `size` bytes."""
        if group == 1:
            return 0.0
        neighbours = min(group, max(1, self.per_host // stride))
        rate = (
            self.gpu.link_gb_s if neighbours == group else min(self.gpu.link_gb_s, self.gpu.network_gb_s * neighbours)
        )
        return size * (group - 1) / group / (rate * 1e9 * ATTAINED_LINK)


_EXPOSED = 0.3  # of the messages, at least: those that nothing hides
_WAITED = 0.8  # of copies between a device and its host, in compiled decoders with remat dots
