"""The lines that a run prints before its first step and after its last."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jaxmem.checkpoint.same_run import changed
from jaxmem.config import LOW_RANK, Config
from jaxmem.config.sections import Data
from jaxmem.errors import abridge
from jaxmem.step.programs import Program
from jaxmem.training.progress import Work
from jaxmem.typing import JsonView

if TYPE_CHECKING:
    from jaxmem.data.corpus import Corpus
    from jaxmem.planning.result import Plan

MIN_FILLED_SHARE = 0.9  # share of the tokens of a sequence, below which a warning is printed
EARLY_END = 0.9  # share of the updates, below which a warning is printed if the data ends
MANY_PASSES = 20  # passes over the data, above which a warning is printed
FEW_PASSES = 5  # passes that the warning proposes


def work_of(built: Program) -> Work:
    """Tokens and FLOPs of an update on all devices."""
    from jaxmem.planning.result import ideal_flops

    cfg = built.cfg
    length = cfg.data.sequence_length if cfg.reads_text else 1
    return Work(cfg.batch.global_size * length, ideal_flops(built))


def unit_of(built: Program) -> str:
    """What progress counts."""
    return "tokens" if built.cfg.reads_text else "rows" if built.cfg.user.data else "images"


def model_line(built: Program) -> str:
    """The model and the devices of a run, before it is compiled."""
    model = built.model
    mesh = built.layout.mesh
    count = built.model.parameter_count
    trainable = "all" if model.trainable_count == count else f"{model.trainable_count:,}"
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    devices = f"{mesh.devices.size} {mesh.devices.flat[0].platform.upper()} device{'s'[: mesh.devices.size > 1]}"
    pipeline = model.execution.pipeline
    extra = pipeline.stored - pipeline.layers if pipeline else 0
    padding = f", {extra} identity layers pad the pipeline stages" if extra else ""
    active = "" if model.active_count == count else f" ({model.active_count:,} active)"
    name = built.cfg.name
    mesh_axes = f" ({axes})" if axes else ""
    return f"{name}: {count:,} parameters{active}, {trainable} trainable, on {devices}{mesh_axes}{padding}"


def elastic_line(cfg: Config, used: Config) -> str | None:
    """What `cluster.elastic` changed for the devices of this run."""
    changes = changed(cfg.model_dump(), used.model_dump(), ("mesh.*", "batch.accumulate"))
    if not cfg.cluster.elastic or not changes:
        return None
    return f"cluster.elastic: {', '.join(changes)}; an update still has {cfg.batch.global_size:,} rows"


def plan_line(plan: Plan, step: int) -> str:
    """Memory and work of a run that starts, or resumes after a step, with warnings on lines of their own."""
    from jaxmem.planning.advice import warnings_at_start
    from jaxmem.planning.units import format_bytes

    cfg = plan.program.cfg
    start = f"resuming after step {step}: " if step else ""
    work = f"{work_of(plan.program).tokens:,} {unit_of(plan.program)} per update, {cfg.steps:,} updates"
    warnings = "".join(f"\nwarning: {warning.text}; try {warning.cure}" for warning in warnings_at_start(plan))
    planned = format_bytes(plan.bytes_per_device["total"])
    choices = "".join(f"\n{line}" for line in plan.choices)
    return f"{start}planned {planned} per device, {work}{choices}{warnings}"


def data_line(data: Data, rows: int, steps: int, corpus: Corpus, tokens: float) -> str | None:
    """The passes that a run makes over its data, with a warning if they are many, or if short documents leave
    sequences padded. None if a sequence is not filled with documents.

    Args:
      rows: sequences per update.
      steps: updates of the run.
      tokens: mean length of a document.
    """
    source = corpus.sources[0]
    if not tokens or len(corpus.sources) > 1 or source.documents_per_record > 1:
        return None
    in_update = rows * (min(data.sequence_length / tokens, data.documents_per_row) if data.packing else 1)
    if data.streaming:
        lines = [f"data: {len(source.names):,} files, one after the other; {source.noun} of about {tokens:,.0f} tokens"]
        return "\n".join([*lines, *_padding_line(data, tokens)])
    records = max(round((1 - data.held_out) * len(source)), 1)
    passes = min(steps * in_update / records, data.epochs or float("inf"))
    digits = 0 if passes >= 10 else 1 if passes >= 0.1 else 3
    updates = f"{steps:,} updates are about {passes:,.{digits}f} passes over them"
    lines = [f"data: {records:,} {source.noun} of about {tokens:,.0f} tokens; {updates}"]
    if data.epochs:
        last = round(data.epochs * records / in_update)
        if last < EARLY_END * steps:
            lines.append(
                f"warning: data.epochs={data.epochs} ends after about {last:,} of {steps:,} updates, before the"
                f" learning rate has decreased; use train.steps={last}"
            )
    lines += _padding_line(data, tokens)
    if passes > MANY_PASSES:
        steps = max(round(FEW_PASSES * records / in_update), 1)
        lines.append(
            f"warning: the run reads each document about {passes:,.0f} times ({in_update:,.0f} documents per update);"
            f" use a smaller batch.global_size, or train.steps={steps} for {FEW_PASSES} passes"
        )
    return "\n".join(lines)


def _padding_line(data: Data, tokens: float) -> list[str]:
    """A warning if the largest number of documents per sequence leaves sequences padded."""
    most = data.documents_per_row
    filled = most * tokens
    if not data.packing or filled > MIN_FILLED_SHARE * data.sequence_length:
        return []
    documents = round(data.sequence_length / tokens)
    use = f"data.sequence_length={max(round(filled), 1)}, or data.documents_per_row={documents}"
    given = f"data.documents_per_row={most} documents fill about {filled:,.0f} of {data.sequence_length:,} tokens"
    return [f"warning: {given} of a sequence; use {use}, which needs more memory for attention"]


def finished_line(built: Program, before: JsonView, step: int, directory: Path) -> str:
    """A run that had finished before, and the settings that differ from its own, which have no effect."""
    cfg = built.cfg
    line = f"{cfg.name}: {step} steps are done, in {directory}"
    extension = f"train.steps above {step}"
    if step < cfg.steps:
        line = f"{cfg.name}: the data ended after step {step} of {cfg.steps}, in {directory}"
        extension = f"data.epochs above {cfg.data.epochs}"
    changes = changed(before, cfg.model_dump(mode="json"), ("*",), ("mesh*", "output", "name", "checkpoint.resume"))
    if not changes:
        return f"{line}; to continue, use {extension}"
    line += f"; changes without effect on a finished run: {abridge(changes)}"
    return f"{line}; set another name for a new run, or {extension} to continue this one"


def last_line(cfg: Config, step: int, directory: Path, *, data_ended: bool = False, best: int | None = None) -> str:
    """The end of a run, and the commands that use or continue it. `data_ended`: no batch is left. `best`: the step of
    the checkpoint with the lowest held-out loss."""
    if step < cfg.steps and not data_ended:
        change = " with checkpoint.resume=auto" if cfg.checkpoint.resume == "never" else ""
        again = f"to continue, run the same command again{change}"
        if not _needs_script(cfg) and cfg.user.is_empty:
            again += f", or jaxmem train {directory}"
        return f"stopped after step {step} of {cfg.steps}, saved in {directory}; {again}"
    epochs = f" (data.epochs={cfg.data.epochs})" if cfg.data.epochs else ""
    done = f"the data ended after step {step} of {cfg.steps}{epochs}" if data_ended else f"{step} steps"
    done = f"done: {done}, saved in {directory}"
    if best not in (None, step):
        done += f"; lowest held-out loss: step {best} (checkpoint.step=best)"
    if _needs_script(cfg):
        return done
    use = [f"evaluate {directory}"]
    if cfg.reads_text:
        data = cfg.data
        has_template = data.chat_template is not None or data.tokenizer != "bytes"  # pairs of texts need none
        is_chat = has_template and data.has_conversations
        kind = cfg.adapter.kind
        options = (" --adapter", " --merge") if kind in LOW_RANK else (" --adapter",) if kind == "prompt" else ("",)
        use = [
            f"chat {directory}" if is_chat else f"generate {directory} --prompt TEXT",
            *use,
            *(f"export {directory} DIR{option}" for option in options),
        ]
    return "\n  ".join([f"{done}; next:", *(f"jaxmem {command}" for command in use)])


def _needs_script(cfg: Config) -> bool:
    """Whether the commands of `jaxmem` cannot open a run: its model, loss, data or the name of its optimizer exist only
    in the process of a script."""
    user = cfg.user
    return cfg.is_registered or user.has_model or any((user.data, user.loss, user.loss_with_keys))
