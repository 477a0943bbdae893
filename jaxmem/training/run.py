"""A complete training run, from a config to a trained model; read it from top to bottom.

From the next batch to its metrics (`_gradients`, `_metrics`, `_update` are in step/step.py):

    `_Loop.run`           takes the next batch of the `Loader`, the rows of this process: {name: array [micro-batches,
                          rows, sequence]}
    `Program.place`       copies them to the devices of this process (step/batches.py)
    `plan.executable`     `planning.result.plan_program` compiled it from `Program.lower_step`, that is `step.make_step`
    `_gradients`          differentiates the loss: `Objective`, sums over the batch
    `_metrics`            these sums as means, the norm of the gradient, the learning rate
    `_update`             new weights and optimizer state; with `memory.update: during` see `_update_during`
    `Telemetry.update`    keeps the metrics until the next step has started, so that the devices do not wait; then it
                          reads them, stops a run that diverges, and passes them to `Progress` and `Trackers`

The step is compiled before the state is allocated and `output/name/` is created, so a config that cannot be read or
compiled leaves nothing there; the lock creates `output/`, and checks of kernels run before. A run writes
`output/name/`: config.yaml, plan.json, memory.json, metrics.jsonl, checkpoints/. All processes run this function in
lockstep: each reads its own rows and writes its own shards; process 0 writes and prints everything else. Planning,
evaluation and what only some runs need are imported where they are used, so that importing this module reads few
others (tests/test_house.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import jax
from etils import epath

from jaxmem.checkpoint.manager import Checkpoints
from jaxmem.checkpoint.metrics import read_rows
from jaxmem.checkpoint.paths import checkpoint_directory, refuse_links
from jaxmem.checkpoint.same_run import PROCESS_KEYS, changed
from jaxmem.checkpoint.saved_state import SavedState
from jaxmem.config import Cluster, Config
from jaxmem.config.methods import config_with
from jaxmem.config.user import Parts
from jaxmem.data.loader import Loader, merge_states
from jaxmem.data.user import open_loader
from jaxmem.distributed.agree import DelayedMax, any_process, gather_objects, serialized
from jaxmem.distributed.cluster import jobs
from jaxmem.distributed.join import failing_together
from jaxmem.errors import UserError, abridge
from jaxmem.machine.devices import cache_compiled_programs, peak_flops, reserve_gpu_memory
from jaxmem.machine.terminal import say, say_text
from jaxmem.step.programs import Program, program
from jaxmem.step.state import TrainState
from jaxmem.training import lines
from jaxmem.training.directory import is_shared, locked_places, run_directory, run_lock, write_description
from jaxmem.training.progress import Progress, RunSpec, spinner
from jaxmem.training.restore import (
    SavedRecord,
    check_finite,
    data_fingerprint,
    latest_of_same_run,
    latest_state,
    restore,
    resume_if_started_again,
)
from jaxmem.training.signals import StopSignal, requeued_before_training
from jaxmem.training.telemetry import HELD_OUT, Profile, Telemetry
from jaxmem.training.trackers import check_trackers, trackers_for
from jaxmem.typing import JsonDict, JsonView

if TYPE_CHECKING:
    from jaxmem.inference.evaluate import Evaluator
    from jaxmem.planning.result import Plan
    from jaxmem.planning.targets import Target
    from jaxmem.training.memory_check import PeakCheck

_UNITS = {"tokens": "tok", "images": "img", "rows": "row"}  # units in the speed that a progress line shows


@dataclass(frozen=True, repr=False)
class Result:
    """A run that has ended.

    `directory`: the directory of its files. `step`: the number of updates. `metrics`: the metrics of the last update.
    `held_out`: the metrics of the last evaluation. If the run had finished before, both are from `metrics.jsonl`.
    `state`: parameters and optimizer state as arrays on the devices, from `read_state`. `program`: its compiled
    functions. `exit_code`: the exit code of `jaxmem train`. `is_stopped`: whether a signal stopped the run before its
    end. `compiled`: its plan; None if the run had finished before.
    """

    directory: Path
    step: int
    metrics: dict[str, float]
    held_out: dict[str, float]
    read_state: Callable[[], TrainState]
    program: Program
    exit_code: int = 0
    is_stopped: bool = False
    compiled: Plan | None = None

    def __repr__(self) -> str:
        values = {**self.metrics, **{f"held-out {name}": value for name, value in self.held_out.items()}}
        shown = "".join(f", {name} {value:.4g}" for name, value in values.items())
        return f"Result({self.directory}, step {self.step}{shown})"

    @cached_property
    def state(self) -> TrainState:
        return self.read_state()

    @cached_property
    def plan(self) -> Plan:
        from jaxmem.planning.result import plan_program

        return self.compiled or plan_program(self.program)


def run(
    cfg: Config | JsonView | str | PathLike[str],
    devices: Sequence[jax.Device] | None = None,
    **parts: Unpack[Parts],
) -> Result:
    """Trains a config on these devices (by default all that jax sees), or resumes its run.

    `parts`: a model, loss, data or optimizer of a script instead of those in the config, see
    docs/how-to/from-a-script.md.
    """
    reserve_gpu_memory()
    cfg = config_with(cfg, **parts)
    if (chosen := cfg.checkpoint.step) is not None:
        raise UserError(
            f"train does not support checkpoint.step={chosen}, which is for evaluate, generate, chat and export; a run"
            " continues from its newest checkpoint"
        )
    with requeued_before_training(), ExitStack() as locks:
        _refuse_other_configs(cfg)
        for key, place in locked_places(cfg.output, cfg.checkpoint.path).items():
            if warning := locks.enter_context(run_lock(place, cfg.name, key)):
                say(warning)
        return _run(cfg, devices)


def _run(cfg: Config, devices: Sequence[jax.Device] | None) -> Result:
    """Trains, if steps and data are left."""
    job = _prepare(cfg, devices)
    if finished := _finished(job):
        return finished
    with open_loader(job.cfg, "train", job.built.rows, agree=any_process) as loader:
        if job.cfg.data.epochs and (finished := _finished(job, loader)):
            return finished
        return _train(job, loader)


@dataclass(frozen=True)
class _Job:
    """What is trained, on which devices, and where its files are."""

    built: Program
    target: Target
    remat_why: str | None  # the reason for the recompute policy
    elastic: str | None  # a line: what `cluster.elastic` changed
    directory: Path
    checkpoint_path: epath.Path
    fingerprint: str  # of the data
    latest: SavedRecord | None  # of the newest checkpoint; None: the run starts from step 0

    @property
    def cfg(self) -> Config:
        return self.built.cfg


def _prepare(cfg: Config, devices: Sequence[jax.Device] | None) -> _Job:
    """Settles every choice that the config leaves open. Refuses the directory of a run of another config."""
    from jaxmem.planning.budget import resolve_remat
    from jaxmem.planning.targets import local_target
    from jaxmem.step.kernel_check import refuse_gpu_kernels, with_passing_kernels

    check_trackers(cfg.train.trackers)
    # If some processes found a program that others compile, these would wait in XLA's autotuner, which is shared by
    # all. Programs for CPUs are not cached: compiling is fast, and they depend on the instructions of the CPU.
    if jax.default_backend() != "cpu" and is_shared(Path(cfg.output)):
        cache_compiled_programs(cfg.output)
    _preflight(cfg.cluster)
    devices = jax.devices() if devices is None else devices
    directory = Path(cfg.output, cfg.name)
    checkpoint_path = checkpoint_directory(directory, cfg.checkpoint.path, cfg.name)
    refuse_links(directory)
    refuse_links(checkpoint_path)
    cfg = resume_if_started_again(cfg, checkpoint_path)
    refuse_gpu_kernels(cfg, devices[0].platform)
    cfg = with_passing_kernels(cfg, devices, any_process)
    target = local_target(devices, gather_objects)
    resolved, remat_why = resolve_remat(cfg, target)
    built = program(resolved, devices)
    elastic = lines.elastic_line(cfg, built.cfg)
    fingerprint = data_fingerprint(built.cfg)
    is_new = built.cfg.checkpoint.resume == "never"
    latest = None if is_new else latest_of_same_run(built, directory, checkpoint_path, fingerprint)
    return _Job(built, target, remat_why, elastic, directory, checkpoint_path, fingerprint, latest)


def _finished(job: _Job, loader: Loader | None = None) -> Result | None:
    """The result of a run whose steps are all done or, with a `loader`, whose data has ended; else None."""
    built = job.built
    steps = job.cfg.steps
    if job.latest is None:
        return None
    if job.latest.step < steps:
        if loader is None:
            return None
        loader.restore(job.latest.position)
        if not loader.has_ended():
            return None
    with _checkpoints(job) as checkpoints, failing_together():
        latest = latest_state(built, checkpoints)
    if latest is None or latest.step < min(job.latest.step, steps):
        return None
    if jax.process_index() == 0:
        say_text(lines.finished_line(built, job.latest.config, latest.step, job.directory))
    metrics, held_out = _recorded(job.directory, latest.step)
    return Result(job.directory, latest.step, metrics, held_out, latest.read_state, built)


def _train(job: _Job, loader: Loader) -> Result:
    """Compiles the step, opens all that the loop uses, and runs the loop."""
    from jaxmem.inference.evaluate import Evaluator
    from jaxmem.planning.result import plan_program
    from jaxmem.training.memory_check import PeakCheck, check_fits, explained_out_of_memory

    built = job.built
    cfg = job.cfg
    directory = job.directory
    is_first = jax.process_index() == 0
    with ExitStack() as stack:
        evaluator = stack.enter_context(Evaluator(built, loader.corpus)) if cfg.train.evaluate_every else None
        document_tokens = loader.corpus.check()
        with spinner(f"{lines.model_line(built)}\ncompiling ...", enabled=is_first):
            plan = plan_program(built, job.remat_why, job.target)
        check_fits(plan)

        keep_directory = stack.enter_context(
            run_directory(directory, job.checkpoint_path, resume=cfg.checkpoint.resume)
        )
        checkpoints = stack.enter_context(_checkpoints(job))
        stack.enter_context(failing_together())  # closing the contexts above needs all processes
        stack.enter_context(explained_out_of_memory(plan))
        step, state, sources = _begin(job, checkpoints, loader)
        if is_first:  # all checks have passed
            write_description(plan, directory, is_new=step == 0)

        trackers = stack.enter_context(trackers_for(cfg, directory, step))
        progress = stack.enter_context(_progress(built, step, trackers.seconds))
        progress.say(job.elastic)
        progress.say(lines.plan_line(plan, step))
        if document_tokens:
            progress.say(lines.data_line(cfg.data, cfg.batch.global_size, cfg.steps, loader.corpus, document_tokens))
        telemetry = Telemetry(cfg.train, built.spec.gradient_names, progress, trackers, cfg.precision.loss_scale)
        telemetry.has_targets = step > 0  # a run is only saved if it had target tokens
        peak = PeakCheck(plan, directory / "plan.json")
        profile = stack.enter_context(Profile(directory / "profile", cfg.train.profile))
        stop = stack.enter_context(StopSignal())
        loop = _Loop(step, state, sources, plan, loader, checkpoints, evaluator, telemetry)
        del state  # its arrays that are not donated would remain in memory
        keep_directory()
        loop.run(progress, profile, peak, stop)
        for line in loader.corpus.summary(built.rows, gather_objects):
            progress.say(line)
        best = checkpoints.best() if cfg.checkpoint.keep_best else None
        progress.say(lines.last_line(cfg, loop.step, directory, data_ended=loop.data_ended, best=best))
    final_state = loop.state  # a function that reads `loop.state` would keep the loader and checkpoints in memory
    return Result(
        directory,
        loop.step,
        telemetry.last,
        loop.held_out,
        read_state=lambda: final_state,
        program=built,
        exit_code=stop.exit_code,
        is_stopped=stop.requested is not None and loop.step < cfg.steps,
        compiled=plan,
    )


def _begin(job: _Job, checkpoints: Checkpoints, loader: Loader) -> tuple[int, TrainState, JsonDict]:
    """The step and the state with which a run begins or continues, and what its checkpoints record beside them. The
    loader continues at the saved position."""
    from jaxmem.inference.load import initial_state

    built = job.built
    step, state, position = restore(built, checkpoints) or (0, initial_state(built), {})
    if position:
        loader.restore(position)
    sources: JsonDict = {"fingerprint": job.fingerprint, "jobs": jobs()}
    if base := SavedState(built).base:
        sources["base"] = base
    if job.cfg.objective.name == "dpo":
        from jaxmem.inference.reference import reference_logprobs

        resumed = position.get("reference")
        reference = reference_logprobs(built, loader.corpus, state.params, job.fingerprint, resumed)
        loader.corpus.references = reference.values
        sources["reference"] = reference.weights
    return step, state, sources


@dataclass
class _Loop:
    """The steps of a run, with the evaluations and checkpoints between them. `sources`: as from `_begin`."""

    step: int
    state: TrainState
    sources: JsonDict
    plan: Plan
    loader: Loader
    checkpoints: Checkpoints
    evaluator: Evaluator | None
    telemetry: Telemetry
    held_out: dict[str, float] = field(default_factory=dict)  # metrics of the last evaluation
    data_ended: bool = False  # no batch is left

    @property
    def cfg(self) -> Config:
        return self.plan.program.cfg

    def run(self, progress: Progress, profile: Profile, peak: PeakCheck, stop: StopSignal) -> None:
        work = lines.work_of(self.plan.program)
        largest_signal = DelayedMax()
        batches = iter(self.loader)
        is_stopped = False
        while self.step < self.cfg.steps and not is_stopped:
            batch = next(batches, None)
            if batch is None:
                self.data_ended = True
                break
            self.step += 1
            profile.before(self.step)
            # The old state is donated. Nothing waits for the step: its metrics are read after the next one has started.
            self.state, metrics = serialized(self.plan.executable(self.state, self.plan.program.place(batch)))
            profile.after(self.step, metrics)
            is_stopped = stop.from_any_process(largest_signal.of(stop.requested or 0))
            self.telemetry.update(self.step, metrics, work)
            progress.say(peak.after_step())
            if is_stopped or self._is_interrupted:
                self._flush()  # waits for the step, which counts in tokens per second
            with progress.paused():
                self._evaluate_and_save(is_stopped)
        self._finish()

    def _evaluate_and_save(self, is_stopped: bool) -> None:
        """After a step: an evaluation and a checkpoint, if they are due."""
        if is_stopped:  # an evaluation may take longer than the time until the process is killed
            self._save(force=True)
            self.checkpoints.wait()
        is_last = self.step == self.cfg.steps
        held_out = self._evaluate() if is_last or self._is_evaluation_step else None
        self._save(held_out, force=is_last or is_stopped)

    def _finish(self) -> None:
        """Evaluates and saves the last step, also if the data ended before `train.steps`."""
        self._flush()
        self.telemetry.finish()
        if self.data_ended and self.telemetry.last and not self._is_evaluation_step:
            self._evaluate()
        self._save(self.held_out if self.data_ended else None, force=True)
        self.checkpoints.wait()

    @property
    def _is_interrupted(self) -> bool:
        """Whether an evaluation or a checkpoint follows this step."""
        is_evaluated = self.evaluator is not None and self._is_evaluation_step
        return is_evaluated or self.step == self.cfg.steps or self.checkpoints.is_due(self.step)

    @property
    def _is_evaluation_step(self) -> bool:
        return self.step % (self.cfg.train.evaluate_every or 1) == 0

    def _evaluate(self) -> dict[str, float] | None:
        """The held-out metrics; None if the config evaluates nothing."""
        if self.evaluator is None:
            return None
        self.held_out = self.evaluator(self.state.params, self.cfg.train.evaluate_batches)
        self.telemetry.held_out(self.step, self.held_out)
        return self.held_out

    def _save(self, held_out: dict[str, float] | None = None, *, force: bool) -> None:
        """Saves if this step is due, forced, or the best by its `held_out` metrics."""
        if self.checkpoints.is_due(self.step, held_out, force):
            self._flush()  # a step is saved only when its loss is known to be finite
            arrays = SavedState(self.plan.program).to_save(self.state)
            check_finite(arrays.params, self.step)
            position = merge_states(gather_objects(self.loader.state())) | self.sources
            config = self.cfg.model_dump(mode="json")
            self.checkpoints.save(self.step, arrays, position, config, held_out, force=force)

    def _flush(self) -> None:
        """Reads the pending metrics. A run in which no step had a target token is stopped, not saved."""
        self.telemetry.flush()
        if self.telemetry.last and not self.telemetry.has_targets:
            reason = "; ".join(self.loader.corpus.summary()) or "the data has no target tokens"
            raise UserError(f"no step had a token to train on: {reason}; change data.on_invalid or data.on_overlong")


def _recorded(directory: Path, step: int) -> tuple[dict[str, float], dict[str, float]]:
    """The metrics of a step and of its evaluation that the run has logged; nothing in a process without the file."""
    values: JsonDict = {}
    for row in read_rows(directory / "metrics.jsonl"):
        if row["step"] == step:
            values |= {name: float("nan") if value is None else value for name, value in row.items()}
    values.pop("step", None)
    held_out = {name: value for name, value in values.items() if name.startswith(HELD_OUT)}
    metrics = {name: value for name, value in values.items() if name not in held_out}
    return metrics, {name.removeprefix(HELD_OUT): value for name, value in held_out.items()}


def _refuse_other_configs(cfg: Config) -> None:
    """Refuses processes with other settings than process 0: they would train other models together."""
    first, *others = gather_objects(cfg.model_dump(mode="json"))
    for process, other in enumerate(others, 1):
        if differences := changed(first, other, ("*",), PROCESS_KEYS, "{0} is {2}, not {1}"):
            raise UserError(
                f"the config of process {process} differs from that of process 0: {abridge(differences)}; start all"
                " processes with the same command"
            )


def _preflight(cluster: Cluster) -> None:
    if cluster.preflight and jax.process_count() > 1:
        from jaxmem.distributed.preflight import preflight

        lines = preflight()
        if jax.process_index() == 0:
            say(*lines)


def _checkpoints(job: _Job) -> Checkpoints:
    section = job.cfg.checkpoint
    return Checkpoints(job.checkpoint_path, section.every, section.keep, section.keep_best)


def _progress(built: Program, step: int, seconds: float) -> Progress:
    """The progress of a run. `seconds`: its duration before a resume."""
    cfg = built.cfg
    devices = built.layout.mesh.devices
    peak = peak_flops(devices.flat[0])
    spec = RunSpec(
        cfg.steps,
        peak * devices.size if peak else None,
        cfg.train.log_every,
        unit=_UNITS[lines.unit_of(built)],
        step=step,
        seconds=seconds,
        tokens=step * lines.work_of(built).tokens,  # a checkpoint may be newer than the last logged row
    )
    return Progress(spec, enabled=jax.process_index() == 0)
