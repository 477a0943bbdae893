"""The network of a config, before any array exists: its structure, the shapes and logical axes of its weights, which of
them are trainable, and how initial weights are created."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import TYPE_CHECKING, Any, cast

import jax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxmem import adapters, models
from jaxmem.config import Config, Convnet, Memory, Precision, Save
from jaxmem.config.names import is_offloaded, offloaded_activations, split_stack
from jaxmem.config.networks import Quantization, UserModel, pipelined_layers
from jaxmem.config.recompute import policy_of
from jaxmem.errors import UserError
from jaxmem.models import user, user_layers
from jaxmem.models.chunking import Chunking
from jaxmem.optim.selection import Selection
from jaxmem.pipeline import Pipeline
from jaxmem.quant.precision import Params, compute_dtype
from jaxmem.sharding import Axes, is_axes
from jaxmem.sharding.weights import Storage, storing_as
from jaxmem.stack import StackOptions, creating_in

if TYPE_CHECKING:
    from jaxmem.kernels.choice import Choice
    from jaxmem.step.kernel_choice.choice import AttentionChoice

# Folded into the key of the seed for new adapters, so that they do not depend on the weights of the model.
_ADAPTER_KEY = 2**31 - 1


@dataclass(frozen=True)
class ModelSpec:
    cfg: Config
    platform: str  # the platform of the devices; determines the compute dtype for `precision.compute: auto`
    capability: int | None = None  # the compute capability of GPUs: 90 for 9.0

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

    @cached_property
    def _split(self) -> tuple[Any, Any, Any]:
        if (model := self.flax_model) is not None:
            shapes = {path: variable.get_value() for path, variable in model.variables.items()}
            return model.graphdef, unflatten_dict(dict(model.axes)), unflatten_dict(shapes)
        # These shapes do not include the identity layers that pad pipeline stages.
        graphdef, state = nnx.split(nnx.eval_shape(lambda: self._with_new_adapters(self._build(jax.random.key(0)))))
        axes = unflatten_dict({path: axes_of(path, variable) for path, variable in nnx.to_flat_state(state)})
        return graphdef, axes, nnx.to_pure_dict(state)

    @cached_property
    def flax_model(self) -> user.PlainModel | None:
        """The model that a script passed, or None if it is built from jaxmem's layers or comes from the config."""
        if self.cfg.user.model is None:
            return None

        def build() -> tuple[Any, Mapping[tuple[str, ...], int]]:
            network, stacks = self._build_plain(jax.random.key(0))
            return self._with_new_adapters(network), stacks

        return user.PlainModel.of(build, self.cfg.user.axes, shards=self.cfg.mesh.fsdp * self.cfg.mesh.context)

    @property
    def forward_state(self) -> frozenset[tuple[str, ...]]:
        """The paths of arrays that the forward pass changes, for example the statistics of BatchNorm. They are stored
        with the parameters, but they are neither trainable nor quantized."""
        return frozenset() if self.flax_model is None else self.flax_model.state

    def forward_state_of(self, params: Params) -> Params:
        return unflatten_dict({path: x for path, x in flatten_dict(params).items() if path in self.forward_state})

    def with_forward_state(self, params: Params, new: Any) -> Params:
        """`params` with the arrays in `new` in place of those that the forward pass changes, if there are any."""
        return unflatten_dict(flatten_dict(params) | flatten_dict(new)) if new else params

    @property
    def graphdef(self) -> Any:
        return self._split[0]

    def network(self, params: Params) -> Any:
        """The network with these weights."""
        if self.flax_model is None:
            return nnx.merge(self.graphdef, params)
        options = self._execution.stack if self.flax_model.stacks else StackOptions()
        return self.flax_model.network(params, compute_dtype(self.cfg.precision, self.platform), options)

    @property
    def axes(self) -> Any:
        """The logical axes of each parameter."""
        return self._split[1]

    @property
    def shapes(self) -> Any:
        """The shape of each parameter before it is converted to the form in which it is stored."""
        return self._split[2]

    @property
    def _parameter_shapes(self) -> Any:
        """`shapes`, with None for the arrays that the forward pass changes."""
        return Selection.of(self.shapes, ("*",)).without(self.forward_state).select(self.shapes)

    @cached_property
    def parameter_count(self) -> int:
        """The number of parameters, without identity layers."""
        return _count(self._parameter_shapes)

    @cached_property
    def trainable_count(self) -> int:
        """The number of trainable parameters."""
        return _count(self.select(self.shapes))

    @cached_property
    def active_count(self) -> int:
        """The number of parameters that a token uses: of the experts, only the chosen ones."""
        return self._active(self._parameter_shapes)

    @cached_property
    def active_trainable_count(self) -> int:
        return self._active(self.select(self.shapes))

    def _active(self, shapes: Any) -> int:
        experts = getattr(self.cfg.model, "experts", None)
        if experts is None:
            return _count(shapes)
        counts = jax.tree.map(lambda axes, x: _count(x) if "expert" in axes else 0, self.axes, shapes, is_leaf=is_axes)
        in_experts = sum(jax.tree.leaves(counts))
        return _count(shapes) - in_experts + in_experts * experts.top_k // experts.count

    @cached_property
    def selection(self) -> Selection:
        """Which parameters are trainable."""
        patterns = self.cfg.trainable_patterns or ("*",)
        Selection.of(self.axes, patterns)  # refuses ranges of layers for weights that are not stacked
        return Selection.of(self.shapes, patterns).without(self.forward_state)

    def select(self, params: Any) -> Any:
        """The trainable part of a tree of parameters or of their axes, with None for frozen ones."""
        return self.selection.select(params)

    def storage(self, path: Sequence[str]) -> Storage:
        """How the weight at a path is stored."""
        cfg = self.cfg
        if path in self.forward_state:
            return Storage(Precision())
        if tuple(jax.tree_util.DictKey(name) for name in path) in self.selection.layers:
            return Storage(cfg.precision)
        on_host = is_offloaded(cfg.memory.offload, "frozen")
        stored_form: Quantization | None = cfg.base_quantization
        if (
            stored_form is not None
            and path[-1] == "weight"
            and split_stack(".".join(path[:-1]))[0] in stored_form.layers
        ):
            return Storage(cfg.base_precision, stored_form.scale_group or False, on_host, has_exact_blocks=True)
        is_expert = "expert" in reduce(operator.getitem, path, self.axes)
        precision = cfg.expert_precision if is_expert else cfg.base_precision
        if stored_form is not None:
            stored = stored_form.others if cfg.adapter.base is None else cfg.adapter.base
            precision = cfg.precision.model_copy(update={"parameters": stored})
        return Storage(precision, cfg.adapter.double_quant and precision != cfg.precision, on_host)

    def new_weights(self, key: jax.Array) -> Params:
        """Initial weights, including adapters, in their stored form."""
        base = self.new_base(key)
        return base if self.cfg.adapter.kind == "none" else self.with_adapters(base, key)

    def new_base(self, key: jax.Array) -> Params:
        """Initial weights of the model without adapters. If trainable and frozen weights are stored differently, the
        network is traced twice, and XLA removes what is not used."""

        def create(storage: Storage) -> Params:
            if self.flax_model is not None:
                axes, state = self.flax_model.axes, self.forward_state
                values = user.variables_of(self._build(key)).items()
                return unflatten_dict({p: x if p in state else user.store(x, axes[p], storage) for p, x in values})
            with storing_as(storage), creating_in(self.pipeline):
                return nnx.to_pure_dict(nnx.state(self._build(key)))

        storages = {self.storage(path) for path in flatten_dict(self.axes)}
        created = {storage: flatten_dict(create(storage)) for storage in storages}
        paths = flatten_dict(adapters.base_of(self.axes))
        return unflatten_dict({path: created[self.storage(path)][path] for path in paths})

    def with_adapters(self, base: Params, key: jax.Array) -> Params:
        """The weights of the model with new adapters."""
        network, adapter_key = nnx.eval_shape(partial(self._build, key)), jax.random.fold_in(key, _ADAPTER_KEY)
        if self.flax_model is not None:
            adapters.attach(network, self.cfg.adapter, adapter_key)
            added = {path: x for path, x in user.variables_of(network).items() if "lora" in path}
            new = {p: user.store(x, self.flax_model.axes[p], Storage(self.cfg.precision)) for p, x in added.items()}
            return unflatten_dict(flatten_dict(base) | new)
        network = nnx.merge(nnx.split(network)[0], base)
        with storing_as(Storage(self.cfg.precision)):
            adapters.attach(network, self.cfg.adapter, adapter_key, self.layer_order)
        return nnx.to_pure_dict(nnx.state(network))

    def _with_new_adapters(self, network: Any) -> Any:
        adapters.attach(network, self.cfg.adapter, jax.random.key(0))
        return network

    def _build(self, key: jax.Array) -> models.Network:
        network = self.cfg.user.network
        if network is not None:
            return network(nnx.Rngs(key), self._execution)
        if self.cfg.user.model is not None:
            return self._build_plain(key)[0]
        return models.build(self.cfg.model, nnx.Rngs(params=key), self._execution)

    def _build_plain(self, key: jax.Array) -> tuple[Any, Mapping[tuple[str, ...], int]]:
        """The model of a script, not built from jaxmem's layers, and the number of layers of each of its stacks."""
        assert self.cfg.user.model is not None
        network = self.cfg.user.model(nnx.Rngs(key))
        return network, user_layers.stack_lists(network, self.cfg.user.layers)

    @cached_property
    def attention(self) -> AttentionChoice | None:
        """The choice of the implementation of attention, or None if there is no attention."""
        return cast("AttentionChoice | None", self.kernels.get("memory.attention"))

    @property
    def context_method(self) -> str:
        """The method of communication over `mesh.context`."""
        return "ring" if self.attention is None else self.attention.context_method

    @cached_property
    def kernels(self) -> dict[str, Choice]:
        """The choice of the implementation of each operation that has a fused kernel, by setting."""
        from jaxmem.step.kernel_choice import kernel_choices

        return kernel_choices(self.cfg, self.platform, self.capability)

    @property
    def _execution(self) -> models.Execution:
        memory = self.cfg.memory
        if memory.remat == "auto":
            raise UserError(
                "memory.remat=auto is supported by plan and train only; use memory.remat=none, full or {save: [names]}"
            )
        named = None if memory.attention == "auto" else memory.attention
        implementation = named if self.attention is None else self.attention.implementation
        return models.Execution(
            dtype=compute_dtype(self.cfg.precision, self.platform),
            attention=implementation,
            experts=experts.implementation if (experts := self.kernels.get("memory.experts")) else "blockwise",
            deterministic=self.cfg.train.deterministic,
            packed=self.cfg.data.packing,
            max_segments=self.cfg.data.max_segments,
            context_method=self.context_method,
            chunking=chunking(memory),
            stack=self.stack_options,
        )

    @property
    def stack_options(self) -> StackOptions:
        memory = self.cfg.memory
        remat = memory.remat.save if isinstance(memory.remat, Save) else memory.remat
        return StackOptions(remat, self.pipeline, offloaded_activations(memory.offload), memory.expert_groups)


def pipeline_of(cfg: Config) -> Pipeline | None:
    """The pipeline of a config whose mesh is resolved, or None if there is one stage."""
    if cfg.mesh.stage == 1 or isinstance(cfg.model, Convnet | UserModel):
        return None
    layers, recomputes = pipelined_layers(cfg.model), repeats_forward(cfg.memory.remat)
    micro_batches, pipeline = cfg.batch.accumulate, cfg.pipeline
    return Pipeline(layers, cfg.mesh.stage, micro_batches, pipeline.rounds, pipeline.name, recomputes)


def chunking(memory: Memory) -> Chunking:
    """The chunks of a layer. Chunks are recomputed, so `auto` uses chunks only if no activation in a layer is saved."""
    if memory.remat not in ("none", "dots") and not isinstance(memory.remat, Save):
        return Chunking(memory.mlp_chunk, memory.head_groups)
    chunk = None if memory.mlp_chunk == "auto" else memory.mlp_chunk
    return Chunking(chunk, 1 if memory.head_groups == "auto" else memory.head_groups)


def axes_of(path: tuple[Any, ...], variable: nnx.Variable) -> Axes:
    axes = variable.get_metadata().get("axes")
    if axes is None or len(axes) != len(variable.shape):
        name = ".".join(map(str, path))
        raise UserError(f"weight {name} of shape {variable.shape} has the axes {axes}; use one axis per dimension")
    return axes


def _count(shapes: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def repeats_forward(remat: object) -> bool:
    """Whether the backward pass of a layer repeats some of its forward pass."""
    policy = policy_of(remat)
    return policy is None or policy.saved is not None
