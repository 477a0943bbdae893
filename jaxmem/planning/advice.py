"""What a plan warns of: places where memory or time goes without anyone having asked for it, each with its cure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
from jax.tree_util import keystr, tree_leaves_with_path

from jaxmem.config import Config
from jaxmem.config.dimensions import undivided
from jaxmem.planning.breakdown import ALL_SCORES, COPIES, GATHERED, LOGITS, STATE_COPIES, UPDATES
from jaxmem.planning.communication import collective
from jaxmem.planning.hlo import Module, total_flops
from jaxmem.planning.known_shapes import sorted_dims
from jaxmem.planning.predict import held
from jaxmem.planning.share import loss_chunk
from jaxmem.planning.text import duration, readable
from jaxmem.sharding import is_axes

if TYPE_CHECKING:
    from jaxmem.planning.planned import Plan

LARGE, NOTABLE = 0.2, 0.01  # of the total
SPILLED = "spilled"  # the kind of warning that training gives, too
COPIED = 0.5  # of what rests on the host: then moving it there saves little


@dataclass(frozen=True)
class Warned:
    kind: str
    text: str
    cure: str


def recomputed(module: Module) -> int:
    """How many values XLA computes again of its own accord: it names them `NAME.remat`."""
    return sum(".remat" in one.name for one in module.walk())


def warnings_of(plan: Plan) -> list[Warned]:
    return [warned for check in _CHECKS for warned in check(plan)]


def _recomputed(plan: Plan) -> Iterator[Warned]:
    again = recomputed(plan.compiled_step.module)
    if not again:
        return
    text = f"XLA found the memory short and computes {again} values again by itself"
    if plan.unlimited is not None:
        flops = total_flops(plan.compiled_step.module) - total_flops(plan.unlimited.module)
        saved = plan.unlimited.total - plan.compiled_step.total
        text += f": {flops:.3g} FLOPs a step more than without a limit, {readable(saved)} less"
    yield Warned(
        "recomputed by XLA", text, "recompute by plan: memory.remat=full, more batch.accumulate, or more devices"
    )


def _whole(plan: Plan) -> Iterator[Warned]:
    known = plan.breakdown.known
    for item in plan.breakdown.buffers:
        weight = item.kind == GATHERED and sorted_dims(item.shape.dims) in known.whole_weights
        summed = item.part == "gradients" and item.kind != UPDATES
        gradient = summed and sorted_dims(item.shape.dims) in known.whole_gradients
        if (weight or gradient) and item.size > NOTABLE * plan.bytes_per_device["total"]:
            what = "a gradient" if gradient else "a weight"
            text = (
                f"{what} of all layers is whole on each device although it is split: {item.what}, {readable(item.size)}"
            )
            yield Warned("whole array", text, "memory.remat=full, which keeps no gathered weight; otherwise report it")


def _logits(plan: Plan) -> Iterator[Warned]:
    size, total = plan.breakdown.of_kind(LOGITS), plan.bytes_per_device["total"]
    if size > LARGE * total:
        text = f"logits and loss take {readable(size)}, {size / total:.0%} of all"
        yield Warned("logits", text, _fewer_logits(plan.program.cfg, "cpu" if plan.target.is_cpu else "gpu"))


def _fewer_logits(cfg: Config, platform: str) -> str:
    rows, split = cfg.batch.global_size // cfg.batch.accumulate, cfg.mesh.replica * cfg.mesh.fsdp
    chunk = loss_chunk(cfg, platform)
    fewer = "" if chunk is None else f"memory.loss_chunk={max(chunk // 8, 1)}, "
    more = f"batch.accumulate={2 * cfg.batch.accumulate}" if rows >= 2 * split else "a shorter data.sequence_length"
    return f"{fewer}{more}, or mesh.tensor to split the vocabulary"


def _offload(plan: Plan) -> Iterator[Warned]:
    step = plan.compiled_step
    if step.wants_host and not step.host_total:
        yield Warned(
            "nothing offloaded",
            "the step moves values to host memory, and as XLA compiled it every byte is on the device",
            "plan for a GPU with --target: on a CPU nothing moves; for one, keep them on the device or report it",
        )
    resting = (
        ("the optimizer's state", ("optimizer", "master"), STATE_COPIES),
        ("the frozen weights", ("parameters", "quantization"), COPIES),
    )
    for what, parts, kind in resting:
        waits, copied = plan.breakdown.on_host(*parts), plan.breakdown.of_kind(kind)
        if copied > COPIED * waits > 0:
            yield Warned(
                "offloaded in vain",
                f"{readable(waits)} of {what} rests in host memory, and at the fullest moment {readable(copied)} of it"
                " is on the device: the peak is hardly lower",
                "keep it on the device, where no step waits for it; split it further with zero and mesh.fsdp",
            )


def _spilled(plan: Plan) -> Iterator[Warned]:
    if plan.spilled and plan.fits:
        text = f"{readable(plan.spilled)} have no room on the device and lie in host memory (memory.spill)"
        if plan.target.gpu:
            # Away when something else needs its place, and back when it is touched again: the least there is.
            seconds = 2 * plan.spilled / (plan.target.gpu.host_link_gb_s * 1e9)
            text += f": {duration(seconds)} a step more at least, and many times that where pages go to and fro"
        yield Warned(SPILLED, text, "what fits: jaxmem fit, memory.remat=full, memory.offload=activations")


def _replicated(plan: Plan) -> Iterator[Warned]:
    for said in plan.remarks.get("replicated", ()):
        what = re.sub(r"\{.*", "", said.partition(" = ")[2])
        yield Warned(
            "replicated by the partitioner",
            f"XLA gathers an array whole on every device to lay it out anew: {what} a device before",
            "another mesh: fsdp or tensor alone",
        )


def _all_scores(plan: Plan) -> Iterator[Warned]:
    if size := plan.breakdown.of_kind(ALL_SCORES):
        length = plan.program.cfg.data.sequence_length
        text = f"attention writes out all {length} x {length} scores: {readable(size)}"
        yield Warned("attention scores", text, "memory.attention=auto")


def _across_hosts(plan: Plan) -> Iterator[Warned]:
    """Tensor parallel waits for several messages a layer: between hosts each takes many times as long."""
    target, tensor = plan.target, plan.mesh["tensor"]
    if target.gpu is None or target.per_host % tensor == 0:
        return
    module = plan.compiled_step.module
    lost = 0.0
    for one in module.walk():
        message = collective(one, target.count, target.per_host)
        # `tensor` is the innermost axis: its groups are devices in a row.
        if message and message.members == tuple(range(message.members[0], message.members[0] + tensor)):
            more = message.seconds(target.gpu) - message.seconds(target.gpu, one_host=True)
            lost += module.executions[one.computation] * more
    text = (
        f"mesh.tensor {tensor} reaches over hosts of {target.per_host} GPUs: its messages take {lost:.3g} s a step more"
        " than within a host"
    )
    within = math.gcd(tensor, target.per_host)
    yield Warned("tensor across hosts", text, f"mesh.tensor={within} mesh.fsdp=-1")


def _undivided(plan: Plan) -> Iterator[Warned]:
    """What `tensor` does not divide rests whole on each of its devices."""
    built, tensor = plan.program, plan.mesh["tensor"]
    for name in undivided(built.cfg):
        sizes = jax.tree.map(
            lambda axes, w, name=name: held(w) if name in axes else 0,
            built.model.axes,
            built.spec.state.params,
            is_leaf=is_axes,
        )
        size = readable(sum(jax.tree.leaves(sizes)))
        count = getattr(built.cfg.model, name)
        how = "each device works on those of its queries" if name == "kv_heads" else "padded where it is computed with"
        text = f"mesh.tensor {tensor} does not divide model.{name} {count}: its weights, {size}, are whole; {how}"
        near = math.gcd(count, tensor)
        yield Warned("not split", text, f"mesh.tensor={near} splits it" if near > 1 else "fewer along mesh.tensor")


def _filled_up(plan: Plan) -> Iterator[Warned]:
    pipeline = plan.program.model.pipeline
    if pipeline is None or pipeline.stored == pipeline.layers:
        return
    extra = pipeline.stored - pipeline.layers
    stacked = [x for path, x in tree_leaves_with_path(plan.program.spec.state) if "blocks" in keystr(path)]
    text = (
        f"{extra} layers that do nothing and never change fill model.layers {pipeline.layers} up to {pipeline.stored}"
        f" on the stages: {readable(held(stacked) * extra / pipeline.stored)} of weights and optimizer state a device"
    )
    parts = [n for n in range(2, pipeline.layers + 1) if pipeline.layers % n == 0]
    nearest = min(parts, key=lambda n: (abs(n - pipeline.stages * pipeline.rounds), n))
    yield Warned("layers filled up", text, f"mesh.stage x pipeline.rounds = {nearest}")


def _idle(plan: Plan) -> Iterator[Warned]:
    pipeline = plan.program.model.pipeline
    if pipeline is not None and pipeline.bubble > LARGE:
        text = f"each stage has nothing to do in {pipeline.bubble:.0%} of the {pipeline.ticks} ticks of a step"
        fewer = f"batch.accumulate={4 * pipeline.stages}" if pipeline.micro_batches < 4 * pipeline.stages else ""
        rounds = f"pipeline.rounds={2 * pipeline.rounds}"
        yield Warned("idle stages", text, " or ".join(filter(None, (fewer, rounds))) + ", or fewer stages")


_CHECKS: Sequence[Callable[[Plan], Iterator[Warned]]] = (
    _recomputed,
    _offload,
    _spilled,
    _whole,
    _logits,
    _replicated,
    _all_scores,
    _across_hosts,
    _undivided,
    _filled_up,
    _idle,
)
