"""The lines that a run prints before its first step and after its last."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jaxmem.config import Config
from jaxmem.step import Program
from jaxmem.training.progress import Work

if TYPE_CHECKING:
    from jaxmem.planning import Plan


def work_of(built: Program) -> Work:
    """Tokens and FLOPs of an update on all devices."""
    from jaxmem.planning import ideal_flops

    cfg = built.cfg
    length = cfg.data.sequence_length if cfg.objective.reads_text else 1
    return Work(cfg.batch.global_size * length, ideal_flops(built))


def model_line(built: Program) -> str:
    """The model and the devices of a run, before it is compiled."""
    model, mesh = built.model, built.layout.mesh
    trainable = "all" if model.trainable == model.parameters else f"{model.trainable:,}"
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    devices = f"{mesh.devices.size} {mesh.devices.flat[0].platform.upper()} device{'s'[: mesh.devices.size > 1]}"
    extra = pipeline.stored - pipeline.layers if (pipeline := model.pipeline) else 0
    padding = f", {extra} identity layers pad the pipeline stages" if extra else ""
    name, mesh_axes = built.cfg.name, f" ({axes})" if axes else ""
    return f"{name}: {model.parameters:,} parameters, {trainable} trainable, on {devices}{mesh_axes}{padding}"


def plan_line(plan: Plan, step: int) -> str:
    """Memory and work of a run that starts, or resumes after a step, with warnings on lines of their own."""
    from jaxmem.planning import format_bytes
    from jaxmem.planning.advice import SPILLED

    cfg = plan.program.cfg
    start = f"resuming after step {step}: " if step else ""
    unit = "tokens" if cfg.objective.reads_text else "images"
    work = f"{work_of(plan.program).tokens:,} {unit} per update, {cfg.steps:,} updates"
    spilled = [one for one in plan.warnings if one.kind == SPILLED] if plan.spilled else []
    warnings = "".join(f"\nwarning: {one.text}; try {one.cure}" for one in spilled)
    planned = format_bytes(plan.bytes_per_device["total"])
    choices = "".join(f"\n{line}" for line in plan.choices)
    return f"{start}planned {planned} per device, {work}{choices}{warnings}"


def last_line(cfg: Config, step: int, directory: Path) -> str:
    """The end of a run, and the commands that use or continue it."""
    if step < cfg.steps:
        again = f"to continue, run the same command again, or jaxmem train {directory}"
        return f"stopped after step {step} of {cfg.steps}, saved in {directory}; {again}"
    use = [f"evaluate {directory}"]
    if cfg.objective.reads_text:
        is_chat = cfg.data.source in ("chat", "preference")
        use = [
            f"chat {directory}" if is_chat else f"generate {directory} --prompt TEXT",
            *use,
            f"export {directory} DIR",
        ]
    return "\n  ".join([f"done: {step} steps, saved in {directory}; next:", *(f"jaxmem {one}" for one in use)])
