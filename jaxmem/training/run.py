"""A complete training run, from a config to a trained model; read it from top to bottom.

The run is compiled before anything is allocated: a config that cannot be read or compiled leaves no files. A run writes
`output/name/`: config.yaml, plan.json, memory.json, metrics.jsonl, checkpoints/. All processes run this function in
lockstep: each reads its own rows and writes its own shards; process 0 writes and prints everything else. Modules that
only some runs need (planning, Hugging Face files, evaluation, references) are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
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
from jaxmem.config import Checkpoint, Cluster, Config
from jaxmem.config.methods import config_with
from jaxmem.config.user import Parts
from jaxmem.data.loader import Loader, merge_states
from jaxmem.data.user import open_loader
from jaxmem.distributed.agree import DelayedMax, any_process, gather, serialized
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
    check_finite,
    data_fingerprint,
    newest_of_same_run,
    newest_state,
    restore,
    resuming_own_checkpoints,
)
from jaxmem.training.signals import StopSignal, requeued_before_training
from jaxmem.training.telemetry import HELD_OUT, Profile, Telemetry
from jaxmem.training.trackers import check_trackers, trackers_for
from jaxmem.typing import JsonDict, JsonView

if TYPE_CHECKING:
    from jaxmem.planning.result import Plan

_UNITS = {"tokens": "tok", "images": "img", "rows": "row"}  # units in the speed that a progress line shows


@dataclass(frozen=True, repr=False)
class Result:
    """A run that has ended.

    `directory`: the directory of its files. `step`: the number of updates. `metrics`: the metrics of the last update.
    `held_out`: the metrics of the last evaluation. If the run had finished before, both are from `metrics.jsonl`.
    `state`: parameters and optimizer state as arrays on the devices, from `read_state`. `program`: its compiled
    functions. `exit_code`: the exit code of `jaxmem train`, not 0 if a signal stopped the run. `compiled`: its plan;
    None if the run had finished before.
    """

    directory: Path
    step: int
    metrics: dict[str, float]
    held_out: dict[str, float]
    read_state: Callable[[], TrainState]
    program: Program
    exit_code: int = 0
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
        for key, place in locked_places(cfg).items():
            if warning := locks.enter_context(run_lock(place, cfg.name, key)):
                say(warning)
        return _run(cfg, devices)


def _run(cfg: Config, devices: Sequence[jax.Device] | None) -> Result:
    from jaxmem.inference.evaluate import Evaluator
    from jaxmem.inference.load import with_passing_kernels
    from jaxmem.planning.budget import resolve_remat
    from jaxmem.planning.result import plan_program
    from jaxmem.planning.targets import local_target
    from jaxmem.step.kernel_check import refuse_gpu_kernels
    from jaxmem.training.memory_check import PeakCheck, check_fits, explained_out_of_memory

    check_trackers(cfg.train.trackers)
    _cache_compiled_programs(cfg.output)
    _preflight(cfg.cluster)
    devices = jax.devices() if devices is None else devices
    directory = Path(cfg.output, cfg.name)
    checkpoint_path = checkpoint_directory(directory, cfg.checkpoint.path, cfg.name)
    refuse_links(directory)
    refuse_links(checkpoint_path)
    cfg = resuming_own_checkpoints(cfg, checkpoint_path)
    refuse_gpu_kernels(cfg, devices[0].platform)
    cfg = with_passing_kernels(cfg, devices)
    target = local_target(devices, gather)
    resolved, remat_why = resolve_remat(cfg, target)
    built = program(resolved, devices)
    elastic = lines.elastic_line(cfg, built.cfg)
    cfg = built.cfg
    fingerprint = data_fingerprint(cfg)
    if finished := _finished(built, directory, checkpoint_path, fingerprint):
        return finished

    with ExitStack() as stack:
        loader = stack.enter_context(open_loader(cfg, "train", built.rows, agree=any_process))
        if cfg.data.epochs and (finished := _finished(built, directory, checkpoint_path, fingerprint, loader)):
            return finished
        evaluate = stack.enter_context(Evaluator(built, loader.corpus)) if cfg.train.evaluate_every else None
        document_tokens = loader.corpus.check()
        first = jax.process_index() == 0
        with spinner(f"{lines.model_line(built)}\ncompiling ...", enabled=first):
            plan = plan_program(built, remat_why, target)
        check_fits(plan)

        keep_directory = stack.enter_context(run_directory(directory, checkpoint_path, resume=cfg.checkpoint.resume))
        checkpoints = stack.enter_context(_checkpoints(cfg.checkpoint, checkpoint_path))
        stack.enter_context(failing_together())  # closing the contexts above needs all processes
        stack.enter_context(explained_out_of_memory(plan))
        step, state, position = _begin(built, checkpoints, loader)
        saved = SavedState(built)
        sources: JsonDict = {"fingerprint": fingerprint, "jobs": jobs()} | ({"base": saved.base} if saved.base else {})
        sources |= _add_reference(built, loader, state, fingerprint, position.get("reference"))
        if jax.process_index() == 0:  # all checks have passed
            write_description(plan, directory, is_new=step == 0)

        trackers = stack.enter_context(trackers_for(cfg, directory, step))
        progress = stack.enter_context(_progress(built, step, trackers.seconds))
        progress.say(elastic)
        progress.say(lines.plan_line(plan, step))
        rows = cfg.batch.global_size
        corpus = loader.corpus
        progress.say(lines.data_line(cfg.data, rows, cfg.steps, corpus, document_tokens) if document_tokens else None)
        telemetry = Telemetry(cfg.train, built.spec.gradient_names, progress, trackers, cfg.precision.loss_scale)
        telemetry.has_targets = step > 0  # a run is only saved if it had target tokens
        work = lines.work_of(built)
        peak = PeakCheck(plan, directory / "plan.json")
        profile = stack.enter_context(Profile(directory / "profile", cfg.train.profile))
        stop = stack.enter_context(StopSignal())
        largest_signal = DelayedMax()
        held_out: dict[str, float] = {}

        def save(metrics: dict[str, float] | None = None, *, force: bool) -> None:
            if checkpoints.is_due(step, metrics, force):
                _flush(telemetry, loader)  # a step is saved only when its loss is known to be finite
                arrays = saved.of(state)
                check_finite(arrays.params, step)
                position = merge_states(gather(loader.state())) | sources
                checkpoints.save(step, arrays, position, cfg.model_dump(mode="json"), metrics, force=force)

        keep_directory()
        batches = iter(loader)
        data_ended = False
        while step < cfg.steps and (batch := next(batches, None)) is not None:
            step += 1
            profile.before(step)
            state, metrics = serialized(plan.executable(state, built.place(batch)))
            profile.after(step, metrics)
            is_stopped = stop.from_any_process(largest_signal.of(stop.requested or 0))
            last = is_stopped or step == cfg.steps
            telemetry.update(step, metrics, work)
            progress.say(peak.after_step())
            with progress.paused():
                if is_stopped:  # an evaluation may take longer than the time until the process is killed
                    save(force=True)
                    checkpoints.wait()
                is_evaluated = evaluate and (step == cfg.steps or step % (cfg.train.evaluate_every or 1) == 0)
                if evaluate and is_evaluated:
                    held_out = evaluate(state.params, cfg.train.evaluate_batches)
                    telemetry.held_out(step, held_out)
                save(held_out if is_evaluated else None, force=last)
            if last:
                break
        else:
            data_ended = step < cfg.steps
        _flush(telemetry, loader)
        telemetry.finish()
        if evaluate and data_ended and telemetry.last and step % (cfg.train.evaluate_every or 1):
            held_out = evaluate(state.params, cfg.train.evaluate_batches)
            telemetry.held_out(step, held_out)
        save(held_out if data_ended else None, force=True)  # has an effect if the data ended before the last step
        checkpoints.wait()
        for line in loader.corpus.summary(built.rows, gather):
            progress.say(line)
        best = checkpoints.best() if cfg.checkpoint.keep_best else None
        progress.say(lines.last_line(cfg, step, directory, data_ended=data_ended, best=best))
    return Result(directory, step, telemetry.last, held_out, lambda: state, built, stop.exit_code, plan)


def _finished(
    built: Program, directory: Path, path: epath.Path, fingerprint: str, loader: Loader | None = None
) -> Result | None:
    """The result of a run whose steps are all done or, with a `loader`, whose data has ended; None if steps are left.
    Refuses a run of another config."""
    if built.cfg.checkpoint.resume == "never":
        return None
    done, position, config = newest_of_same_run(built, directory, path, fingerprint)
    if done < built.cfg.steps:
        if loader is None or not position:
            return None
        loader.restore(position)
        if not loader.has_ended():
            return None
    with _checkpoints(built.cfg.checkpoint, path) as checkpoints, failing_together():
        newest = newest_state(built, checkpoints)
    if newest is None or newest.step < min(done, built.cfg.steps):
        return None
    if jax.process_index() == 0:
        say_text(lines.finished_line(built, config, newest.step, directory))
    metrics, held_out = _recorded(directory, newest.step)
    return Result(directory, newest.step, metrics, held_out, newest.read_state, built)


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
    first, *others = gather(cfg.model_dump(mode="json"))
    for process, other in enumerate(others, 1):
        if differences := changed(first, other, ("*",), PROCESS_KEYS, "{0} is {2}, not {1}"):
            raise UserError(
                f"the config of process {process} differs from that of process 0: {abridge(differences)}; start all"
                " processes with the same command"
            )


def _cache_compiled_programs(output: str) -> None:
    """Caches compiled programs in `output` if all processes see it. If some found a program that others compile, these
    would wait in XLA's autotuner, which is shared by all."""
    if jax.default_backend() != "cpu" and is_shared(Path(output)):  # programs for CPUs are not cached
        cache_compiled_programs(output)


def _preflight(cluster: Cluster) -> None:
    if cluster.preflight and jax.process_count() > 1:
        from jaxmem.distributed.preflight import preflight

        lines = preflight()
        if jax.process_index() == 0:
            say(*lines)


def _checkpoints(section: Checkpoint, path: epath.Path) -> Checkpoints:
    return Checkpoints(path, section.every, section.keep, section.keep_best)


def _begin(built: Program, checkpoints: Checkpoints, loader: Loader) -> tuple[int, TrainState, JsonDict]:
    """Step, state and data position with which the run begins or continues, at which the loader is then."""
    from jaxmem.inference.load import initial_state

    resumed = restore(built, checkpoints)
    if resumed is None:
        return 0, initial_state(built), {}
    loader.restore(resumed[2])
    return resumed


def _add_reference(
    built: Program, loader: Loader, state: TrainState, fingerprint: str, resumed: str | None
) -> dict[str, str]:
    """For DPO: passes the reference log-probabilities of each pair to the corpus, and returns the fingerprint of the
    reference model's weights. `resumed`: this fingerprint in the checkpoint."""
    if built.cfg.objective.name != "dpo":
        return {}
    from jaxmem.inference.reference import reference_logprobs

    reference = reference_logprobs(built, loader.corpus, state.params, fingerprint, resumed)
    loader.corpus.references = reference.values
    return {"reference": reference.weights}


def _flush(telemetry: Telemetry, loader: Loader) -> None:
    """Reads the pending metrics. A run in which no step had a target token is stopped, not saved."""
    telemetry.flush()
    if telemetry.last and not telemetry.has_targets:
        reason = "; ".join(loader.corpus.summary()) or "the data has no target tokens"
        raise UserError(f"no step had a token to train on: {reason}; change data.on_invalid or data.on_overlong")


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
