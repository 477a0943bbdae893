"""Everything about a run that is known before any array exists: shapes, places, and the functions to compile.

`plan` and `train` both compile a `Program`'s step, so what one counts is what the other runs. State is born
sharded: shapes by `eval_shape`, places from the layout, then one compiled initialiser whose outputs lie there;
no array is ever whole on a device that will not hold it whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.traverse_util import unflatten_dict

from jaxmem import data, optim
from jaxmem.config import Config, Convnet, Decoder
from jaxmem.config.names import RESTING, rests_on_host
from jaxmem.errors import UserError
from jaxmem.machine.devices import lowering_for
from jaxmem.quant import precision
from jaxmem.quant.precision import Params
from jaxmem.sharding import Axes, Layout, Role, axes_at_rest, is_axes, layout_for
from jaxmem.sharding.leaves import state_axes
from jaxmem.sharding.weights import points
from jaxmem.stack import Pipeline
from jaxmem.step import batches, nonfinite, scaling
from jaxmem.step.checkpointed import Checkpointed
from jaxmem.step.compiler import compiler_options
from jaxmem.step.host_state import InLayers, frozen_waits, kinds, placed, sent, state_waits, told
from jaxmem.step.objective import Batch, Sums, likelihoods, objective
from jaxmem.step.pipelined import sums_of_all
from jaxmem.step.step import Metrics, TrainState, make_step
from jaxmem.step.update_during import During
from jaxmem.step.weights import Weights


@dataclass(frozen=True)
class Program:
    """A resolved config on a layout."""

    cfg: Config
    layout: Layout

    @cached_property
    def _network(self) -> tuple[Any, Any, Any]:
        graphdef, state = nnx.split(nnx.eval_shape(self.weights.network))
        axes = unflatten_dict({path: _axes(path, v) for path, v in nnx.to_flat_state(state)})
        return graphdef, axes, nnx.to_pure_dict(state)

    @property
    def graphdef(self) -> Any:
        return self._network[0]

    @property
    def made(self) -> Any:
        """The shape of every parameter as the network makes it, whatever it then rests in."""
        return self._network[2]

    @property
    def axes(self) -> Any:
        """The logical axes of every parameter, whatever it rests in."""
        return self._network[1]

    @cached_property
    def parameters(self) -> int:
        """Of the model: without the layers that fill up the stages."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.made))

    @cached_property
    def pipeline(self) -> Pipeline | None:
        return pipeline_of(self.cfg)

    @cached_property
    def learning_rate(self) -> optax.Schedule:
        return optim.schedule(self.cfg.optimizer, self.cfg.steps)

    @property
    def gradients_in(self) -> np.dtype | None:
        """What gradients are held in; None: each in its weight's own dtype."""
        return precision.gradient_dtype(self.cfg.precision, self.platform)

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        return self._optimizer_for(self.chosen(self.axes))

    @cached_property
    def choice(self) -> optim.Choice | None:
        """Which weights learn; None: all."""
        patterns = self.cfg.learns
        if not patterns:
            return None
        optim.Choice.of(self.axes, patterns)  # refuses layers of what is no stack
        return optim.Choice.of(self._network[2], patterns)

    @property
    def some(self) -> Mapping[Any, tuple[int, ...]]:
        """By their paths, the stacks of which only these layers learn."""
        return {} if self.choice is None else self.choice.some

    def chosen(self, weights: Any) -> Any:
        """A tree of the parameters, or of their axes, with None in the place of what is frozen."""
        return weights if self.choice is None else self.choice(weights)

    @cached_property
    def trainable(self) -> int:
        """Parameters that learn."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.chosen(self.made)))

    def _optimizer_for(self, axes: Any) -> optax.GradientTransformationExtraArgs:
        """Of the parameters that have these axes: all, or some."""
        tx = optim.build(self.cfg.optimizer, self.learning_rate, axes)
        if self.cfg.adapter.lora_plus_ratio != 1.0:
            tx = optim.faster(tx, self.cfg.adapter.lora_plus_ratio, ("*.lora.b",))
        master = self.cfg.precision.master
        if master in optim.BITS:
            return optim.with_remainder(tx, optim.BITS[master], axes)
        return tx if master == "none" else optim.with_master(tx)

    @cached_property
    def state(self) -> TrainState:
        """Shape, dtype and place of every array of the state."""
        shapes = self._shapes
        state = TrainState(
            step=self._placed("weights", (), shapes.step),
            params=self._placed("weights", self.axes_at_rest, shapes.params),
            opt_state=self._placed("optimizer", self.opt_axes, shapes.opt_state),
            loss_scale=self._placed("optimizer", jax.tree.map(lambda _: (), shapes.loss_scale), shapes.loss_scale),
        )
        return placed(state, self._away, self.layout.mesh.devices) if self.offloads else state

    @cached_property
    def weights(self) -> Weights:
        return Weights(self)

    @cached_property
    def checkpointed(self) -> Checkpointed:
        return Checkpointed(self)

    def rests_away(self, what: str) -> bool:
        """Whether this part of the state waits in host memory: `optimizer`, or `frozen` weights."""
        return rests_on_host(self.cfg.memory.offload, what)

    @property
    def offloads(self) -> bool:
        """Whether some of the state does."""
        return any(map(self.rests_away, RESTING))

    @property
    def waiting(self) -> TrainState:
        """Shape, dtype and place of the arrays that wait there, None in the place of others."""
        return jax.tree.map(lambda own, x: x if own else None, self._away, self.state)

    @cached_property
    def _away(self) -> TrainState:
        """Of each array of the state, whether it waits in host memory."""
        away = jax.tree.map(lambda _: False, self._shapes)
        if self.rests_away("optimizer"):
            away = dataclasses.replace(away, opt_state=state_waits(self.opt_axes))
        if self.rests_away("frozen"):
            learning = self.chosen(self.axes)
            away = dataclasses.replace(away, params=frozen_waits(self.axes, learning, self.axes_at_rest))
        return away

    def _sent(self, state: TrainState) -> TrainState:
        return sent(state, self._away) if self.offloads else state

    def _told(self, lowered: jax.stages.Lowered) -> jax.stages.Lowered:
        return told(lowered) if self.offloads and kinds(self.layout.mesh.devices.flat[0]) is None else lowered

    @cached_property
    def axes_at_rest(self) -> Any:
        """The logical axes of every array that the parameters rest in."""
        return axes_at_rest(self.axes, self._shapes.params)

    @property
    def culprits(self) -> list[str]:
        """What the metric `culprit` counts: weights and layers by name."""
        dense = jax.eval_shape(points, self._shapes.params)
        return nonfinite.names(self.chosen(self.axes), self.chosen(dense), self.weights.order, self.some)

    @cached_property
    def opt_axes(self) -> Any:
        """The logical axes of every array of the optimizer's state."""
        return state_axes(self._shapes.opt_state, self.chosen(self._shapes.params), self.chosen(self.axes))

    @cached_property
    def _shapes(self) -> TrainState:
        return jax.eval_shape(self._initial, jax.random.key(0))

    @cached_property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape, dtype and place of every array of a batch."""
        return {
            name: self._placed("activations", axes, jax.ShapeDtypeStruct(shape, dtype))
            for name, (shape, dtype, axes) in data.batch_spec(self.cfg).items()
        }

    def initialise(self) -> TrainState:
        """A new state, each array born where it lies. Same seed and mesh: the same bits. With `model.hf` the weights
        are read, and never random."""
        model = self.cfg.model
        if isinstance(model, Decoder) and model.hf is not None:
            return self.begin(self.weights.adapted(self.weights.read()))
        return self.compiled_initialise(jax.random.key(self.cfg.seed))

    def begin(self, params: Params) -> TrainState:
        """A new state of these weights, which it takes over."""
        return self._compiled_begin(params)

    @cached_property
    def compiled_initialise(self) -> jax.stages.Compiled:
        return self.lower_initialise().compile()

    @cached_property
    def compiled_evaluate(self) -> jax.stages.Compiled:
        return self.lower_evaluate().compile()

    @cached_property
    def _compiled_begin(self) -> jax.stages.Compiled:
        return self._lower_begin().compile()

    def _lower_begin(self) -> jax.stages.Lowered:
        places = jax.tree.map(lambda x: x.sharding, self.state)
        with self.lowering():
            begun = jax.jit(lambda params: self._sent(self._begun(params)), donate_argnums=0, out_shardings=places)
            return self._told(begun.lower(self.state.params))

    def lower_initialise(self) -> jax.stages.Lowered:
        """What makes a new state: of a random key, or of the weights that `model.hf` or `adapter.base_run` names."""
        model = self.cfg.model
        if self.cfg.adapter.base_run is not None or (isinstance(model, Decoder) and model.hf is not None):
            return self._lower_begin()
        key = self._placed("weights", (), jax.eval_shape(lambda: jax.random.key(0)))
        places = jax.tree.map(lambda x: x.sharding, self.state)
        with self.lowering():
            return self._told(jax.jit(lambda key: self._sent(self._initial(key)), out_shardings=places).lower(key))

    def lower_step(self) -> jax.stages.Lowered:
        """The training step; its state is donated."""
        loss = objective(self.cfg.objective, self.cfg.memory)
        update = make_step(
            self.graphdef,
            self.chosen(self.axes),
            loss,
            self.optimizer,
            self.learning_rate,
            self.cfg.seed,
            self.cfg.precision,
            precision.compute_dtype(self.cfg.precision, self.platform),
            self.pipeline,
            self.gradients_in,
            self._during if self.cfg.memory.update == "during" else None,
            self.cfg.train.on_nan == "skip",
            self.choice,
            InLayers(self.chosen(self.axes), self.opt_axes, self._optimizer_for)
            if self.rests_away("optimizer")
            else None,
            self.cfg.optimizer.kernel,
        )

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            return update(self._sent(state), batch)

        places = jax.tree.map(lambda x: x.sharding, self.state)
        with self.lowering():
            jitted = jax.jit(
                step,
                donate_argnums=0,
                out_shardings=(places, self.layout.replicated()),
                compiler_options=compiler_options(
                    self.platform,
                    self.layout.mesh.size,
                    fetches=self.offloads,
                    deterministic=self.cfg.train.deterministic,
                ),
            )
            return self._told(jitted.lower(self.state, self.batch))

    @property
    def _during(self) -> During:
        return During(
            self.graphdef,
            self.axes,
            self.opt_axes,
            objective(self.cfg.objective, self.cfg.memory),
            self._optimizer_for,
            self.gradients_in,
            measures=self.cfg.measures_first,
            chosen=self.chosen,
            on_host=self.rests_away("optimizer"),
            entries=None if self.cfg.memory.loss_chunk == "auto" else self.cfg.memory.loss_chunk,
        )

    @cached_property
    def buckets(self) -> dict[int, Program]:
        """This program for rows of each length that batches have; the longest, and last, is itself."""
        shorter = {n: replace(self, cfg=self.cfg.at_length(n)) for n in self.cfg.data.buckets}
        return {**shorter, self.cfg.data.sequence_length: self}

    def bucket(self, batch: Mapping[str, Any]) -> int:
        """Which of `buckets` a batch is for."""
        return int(batch["inputs"].shape[2]) if self.cfg.data.buckets else self.cfg.data.sequence_length

    def lower_others(self) -> dict[str, Callable[[], jax.stages.Lowered]]:
        """What a run compiles beside the step, by its phase."""
        shorter = {step_at(n): at.lower_step for n, at in self.buckets.items() if at is not self}
        unseen = {"evaluate": self.lower_evaluate} if self.cfg.train.evaluate_every else {}
        return {"initialise": self.lower_initialise, **shorter, **unseen}

    @cached_property
    def compiled_likelihoods(self) -> jax.stages.Compiled:
        """(params, batch) -> the log-probability of each row, [micro-batches, rows]."""

        def of_rows(params: Params, batch: Batch) -> jax.Array:
            network = nnx.merge(self.graphdef, params)
            return jax.lax.map(lambda micro: likelihoods(network, micro, self.cfg.memory), batch)

        with self.layout:
            whole = self.layout.replicated()
            return jax.jit(of_rows, out_shardings=whole).lower(self.state.params, self.batch).compile()

    def lower_evaluate(self) -> jax.stages.Lowered:
        """(params, batch) -> sums of the objective alone, without what only training adds to it."""
        terms = self.cfg.objective.model_copy(update={"label_smoothing": 0.0, "z_loss": 0.0})
        plain = objective(terms, self.cfg.memory)

        def evaluate(params: Params, batch: Batch) -> Sums:
            network = nnx.merge(self.graphdef, sent(params, self._away.params))
            if self.pipeline is not None:
                return sums_of_all(plain, self.pipeline, network, batch, None)
            sums = jax.lax.map(lambda micro: plain(network, micro, None), batch)
            return jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)

        with self.lowering():
            jitted = jax.jit(evaluate, out_shardings=self.layout.replicated())
            return self._told(jitted.lower(self.state.params, self.batch))

    @cached_property
    def rows(self) -> range:
        """The columns of the global batch of which this process's devices hold something."""
        return batches.rows(self.batch)

    def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """A batch on its devices; each process gives its `rows`."""
        return batches.place(self.cfg, self.layout, self.rows, self.buckets[self.bucket(batch)].batch, batch)

    @contextlib.contextmanager
    def lowering(self) -> Iterator[None]:
        with self.layout, lowering_for(self.layout.mesh.devices.flat[0]):
            yield

    @property
    def platform(self) -> str:
        return self.layout.mesh.devices.flat[0].platform

    def _initial(self, key: jax.Array) -> TrainState:
        return self._begun(self.weights.new(key))

    def _begun(self, params: Params) -> TrainState:
        scale = scaling.initial(self.cfg.precision.loss_scale)
        return TrainState(jnp.zeros((), jnp.int32), params, self.optimizer.init(self.chosen(params)), scale)

    def _placed(self, role: Role, axes: Any, shapes: Any) -> Any:
        """Shapes with their places."""

        def place(path: Any, axes: Axes, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.layout.sharding(role, axes, x.shape, name))

        return jax.tree_util.tree_map_with_path(place, axes, shapes, is_leaf=is_axes)


def program(cfg: Config, devices: Sequence[Any] | None = None) -> Program:
    """The program of a config on these devices, by default all that jax sees."""
    devices = jax.devices() if devices is None else devices
    cfg = cfg.for_devices(len(devices))
    return Program(cfg, layout_for(cfg, devices))


def step_at(length: int) -> str:
    """The phase that is a step of rows shorter than the longest."""
    return f"step at {length}"


def pipeline_of(cfg: Config) -> Pipeline | None:
    """The stages of a config whose mesh is filled in; None: the layers lie together."""
    if cfg.mesh.stage == 1 or isinstance(cfg.model, Convnet):
        return None
    return Pipeline(cfg.model.layers, cfg.mesh.stage, cfg.batch.accumulate, cfg.pipeline.rounds)


def _axes(path: tuple[Any, ...], variable: nnx.Variable) -> Axes:
    axes = variable.get_metadata().get("axes")
    if axes is None or len(axes) != len(variable.shape):
        name = ".".join(map(str, path))
        raise UserError(f"weight {name} of shape {variable.shape} names axes {axes}; it needs one for each dimension")
    return axes
