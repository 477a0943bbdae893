"""Warnings of a plan: memory or time that is spent although the config does not ask for it, each with a remedy."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import yaml
from jax.tree_util import keystr, tree_leaves_with_path

from jaxmem.config import LOW_RANK, Config
from jaxmem.config.check import check
from jaxmem.config.combinations import value_of
from jaxmem.config.devices import resolve
from jaxmem.config.hf_values import read_json
from jaxmem.config.mesh import MESH_AXES, divisors, replicated_dims
from jaxmem.config.recompute import is_scheduled
from jaxmem.errors import UserError, as_yaml, one_of
from jaxmem.estimate.passes import loss_chunk
from jaxmem.estimate.state import bytes_on_device
from jaxmem.models.fp8 import SCOPE
from jaxmem.planning.breakdown import ALL_SCORES, LOGITS, STATE_COPIES, UPDATES, stacked_dims
from jaxmem.planning.budget import estimated
from jaxmem.planning.communication import collective
from jaxmem.planning.hlo import dot_flops, flops_of, recomputed
from jaxmem.planning.result import Plan, PlanWarning, state_bytes
from jaxmem.planning.targets import Target
from jaxmem.planning.units import format_bytes
from jaxmem.quant.precision import compute_dtype
from jaxmem.sharding.table import is_axes
from jaxmem.step.categories import COPIES, GATHERED
from jaxmem.step.pipeline import stacks_of
from jaxmem.step.programs import Program

LARGE_SHARE = 0.2  # of the total bytes
NOTABLE_SHARE = 0.01
MIN_UNSHARDED = 2**24  # bytes of an unsharded array that a warning names; in smaller ones, sizes coincide often
MIN_FLOAT32_BASE = 2 * 2**30  # bytes of frozen float32 weights that a warning names
# Settings that take time to save memory, and the nearest value that takes less.
FASTER = {
    "optimizer.clip_by": "previous", "memory.remat": "full", "memory.offload": "none", "precision.compute": "bfloat16",
    "zero": 2, "batch.accumulate": 1,
}  # fmt: skip
MIN_SLOWDOWN = 1.3  # a step that takes this many times as long as with the faster value
MAX_COPIED_SHARE = 0.5  # if a larger share of the offloaded bytes is on the device at the peak, offloading saves little


Check = Callable[[Plan], Iterator[PlanWarning]]


def warnings_of(plan: Plan) -> list[PlanWarning]:
    return [warning for check in (*_CHECKS_OF_BYTES, *_CHECKS_AT_START) for warning in check(plan)]


def warnings_at_start(plan: Plan) -> list[PlanWarning]:
    """The warnings that a run prints, which need no breakdown of the bytes."""
    return [warning for check in _CHECKS_AT_START for warning in check(plan)]


def _remedies(built: Program, *options: str | None) -> str:
    """The remedies, without settings that the config has already, and those that it does not support."""
    useful = [option for option in options if option and not _has(built, option) and _is_supported(built, option)]
    return one_of(useful) if useful else ""


def _has(built: Program, setting: str) -> bool:
    if setting == "memory.remat=full" and is_scheduled(built.cfg.memory.remat):
        return True  # a scheduled policy saves fewer activations
    key, _, value = setting.partition("=")
    return bool(value) and as_yaml(value_of(built.cfg, key)) in (value, f"[{value}]")


def _is_supported(built: Program, remedy: str) -> bool:
    """Whether the config is valid with a remedy; a remedy in words counts as valid."""
    key, is_setting, value = remedy.partition("=")
    if not is_setting or " " in remedy:
        return True
    devices = math.prod(getattr(built.cfg.mesh, axis) for axis in MESH_AXES)
    return _is_valid(_with(built.cfg, key, yaml.safe_load(value)), devices)


def _is_valid(cfg: Config, devices: int) -> bool:
    try:
        check(cfg)
    except UserError:
        return False
    return not resolve(cfg, devices)[1]


def _with(cfg: Config, key: str, value: Any) -> Config:
    section, _, field = key.rpartition(".")
    return cfg.replace(**({section: {field: value}} if section else {field: value}))


def _smaller_micro_batch(built: Program) -> str:
    """The setting for fewer sequences per device in a micro-batch; for shorter sequences if there is only one."""
    rows = built.share.complete_rows
    micro_batches = built.cfg.batch.accumulate
    counts = (n * micro_batches for n in range(2, rows + 1) if rows % n == 0)
    return _with_micro_batches(built, counts) or "a shorter data.sequence_length"


def _with_micro_batches(built: Program, counts: Iterable[int]) -> str | None:
    """The setting for the first number of micro-batches that the config supports."""
    settings = (f"batch.accumulate={count}" for count in counts)
    return next((setting for setting in settings if _is_supported(built, setting)), None)


def _recomputed_by_xla(plan: Plan) -> Iterator[PlanWarning]:
    module = plan.compiled_step.module
    repeated = recomputed(module)
    flops = flops_of((part for kernel in repeated for part in (kernel, *kernel.inner())), module)
    if flops and state_bytes(plan.program) <= plan.limit:  # recomputation cannot cure a larger state
        text = f"to stay below the memory limit, XLA recomputes {len(repeated)} values that memory.remat saves:"
        cure = _remedies(plan.program, "memory.remat=full", _smaller_micro_batch(plan.program), "more devices")
        yield PlanWarning("recomputed by XLA", f"{text} {flops:.3g} more FLOPs per step", cure)


def _unsharded(plan: Plan) -> Iterator[PlanWarning]:
    known = plan.breakdown.known
    share = plan.program.share
    cfg = plan.program.cfg
    length = share.row_length // cfg.mesh.context
    counts = (1, cfg.batch.accumulate if cfg.memory.update == "during" else 1)  # micro-batches that are in one array
    lengths = (length, length // cfg.mesh.tensor)  # norms may divide the sequence over `tensor`
    of_activations = {(share.complete_rows * count, n) for count in counts for n in lengths}
    for buffer in plan.breakdown.buffers:
        if buffer.size < max(MIN_UNSHARDED, NOTABLE_SHARE * plan.bytes_per_device["total"]):
            continue
        dims = stacked_dims(buffer.shape.dims)
        is_weight = buffer.kind == GATHERED and dims in known.full_weights
        is_gradient = buffer.category == "gradients" and buffer.kind != UPDATES and dims in known.full_gradients
        if buffer.by_shape and buffer.shape.dims[:2] in of_activations:
            continue
        if is_weight or is_gradient:
            what = "gradient" if is_gradient else "weight"
            text = (
                f"all layers of a sharded {what} are on each device at once: {buffer.what}, {format_bytes(buffer.size)}"
            )
            cure = _remedies(plan.program, "memory.remat=full", "reporting it as a bug")
            yield PlanWarning("unsharded array", text, cure)


def _gathered_model(plan: Plan) -> Iterator[PlanWarning]:
    built = plan.program
    cfg = built.cfg
    model = built.model.flax_model
    if model is None or model.stacks or built.layout.shard_count("weights", "embed") == 1:
        return
    size = plan.breakdown.of_kind(GATHERED)
    of_model = built.model.parameter_count * compute_dtype(cfg.precision, plan.target.platform).itemsize
    if size > max(MIN_UNSHARDED, of_model / cfg.mesh.tensor / 2):
        text = f"a model of a script without `layers` gathers all weights at once: {format_bytes(size)} on each device"
        yield PlanWarning("gathered model", text, "layers=NAME of a list of equal blocks, or jaxmem's layers")


def _logits(plan: Plan) -> Iterator[PlanWarning]:
    cfg = plan.program.cfg
    size = plan.breakdown.of_kind(LOGITS)
    total = plan.bytes_per_device["total"]
    if size > LARGE_SHARE * total:
        text = f"logits and loss need {format_bytes(size)}, {size / total:.0%} of the total"
        dtype = compute_dtype(cfg.precision, plan.target.platform)
        chunk = loss_chunk(cfg.memory, plan.program.share, dtype)
        small = LARGE_SHARE / (1 - LARGE_SHARE) * (total - size)
        slices = max(8, 2 ** math.ceil(math.log2(size / small)))  # for logits that are a small part of the new total
        smaller = None if chunk is None or chunk < slices else f"memory.loss_chunk={chunk // slices}"
        yield PlanWarning(
            "logits", text, _remedies(plan.program, smaller, _smaller_micro_batch(plan.program), "a larger mesh.tensor")
        )


def _not_in_fp8(plan: Plan) -> Iterator[PlanWarning]:
    """Matmuls that the config computes in FP8, but XLA in another dtype."""
    if plan.target.is_cpu:  # emulates FP8
        return
    # XLA names a matmul with block scales only if it is one of cuDNN.
    has_nameless = plan.program.cfg.precision.fp8_scaling == "mxfp8"
    matmuls = [part for part in plan.compiled_step.module.walk() if dot_flops(part)]
    parts = [part for part in matmuls if SCOPE in part.op_name or (has_nameless and not part.op_name)]
    wide = [part for part in parts if not part.operands[0].shape.dtype.startswith("float8")]
    if wide:
        kinds = sorted({f"{part.operands[0].shape} x {part.operands[1].shape}" for part in wide})
        count = f"{len(wide)} of {len(parts)} matmuls of precision.fp8_layers"
        text = f"XLA compiles {count} without FP8: {', '.join(kinds)}"
        yield PlanWarning("not in FP8", text, "precision.fp8_layers without them, or precision.compute=bfloat16")


def _offload(plan: Plan) -> Iterator[PlanWarning]:
    step = plan.compiled_step
    if step.wants_host and not step.host_total:
        yield PlanWarning(
            "nothing offloaded",
            "memory.offload is set, but the compiled step stores every byte on the device",
            "--target with a GPU, since a CPU offloads nothing; on a GPU, memory.offload=none",
        )
    for what, categories, kind in (
        ("optimizer state", ("optimizer", "master"), STATE_COPIES),
        ("frozen weights", ("parameters", "quantization"), COPIES),
    ):
        on_host = plan.breakdown.on_host(*categories)
        copied = plan.breakdown.of_kind(kind)
        if copied > MAX_COPIED_SHARE * on_host > 0:
            yield PlanWarning(
                "offloaded without gain",
                f"{format_bytes(on_host)} of {what} is in host memory, but at the peak {format_bytes(copied)} of it is"
                " on the device: offloading hardly lowers the peak",
                "memory.offload without it, so that no step waits for copies, or more devices along mesh.fsdp",
            )


def _replicated(plan: Plan) -> Iterator[PlanWarning]:
    cfg = plan.program.cfg
    is_uneven = "vocab" in replicated_dims(cfg.model, cfg.rules, cfg.mesh)
    cure = "a vocabulary divisible by mesh.tensor, or " if is_uneven else ""
    for array in plan.replicated:
        shape = array.partition(" = ")[2].partition("{")[0]
        yield PlanWarning(
            "replicated by the partitioner",
            f"to change its sharding, XLA replicates an array on every device; the shard of a device was {shape}",
            f"{cure}another mesh, with only fsdp or only tensor",
        )


def _all_scores(plan: Plan) -> Iterator[PlanWarning]:
    if size := plan.breakdown.of_kind(ALL_SCORES):
        cfg = plan.program.cfg
        text = f"attention stores the scores of all pairs of {cfg.row_length} positions: {format_bytes(size)}"
        settings = ("memory.attention=auto", "memory.attention=blockwise", _smaller_micro_batch(plan.program))
        yield PlanWarning("attention scores", text, _remedies(plan.program, *settings))


def _tensor_across_hosts(plan: Plan) -> Iterator[PlanWarning]:
    """Each layer waits for several collectives of tensor parallelism, which are many times slower between hosts."""
    target = plan.target
    tensor = plan.program.cfg.mesh.tensor
    if target.gpu is None or target.per_host % tensor == 0:
        return
    module = plan.compiled_step.module
    extra = 0.0
    for instruction in module.walk():
        transfer = collective(instruction, target.count, target.per_host)
        # `tensor` is the innermost axis, so its groups are consecutive devices.
        if transfer and transfer.members == tuple(range(transfer.members[0], transfer.members[0] + tensor)):
            seconds = transfer.seconds(target.gpu) - transfer.seconds(target.gpu, one_host=True)
            extra += module.executions[instruction.computation] * seconds
    text = (
        f"mesh.tensor={tensor} spans hosts of {target.per_host} GPUs: its communication takes {extra:.3g} s per step"
        " longer than within a host"
    )
    within = math.gcd(tensor, target.per_host)
    yield PlanWarning("tensor across hosts", text, f"mesh.tensor={within} mesh.fsdp=-1")


def _not_sharded(plan: Plan) -> Iterator[PlanWarning]:
    """Dimensions that are not divisible by `mesh.tensor`: their weights are replicated over it."""
    built = plan.program
    tensor = plan.program.cfg.mesh.tensor
    for name in replicated_dims(built.cfg.model, built.cfg.rules, built.cfg.mesh):
        weights = jax.tree.map(
            lambda axes, weight, name=name: weight if name in axes else None,
            *(built.model.axes, built.spec.state.params),
            is_leaf=is_axes,
        )
        size = format_bytes(bytes_on_device(weights))
        count = getattr(built.cfg.model, name)
        how = "each device uses some of them" if name == "kv_heads" else "they are padded for computing"
        text = (
            f"model.{name}={count} is not divisible by mesh.tensor={tensor}: its weights, {size}, are replicated; {how}"
        )
        divisor = math.gcd(count, tensor)
        yield PlanWarning("not sharded", text, f"mesh.tensor={divisor}" if divisor > 1 else "a smaller mesh.tensor")


def _padding_layers(plan: Plan) -> Iterator[PlanWarning]:
    pipeline = plan.program.model.execution.pipeline
    if pipeline is None or pipeline.stored == pipeline.layers:
        return
    extra = pipeline.stored - pipeline.layers
    stacked = [x for path, x in tree_leaves_with_path(plan.program.spec.state) if "blocks" in keystr(path)]
    size = format_bytes(bytes_on_device(stacked) * extra / pipeline.stored)
    text = (
        f"{extra} identity layers pad model.layers={pipeline.layers} to {pipeline.stored}, a multiple of the pipeline"
        f" stages: {size} of weights and optimizer state per device"
    )
    divisors = [n for n in range(2, pipeline.layers + 1) if pipeline.layers % n == 0]
    nearest = min(divisors, key=lambda n: (abs(n - pipeline.stages * pipeline.rounds), n))
    yield PlanWarning("padding layers", text, f"mesh.stage x pipeline.rounds = {nearest}")


def _first_layers(plan: Plan) -> Iterator[PlanWarning]:
    """Layers before those that pipeline stages share."""
    built = plan.program
    names = [] if built.model.execution.pipeline is None else stacks_of(built.model)[:-1]
    state = tree_leaves_with_path(built.spec.state)
    size = bytes_on_device([x for path, x in state if any(f"'{name}'" in keystr(path) for name in names)])
    if size > 5 * NOTABLE_SHARE * plan.bytes_per_device["total"]:
        text = f"{', '.join(names)}, layers without experts before the others, are computed by every pipeline stage"
        text += f": {format_bytes(size)} of weights and optimizer state per device"
        yield PlanWarning("first layers", text, "a smaller mesh.stage")


def _pipeline_bubble(plan: Plan) -> Iterator[PlanWarning]:
    pipeline = plan.program.model.execution.pipeline
    if pipeline is not None and pipeline.bubble > LARGE_SHARE:
        text = f"each pipeline stage is idle for {pipeline.bubble:.0%} of the time of a step"
        # At least four micro-batches per stage, or nearly as many.
        enough = 4 * pipeline.stages
        counts = [n for n in divisors(plan.program.cfg.batch.global_size) if pipeline.micro_batches < n]
        counts.sort(key=lambda n: (n < enough, abs(n - enough)))
        larger_batch = _with_micro_batches(plan.program, counts) if pipeline.micro_batches < enough else None
        options = (larger_batch, f"pipeline.rounds={2 * pipeline.rounds}", "a smaller mesh.stage")
        yield PlanWarning("pipeline bubble", text, _remedies(plan.program, *options))


def _float32_adapters(plan: Plan) -> Iterator[PlanWarning]:
    cfg = plan.program.cfg
    model = plan.program.model
    if cfg.adapter.kind not in LOW_RANK or cfg.precision.parameters != "float32":
        return
    size = bytes_on_device(model.select(plan.program.spec.state.params))
    gradients = 0 if cfg.memory.update == "during" else size
    if size + gradients > 2 * NOTABLE_SHARE * plan.bytes_per_device["total"]:
        text = f"float32 adapters need {format_bytes(size)}" + (
            ", and their gradients as much again" if gradients else ""
        )
        cure = "precision.parameters=bfloat16 for half of that"
        yield PlanWarning("float32 adapters", text, cure)


def _float32_base(plan: Plan) -> Iterator[PlanWarning]:
    """Frozen weights in float32, the default, which a base in bfloat16 does not need."""
    cfg = plan.program.cfg
    if cfg.adapter.kind not in LOW_RANK or cfg.base_precision.parameters != "float32":
        return
    params = plan.program.spec.state.params
    size = bytes_on_device(params) - bytes_on_device(plan.program.model.select(params))
    if size > MIN_FLOAT32_BASE:
        text = f"the frozen weights are stored in float32: {format_bytes(size)} per device"
        yield PlanWarning("float32 base", text, "adapter.base=bfloat16, which halves this")


def _sequence_length(plan: Plan) -> Iterator[PlanWarning]:
    """Positions on which a Hugging Face model was not trained."""
    cfg = plan.program.cfg
    if (hf := getattr(cfg.model, "hf", None)) is None:
        return
    file = Path(hf, "config.json")
    longest = read_json(file).get("max_position_embeddings") if file.is_file() else None
    if isinstance(longest, int) and cfg.data.sequence_length > longest:
        text = f"data.sequence_length={cfg.data.sequence_length} exceeds max_position_embeddings={longest} of {file}"
        yield PlanWarning("sequence length", text, f"data.sequence_length={longest}, or model.rope.scaling")


def _slow_settings(plan: Plan) -> Iterator[PlanWarning]:
    return slow_settings(plan.program.cfg, plan.target, plan.limit)


def slow_settings(cfg: Config, target: Target, limit: int, keys: Iterable[str] = FASTER) -> Iterator[PlanWarning]:
    """Settings that make a step much longer than their neighbour, which fits too, by the estimate of both. `limit`:
    bytes per device; `keys`: of FASTER."""
    if target.gpu is None:
        return
    used = estimated(cfg, target)
    for key in keys:
        value = FASTER[key]
        changed = _with(cfg, key, value)
        if value_of(cfg, key) == value or not _is_valid(changed, target.count):
            continue
        try:
            faster = estimated(changed, target)
        except UserError:  # a kernel that the config names does not support it
            continue
        if faster.total > limit or not used.seconds or not faster.seconds:
            continue
        ratio = used.seconds / faster.seconds
        if ratio > MIN_SLOWDOWN:
            given = f"{key}={as_yaml(value_of(cfg, key))}"
            text = f"{given} makes a step {ratio:.1f} times as long as {key}={value} (estimated)"
            saved = faster.total - used.total
            if saved > NOTABLE_SHARE * used.total:
                text += f"; it saves {format_bytes(saved)} per device"
            yield PlanWarning("slow setting", text, f"{key}={value}")


_CHECKS_OF_BYTES: Sequence[Check] = (
    _recomputed_by_xla, _not_in_fp8, _offload, _unsharded, _gathered_model, _logits, _replicated, _all_scores,
    _tensor_across_hosts, _not_sharded, _padding_layers, _first_layers, _pipeline_bubble, _float32_adapters,
)  # fmt: skip
_CHECKS_AT_START: Sequence[Check] = (_float32_base, _sequence_length, _slow_settings)
