"""The functions that a run compiles for a config on some devices. `plan` and `train` both use them.

State is created sharded: shapes come from `eval_shape`, shardings from the layout, and one compiled initializer has
outputs with these shardings. No sharded array ever exists completely on one device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from jaxmem import adapters
from jaxmem.config import MESH_AXES, Config, Decoder, Precision
from jaxmem.config.mesh import BATCH_AXES, SEQUENCE_AXES
from jaxmem.config.networks import Vit
from jaxmem.errors import UserError, one_of
from jaxmem.quant.precision import Params
from jaxmem.sharding.layout import Layout, layout_for
from jaxmem.sharding.table import is_axes
from jaxmem.step import batches, host_placement
from jaxmem.step.execution import ExecutionSpec
from jaxmem.step.model import ModelSpec
from jaxmem.step.objective import Batch, Objective, Sums, likelihoods, objective_of
from jaxmem.step.state import StepSpec, TrainState
from jaxmem.step.step import Metrics, make_step
from jaxmem.typing import Tree

if TYPE_CHECKING:
    from jaxmem.sharding.share import DeviceShare

# XLA's options for a step, in plans and in runs, each with its reason and its planned cost.
#
# Several GPUs: two of XLA's defaults leave communication exposed. It combines all gradients of a layer into one
# reduce-scatter, which has to wait for the last of them; and it runs one collective at a time, so that a layer's last
# reduction delays the next layer's all-gather. Llama 3 8B on 8 H100s, sequence length 4096, a ring over `context: 8`:
# 6 % of the communication time is exposed with the defaults, 0.02 % with these options, in the same memory. Not used:
# pipelined collectives (5 GiB more, no gain) and double-buffered loops (0.6 GiB more, no gain).
XlaOptions = dict[str, bool | str]  # as jax types them

# Overlaps communication and host transfers with kernels. XLA's default is on from Hopper on, and off for older GPUs.
# Llama 3 8B on 8 RTX 4090s: 75.6 -> 66.0 s per step, 0.45 GiB more memory; 70 B frozen in host memory on one A100: 10.3
# -> 7.6 s, 0.67 GiB more.
LATENCY_HIDING: XlaOptions = {"xla_gpu_enable_latency_hiding_scheduler": True}
OVERLAP: XlaOptions = {
    "xla_gpu_reduce_scatter_combine_threshold_bytes": "1",  # each gradient is reduced as soon as it exists
    "xla_gpu_experimental_parallel_collective_overlap_limit": "2",
}
# All transfers from host memory may run at once. By default only two may, and XLA runs the others before the first
# kernel: kernels then wait for five of the seven weights of a layer.
FETCH: XlaOptions = {"xla_gpu_experimental_parallel_async_compute_limit": "64"}
# Without this option some of XLA's kernels, e.g. the scatter-add of an embedding's gradient, add in varying order.
DETERMINISTIC: XlaOptions = {"xla_gpu_deterministic_ops": True}
# XLA's autotuner is off in plans and would use its Triton kernels, in which values of FP8 matmuls are bfloat16. Without
# them every matmul is one of cuBLASLt, in plans and in runs.
CUBLAS: XlaOptions = {"xla_gpu_enable_triton_gemm": False}
# jax 0.10 computes batched matmuls on CPUs with a library that takes twice as long as Eigen.
EIGEN: XlaOptions = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}


@dataclass(frozen=True)
class Program:
    """The compiled functions of a resolved config on a layout. `model` and `spec` describe their arguments."""

    cfg: Config
    layout: Layout

    @cached_property
    def model(self) -> ModelSpec:
        from jaxmem.kernels.support import capability

        device = self.layout.mesh.devices.flat[0]
        return ModelSpec(self.cfg, ExecutionSpec(self.cfg, self.platform, capability(device)))

    @cached_property
    def spec(self) -> StepSpec:
        check_mesh(self.layout, self.model)
        return StepSpec(self.cfg, self.layout, self.model)

    @property
    def resolved(self) -> Config:
        """The config with `auto` resolved for these devices, in the settings of kernels and `mesh.context_method`."""
        from jaxmem.step.kernel_choice import resolve_kernels

        return resolve_kernels(self.cfg, self.platform, self.model.execution.capability)

    def with_precision(self, precision: Precision) -> Program:
        """The same program with weights that are stored in another format."""
        return replace(self, cfg=self.cfg.replace(precision=precision))

    @property
    def platform(self) -> str:
        return self.layout.mesh.devices.flat[0].platform

    @cached_property
    def share(self) -> DeviceShare:
        from jaxmem.sharding.share import share_of

        return share_of(self.cfg)

    @cached_property
    def objective(self) -> Objective:
        return objective_of(self.cfg)

    def lower_step(self) -> jax.stages.Lowered:
        """(state, batch) -> (state, metrics): the training step, which donates its state."""
        update = make_step(self.spec)

        # Plans recognize arguments by these names (`categories.category_of`).
        def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            return update(self.spec.to_memory(state), batch)

        options = compiler_options(
            self.platform,
            self.layout.mesh.size,
            fetches=self.spec.has_offload,
            deterministic=self.cfg.train.deterministic,
        )
        if self.platform != "cpu" and self.cfg.precision.compute == "fp8":
            options |= CUBLAS
        outputs = (self.spec.shardings, self.layout.replicated())
        return self._lower(step, self.spec.state, self.spec.batch, outputs=outputs, donate=0, options=options)

    def lower_initialise(self) -> jax.stages.Lowered:
        """The initializer: key -> state, or parameters -> state if the config names existing weights."""
        if self.cfg.adapter.base_run is not None or getattr(self.cfg.model, "hf", None) is not None:
            return self._lower_begin()

        def initialise(key: jax.Array) -> TrainState:
            return self.spec.to_memory(self.spec.new_state(self.spec.initial_weights.new(key)))

        key = self.spec.sharded("weights", (), jax.eval_shape(lambda: jax.random.key(0)))
        return self._lower(initialise, key, outputs=self.spec.shardings)

    def lower_evaluate(self) -> jax.stages.Lowered:
        """(params, batch) -> sums of the objective, without label smoothing and z-loss."""
        plain = objective_of(self.cfg.replace(objective={"label_smoothing": 0.0, "z_loss": 0.0}))

        def evaluate(params: Params, batch: Batch) -> Sums:
            params = self.spec.to_memory(params)
            if self.model.execution.pipeline is not None:
                from jaxmem.step.pipeline import pipeline_sums

                return pipeline_sums(self.spec, plain, params, batch)
            sums = jax.lax.map(lambda micro_batch: plain(self.model.bind(params), micro_batch, None), batch)
            return jax.tree.map(lambda x: jnp.sum(x, axis=0), sums)

        return self._lower(evaluate, self.spec.state.params, self.spec.batch, outputs=self.layout.replicated())

    def lower_others(self) -> dict[str, Callable[[], jax.stages.Lowered]]:
        """The other functions that a run compiles, by phase."""
        evaluate = {"evaluate": self.lower_evaluate} if self.cfg.train.evaluate_every else {}
        return {"initialise": self.lower_initialise, **evaluate}

    @cached_property
    def compiled_initialise(self) -> jax.stages.Compiled:
        return self.lower_initialise().compile()

    @cached_property
    def compiled_evaluate(self) -> jax.stages.Compiled:
        return self.lower_evaluate().compile()

    @cached_property
    def compiled_likelihoods(self) -> jax.stages.Compiled:
        """(params, batch) -> the log-probability of each row, [micro-batches, rows]."""

        def of_rows(params: Params, batch: Batch) -> jax.Array:
            network = self.model.bind(params)
            return jax.lax.map(lambda micro_batch: likelihoods(network, micro_batch, self.cfg.memory), batch)

        replicated = self.layout.replicated()
        return self._lower(of_rows, self.spec.state.params, self.spec.batch, outputs=replicated).compile()

    def initialise(self) -> TrainState:
        """A new state with random weights, bitwise equal for the same seed and mesh. For other weights:
        `inference.load.initial_state`."""
        if (directory := getattr(self.cfg.model, "hf", None)) is not None:
            raise UserError(
                f"model.hf={directory} provides the weights; use jaxmem.inference.load.initial_state(program)"
            )
        return self.compiled_initialise(self.spec.key)

    def begin(self, params: Params) -> TrainState:
        """A new state with these parameters, which are donated."""
        return self._lower_begin().compile()(params)

    def add_adapters(self, base: Params) -> Params:
        """The weights of the model, which are donated, with new adapters."""
        if self.cfg.adapter.kind == "none":
            return base
        with self.lowering():
            add = jax.jit(
                self.spec.initial_weights.with_adapters, donate_argnums=0, out_shardings=self.spec.shardings.params
            )
            return add(base, self.spec.key)

    def new_module(self, name: str) -> dict[tuple[str, ...], Tree]:
        """New weights of one module of the model, by path."""
        shardings = flatten_dict(self.spec.shardings.params)
        paths = [path for path in flatten_dict(adapters.base_of(self.model.axes)) if path[0] == name]

        def create(key: jax.Array) -> dict[tuple[str, ...], Tree]:
            weights = flatten_dict(self.spec.initial_weights.new_base(key))
            return {path: weights[path] for path in paths}

        with self.lowering():
            outputs = {path: shardings[path] for path in paths}
            return jax.jit(create, out_shardings=outputs)(self.spec.key)

    @cached_property
    def rows(self) -> range:
        """The rows of the global batch on the devices of this process."""
        return batches.rows(self.spec.batch)

    def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """A batch on its devices. Each process passes the `rows` of its devices."""
        order = None
        if isinstance(self.cfg.model, Decoder):
            from jaxmem.models.attention import context_order

            length = self.cfg.data.sequence_length
            order = context_order(
                self.layout, length, self.model.execution.of_network.context_method, self.cfg.model.window
            )
        return batches.place(order, self.rows, self.spec.batch, batch)

    @contextlib.contextmanager
    def lowering(self) -> Iterator[None]:
        from jaxmem.machine.devices import lowering_for

        with self.layout, lowering_for(self.layout.mesh.devices.flat[0]):
            yield

    def _lower_begin(self) -> jax.stages.Lowered:
        def begin(params: Params) -> TrainState:
            return self.spec.to_memory(self.spec.new_state(params))

        return self._lower(begin, self.spec.state.params, outputs=self.spec.shardings, donate=0)

    def _lower(
        self,
        function: Callable[..., Any],
        *arguments: Tree,
        outputs: Tree,
        donate: int | tuple[()] = (),
        options: XlaOptions | None = None,
    ) -> jax.stages.Lowered:
        with self.lowering():
            jitted = jax.jit(function, donate_argnums=donate, out_shardings=outputs, compiler_options=options)
            lowered = jitted.lower(*arguments)
        # jax does not know the memories of a compile-only device, so the lowered program is annotated instead.
        is_compile_only = host_placement.memory_kinds(self.layout.mesh.devices.flat[0]) is None
        return host_placement.annotate(lowered) if self.spec.has_offload and is_compile_only else lowered


def program(cfg: Config, devices: Sequence[jax.Device] | None = None) -> Program:
    """The program of a config on these devices, by default all devices of jax."""
    from jaxmem.config.devices import for_devices

    if cfg.model.family == "own" and not cfg.user.has_model:
        raise UserError(
            f"{cfg.name}: model.family=own is the model of a script; pass the arguments model (or network), loss,"
            " layers and axes of its training to jaxmem.train(cfg, ...) or jaxmem.evaluate(run, data, ...)"
        )
    devices = jax.devices() if devices is None else devices
    cfg = for_devices(cfg, len(devices))
    return Program(cfg, layout_for(cfg, devices))


def check_mesh(layout: Layout, model: ModelSpec) -> None:
    """Refuses a mesh axis that shards neither the batch, nor the sequence, nor a weight: its devices would all compute
    the same."""
    cfg = model.cfg
    used = {*BATCH_AXES, *(SEQUENCE_AXES if isinstance(cfg.model, Decoder | Vit) else ())}
    for axes in jax.tree.leaves(model.axes, is_leaf=is_axes):
        used.update(*layout.mesh_axes_each("compute", axes), *layout.mesh_axes_each("weights", axes))
    for axis in (axis for axis in MESH_AXES if getattr(cfg.mesh, axis) > 1 and axis not in used):
        named = [dim for dim, over in cfg.rules.table.items() if axis in over]
        why = f"none of its weights has the axis {one_of(named)}" if named else f"no key of rules names {axis}"
        use = f"use mesh.{axis}=1 and e.g. a larger mesh.fsdp"
        if cfg.user.has_model and named:
            use += f", or name the axes of its weights, e.g. axes={{'*.up.kernel': ('embed', '{named[-1]}')}}"
            use += " (docs/how-to/from-a-script.md)"
        raise UserError(f"mesh.{axis}={getattr(cfg.mesh, axis)} does not shard the model: {why}; {use}")


def compiler_options(platform: str, devices: int, *, fetches: bool, deterministic: bool) -> XlaOptions:
    """The options. `fetches`: whether the step has state in host memory; `deterministic`: whether equal inputs must
    give bitwise equal outputs."""
    if platform == "cpu":
        return EIGEN if jax.__version_info__ < (0, 11) else {}
    hiding = LATENCY_HIDING if devices > 1 or fetches else {}
    return (
        hiding
        | (OVERLAP if devices > 1 else {})
        | (FETCH if fetches else {})
        | (DETERMINISTIC if deterministic else {})
    )
