"""The structure of the network of a config, before any array exists: the shapes and logical axes of its weights, and
which of them are trainable."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxmem import adapters, models
from jaxmem.config import Config, Precision
from jaxmem.config.names import split_stack
from jaxmem.errors import UserError, nearest
from jaxmem.optim.selection import Selection
from jaxmem.quant.precision import Params
from jaxmem.sharding.table import Axes, is_axes
from jaxmem.sharding.trees import replace_at
from jaxmem.stack.call import StackOptions
from jaxmem.step.execution import ExecutionSpec
from jaxmem.typing import AxesTree, Tree

if TYPE_CHECKING:
    from jaxmem.models.user import FlaxModel

OUTPUT_LAYER = "head"  # never in FP8: a decoder's logits are also computed in slices of this layer's weight


class Structure(NamedTuple):
    """A network without arrays."""

    graphdef: Any  # of flax, to merge with parameters
    axes: AxesTree  # the logical axes of each parameter
    shapes: Tree  # the shape of each parameter before it is converted to the form in which it is stored


@dataclass(frozen=True)
class ModelSpec:
    cfg: Config
    execution: ExecutionSpec

    @cached_property
    def _structure(self) -> Structure:
        model = self.flax_model
        if model is not None:
            from jaxmem.models.user_layers import value_of

            shapes = {path: value_of(variable) for path, variable in model.variables.items()}
            return Structure(model.graphdef, unflatten_dict(dict(model.axes)), unflatten_dict(shapes))
        # These shapes do not include the identity layers that pad pipeline stages.
        graphdef, state = nnx.split(nnx.eval_shape(lambda: self._with_new_adapters(self.build(jax.random.key(0)))))
        axes = unflatten_dict({path: axes_of(path, variable) for path, variable in nnx.to_flat_state(state)})
        return Structure(graphdef, axes, nnx.to_pure_dict(state))

    @cached_property
    def flax_model(self) -> FlaxModel | None:
        """The model that a script passed, or None if it is built from jaxmem's layers or comes from the config."""
        if self.cfg.user.model is None:
            return None
        from jaxmem.models.user import FlaxModel

        def build() -> tuple[Any, Mapping[tuple[str, ...], int]]:
            network, stacks = self._build_flax(jax.random.key(0))
            return self._with_new_adapters(network), stacks

        mesh = self.cfg.mesh
        shards = mesh.fsdp * mesh.context
        of_optimizer = shards * math.prod(getattr(mesh, axis) for axis in self.cfg.rules.optimizer)
        return FlaxModel.of(build, self.cfg.user.axes, shards=(of_optimizer, shards))

    @property
    def forward_state(self) -> frozenset[tuple[str, ...]]:
        """The paths of arrays that the forward pass changes, for example the statistics of BatchNorm. They are stored
        with the parameters, but they are neither trainable nor quantized."""
        return frozenset() if self.flax_model is None else self.flax_model.state

    def forward_state_of(self, params: Params) -> Params:
        return unflatten_dict({path: x for path, x in flatten_dict(params).items() if path in self.forward_state})

    def with_forward_state(self, params: Params, new: Tree) -> Params:
        """`params` with the arrays in `new` in place of those that the forward pass changes, if there are any."""
        return replace_at(params, flatten_dict(new)) if new else params

    @property
    def graphdef(self) -> Any:
        return self._structure.graphdef

    def bind(self, params: Params) -> Any:
        """The network with these weights."""
        if self.flax_model is None:
            return nnx.merge(self.graphdef, params)
        options = self.execution.of_stacks if self.flax_model.stacks else StackOptions()
        return self.flax_model.bind(params, self.execution.dtype, options)

    @property
    def axes(self) -> AxesTree:
        """The logical axes of each parameter."""
        return self._structure.axes

    @property
    def shapes(self) -> Tree:
        """The shape of each parameter before it is converted to the form in which it is stored."""
        return self._structure.shapes

    @property
    def _parameter_shapes(self) -> Tree:
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

    def _active(self, shapes: Tree) -> int:
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

    def select(self, params: Tree) -> Tree:
        """The trainable part of a tree of parameters or of their axes, with None for frozen ones."""
        return self.selection.select(params)

    def _with_new_adapters(self, network: Tree) -> Tree:
        adapters.attach(network, self.cfg.adapter, jax.random.key(0))
        return network

    def build(self, key: jax.Array) -> nnx.Module:
        if self.cfg.user.model is not None:
            return self._build_flax(key)[0]
        if self.cfg.user.network is not None:
            network = self.cfg.user.network(nnx.Rngs(key), self.execution.of_network)
        else:
            network = models.build(self.cfg.model, nnx.Rngs(params=key), self.execution.of_network)
        if self.cfg.precision.compute == "fp8":
            _use_fp8(network, self.cfg.precision, self.execution.capability)
        return network

    def _build_flax(self, key: jax.Array) -> tuple[Any, Mapping[tuple[str, ...], int]]:
        """The model of a script, not built from jaxmem's layers, and the number of layers of each of its stacks."""
        from jaxmem.models.user_layers import stack_lists

        assert self.cfg.user.model is not None
        network = self.cfg.user.model(nnx.Rngs(key))
        return network, stack_lists(network, self.cfg.user.layers)


def axes_of(path: tuple[Any, ...], variable: nnx.Variable) -> Axes:
    axes = variable.get_metadata().get("axes")
    if axes is None or len(axes) != len(variable.shape):
        name = ".".join(map(str, path))
        raise UserError(f"weight {name} of shape {variable.shape} has the axes {axes}; use one axis per dimension")
    return axes


def _count(shapes: Tree) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def _use_fp8(network: nnx.Module, precision: Precision, capability: int | None) -> None:
    """Sets the scaling of the linear layers that `precision.fp8_layers` matches, in place. `capability`: that of the
    GPU (90 for 9.0), or None for a CPU, which emulates FP8."""
    from jaxmem.models.fp8 import MIN_CAPABILITY, MXFP8_MAJOR
    from jaxmem.models.linear import Linear

    if capability is not None and capability < MIN_CAPABILITY:
        given = f"precision.compute=fp8 requires compute capability 8.9, not {capability / 10:.1f}"
        raise UserError(f"{given}; use precision.compute=bfloat16")
    if capability is not None and capability // 10 != MXFP8_MAJOR and precision.fp8_scaling == "mxfp8":
        given = f"precision.fp8_scaling=mxfp8 requires compute capability {MXFP8_MAJOR}.x, not {capability / 10:.1f}"
        raise UserError(f"{given}; use precision.fp8_scaling=tensor or row")
    modules = [(split_stack(".".join(map(str, path)))[0], module) for path, module in nnx.iter_modules(network)]
    layers = [(name, module) for name, module in modules if isinstance(module, Linear)]
    names = dict.fromkeys(name for name, _ in layers)
    for pattern in precision.fp8_layers:
        matched = {name for name in names if precision.replace(fp8_layers=(pattern,)).is_fp8(name)}
        if not matched:
            raise UserError(f"precision.fp8_layers: {pattern} matches no linear layer{nearest(pattern, names)}")
        if matched == {OUTPUT_LAYER}:
            given = f"precision.fp8_layers: {pattern} matches only the output layer, which FP8 does not support"
            raise UserError(f"{given}; use patterns of other layers, for example *blocks.*")
    for name, layer in layers:
        if name != OUTPUT_LAYER and precision.is_fp8(name):
            layer.scaling = precision.fp8_scaling
