"""The training state: its arrays, and their shapes, dtypes and shardings before they are created."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath

from jaxmem import optim
from jaxmem.config import Config
from jaxmem.config.names import STATE_PARTS, is_offloaded
from jaxmem.errors import UserError
from jaxmem.optim.groups import ParameterGroup
from jaxmem.quant.precision import Params, gradient_dtype
from jaxmem.sharding.gathering import stored_axes
from jaxmem.sharding.layout import Layout
from jaxmem.sharding.table import Axes, Role, is_axes, is_stacked, path_name
from jaxmem.sharding.weights import differentiable
from jaxmem.step import host_placement, nonfinite
from jaxmem.step.batches import batch_spec
from jaxmem.step.model import ModelSpec
from jaxmem.typing import AxesTree, Tree

if TYPE_CHECKING:
    from jaxmem.step.initial_weights import InitialWeights

INITIAL_SCALE = 2.0**15
MIN_SCALE = 1.0
GROWTH_INTERVAL = 2000  # finite updates before the scale is doubled


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """The scale of a loss whose float16 gradients would underflow below 6e-8 (Micikevicius et al., arXiv:1710.03740).

    The loss is multiplied by it and the gradients divided by it. An update whose gradients overflow is skipped; a
    dynamic scale is then halved, and doubled after 2,000 finite updates. The state is 12 bytes.
    """

    scale: jax.Array
    sound: jax.Array  # number of finite updates since the last change of the scale
    skipped: jax.Array  # number of all skipped updates


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The arrays of a run: what an update changes, and frozen weights. A checkpoint contains them, except for frozen
    weights of `model.hf` (`SavedState.to_save`)."""

    step: jax.Array  # number of updates so far
    params: Params
    opt_state: Tree
    loss_scale: LossScale | None = None


@dataclass(frozen=True)
class StepSpec:
    """The specification of the compiled step: a resolved config, its model, its optimizer, and the sharding of all
    state."""

    cfg: Config
    layout: Layout
    model: ModelSpec

    @property
    def initial_weights(self) -> InitialWeights:
        from jaxmem.step.initial_weights import InitialWeights

        return InitialWeights(self.model)

    @property
    def key(self) -> jax.Array:
        """The random key of the run. jax takes 32 bits of a seed; the others are folded in."""
        key = jax.random.key(self.cfg.seed % 2**32)
        later_bits = self.cfg.seed // 2**32
        return jax.random.fold_in(key, later_bits) if later_bits else key

    @cached_property
    def learning_rate(self) -> optax.Schedule:
        return optim.learning_rate_schedule(self.cfg.optimizer, self.cfg.steps)

    @cached_property
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer of all trainable parameters."""
        return self.optimizer_for(self.model.select(self.model.axes))

    def optimizer_for(self, axes: AxesTree) -> optax.GradientTransformationExtraArgs:
        """The optimizer of the parameters that have these axes, a subset of the trainable ones."""
        master = self.cfg.precision.master
        tx = self.cfg.user.optimizer
        if tx is None:
            tx = optim.build(self.cfg.optimizer.replace(kernel=self.update_kernel), self.learning_rate, axes)
        elif master in optim.REMAINDER_BITS:
            tx = optim.in_float32(optim.chain(tx))
        else:
            tx = optim.chain(tx)
        if self.cfg.adapter.lora_plus_ratio != 1.0:
            tx = optim.scale_updates(tx, self.cfg.adapter.lora_plus_ratio, ("*.lora.b",))
        if master in optim.REMAINDER_BITS:
            tx = optim.with_remainder(tx, optim.REMAINDER_BITS[master], axes)
        elif master != "none":
            tx = optim.with_master(tx)
        return optim.named_update(tx)

    @property
    def update_kernel(self) -> Literal["auto", "none", "triton"]:
        """`optimizer.kernel` on these devices: `auto` selects fused updates of all arrays that support them."""
        chosen = self.model.execution.kernels.update
        return self.cfg.optimizer.kernel if chosen is not None and chosen.implementation == "triton" else "none"

    @cached_property
    def trainable(self) -> ParameterGroup:
        """The trainable parameters, and their optimizer."""
        axes = self.model.select(self.model.axes)
        self._check_stacks(axes)
        return ParameterGroup(self.optimizer, axes, self.opt_axes, self.model.execution.pipeline_of_weight)

    def group(self, params: Tree) -> ParameterGroup:
        """The optimizer of some of the trainable parameters: `params` is a tree of only these."""
        self._check_parts()
        return self.trainable.part(params, self.optimizer_for)

    def _check_stacks(self, axes: AxesTree) -> None:
        """Refuses an argument `optimizer` that would update stacks in another way than their layers."""
        tx = self._user_optimizer
        if tx is None or not any(map(is_stacked, jax.tree.leaves(axes, is_leaf=is_axes))):
            return
        if self._is_elementwise and not optim.updates_stacks_as_layers(tx, self._dense_shapes, axes):
            raise UserError(
                "the argument optimizer updates a stack of blocks in another way than each of them: a mask or labels by"
                " x.ndim see the stack as one array with one more dimension; choose weights by name, or give an"
                " optimizer of jaxmem.optim its axes"
            )

    def _check_parts(self) -> None:
        """Refuses an argument `optimizer` whose updates of layers and of slices of matrices differ from one update of
        all parameters. Optimizers of the config have the names of layers and slices."""
        tx = self._user_optimizer
        if tx is None:
            return
        during = self.cfg.memory.update == "during"
        setting = "memory.update=during" if during else "memory.offload=optimizer"
        alternative = "memory.update=after" if during else "memory.offload=none"
        if not self._updates_single_weights:
            raise UserError(
                f"{setting} does not support the argument optimizer if its mask or labels are a tree, because it "
                f"updates one layer at a time; pass the mask or labels as a function of the parameters, or use "
                f"{alternative}"
            )
        if not self._is_elementwise:
            raise UserError(
                f"{setting} does not support the argument optimizer if its updates depend on several values of a "
                "gradient (clip_by_global_norm, lars, lamb, ...), because it updates one layer at a time; use "
                f"{alternative}, or in place of the argument an optimizer of the config with optimizer.clip"
            )

    @property
    def _user_optimizer(self) -> optax.GradientTransformationExtraArgs | None:
        tx = self.cfg.user.optimizer
        return None if tx is None else optim.chain(tx)

    @property
    def _dense_shapes(self) -> Tree:
        """The trainable parameters as an optimizer sees them: without quantization."""
        return jax.eval_shape(differentiable, self.model.select(self._shapes.params))

    @cached_property
    def _is_elementwise(self) -> bool:
        tx = self._user_optimizer
        return tx is None or optim.is_elementwise(tx, self._dense_shapes)

    @cached_property
    def _updates_single_weights(self) -> bool:
        tx = self._user_optimizer
        return tx is None or optim.updates_single_weights(tx, self._dense_shapes)

    @property
    def gradient_dtype(self) -> np.dtype | None:
        """The dtype of gradients; None: the dtype of each weight."""
        return gradient_dtype(self.cfg.precision, self.model.execution.platform)

    @cached_property
    def state(self) -> TrainState:
        """Shape, dtype and sharding of every array of the state."""
        shapes = self._shapes
        scalars = jax.tree.map(lambda _: (), shapes.loss_scale)
        state = TrainState(
            step=self.sharded("weights", (), shapes.step),
            params=self.sharded("weights", self.param_axes, shapes.params),
            opt_state=self.sharded("optimizer", self.opt_axes, shapes.opt_state),
            loss_scale=self.sharded("optimizer", scalars, shapes.loss_scale),
        )
        return host_placement.place(state, self.is_on_host, self.layout.mesh.devices) if self.has_offload else state

    @property
    def shardings(self) -> TrainState:
        return jax.tree.map(lambda x: x.sharding, self.state)

    @cached_property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape, dtype and sharding of every array of a batch."""
        return {
            name: self.sharded("activations", axes, jax.ShapeDtypeStruct(shape, dtype))
            for name, (shape, dtype, axes) in batch_spec(self.cfg).items()
        }

    @cached_property
    def param_axes(self) -> AxesTree:
        """The logical axes of every array of the stored parameters."""
        return stored_axes(self.model.axes, self._shapes.params)

    @cached_property
    def opt_axes(self) -> AxesTree:
        """The logical axes of every array of the optimizer state."""
        select = self.model.select
        axes = optim.state_axes(self.optimizer, select(self._shapes.params), select(self.model.axes))

        def accumulates(x: Tree) -> bool:
            return isinstance(x, optax.MultiStepsState)

        if any(map(accumulates, jax.tree.leaves(axes, is_leaf=accumulates))):
            raise UserError(
                "the argument optimizer is, or contains, optax.MultiSteps, which accumulates gradients; pass the"
                " optimizer without it, and set batch.accumulate"
            )
        return axes

    def offloads(self, part: str) -> bool:
        """Whether this part of the state is in host memory between updates: `optimizer`, or `frozen` weights."""
        return is_offloaded(self.cfg.memory.offload, part)

    @property
    def has_offload(self) -> bool:
        return any(map(self.offloads, STATE_PARTS))

    @cached_property
    def is_on_host(self) -> TrainState:
        """For each array of the state, whether it is in host memory between updates."""
        on_host = jax.tree.map(lambda _: False, self._shapes)
        if self.offloads("optimizer"):
            on_host = dataclasses.replace(on_host, opt_state=host_placement.offloaded_state(self.opt_axes))
        if self.offloads("frozen"):
            trainable = self.model.select(self.model.axes)
            frozen = host_placement.offloaded_weights(self.model.axes, trainable, self.param_axes)
            on_host = dataclasses.replace(on_host, params=frozen)
        return on_host

    @property
    def host_state(self) -> TrainState:
        """Shape, dtype and sharding of the arrays in host memory; None for others."""
        return jax.tree.map(lambda on_host, x: x if on_host else None, self.is_on_host, self.state)

    @cached_property
    def backward_order(self) -> nonfinite.BackwardOrder:
        """The order of gradients in the metrics."""
        model = self.model
        axes = model.select(model.axes)
        return nonfinite.BackwardOrder(axes, model.execution.layer_order, model.selection.partial_stacks)

    @property
    def gradient_names(self) -> list[str]:
        """Names of gradients, one per layer for stacks; the metric `nonfinite.METRIC` is an index in this list."""
        return self.backward_order.names(self._dense_shapes)

    def new_state(self, params: Params) -> TrainState:
        """The state before the first update of these parameters."""
        scale = initial_loss_scale(self.cfg.precision.loss_scale)
        return TrainState(jnp.zeros((), jnp.int32), params, self.optimizer.init(self.model.select(params)), scale)

    def to_memory(self, state: Tree) -> Tree:
        """Each array of a state, or of its parameters, in the memory in which it is stored."""
        if not self.has_offload:
            return state
        on_host = self.is_on_host if isinstance(state, TrainState) else self.is_on_host.params
        return host_placement.send(state, on_host)

    @cached_property
    def _shapes(self) -> TrainState:
        return jax.eval_shape(lambda key: self.new_state(self.initial_weights.new(key)), jax.random.key(0))

    def sharded(self, role: Role, axes: AxesTree, shapes: Tree) -> Tree:
        """Shapes with their shardings."""

        def with_sharding(path: KeyPath, axes: Axes, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            sharding = self.layout.sharding(role, axes, x.shape, path_name(path))
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree_util.tree_map_with_path(with_sharding, axes, shapes, is_leaf=is_axes)


def initial_loss_scale(setting: Literal["none", "dynamic"] | float) -> LossScale | None:
    """The state for `precision.loss_scale`; None: gradients are not scaled, and no update is skipped."""
    if setting == "none":
        return None
    zero = jnp.zeros((), jnp.int32)
    return LossScale(jnp.asarray(INITIAL_SCALE if setting == "dynamic" else setting, jnp.float32), zero, zero)


def next_loss_scale(state: LossScale, finite: jax.Array, *, dynamic: bool) -> LossScale:
    """The state after an update with finite or non-finite gradients."""
    sound = jnp.where(finite, state.sound + 1, 0)
    scale = state.scale
    if dynamic:
        grows = sound == GROWTH_INTERVAL
        scale = jnp.where(finite, jnp.where(grows, scale * 2, scale), jnp.maximum(scale / 2, MIN_SCALE))
        sound = jnp.where(grows, 0, sound)
    return LossScale(scale, sound, state.skipped + jnp.where(finite, 0, 1))
