"""Warnings of a plan: memory or time that is spent without anyone having asked for it, each with a remedy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
from jax.tree_util import keystr, tree_leaves_with_path

from jaxmem.config import Config
from jaxmem.config.mesh import undivided
from jaxmem.planning.breakdown import ALL_SCORES, COPIES, GATHERED, LOGITS, STATE_COPIES, UPDATES
from jaxmem.planning.communication import collective
from jaxmem.planning.hlo import Module, total_flops
from jaxmem.planning.known_shapes import sorted_dims
from jaxmem.planning.plan_facts import PlanFacts
from jaxmem.planning.share import loss_chunk
from jaxmem.planning.state import bytes_on_device
from jaxmem.planning.units import format_bytes, format_seconds
from jaxmem.sharding import is_axes

LARGE, NOTABLE = 0.2, 0.01  # of the total
SPILLED = "spilled"  # training gives this warning too
MOST = 0.5  # of the offloaded bytes: with more of them on the device at the peak, offloading saves little


@dataclass(frozen=True)
class PlanWarning:
    kind: str
    text: str
    cure: str


def warnings_of(plan: PlanFacts) -> list[PlanWarning]:
    return [warning for check in _CHECKS for warning in check(plan)]


def recomputed_values(module: Module) -> int:
    """How many values XLA recomputes of its own accord: it names them `NAME.remat`."""
    return sum(".remat" in one.name for one in module.walk())


def _recomputed_by_xla(plan: PlanFacts) -> Iterator[PlanWarning]:
    step = plan.compiled_step
    if not (count := recomputed_values(step.module)):
        return
    text = f"near the memory limit XLA recomputes {count} values of its own accord"
    if plan.unlimited is not None:
        flops = total_flops(step.module) - total_flops(plan.unlimited.module)
        saved = format_bytes(plan.unlimited.total - step.total)
        text += f": {flops:.3g} more FLOPs per step and {saved} less memory than without a limit"
    yield PlanWarning("recomputed by XLA", text, "memory.remat=full, more batch.accumulate, or more devices")


def _unsharded(plan: PlanFacts) -> Iterator[PlanWarning]:
    known = plan.breakdown.known
    for one in plan.breakdown.buffers:
        dims = sorted_dims(one.shape.dims)
        is_weight = one.kind == GATHERED and dims in known.whole_weights
        is_gradient = one.part == "gradients" and one.kind != UPDATES and dims in known.whole_gradients
        if (is_weight or is_gradient) and one.size > NOTABLE * plan.bytes_per_device["total"]:
            what = "gradient" if is_gradient else "weight"
            text = f"all layers of a sharded {what} are gathered on each device: {one.what}, {format_bytes(one.size)}"
            yield PlanWarning(
                "unsharded array", text, "memory.remat=full, which saves no gathered weight; or report it"
            )


def _logits(plan: PlanFacts) -> Iterator[PlanWarning]:
    size, total = plan.breakdown.of_kind(LOGITS), plan.bytes_per_device["total"]
    if size > LARGE * total:
        text = f"logits and loss take {format_bytes(size)}, {size / total:.0%} of the total"
        yield PlanWarning("logits", text, _smaller_logits(plan.program.cfg, "cpu" if plan.target.is_cpu else "gpu"))


def _smaller_logits(cfg: Config, platform: str) -> str:
    rows, split = cfg.batch.global_size // cfg.batch.accumulate, cfg.mesh.row_shards
    chunk = loss_chunk(cfg, platform)
    smaller = "" if chunk is None else f"memory.loss_chunk={max(chunk // 8, 1)}, "
    more = f"batch.accumulate={2 * cfg.batch.accumulate}" if rows >= 2 * split else "a shorter data.sequence_length"
    return f"{smaller}{more}, or mesh.tensor, which shards the vocabulary"


def _offload(plan: PlanFacts) -> Iterator[PlanWarning]:
    step = plan.compiled_step
    if step.wants_host and not step.host_total:
        yield PlanWarning(
            "nothing offloaded",
            "the step places values in host memory, but in the compiled step every byte is on the device",
            "plan for a GPU with --target: a CPU offloads nothing; on a GPU keep them on the device or report it",
        )
    offloaded = (
        ("optimizer state", ("optimizer", "master"), STATE_COPIES),
        ("frozen weights", ("parameters", "quantization"), COPIES),
    )
    for what, parts, kind in offloaded:
        on_host, copied = plan.breakdown.on_host(*parts), plan.breakdown.of_kind(kind)
        if copied > MOST * on_host > 0:
            yield PlanWarning(
                "offloaded without gain",
                f"{format_bytes(on_host)} of {what} is in host memory, but at the peak {format_bytes(copied)} of it is"
                " on the device: offloading hardly lowers the peak",
                "keep it on the device, where no step waits for it; shard it further with zero and mesh.fsdp",
            )


def _spilled(plan: PlanFacts) -> Iterator[PlanWarning]:
    if plan.spilled and plan.fits:
        text = f"{format_bytes(plan.spilled)} exceed the device's memory and go to host memory (memory.spill)"
        if plan.target.gpu:
            # Each page leaves once and comes back once when it is used: the minimum.
            seconds = 2 * plan.spilled / (plan.target.gpu.host_link_gb_s * 1e9)
            text += f": at least {format_seconds(seconds)} per step, many times that if pages are evicted repeatedly"
        yield PlanWarning(SPILLED, text, "what fits: jaxmem fit, memory.remat=full, memory.offload=activations")


def _replicated(plan: PlanFacts) -> Iterator[PlanWarning]:
    for remark in plan.remarks.get("replicated", ()):
        shape = re.sub(r"\{.*", "", remark.partition(" = ")[2])
        yield PlanWarning(
            "replicated by the partitioner",
            f"XLA replicates an array on every device to reshard it; each device's shard was {shape}",
            "another mesh: fsdp or tensor alone",
        )


def _all_scores(plan: PlanFacts) -> Iterator[PlanWarning]:
    if size := plan.breakdown.of_kind(ALL_SCORES):
        length = plan.program.cfg.data.sequence_length
        text = f"attention materializes all {length} x {length} scores: {format_bytes(size)}"
        yield PlanWarning("attention scores", text, "memory.attention=auto")


def _tensor_across_hosts(plan: PlanFacts) -> Iterator[PlanWarning]:
    """Tensor parallelism waits for several collectives per layer: between hosts each takes many times as long."""
    target, tensor = plan.target, plan.mesh["tensor"]
    if target.gpu is None or target.per_host % tensor == 0:
        return
    module, extra = plan.compiled_step.module, 0.0
    for one in module.walk():
        found = collective(one, target.count, target.per_host)
        # `tensor` is the innermost axis: its groups are consecutive devices.
        if found and found.members == tuple(range(found.members[0], found.members[0] + tensor)):
            more = found.seconds(target.gpu) - found.seconds(target.gpu, one_host=True)
            extra += module.executions[one.computation] * more
    text = (
        f"mesh.tensor={tensor} spans hosts of {target.per_host} GPUs: its communication takes {extra:.3g} s per step"
        " longer than within a host"
    )
    within = math.gcd(tensor, target.per_host)
    yield PlanWarning("tensor across hosts", text, f"mesh.tensor={within} mesh.fsdp=-1")


def _not_sharded(plan: PlanFacts) -> Iterator[PlanWarning]:
    """Dimensions that `tensor` does not divide: their weights are replicated over it."""
    built, tensor = plan.program, plan.mesh["tensor"]
    for name in undivided(built.cfg.model, built.cfg.rules, built.cfg.mesh):
        sizes = jax.tree.map(
            lambda axes, w, name=name: bytes_on_device(w) if name in axes else 0,
            built.model.axes,
            built.spec.state.params,
            is_leaf=is_axes,
        )
        size = format_bytes(sum(jax.tree.leaves(sizes)))
        count = getattr(built.cfg.model, name)
        how = "each device uses those of its query heads" if name == "kv_heads" else "they are padded for computing"
        text = f"mesh.tensor={tensor} does not divide model.{name}={count}: its weights, {size}, are replicated; {how}"
        near = math.gcd(count, tensor)
        yield PlanWarning("not sharded", text, f"mesh.tensor={near}" if near > 1 else "a smaller mesh.tensor")


def _padding_layers(plan: PlanFacts) -> Iterator[PlanWarning]:
    pipeline = plan.program.model.pipeline
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


def _pipeline_bubble(plan: PlanFacts) -> Iterator[PlanWarning]:
    pipeline = plan.program.model.pipeline
    if pipeline is not None and pipeline.bubble > LARGE:
        text = f"each pipeline stage is idle in {pipeline.bubble:.0%} of the {pipeline.ticks} ticks of a step"
        fewer = f"batch.accumulate={4 * pipeline.stages}" if pipeline.micro_batches < 4 * pipeline.stages else ""
        rounds = f"pipeline.rounds={2 * pipeline.rounds}"
        yield PlanWarning(
            "pipeline bubble", text, " or ".join(filter(None, (fewer, rounds))) + ", or a smaller mesh.stage"
        )


_CHECKS: Sequence[Callable[[PlanFacts], Iterator[PlanWarning]]] = (
    _recomputed_by_xla,
    _offload,
    _spilled,
    _unsharded,
    _logits,
    _replicated,
    _all_scores,
    _tensor_across_hosts,
    _not_sharded,
    _padding_layers,
    _pipeline_bubble,
)
