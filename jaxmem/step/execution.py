"""How a network is executed: compute dtype, kernels, recompute, pipeline stages. Does not depend on its weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from jaxmem.config import Config, Convnet, Memory, Save
from jaxmem.config.names import is_last_stack, offloaded_activations
from jaxmem.config.networks import UserModel, pipelined_layers
from jaxmem.config.recompute import policy_of
from jaxmem.errors import UserError
from jaxmem.models.chunking import Chunking
from jaxmem.models.network import Execution
from jaxmem.pipeline.stages import Pipeline
from jaxmem.quant.precision import compute_dtype
from jaxmem.stack.call import StackOptions

if TYPE_CHECKING:
    from jaxmem.step.kernel_choice import KernelChoices


@dataclass(frozen=True)
class ExecutionSpec:
    cfg: Config
    platform: str  # the platform of the devices; determines the compute dtype for `precision.compute: auto`
    capability: int | None = None  # the compute capability of GPUs: 90 for 9.0

    @property
    def dtype(self) -> np.dtype:
        """The compute dtype."""
        return compute_dtype(self.cfg.precision, self.platform)

    @cached_property
    def pipeline(self) -> Pipeline | None:
        return pipeline_of(self.cfg)

    @property
    def layer_order(self) -> list[int] | None:
        """The layer that is stored at each position of a stack, or None if layers are in order."""
        return None if self.pipeline is None else self.pipeline.order.tolist()

    @property
    def layer_indices(self) -> list[int] | None:
        """The position of each layer in a stack, or None if layers are in order."""
        pipeline = self.pipeline
        return None if pipeline is None else pipeline.order.argsort()[: pipeline.layers].tolist()

    def pipeline_of_weight(self, name: str) -> Pipeline | None:
        """The pipeline whose stages share the layers of the weight with this name."""
        is_shared = self.pipeline is not None and is_last_stack(name, self.cfg.model.layers)  # type: ignore[union-attr]
        return self.pipeline if is_shared else None

    @cached_property
    def kernels(self) -> KernelChoices:
        """The choice of the implementation of each operation that has a fused kernel."""
        from jaxmem.step.kernel_choice import kernel_choices

        return kernel_choices(self.cfg, self.platform, self.capability)

    @property
    def of_network(self) -> Execution:
        """The settings that the network receives."""
        memory = self.cfg.memory
        if memory.remat == "auto":
            raise UserError(
                "memory.remat=auto is supported by plan and train only; use memory.remat=none, full or {save: [names]}"
            )
        named = "blockwise" if memory.attention == "auto" else memory.attention  # of a script's network
        attention = self.kernels.attention
        experts = self.kernels.experts
        return Execution(
            dtype=self.dtype,
            attention=named if attention is None else attention.implementation,
            experts="blockwise" if experts is None else experts.implementation,
            packed=self.cfg.data.packing,
            max_segments=self.cfg.data.max_segments,
            context_method="ring" if attention is None else attention.context_method,
            chunking=chunking(memory),
            stack=self.of_stacks,
        )

    @property
    def of_stacks(self) -> StackOptions:
        """The settings that its stacks of layers receive."""
        memory = self.cfg.memory
        remat = memory.remat.save if isinstance(memory.remat, Save) else memory.remat
        host = offloaded_activations(memory.offload)
        return StackOptions(remat, self.pipeline, host, memory.save_dtype == "fp8")


def pipeline_of(cfg: Config) -> Pipeline | None:
    """The pipeline of a config whose mesh is resolved, or None if there is one stage."""
    if cfg.mesh.stage == 1 or isinstance(cfg.model, Convnet | UserModel):
        return None
    layers = pipelined_layers(cfg.model)
    recomputes = repeats_forward(cfg.memory.remat)
    micro_batches = cfg.batch.accumulate
    pipeline = cfg.pipeline
    return Pipeline(layers, cfg.mesh.stage, micro_batches, pipeline.rounds, pipeline.name, recomputes)


def chunking(memory: Memory) -> Chunking:
    """The chunks of a layer. Chunks are recomputed, so `auto` uses chunks only if no activation in a layer is saved."""
    if memory.remat not in ("none", "dots") and not isinstance(memory.remat, Save):
        return Chunking(memory.mlp_chunk, memory.head_groups)
    chunk = None if memory.mlp_chunk == "auto" else memory.mlp_chunk
    return Chunking(chunk, 1 if memory.head_groups == "auto" else memory.head_groups)


def repeats_forward(remat: object) -> bool:
    """Whether the backward pass of a layer repeats some of its forward pass."""
    policy = policy_of(remat)
    return policy is None or policy.saved is not None
