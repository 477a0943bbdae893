"""The part of a training state that a checkpoint contains, and the state that is restored from it.

Frozen weights that `model.hf` provides are not saved again.

Layers are saved as they are stored: padded and ordered for the pipeline stages of the run. For other stages they are
read with all layers on each device and another dimension sharded over `stage`, so that each device reorders its shards;
then each layer is sent to its stage. In addition to the state, one array at a time is in memory.
"""

import dataclasses
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.tree_util import KeyPath

from jaxmem.config.names import is_last_stack
from jaxmem.config.networks import pipelined_layers
from jaxmem.errors import UserError
from jaxmem.pipeline.stages import Pipeline
from jaxmem.quant.precision import Params
from jaxmem.sharding.table import Axes, Role, is_axes, is_stacked, path_name
from jaxmem.sharding.trees import replace_at
from jaxmem.step.programs import Program
from jaxmem.step.state import TrainState
from jaxmem.typing import AxesTree, JsonView, Tree


class SavedState:
    """Converts the state of a program to and from checkpoints. `config`: the config of the run that saved, as JSON."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._model = program.model
        self._spec = program.spec

    def to_save(self, state: TrainState) -> TrainState:
        """The part of a state that is saved."""
        return dataclasses.replace(state, params=self.without_external_base(state.params))

    def shapes_to_restore(self, config: JsonView) -> TrainState:
        """Shapes and shardings to restore a checkpoint into."""
        state = self.to_save(self._spec.state)
        params = self._shapes(config, "weights", self.without_external_base(self._spec.param_axes), state.params)
        opt_state = self._shapes(config, "optimizer", self._spec.opt_axes, state.opt_state)
        return dataclasses.replace(state, params=params, opt_state=opt_state)

    def complete(self, saved: TrainState, config: JsonView) -> TrainState:
        """The state of the program, from the arrays that were restored into `shapes_to_restore`."""
        params = self.complete_params(saved.params, config)
        opt_state = self._reordered(config, self._spec.opt_axes, saved.opt_state, self._spec.state.opt_state)
        loss_scale = saved.loss_scale
        setting = self._program.cfg.precision.loss_scale
        if loss_scale is not None and setting != "dynamic":  # the constant may have changed
            scale = jax.device_put(np.float32(setting), loss_scale.scale.sharding)
            loss_scale = dataclasses.replace(loss_scale, scale=scale)
        return dataclasses.replace(saved, params=params, opt_state=opt_state, loss_scale=loss_scale)

    def complete_params(self, params: Params, config: JsonView) -> Params:
        axes = self.without_external_base(self._spec.param_axes)
        shapes = self.without_external_base(self._spec.state.params)
        params = self._reordered(config, axes, params, shapes)
        if not self._has_external_base:
            return params
        from jaxmem.hf.peft import read_base

        merged = replace_at(params, flatten_dict(read_base(self._program)))
        return self._model.selection.merge(merged, params)

    @cached_property
    def base(self) -> str | None:
        """The fingerprint of the frozen weights that `model.hf` provides; None: all weights are saved."""
        from jaxmem.hf.peft import fingerprint

        return fingerprint(self._hf) if self._hf is not None and self._has_external_base else None

    def check_base(self, position: JsonView, where: object) -> None:
        """Refuses a checkpoint that was trained on frozen weights other than those of `model.hf`."""
        if self._hf is not None and position.get("base", self.base) != self.base:
            raise UserError(
                f"the weights of model.hf={self._hf} differ from the base weights of {where}; set model.hf to the"
                " base model that it was trained with"
            )

    @property
    def _hf(self) -> str | None:
        return getattr(self._program.cfg.model, "hf", None)

    @property
    def _has_external_base(self) -> bool:
        return self._hf is not None and bool(self._program.cfg.trainable_patterns)

    def without_external_base(self, params: Tree) -> Tree:
        """The weights, or their axes, without the frozen ones that `model.hf` provides."""
        if not self._has_external_base:
            return params
        leaves = flatten_dict(params)
        trainable = flatten_dict(self._model.select(params))
        # `layer_scale` of adapters is not trained, but the base does not contain it.
        return unflatten_dict({path: leaves[path] if path[-1] == "layer_scale" else x for path, x in trainable.items()})

    def _orders(self, config: JsonView) -> tuple[np.ndarray, np.ndarray] | None:
        """The layer at each position of a stack in the checkpoint and in the program; None: they are equal."""
        layers = pipelined_layers(self._program.cfg.model)
        cfg = self._program.cfg
        saved = order(config, layers)
        here = order(cfg.model_dump(mode="json"), layers)
        return None if np.array_equal(saved, here) else (saved, here)

    def _shapes(self, config: JsonView, role: Role, axes: AxesTree, shapes: Tree) -> Tree:
        """Shapes and shardings of the arrays of the checkpoint, with which they can be reordered."""
        if (orders := self._orders(config)) is None:
            return shapes

        def as_saved(path: KeyPath, axes: Axes, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            if not self._is_ordered(path, axes):
                return x
            shape = (len(orders[0]), *x.shape[1:])
            sharding = self._program.layout.with_unsplit_layers(role, axes, shape)
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

        return jax.tree_util.tree_map_with_path(as_saved, axes, shapes, is_leaf=is_axes)

    def _is_ordered(self, path: KeyPath, axes: Axes) -> bool:
        """Whether an array is a stack of layers that pipeline stages share."""
        layers = self._program.cfg.model.layers  # type: ignore[union-attr]  # networks with stages have layers
        return is_stacked(axes) and is_last_stack(path_name(path), layers)

    def _reordered(self, config: JsonView, axes: AxesTree, arrays: Tree, shapes: Tree) -> Tree:
        if (orders := self._orders(config)) is None:
            return arrays
        positions = {layer: position for position, layer in enumerate(orders[0].tolist())}
        layers = pipelined_layers(self._program.cfg.model)
        sources = np.array([positions[layer] if layer < layers else -1 for layer in orders[1].tolist()])

        def pick(x: jax.Array) -> jax.Array:
            is_layer = (sources >= 0).reshape(-1, *[1] * (x.ndim - 1))
            return jnp.where(is_layer, x[np.maximum(sources, 0)], jnp.zeros((), x.dtype))

        def reorder(path: KeyPath, axes: Axes, x: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
            return jax.jit(pick, out_shardings=shape.sharding)(x) if self._is_ordered(path, axes) else x

        return jax.tree_util.tree_map_with_path(reorder, axes, arrays, shapes, is_leaf=is_axes)


def order(config: JsonView, layers: int) -> np.ndarray:
    """The layer at each position of a stack, from a config as JSON; numbers from `layers` on are identity layers.

    >>> order({"mesh": {"stage": 2}, "pipeline": {"rounds": 1}}, 3).tolist()
    [0, 1, 2, 3]
    """
    stages = config["mesh"]["stage"]
    if stages == 1:
        return np.arange(layers)
    return Pipeline(layers, stages, 1, config["pipeline"]["rounds"]).order
