"""A whole run, from a config to a trained model, read from top to bottom.

Compile, then allocate: what cannot be read or compiled leaves nothing behind. What a run leaves is `output/name/`:
config.yaml, plan.json, memory.json, metrics.jsonl, checkpoints/. Where several processes train together, all of them
come through here in step: each reads its own rows and writes its own shards, and the first writes and says all the
rest.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from etils import epath

from jaxmem import hf
from jaxmem.checkpoint import Checkpoints, place, put_aside
from jaxmem.checkpoint.resume import refuse_changes
from jaxmem.checkpoint.saved_state import SavedState
from jaxmem.config import Config, Decoder, Train, save_config
from jaxmem.data import Loader, fingerprint, merge_states
from jaxmem.distributed.agree import Vote, any_of, gather, in_order
from jaxmem.distributed.join import together
from jaxmem.distributed.preflight import preflight
from jaxmem.errors import UserError
from jaxmem.inference.evaluate import HeldOut
from jaxmem.inference.load import BESIDE
from jaxmem.inference.reference import reference_for
from jaxmem.machine.devices import keep_compiled, peak_flops
from jaxmem.planning import Plan, decided, ideal_flops, plan_program, readable
from jaxmem.planning.advice import SPILLED
from jaxmem.planning.targets import local_target
from jaxmem.step import Program, program
from jaxmem.step.state import TrainState
from jaxmem.training.fitting import DoesNotFitError, Measured, check_fits
from jaxmem.training.lock import only_run
from jaxmem.training.out_of_memory import explained
from jaxmem.training.profile import Profile
from jaxmem.training.progress import Progress, Work
from jaxmem.training.replicas import Replicas
from jaxmem.training.restoring import Rollback, begun, restored
from jaxmem.training.signals import Stop, nothing_to_save
from jaxmem.training.telemetry import DivergedError, Spikes, Telemetry
from jaxmem.training.trackers import Trackers, check_trackers, trackers_for

WEIGHTS = ("model", "precision")  # sections of a config that say what weights are
PATIENCE = 60  # s for what one host has made to be seen by the others


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    directory: Path
    step: int  # updates done
    metrics: dict[str, float]  # of the last update
    held_out: dict[str, float]  # of the last evaluation
    state: TrainState
    plan: Plan
    exit_code: int = 0


def run(cfg: Config, devices: Sequence[Any] | None = None) -> Result:
    """Train a config on these devices (by default all that jax sees), or go on where it stopped."""
    with only_run(cfg.output, cfg.name) as told:
        if told:
            print(told, flush=True)
        return _run(cfg, devices)


def _run(cfg: Config, devices: Sequence[Any] | None) -> Result:
    check_trackers(cfg)
    keep_compiled(cfg.output)
    _preflight(cfg)
    devices = jax.devices() if devices is None else devices
    built = program(decided(cfg, local_target(devices)), devices)
    cfg, directory = built.cfg, Path(cfg.output, cfg.name)
    kept = place(cfg, directory)
    identity = _same_everywhere(fingerprint(cfg), "the data's files", "fingerprint")
    if cfg.checkpoint.resume == "auto":
        _refuse_another_run(built, directory, kept, identity)

    with ExitStack() as opened:
        opened.enter_context(nothing_to_save())
        loader = opened.enter_context(Loader(cfg, rows=built.rows, agree=any_of))
        unseen = opened.enter_context(HeldOut(built, loader.corpus)) if cfg.train.evaluate_every else None
        planned = plan_program(built)
        check_fits(planned)

        _make_room(cfg, directory, kept)
        checkpoints = opened.enter_context(_checkpoints(cfg, kept))
        opened.enter_context(together())  # closing what is above needs all processes
        opened.enter_context(explained(planned))
        step, state, position = restored(built, checkpoints) or (0, begun(built), {})
        if position:
            loader.restore(position)
        saved = SavedState(built)
        made_of = {"fingerprint": identity} | ({"base": saved.base} if saved.base else {})
        if cfg.objective.name == "dpo":
            made_of["reference"] = _refer(built, loader, state, identity, position.get("reference"))
        if jax.process_index() == 0:  # all that could be refused was accepted
            _leave(planned, directory)

        trackers = opened.enter_context(trackers_for(cfg, directory, step))
        progress = opened.enter_context(_progress(planned, step, trackers.last))
        work = {bucket: _work(at) for bucket, at in built.buckets.items()}
        progress.say(_opening(planned, step))
        telemetry = _telemetry(cfg.train, built.spec.gradient_names, progress, trackers)
        rollback = Rollback(built, checkpoints, cfg.train)
        replicas = Replicas(cfg.train.check_replicas)
        measured = Measured(planned, directory / "plan.json")
        profile = opened.enter_context(Profile(directory / "profile", cfg.train.profile))
        stop, votes = opened.enter_context(Stop()), Vote()
        held_out: dict[str, float] = {}

        def save(metrics: dict[str, float] | None = None, *, force: bool) -> None:
            if checkpoints.due(step, metrics, force):
                telemetry.flush()  # nothing is kept of a step that is not known to be sound
                position = merge_states(gather(loader.state())) | made_of
                kept = saved.of(state)
                checkpoints.save(step, kept, position, cfg.model_dump(mode="json"), metrics, force=force)

        batches = iter(loader)
        while step < cfg.steps and (batch := next(batches, None)) is not None:
            step += 1
            bucket = built.bucket(batch)
            profile.before(step)
            state, metrics = in_order(planned.step_for(bucket)(state, built.place(batch)))
            profile.after(step, metrics)
            last = stop.agreed(votes.cast(stop.requested or 0)) or step == cfg.steps
            try:
                telemetry.update(step, metrics, work[bucket])
                progress.say(measured.after_step(bucket))
                with progress.paused():
                    replicas.after(step, state)
                    if unseen and (last or step % (cfg.train.evaluate_every or 1) == 0):
                        held_out = unseen(state.params, cfg.train.evaluate_batches)
                        telemetry.held_out(step, held_out)
                        save(held_out, force=last)
                    else:
                        save(force=last)
            except DivergedError as error:
                step, state = rollback(error, state)
                telemetry.back_to(step)
                progress.say(f"{error.told}: back to step {step}, and on with the data that follows")
                continue
            if last:
                break
        telemetry.flush()
        save(force=True)  # where the data ended first
        checkpoints.wait()
        for line in loader.corpus.summary():
            progress.say(line)
        progress.say(_closing(cfg, step, directory))
    return Result(directory, step, telemetry.last, held_out, state, planned, stop.exit_code)


__all__ = ["DoesNotFitError", "Result", "run"]


def _preflight(cfg: Config) -> None:
    """How fast the processes are, and talk, before they depend on each other for hours."""
    if cfg.cluster.preflight and jax.process_count() > 1:
        found = preflight().lines()
        if jax.process_index() == 0:
            print(*found, sep="\n", flush=True)


def _checkpoints(cfg: Config, kept: epath.Path) -> Checkpoints:
    keep = cfg.checkpoint
    say = partial(print, flush=True) if keep.on_failure == "continue" else None
    return Checkpoints(kept, keep.every, keep.keep, keep.keep_best, say=say)


def _same_everywhere(mine: str, what: str, kind: str) -> str:
    for process, other in enumerate(gather(mine)):
        if other != mine:
            raise UserError(f"{what} are not those of process {process} ({kind} {mine} here, {other} there)")
    return mine


def _make_room(cfg: Config, directory: Path, kept: epath.Path) -> None:
    """A directory for the checkpoints. One is written by all processes, so all must see it."""
    if cfg.checkpoint.resume == "never":
        put_aside(directory)
        put_aside(kept)
    if jax.process_index() == 0:
        kept.mkdir(parents=True, exist_ok=True)
    gather(None)  # the first process has made it
    end = time.monotonic() + PATIENCE
    while blind := [process for process, sees in enumerate(gather(kept.is_dir())) if not sees]:
        if any_of(time.monotonic() > end):
            break
        time.sleep(1)  # for a network file system to notice
    else:
        return
    raise UserError(
        f"{kept}: made by process 0, and not seen by {', '.join(map(str, blind))}; "
        "give output or checkpoint.path a place that all hosts share"
    )


def _refuse_another_run(built: Program, directory: Path, kept: epath.Path, identity: str) -> None:
    """Before anything is compiled: what is there must be of this config, but for what may change."""
    if all(gather(kept.is_dir())):
        with Checkpoints(kept, read_only=True) as checkpoints:
            if found := checkpoints.read_latest():
                position, before = found
                cfg, after = built.cfg, built.cfg.model_dump(mode="json")
                if position:
                    refuse_changes(before, after, directory, (position["fingerprint"], identity))
                    SavedState(built).check_base(position, directory)
                else:  # imported weights, which rest in something else where they stay
                    own = WEIGHTS if cfg.adapter.kind == "none" else ("model",)
                    refuse_changes({key: before[key] for key in own}, {key: after[key] for key in own}, directory)


def _refer(built: Program, loader: Loader, state: TrainState, identity: str, began: str | None) -> str:
    """Give the corpus what the reference says of each pair; the fingerprint of the reference's weights."""
    reference = reference_for(built, loader.corpus, state.params, identity, began)
    loader.corpus.references = reference.values
    return reference.weights


def _telemetry(train: Train, culprits: Sequence[str], progress: Progress, trackers: Trackers) -> Telemetry:
    skipped = train.max_skipped if train.on_nan == "skip" else 0
    spikes = None if train.on_spike == "ignore" else Spikes(train.spike_threshold)
    return Telemetry(progress, trackers, culprits, skipped, spikes)


def _leave(planned: Plan, directory: Path) -> None:
    """What a run leaves beside its checkpoints and metrics. The settings and the tokenizer that the weights came with
    are among it, so that the run can be used without where it came from."""
    cfg = planned.program.cfg
    save_config(cfg, directory / "config.yaml")
    (directory / "plan.json").write_text(json.dumps(planned.as_json(), indent=2) + "\n")
    (directory / "memory.json").write_text(json.dumps(planned.history.as_json()) + "\n")
    if isinstance(cfg.model, Decoder) and cfg.model.hf is not None and not (directory / BESIDE).exists():
        hf.copy_metadata(cfg.model.hf, directory / BESIDE)


def _work(built: Program) -> Work:
    """Of an update."""
    cfg = built.cfg
    each = cfg.data.sequence_length if cfg.objective.reads_text else 1
    return Work(cfg.batch.global_size * each, ideal_flops(built))


def _progress(planned: Plan, step: int, last: Mapping[str, float]) -> Progress:
    """`last`: what was logged before, of a run that goes on."""
    cfg, devices = planned.program.cfg, planned.program.layout.mesh.devices
    peak, usual = peak_flops(devices.flat[0]), _work(planned.program)
    return Progress(
        cfg.steps,
        usual.tokens,
        usual.flops,
        peak * devices.size if peak else None,
        enabled=jax.process_index() == 0,
        log_every=cfg.train.log_every,
        step=step,
        seconds=last.get("seconds", 0.0),
        tokens=int(last.get("tokens", step * usual.tokens)),
        unit="tok" if cfg.objective.reads_text else "img",
    )


def _opening(planned: Plan, step: int) -> str:
    built = planned.program
    shape = " x ".join(f"{axis} {size}" for axis, size in built.layout.mesh.shape.items() if size > 1)
    kind = built.layout.mesh.devices.flat[0].platform
    total = readable(planned.bytes_per_device["total"])
    start = f"goes on after step {step}" if step else f"{built.model.parameters:,} parameters"
    devices = f"{built.layout.mesh.devices.size} {kind} devices{f' ({shape})' if shape else ''}"
    extra = built.model.pipeline.stored - built.model.pipeline.layers if built.model.pipeline else 0
    filled = f", {extra} layers that do nothing among the stages" if extra else ""
    spilled = [one for one in planned.warnings if one.kind == SPILLED] if planned.spilled else []
    warned = "".join(f"\nwarning: {one.text}; try {one.cure}" for one in spilled)
    return f"{built.cfg.name}: {start}, {devices}, {total} each{filled}{warned}"


def _closing(cfg: Config, step: int, directory: Path) -> str:
    if step == cfg.steps:
        return f"done: {step} steps, in {directory}"
    return f"stopped after step {step} of {cfg.steps}; saved in {directory}, the same command goes on"
