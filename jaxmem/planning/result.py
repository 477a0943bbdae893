"""A plan: the bytes of one device in each phase of a run, the time of a step, and warnings; as JSON and as a table."""

import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Unpack

import jax

from jaxmem.checkpoint.saved_state import SavedState
from jaxmem.config import Mesh, Save
from jaxmem.config.methods import RunOptions, RunSource, run_config
from jaxmem.estimate.memory import predict
from jaxmem.estimate.passes import passes_of
from jaxmem.estimate.state import bytes_on_device
from jaxmem.machine.console import Printed
from jaxmem.machine.devices import reserve_gpu_memory
from jaxmem.planning.breakdown import Breakdown, known_shapes
from jaxmem.planning.budget import check_size, resolve_remat
from jaxmem.planning.buffers import read_allocations
from jaxmem.planning.communication import COLLECTIVES, FROM_HOST, TO_HOST
from jaxmem.planning.compile import (
    CompiledProgram,
    check_stages,
    compile_all,
    compile_program,
    replicated_arrays,
    total_of,
)
from jaxmem.planning.history import history
from jaxmem.planning.targets import Target, local_target, parse_target, reserved_memory, target_devices, usable_memory
from jaxmem.planning.timeline import Timeline, Traffic, timeline
from jaxmem.planning.units import format_bytes, format_seconds
from jaxmem.step.categories import CATEGORIES
from jaxmem.step.programs import Program, program
from jaxmem.typing import JsonDict


@dataclass(frozen=True)
class PlanWarning:
    kind: str
    text: str
    cure: str


@dataclass(frozen=True)
class Plan(Printed):
    """The plan of a program for one device. Each figure is computed when it is first read."""

    program: Program
    target: Target
    compiled_step: CompiledProgram
    seconds: float  # time that planning took
    reserve_gib: float | None = None  # memory of a GPU outside the compiled program; None: the default
    replicated: Sequence[str] = ()  # arrays that XLA replicates on every device to reshard them
    others: Mapping[str, int] = field(default_factory=dict)  # bytes of the compiled programs of other phases
    remat_why: str | None = None  # the reason for the policy of `memory.remat: auto`; None: the config names it

    @property
    def executable(self) -> jax.stages.Compiled:
        """The step that `train` runs on local devices."""
        executable = self.compiled_step.executable
        assert executable is not None, f"{self.target.name} is not this machine"
        return executable

    @property
    def kernels(self) -> dict[str, dict[str, str]]:
        """The implementation of each operation that has a fused form, and why, by setting."""
        choices = self.program.model.execution.kernels.by_setting
        return {key: {"implementation": choice.implementation, "why": choice.why} for key, choice in choices.items()}

    @property
    def choices(self) -> list[str]:
        """The values that were chosen for settings that are `auto`, and why, a line each; kernels also if the config
        names them."""
        remat = self.program.cfg.memory.remat
        saved = f"saves {', '.join(remat.save)}" if isinstance(remat, Save) else remat
        lines = [f"recompute: {saved} ({self.remat_why})"] if self.remat_why else []
        if not self.target.is_cpu:
            lines += (f"{key}: {choice['implementation']} ({choice['why']})" for key, choice in self.kernels.items())
        return lines

    @cached_property
    def breakdown(self) -> Breakdown:
        module = self.compiled_step.module
        allocations = read_allocations(module, self.compiled_step.assignment)
        return Breakdown(module, allocations, known_shapes(self.program))

    @cached_property
    def bytes_per_device(self) -> dict[str, int]:
        """Bytes of the training step by category. Every category except `other` is a sum of named buffers: arguments by
        their paths (`Breakdown.permanent`), temporaries at the peak by what computed them (`Breakdown.classify`)."""
        categories = {category: sum(self.breakdown.kinds.get(category, {}).values()) for category in CATEGORIES}
        total = self.compiled_step.total
        return {**categories, "other": total - sum(categories.values()) + categories["other"], "total": total}

    @cached_property
    def predicted(self) -> dict[str, int | None]:
        """Bytes of each category by arithmetic alone."""
        return predict(self.program)

    @cached_property
    def timeline(self) -> Timeline:
        return timeline(self.compiled_step.module, self.target.gpu, self.target.count, self.target.per_host)

    @cached_property
    def history(self) -> JsonDict:
        """The memory of the step over time, as in memory.json."""
        return history(self.breakdown, self.compiled_step.total, self.target, self.timeline)

    @property
    def estimated_step_seconds(self) -> float | None:
        """Estimated seconds of a step; None if the speed of the device is unknown."""
        return self.timeline.seconds if self.target.gpu else None

    @cached_property
    def ideal_flops_per_device(self) -> float:
        return ideal_flops(self.program) / self.program.layout.mesh.size

    @cached_property
    def phases(self) -> dict[str, int]:
        """Bytes of a device in each phase that the run has, state included."""
        state = state_bytes(self.program)
        evaluates = self.program.cfg.train.evaluate_every
        return {
            "initialise": self._bytes_of("initialise"),
            "load": state,  # each shard of an array is read directly to its device
            "step": self.compiled_step.total,
            **({"evaluate": evaluate_bytes(self.program, self._bytes_of("evaluate"))} if evaluates else {}),
            "save": state,  # checksums need no device memory; the copy is in host memory (`host_bytes`)
        }

    @cached_property
    def host_bytes(self) -> int:
        """Peak host memory for each device: offloaded arrays, and a copy of what a checkpoint saves; on a CPU also the
        step, since its device memory is host memory."""
        saved = SavedState(self.program).to_save(self.program.spec.state)
        step = self.compiled_step.total if self.target.is_cpu else 0
        return step + self.compiled_step.host_total + bytes_on_device(saved)

    @property
    def peak(self) -> int:
        """Bytes of a device in the largest phase."""
        return max(self.phases.values())

    @property
    def reserved(self) -> int:
        """Bytes of a GPU that no program can use."""
        return reserved_memory(self.target, self.reserve_gib)

    @property
    def limit(self) -> int:
        """Bytes of a device that the run may use."""
        return usable_memory(self.target, self.program.cfg.memory, self.reserve_gib)

    @property
    def room(self) -> int:
        """Bytes that the largest phase leaves free; below 0 the run does not fit."""
        return self.limit - self.peak

    @property
    def fits(self) -> bool:
        return self.room >= 0 and self.host_bytes <= self.target.host_memory

    def _bytes_of(self, phase: str) -> int:
        """Bytes of the program of another phase. For local devices this is the program that the run uses."""
        return self.others[phase] if phase in self.others else total_of(getattr(self.program, f"compiled_{phase}"))

    def __repr__(self) -> str:
        size = format_bytes(self.compiled_step.total)
        limit = format_bytes(self.limit)
        time = f", {format_seconds(self.timeline.seconds)} per step" if self.target.gpu else ""
        return f"Plan({self.program.cfg.name} on {self.target.name}: a step needs {size} of {limit} per device{time})"

    @cached_property
    def warnings(self) -> list[PlanWarning]:
        from jaxmem.planning.advice import warnings_of

        return warnings_of(self)

    def as_json(self) -> JsonDict:
        return {
            **self.step_as_json(),
            "phases": self.phases,
            "peak_host_bytes_per_device": self.host_bytes,
            "fits": self.fits,
            "warnings": [asdict(warning) for warning in self.warnings],
            "seconds": self.seconds,
        }

    def step_as_json(self) -> JsonDict:
        """The part of the JSON that describes the step; no other program is compiled for it."""
        built = self.program
        target = self.target
        timeline = self.timeline
        pipeline = self.program.model.execution.pipeline
        return {
            "model": {
                "name": built.cfg.name,
                "parameters": built.model.parameter_count,
                "active": built.model.active_count,
                "trainable": built.model.trainable_count,
            },
            "target": {
                "name": target.name,
                "devices": target.count,
                "memory_bytes": target.memory,
                "reserved_bytes": self.reserved,
                "limit_bytes": self.limit,
                "host_memory_bytes": target.host_memory,
            },
            "backend": "cpu" if target.is_cpu else "cuda",
            "remat": built.cfg.memory.model_dump(mode="json")["remat"],
            "remat_why": self.remat_why,
            "kernels": self.kernels,
            "bytes_per_device": self.bytes_per_device,
            "kinds": self.breakdown.kinds,
            "predicted": self.predicted,
            "host_bytes_per_device": self.compiled_step.host_total,
            "bytes_per_parameter": self.compiled_step.total * target.count / built.model.parameter_count,
            "compiled": self.compiled_step.sizes,
            "collectives": self._traffic_as_json(COLLECTIVES, "wire_bytes"),
            "host_transfers": self._traffic_as_json((TO_HOST, FROM_HOST), "bytes"),
            # Kernels, waits and transfers over the step: begin and end as shares of the step, and the kind.
            "timeline": {
                row: [[round(begin, 5), round(end, 5), kind] for begin, end, kind in spans]
                for row, spans in timeline.rows().items()
            },
            # What each pipeline stage does in each tick.
            "schedule": pipeline
            and {"name": pipeline.schedule, "idle": pipeline.bubble, "stages": pipeline.timetable.rows()},
            "flops_per_device": timeline.flops,
            "ideal_flops_per_device": self.ideal_flops_per_device,
            "estimated_step_seconds": self.estimated_step_seconds,
            "roofline_step_seconds": timeline.roofline if target.gpu else None,
            "bound_by": timeline.bound if target.gpu else None,
        }

    def _traffic_as_json(self, kinds: Container[str], bytes_key: str) -> dict[str, JsonDict]:
        has_speed = self.target.gpu is not None

        def row(traffic: Traffic) -> JsonDict:
            fields = {bytes_key if key == "wire_bytes" else key: value for key, value in traffic._asdict().items()}
            return {key: value if has_speed or "seconds" not in key else None for key, value in fields.items()}

        return {kind: row(traffic) for kind, traffic in self.timeline.traffic.items() if kind in kinds}

    def table(self) -> Any:
        """The plan as a table that rich prints."""
        from jaxmem.planning.table import plan_table

        return plan_table(self)


def state_bytes(built: Program) -> int:
    """Bytes of weights and optimizer state on a device."""
    return bytes_on_device(built.spec.state) - bytes_on_device(built.spec.host_state)


def evaluate_bytes(built: Program, program_bytes: int) -> int:
    """Bytes of a device while it evaluates: those of the program, and the optimizer state, which stays there."""
    spec = built.spec
    return program_bytes + bytes_on_device(spec.state.opt_state) - bytes_on_device(spec.host_state.opt_state)


def ideal_flops(built: Program) -> float:
    """FLOPs of an update without recomputation. Of a decoder: per token, 2 FLOPs per matmul weight in the forward pass
    and 4 in the backward pass, plus the two matmuls of causal attention, half of which is masked. Of other models: the
    matmuls and convolutions that jax traces."""
    cfg = built.cfg
    model = built.cfg.model
    parameters = built.model.active_count
    if model.family != "decoder":
        plain = cfg.replace(mesh=Mesh(), memory={"remat": "none", "offload": "none"})
        matmuls = passes_of(plain, built.platform).matmuls
        return float(cfg.batch.global_size * sum(matmul.times * matmul.flops for matmul in matmuls))
    parameters -= cfg.prompt_length * model.embed  # the inputs of a prompt
    length = cfg.row_length
    looked_up = 0 if model.tie_embeddings else model.vocab * model.embed
    seen = [min(window or length, length) for window in model.windows]
    pairs = sum(n * length - n * (n - 1) / 2 for n in seen)  # (query, key) that are not masked, in all layers
    value_dim = model.head_dim if model.latent is None else model.latent.value_dim
    attention = 2 * model.heads * (model.head_dim + value_dim) * pairs
    frozen = 0
    if cfg.trainable_patterns:  # weights without a gradient
        frozen = built.model.active_count - built.model.active_trainable_count
    if looked_up and built.model.select(built.model.shapes)["embedding"]["weight"] is None:
        frozen -= looked_up  # not in the forward pass either
    forward = 2.0 * (parameters - looked_up) * length + attention
    return cfg.batch.global_size * (3.0 * forward - 2.0 * frozen * length)


def plan(
    source: RunSource,
    target: str | None = None,
    *,
    reserve_gib: float | None = None,
    progress: Callable[[str], None] = lambda _: None,
    **options: Unpack[RunOptions],
) -> Plan:
    """Plan every phase of a run.

    Args:
        source: A config, a preset such as `llama3-8b`, or a Hugging Face directory.
        target: Devices such as `h100-80gb:16x8`; by default those of this machine.
        reserve_gib: Memory of each GPU outside the compiled program, by default `jaxmem.machine.gpus.reserved`.
        progress: Called with lines of text.
        **options: `method` (a name in `config.methods.METHODS`), `sequence_length`, `batch`, `overrides`.
    """
    start = time.perf_counter()
    if target is None:
        reserve_gpu_memory()
    aim = local_target(jax.devices()) if target is None else parse_target(target)
    cfg = run_config(source, devices=aim.count, **options)
    if target is None:
        check_size(cfg, aim)
    limit = usable_memory(aim, cfg.memory, reserve_gib)
    planned_devices = target_devices(aim, limit)  # before an estimate starts jax: a CPU is then simulated as several
    cfg, why = resolve_remat(cfg, aim, reserve_gib, progress=progress)
    built = program(cfg, planned_devices)
    progress(f"compiling {cfg.name} for {aim.name} ...")
    with replicated_arrays() as replicated:
        step, others = compile_all(built.lower_step(), built.lower_others(), here=aim.is_here)
        check_stages(step.module, cfg.mesh.stage)
    return Plan(built, aim, step, time.perf_counter() - start, reserve_gib, replicated, others, remat_why=why)


def plan_program(built: Program, remat_why: str | None = None, target: Target | None = None) -> Plan:
    """Plan a program for its local devices. The step is compiled once, also for the run; other phases are compiled when
    their bytes are read. `remat_why`: the reason that `resolve_remat` returned; `target`: of all processes."""
    start = time.perf_counter()
    step = compile_program(built.lower_step(), here=True)
    check_stages(step.module, built.cfg.mesh.stage)
    target = target or local_target(list(built.layout.mesh.devices.flat))
    return Plan(built, target, step, time.perf_counter() - start, remat_why=remat_why)
