"""Forward and backward pass of one sequence, as jax traces them: saved activations, and every matrix multiplication.

Nothing is compiled. The first config of a shape takes half a second; configs that differ only in mesh and batch share
the trace.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.interpreters.partial_eval import dce_jaxpr

from jaxmem import config
from jaxmem.config import Config, Decoder, Memory
from jaxmem.config.names import BOUNDARY, offloaded_activations
from jaxmem.kernels.scopes import mean_runs
from jaxmem.machine.gpus import keys_per_query
from jaxmem.models.cross_entropy import max_update_entries, slice_width
from jaxmem.models.fp8 import SCOPE
from jaxmem.quant.precision import compute_dtype
from jaxmem.sharding.layout import layout_for
from jaxmem.sharding.share import DeviceShare, share_of
from jaxmem.sharding.weights import differentiable, with_gradients
from jaxmem.step.execution import chunking, pipeline_of
from jaxmem.step.programs import Program
from jaxmem.typing import Tree

DEVICE = jax.memory.Space.Device
HOST = jax.memory.Space.Host
MATMULS = ("dot_general", "conv_general_dilated")
LOOPS = ("scan", "while", "cond")
KERNELS = ("triton_kernel_call", "ffi_call")  # primitives of kernels: Triton, and calls of libraries
_COMPUTE = {"compute", "fp8_scaling", "fp8_layers"}  # the keys of `precision` on which matmuls depend
_BACKWARD = 0.75  # share of the backward pass in the time of both, with full recompute
# XLA fuses the operations between matmuls into few kernels. In compiled decoders all kernels together read and write
# two and a half times the bytes of the matmuls, and there are about three kernels per matmul or write in place.
TRAFFIC_PER_MATMUL = 2.5
_KERNELS_PER_MATMUL = 3


@dataclass(frozen=True)
class Matmul:
    """Matrix multiplications of one kind in the two passes of one sequence."""

    times: float  # number of runs; a fraction in a branch that does not always run
    flops: int
    weights: int  # bytes of operands and results that are weights; independent of the number of sequences
    others: int
    dtype: str
    is_kernel: bool = False  # attention or another fused kernel
    keys: float = 0.0  # of such a kernel: keys per query
    width: int = 0  # of such a kernel: the last dimension of its result
    is_backward: bool = False


@dataclass(frozen=True)
class TracedPasses:
    """Forward and backward pass of one sequence on one of the devices that shard its layers."""

    saved: int  # bytes of saved activations on the device; for a decoder, only activations of its layers
    offloaded: int  # bytes of saved activations in host memory
    matmuls: tuple[Matmul, ...]
    kernels: int

    def times(self, count: float) -> "TracedPasses":
        """These passes, run `count` times; their saved activations are those of one run."""
        matmuls = tuple(dataclasses.replace(repeated, times=count * repeated.times) for repeated in self.matmuls)
        return dataclasses.replace(self, matmuls=matmuls, kernels=round(count * self.kernels))


def shape_of(cfg: Config, platform: str) -> Config:
    """The part of a config on which shapes depend: without mesh, batch, and settings that only a run reads."""
    compute = compute_dtype(cfg.precision, platform)
    share = share_of(cfg)
    chunk = loss_chunk(cfg.memory, share, compute)
    if isinstance(cfg.model, Decoder) and chunk is not None and chunk < share.vocab:
        # The size of a slice hardly changes the passes: one shape for all.
        chunk = max(-(-cfg.model.vocab // cfg.mesh.tensor) // 16, 1)
    if cfg.objective.name == "dpo":  # each sequence of a pair is computed like any other
        data = config.Data(sequence_length=cfg.data.sequence_length, tokenizer=cfg.data.tokenizer)
        cfg = cfg.replace(objective=config.Objective(), data=data)
    return cfg.replace(
        name="shape",
        output="",
        mesh=config.Mesh(),
        rules=config.Rules(),
        zero=0,
        batch=config.Batch(global_size=1),
        train=config.Train(steps=cfg.steps),
        checkpoint=config.Checkpoint(),
        memory={"loss_chunk": chunk or "auto", "budget": None},
        precision={"compute": "fp8" if cfg.precision.compute == "fp8" else compute.name},
    )


def loss_chunk(memory: Memory, share: DeviceShare, dtype: jnp.dtype) -> int | None:
    """`memory.loss_chunk`, resolved: at most the vocabulary entries of the device. None: the model has no vocabulary.
    `dtype`: the compute dtype."""
    if not isinstance(share.model, Decoder):
        return None
    tokens = math.ceil(share.tokens * share.shards("vocab") / share.mesh.tensor)
    most = max_update_entries(memory.update, share.model.embed)
    return slice_width(memory.loss_chunk, tokens, share.vocab, dtype.itemsize, most) or share.vocab


def mlp_chunk(memory: Memory, share: DeviceShare, dtype: jnp.dtype) -> int | None:
    """`memory.mlp_chunk`, resolved: the number of tokens of a sequence in a chunk. None: all."""
    if not isinstance(share.model, Decoder):
        return None
    return chunking(memory).chunk_size(share.stream(dtype), 0 if share.model.experts else share.model.mlp)


def passes_of(cfg: Config, platform: str) -> TracedPasses:
    """The passes of a config whose mesh is resolved. If `tensor` does not shard the hidden units or the vocabulary, it
    shards the sequence of that part instead: the matmuls are the same in other shapes."""
    names = offloaded_activations(cfg.memory.offload)
    all_offloaded = names == (BOUNDARY,)  # all activations that would be saved without offloading
    memory = {"update": "after", "offload": "none" if all_offloaded or not names else names}
    shape = shape_of(cfg, platform)
    shape = shape.replace(
        optimizer=config.Optimizer(trainable=cfg.optimizer.trainable),
        memory=memory,
        train=config.Train(steps=1),
        # The stored dtype of weights does not matter: matmuls read them in the compute dtype.
        precision=config.Precision(parameters="bfloat16", **shape.precision.model_dump(include=_COMPUTE)),
    )
    if cfg.base_precision.is_quantized and cfg.adapter.kind != "none":
        kind = "lora" if cfg.adapter.kind == "qlora" else cfg.adapter.kind
        shape = shape.replace(adapter={"kind": kind, "base": "bfloat16", "double_quant": True})
    shape = shape.replace(model=share_of(cfg).part_of_model)
    tensor = cfg.mesh.tensor
    # Each half is traced once for all configs in which it is equal.
    of_layers = shape.replace(memory={"loss_chunk": "auto"})
    if pipeline := pipeline_of(cfg):
        of_layers = of_layers.replace(model=_group_of_layers(of_layers.model, pipeline.group))
    layers = _trace("layers", of_layers, tensor)
    if cfg.mesh.expert > 1:
        saving = _trace("layers", with_recomputed_experts(of_layers), tensor)
        layers = dataclasses.replace(layers, saved=saving.saved, offloaded=saving.offloaded)
    if pipeline:
        layers = layers.times(layers_per_pass(cfg) / (_kinds(cfg.model) * pipeline.group))
    loss = _trace("loss", shape.replace(memory=Memory(loss_chunk=shape.memory.loss_chunk)), tensor)
    saved = layers.saved + loss.saved
    offloaded = saved if all_offloaded else layers.offloaded + loss.offloaded
    return TracedPasses(
        0 if all_offloaded else saved, offloaded, layers.matmuls + loss.matmuls, layers.kernels + loss.kernels
    )


def _group_of_layers(model: Any, count: int) -> Any:
    """A model of the layers that a pipeline stage computes per tick: `count` periods of the repeated pattern. Dense
    layers before the pattern are not in a group."""
    size = count * _kinds(model)
    if not isinstance(model, Decoder) or model.experts is None:
        return model.replace(layers=size)
    first = model.stacks[-1][0].start
    dense = tuple(number for number in range(size) if not model.has_experts[first + number])
    return model.replace(layers=size, experts={"every": 1, "dense_layers": dense})


def _kinds(model: Any) -> int:
    """The number of layers in a period of the pattern that pipeline stages share."""
    return len(model.stacks[-1]) if isinstance(model, Decoder) else 1


def with_recomputed_experts(shape: Config) -> Config:
    """A shape whose backward pass recomputes the MLPs of experts, as it always does along `mesh.expert`."""
    return shape.replace(memory={"experts": "blockwise"})


def passes_per_update(cfg: Config) -> float:
    """The duration of an update as a number of passes of a micro-batch."""
    return cfg.batch.accumulate * (1 + _BACKWARD) if cfg.needs_global_norm_first else cfg.batch.accumulate


def layers_per_pass(cfg: Config) -> float:
    """The layers that a device computes for a micro-batch. The time in which a pipeline stage is idle counts as more
    layers."""
    if (pipeline := pipeline_of(cfg)) is None:
        return getattr(cfg.model, "layers", 1)
    return _kinds(cfg.model) * pipeline.group * pipeline.rounds / (1 - pipeline.bubble)


def passes_in_memory(cfg: Config) -> float:
    """The number of passes whose saved activations are in memory at the same time; in a pipeline, of passes through one
    group of layers."""
    if (pipeline := pipeline_of(cfg)) is not None:
        return pipeline.timetable.slots.counts[0]
    return cfg.batch.accumulate if cfg.memory.update == "during" else 1


@functools.lru_cache(maxsize=512)
def _trace(half: str, shape: Config, tensor: int) -> TracedPasses:
    """One half of the passes: "layers", from a sequence to the output of the last layer, or "loss", from this output
    through the output matrix to the loss. It is differentiated with respect to the trainable weights and, for the loss,
    to the features."""
    built = on_one_device(shape)
    objective = built.objective
    params = jax.tree.map(_in_bfloat16, built.model.shapes)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), built.spec.batch)

    def features(params: Tree, batch: Any) -> Any:
        return objective.features(built.model.bind(params), batch, None)

    def loss(params: Tree, batch: Any, features: Any) -> jax.Array:
        return objective.trained_sum(objective.sums(built.model.bind(params), features, batch))

    run: Callable[..., Any] = features if half == "layers" else loss
    inputs = () if half == "layers" else (jax.eval_shape(features, params, batch),)

    def both(params: Tree, batch: Any, *inputs: Tree) -> tuple[Any, Any]:
        """Saved values, and gradients."""

        def forward(proxies: Any, *inputs: Tree) -> Any:
            return run(with_gradients(params, proxies, built.model.selection.partial_stacks), batch, *inputs)

        y, back = jax.vjp(forward, differentiable(built.model.select(params)), *inputs)
        saved, backward = jax.tree.flatten(back)
        gradients = jax.jit(lambda saved, y: jax.tree.unflatten(backward, saved)(y))
        return saved, gradients(saved, jax.tree.map(jnp.ones_like, y))

    traced, (outs, _) = jax.make_jaxpr(both, return_shape=True)(params, batch, *inputs)
    # The rule of a matmul also computes the gradient of a frozen weight, which XLA removes, with what only it reads.
    needed, _ = dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars), instantiate=True)
    read = {x for x in needed.eqns[-1].invars if not isinstance(x, Literal)}
    residuals = [x for x in traced.jaxpr.outvars[: len(outs)] if not isinstance(x, Literal) and x in read]
    saved = _saved(traced.jaxpr, residuals, shape.model, tensor)
    matmuls: list[Matmul] = []
    kernels = 0.0
    for eqn, times in equations(needed, 1):
        if eqn.primitive.name in (*MATMULS, *KERNELS):
            matmuls.append(cost_of(eqn, times))
        if eqn.primitive.name in (*MATMULS, "dynamic_update_slice"):
            kernels += _KERNELS_PER_MATMUL * times
        elif eqn.primitive.name in KERNELS:
            kernels += times
    return TracedPasses(int(saved[DEVICE]), int(saved[HOST]), tuple(matmuls), round(kernels))


def _in_bfloat16(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The shape of a weight in bfloat16; integers, which the model of a script may store, stay integers."""
    is_weight = jnp.issubdtype(x.dtype, jnp.floating)
    return jax.ShapeDtypeStruct(x.shape, jnp.bfloat16 if is_weight else x.dtype)


def _saved(traced: Any, outs: Sequence[Any], model: Any, tensor: int) -> dict[Any, float]:
    """Bytes of these results of a trace by memory space, without inputs; for a decoder, only of results of layers."""
    made_by = {out: eqn for eqn in traced.eqns for out in eqn.outvars}
    saved = dict.fromkeys(jax.memory.Space, 0.0)
    for out in outs:
        if out not in made_by:
            continue
        eqn = made_by[out]
        size = float(_bytes(out.aval))
        if isinstance(model, Decoder):
            if eqn.primitive.name != "scan" or _leaves_layers(out, eqn):
                continue
            if out.aval.shape[-1:] == (model.embed,) and not _is_repeated_input(out, eqn):
                size /= tensor
        saved[getattr(out.aval, "memory_space", DEVICE)] += size  # random keys have no memory space
    return saved


def _leaves_layers(out: Any, scan: Any) -> bool:
    """Whether a result is the residual stream after the last layer: [row, token, embed], carried through the layers."""
    inner = scan.params["jaxpr"].jaxpr.outvars[scan.outvars.index(out)]
    return out.aval.ndim == 3 and inner.aval.shape == out.aval.shape


def _is_repeated_input(out: Any, scan: Any) -> bool:
    """Whether a value that each layer saves is the input of a matmul. `tensor` shards the sequence of the residual
    stream between layers; a matmul's input is gathered."""
    body = scan.params["jaxpr"].jaxpr
    inner = body.outvars[scan.outvars.index(out)]
    return any(eqn.primitive.name == "dot_general" and inner in eqn.invars for eqn, _ in equations(body, 1))


def equations(traced: Any, times: float) -> Iterator[tuple[Any, float]]:
    """All operations of a trace, including nested ones, and the number of their runs if the trace runs `times`
    times."""
    for eqn in traced.eqns:
        yield eqn, times
        yield from inside(eqn, times)


def inside(eqn: Any, times: float) -> Iterator[tuple[Any, float]]:
    """The operations inside an operation that runs `times` times, and the number of their runs."""
    if eqn.primitive.name == "scan":
        times *= eqn.params["length"]
    elif eqn.primitive.name == "while":
        times = int(times * mean_runs(str(eqn.source_info.name_stack)))
    elif eqn.primitive.name == "cond":  # the branch of false is first; a scope states how often each branch runs
        share = mean_runs(str(eqn.source_info.name_stack))
        branches = eqn.params["branches"]
        if eqn.params.get("branches_platforms"):  # of `jax.lax.platform_dependent`, whose default is last
            yield from equations(branches[-1].jaxpr, times)
            return
        for branch, runs in zip(branches, (1 - share, share) if share != 1 else (1,) * len(branches), strict=True):
            yield from equations(branch.jaxpr, times * runs)
        return
    elif eqn.primitive.name in KERNELS:
        return
    for inner in inner_traces(eqn):
        yield from equations(inner, times)


def inner_traces(eqn: Any) -> Iterator[Any]:
    """The traces in the parameters of an operation, such as the body of a loop."""
    for value in eqn.params.values():
        for part in value if isinstance(value, (list, tuple)) else (value,):
            trace = getattr(part, "jaxpr", part)
            if hasattr(trace, "eqns"):
                yield trace


def cost_of(eqn: Any, times: float) -> Matmul:
    """The cost of a `dot_general`, a convolution or a kernel."""
    if eqn.primitive.name in KERNELS:
        return _kernel(eqn, times)
    left, right = (x.aval for x in eqn.invars[:2])
    out = eqn.outvars[0].aval
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        depth = math.prod(left.shape[d] for d in contracted)
    else:
        depth = math.prod(right.shape) // max(right.shape[eqn.params["dimension_numbers"].rhs_spec[0]], 1)
    sides = [(_bytes(x), _is_weight(x)) for x in (left, right, out)]
    weights = sum(size for size, is_weight in sides if is_weight)
    others = sum(size for size, is_weight in sides if not is_weight)
    dtype = "float8_e4m3fn" if SCOPE in str(eqn.source_info.name_stack) else str(left.dtype)
    return Matmul(times, 2 * math.prod(out.shape) * depth, weights, others, dtype)


def _kernel(eqn: Any, times: float) -> Matmul:
    """The cost of a kernel; its metadata state the FLOPs per element of the result. Of a kernel of a script only the
    bytes are known."""
    flops_per_output = float((eqn.ctx.xla_metadata or {}).get("flops_per_output", 0))
    sizes = [(_bytes(x.aval), x.aval.ndim == 3 and x.aval.shape[0] > 2) for x in (*eqn.invars, *eqn.outvars)]
    weights = sum(size for size, is_weight in sizes if is_weight)  # the weights of experts
    others = sum(size for size, is_weight in sizes if not is_weight)
    if not flops_per_output:
        return Matmul(times, 0, weights, others, "bfloat16")
    out = eqn.outvars[0].aval
    backward = str(eqn.params.get("target_name", "")).endswith("Backward")
    return Matmul(
        times,
        int(flops_per_output * math.prod(out.shape)),
        weights,
        others,
        str(out.dtype),
        is_kernel=True,
        keys=keys_per_query(flops_per_output, backward=backward),
        width=out.shape[-1],
        is_backward=backward,
    )


def _is_weight(x: Tree) -> bool:
    """Whether an array is a weight, its gradient or a slice of either. The first dimension of batch arrays is 1."""
    return x.ndim == 2 or (x.ndim == 3 and x.shape[0] != 1)


def _bytes(x: Tree) -> int:
    """Bytes of an array; 0 for random keys."""
    return math.prod(x.shape) * x.dtype.itemsize if hasattr(x.dtype, "itemsize") else 0


def without_sharding(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def on_one_device(cfg: Config) -> Program:
    """A program that is only traced; no array is created."""
    return Program(cfg, layout_for(cfg, jax.devices()[:1]))
