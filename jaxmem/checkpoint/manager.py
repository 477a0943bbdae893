"""The checkpoints of a run: saved in the background, rotated, found and restored."""

import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxmem.checkpoint.orbax_errors import ORBAX_EXCEPTIONS, Manager, only_first_error, raise_lost_process, root_cause
from jaxmem.checkpoint.paths import absolute, free_name, move_aside, refuse_links
from jaxmem.checkpoint.record import (
    DamagedError,
    add_metrics,
    check_leaves,
    check_savable,
    checksum,
    damaged,
    make_record,
    named_leaves,
    read_record,
)
from jaxmem.distributed.agree import any_process, gather_objects
from jaxmem.distributed.join import end_all
from jaxmem.distributed.watch import lost_process_error
from jaxmem.errors import TemporaryError, UserError, abridge, one_of
from jaxmem.machine.terminal import say
from jaxmem.typing import JsonDict, JsonView, Tree

CHUNK_BYTES = 64 << 20  # bytes decoded at once to restore a part of an array
STEP_PATTERN = re.compile("0|[1-9][0-9]{0,17}")  # the name of a checkpoint
MAX_ERRORS = 10  # of one failed save that Orbax raises one after the other
SAVE_SECONDS = 24 * 3600  # limit of a save; the watch finds a lost process, and large states take long
LISTING_SECONDS = 120  # until all hosts must see the same checkpoints; network file systems cache for a minute
# The state's tree with a jax.ShapeDtypeStruct and its sharding on the present mesh for each array, or a function that
# returns it for the config of the checkpoint.
AbstractState: TypeAlias = Tree | Callable[[JsonView], Tree]
ROTATED_DIRECTORY = ".rotated"  # replaced checkpoints are moved to this directory, and then deleted


@dataclass
class Retention(ocp.checkpoint_managers.PreservationPolicy):
    """Keeps the newest `keep` checkpoints, and with `keep_best` the one with the lowest held-out loss.
    Orbax has such policies (`LatestN`, `BestN`), but they cannot tell in advance whether a checkpoint with some loss
    would be kept as the best, which decides whether a step is saved at all."""

    keep: int
    keep_best: bool
    losses: dict[int, float | None] = field(default_factory=dict)  # the held-out loss of each step

    def is_best(self, loss: float | None) -> bool:
        """Whether a checkpoint with this loss would be kept as the best."""
        best = min((known for known, _ in self._finite(self.losses)), default=math.inf)
        return self.keep_best and loss is not None and math.isfinite(loss) and loss < best

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        steps = [info.step for info in checkpoints]
        kept = set(sorted(steps)[-self.keep :])
        if self.keep_best and (best := self.best(steps)) is not None:
            kept.add(best)
        return [step in kept for step in steps]

    def best(self, steps: Iterable[int]) -> int | None:
        """The step with the lowest held-out loss; None if no loss is known."""
        return min(self._finite(steps), default=(math.inf, None))[1]

    def _finite(self, steps: Iterable[int]) -> list[tuple[float, int]]:
        """(loss, step) of the steps whose loss is known and finite."""
        known = [(self.losses.get(step), step) for step in steps]
        return [(loss, step) for loss, step in known if loss is not None and math.isfinite(loss)]


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """The checkpoints of one run, saved while the training loop continues.

    A loop:

        with Checkpoints("runs/x/checkpoints", every=100, keep=3) as checkpoints:
            for step in ...:
                state, metrics = train_step(state, batch)
                checkpoints.save(step, state, loader.state(), cfg.model_dump(mode="json"))
    """

    def __init__(
        self,
        directory: str | Path | epath.Path,
        every: int | None = None,
        keep: int = 3,
        keep_best: bool = False,
        read_only: bool = False,
    ) -> None:
        """Opens the checkpoints of a directory.

        Args:
            directory: Contains one directory per checkpoint.
            every: Steps between checkpoints.
            keep: The newest checkpoints that are kept.
            keep_best: Also keep the checkpoint with the lowest held-out loss.
            read_only: Change nothing on disk, so that a run may write at the same time.
        """
        self.directory = absolute(directory)
        # In a bucket a rename is a copy, so replaced checkpoints are deleted directly.
        self._has_rename = not read_only and "://" not in str(self.directory)
        self.every = every
        self.read_only = read_only
        self._retention = Retention(keep, keep_best)
        self._sweeper: threading.Thread | None = None
        self._saving = 0  # the step of the last save that was started
        if not read_only:
            refuse_links(self.directory)
        with only_first_error() as silence:
            try:
                self._manager = self._open()
            except ORBAX_EXCEPTIONS as error:
                raise_lost_process(error)
                cause = f"{root_cause(error)}; set checkpoint.path to another directory"
                raise UserError(f"cannot open checkpoints in {self.directory}: {cause}") from error
            self._silence = silence.pop_all()
        self._sweep()

    def is_due(self, step: int, metrics: Mapping[str, float] | None = None, force: bool = False) -> bool:
        """Whether `save` would save. Call this first: `save` needs the data position, which is gathered from all
        processes."""
        loss = None if metrics is None else metrics.get("loss")
        return bool(force or (self.every and step % self.every == 0) or self._retention.is_best(loss))

    def save(
        self,
        step: int,
        state: Tree,
        position: JsonView,
        config: JsonView,
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
    ) -> bool:
        """Starts a save if this step is due, forced, or (with `keep_best`) the best so far. If it is saved, adds
        its metrics. A failed save is raised by the next `save`, or by `wait`; the run may continue after it.

        Args:
            step: The number of updates of this state.
            state: May be donated as soon as this returns.
            position: Of the data.
            config: Saved beside the state.
            metrics: `metrics["loss"]` is the held-out loss of this state, if it has been evaluated.
            force: Save also if the step is not due.

        Returns:
            Whether a save was started.
        """
        if not self.is_due(step, metrics, force):
            return False
        if self.read_only:
            raise ValueError("these checkpoints were opened with read_only=True")
        self.wait()
        if step in self._manager.all_steps():
            if metrics:
                self._add_metrics(step, metrics)
            return False
        leaves = named_leaves(state)
        check_savable(leaves)
        record = make_record(leaves, step=step, position=position, config=config, metrics=metrics or {})
        arrays = ocp.args.PyTreeSave(
            leaves, save_args={name: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES) for name in leaves}
        )
        self._retention.losses[step] = record["metrics"].get("loss")
        self._saving = step
        try:
            self._manager.save(step, args=ocp.args.Composite(state=arrays, run=ocp.args.JsonSave(record)), force=True)
        except ORBAX_EXCEPTIONS as error:
            raise self._save_error(step, error) from error
        self._sweeper = threading.Thread(target=self._sweep_when_saved, name="checkpoint-sweep")
        self._sweeper.start()
        return True

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, oldest first."""
        self.wait()
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step with the lowest held-out loss; None if no checkpoint has been evaluated."""
        return self._retention.best(self.steps())

    def read(self, step: int) -> tuple[JsonDict, JsonDict]:
        """Data position and config, without the arrays, to refuse a resume before anything is compiled."""
        record = read_record(self._path(step))
        return record["position"], record["config"]

    def read_latest(self) -> tuple[int, JsonDict, JsonDict] | None:
        """Step, data position and config of the newest checkpoint with an undamaged record. `restore_latest` reports
        damaged checkpoints."""
        for step in reversed(self.steps()):
            with suppress(DamagedError):
                return step, *self.read(step)
        return None

    def restore(self, step: int, abstract_state: AbstractState) -> tuple[Tree, JsonDict, JsonDict]:
        """State, data position, config."""
        record = read_record(self._path(step))
        abstract = abstract_state(record["config"]) if callable(abstract_state) else abstract_state
        return self._arrays(step, abstract, record["leaves"]), record["position"], record["config"]

    def restore_params(self, step: int, abstract_params: Tree) -> Tree:
        """Only the parameters; the optimizer state is not read."""
        leaves = read_record(self._path(step))["leaves"]
        saved = {name: leaf for name, leaf in leaves.items() if name.startswith("params.")}
        return self._arrays(step, {"params": abstract_params}, saved)["params"]

    def restore_latest(
        self, abstract_state: AbstractState, report: Callable[[str], None] = say
    ) -> tuple[int, Tree, JsonDict, JsonDict] | None:
        """(step, state, position, config) of the newest complete checkpoint; None if there is no checkpoint.

        A damaged checkpoint is reported and renamed, and the one before is used. If all are damaged, an error is
        raised, since a run must not silently start from step 0.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                return step, *self.restore(step, abstract_state)
            except DamagedError as error:
                if jax.process_count() > 1:
                    self._leave_damaged(step, error, others=step != steps[0])
                aside = move_aside(self.directory / str(step), if_empty=True)
                self._reopen()
                report(f"{error}; renamed to {aside}")
        if steps:
            problem = f"all {len(steps)} checkpoints in {self.directory} are damaged"
            raise DamagedError(f"{problem}; restore a copy, or start from step 0 with checkpoint.resume=never")
        return None

    def wait(self) -> None:
        """Waits until the current save is on disk."""
        if self._sweeper is not None:
            self._sweeper.join()
            self._sweeper = None
        try:
            self._manager.wait_until_finished()
        except ORBAX_EXCEPTIONS as error:
            raise self._save_error(self._saving, error) from error

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._manager.close()
            self._silence.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> Manager:
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._retention,
            todelete_subdir=ROTATED_DIRECTORY if self._has_rename else None,
            cleanup_tmp_directories=not self.read_only,  # directories that a killed run left incomplete
            create=not self.read_only,
            async_options=ocp.AsyncOptions(timeout_secs=SAVE_SECONDS),
            lightweight_initialize=True,  # reads names only, so that a damaged checkpoint does not prevent opening
        )
        if self._has_rename:
            self._move_misnamed()
        manager = self._manager_of_all_processes(options)
        losses = []
        for step in manager.all_steps():
            with suppress(DamagedError):  # a damaged checkpoint is never the best; it is reported when it is read
                losses.append([step, read_record(self.directory / str(step))["metrics"].get("loss")])
        # All processes must choose the same checkpoints to keep, also if one could not read a record.
        self._retention.losses = dict(gather_objects(losses)[0])
        return manager

    def _manager_of_all_processes(self, options: ocp.CheckpointManagerOptions) -> Manager:
        """Waits until all processes see the same checkpoints. Otherwise those that see a checkpoint would read it
        without the others, and take it for damaged."""
        end = time.monotonic() + LISTING_SECONDS
        while True:
            manager = Manager(self.directory, options=options, failed=self._end_if_only_this_process_failed)
            first, *others = gather_objects(sorted(manager.all_steps()))
            if all(steps == first for steps in others):
                return manager
            manager.close()
            if any_process(time.monotonic() > end):
                raise UserError(
                    f"{self.directory}: the hosts see different checkpoints; set checkpoint.path to a directory that"
                    " all hosts share"
                )
            time.sleep(1)

    def _move_misnamed(self) -> None:
        """Renames directories that Orbax would read as steps, but whose names no step has (007,
        99999999999999999999)."""
        paths = self.directory.iterdir() if jax.process_index() == 0 and self.directory.is_dir() else ()
        for path in [path for path in paths if path.name.isdigit() and not STEP_PATTERN.fullmatch(path.name)]:
            aside = free_name(path)
            path.rename(aside)
            say(f"{path}: its name is not a step number; renamed to {aside}")

    def _reopen(self) -> None:
        """Reads the directory again and removes incomplete checkpoints, which matters most on a full disk."""
        for _ in range(MAX_ERRORS):  # each call raises one of the errors of the failed save
            try:
                self._manager.close()
                break
            except ORBAX_EXCEPTIONS:
                continue
        self._manager = self._open()

    def _leave_damaged(self, step: int, error: DamagedError, others: bool) -> None:
        """Stops the run after this process could not read a checkpoint, because other processes may wait for it. If
        there are `others`, first renames the checkpoint, so that the next start uses another one."""
        if not others:
            raise error
        path = self.directory / str(step)
        aside = free_name(path)
        with suppress(OSError):  # another process has renamed it already
            path.rename(aside)
        raise TemporaryError(
            f"{error}; this checkpoint was renamed to {aside}; run the same command again to resume from the previous"
            " checkpoint"
        ) from error

    def _end_if_only_this_process_failed(self, error: BaseException) -> None:
        if jax.process_count() > 1 and lost_process_error(error) is None:
            end_all(self._save_error(self._saving, error))

    def _save_error(self, step: int, error: BaseException) -> UserError:
        raise_lost_process(error)
        self._silence.pop_all()  # other writes end later, at an unknown time
        if jax.process_count() == 1:  # opening would involve all processes, but the others do not know of the failure
            with suppress(*ORBAX_EXCEPTIONS):  # on a full disk this may fail too; the next save fails then, and retries
                self._reopen()
        # Read from disk, since the manager also counts the unfinished save.
        last = max(ocp.utils.checkpoint_steps(self.directory), default=None)
        complete = "no complete checkpoint yet" if last is None else f"last complete checkpoint: step {last}"
        return UserError(
            f"checkpoint {self.directory / str(step)} could not be written ({complete}): {root_cause(error)}"
        )

    def _arrays(self, step: int, abstract: Tree, saved: JsonDict) -> Tree:
        path = self.directory / str(step)
        leaves = named_leaves(abstract)
        check_leaves(path, saved, leaves)
        restore_args = ocp.checkpoint_utils.construct_restore_args(leaves)
        args = ocp.args.PyTreeRestore(leaves, restore_args=restore_args, partial_restore=True)
        try:
            arrays = self._manager.restore(step, args=ocp.args.Composite(state=args)).state
        except Exception as error:  # Orbax raises various types if a read fails
            if "RESOURCE_EXHAUSTED" in str(error):  # the device has too little memory; the file is intact
                raise
            raise_lost_process(error)
            self._silence.pop_all()  # other reads end later, at an unknown time
            raise damaged(path, root_cause(error)) from None
        # With damaged metadata, the restored value may not be an array of the expected shape.
        present = {name: arrays[name] for name in leaves if isinstance(arrays.get(name), jax.Array)}
        wrong = [name for name in leaves if name not in present or checksum(present[name]) != saved[name][2]]
        if wrong:
            raise damaged(path, f"the contents of {abridge(wrong)} differ from their checksums")
        return jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in leaves])

    def _add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._retention.losses[step] = metrics.get("loss")
        if jax.process_index() == 0:
            add_metrics(self.directory / str(step), metrics)

    def _path(self, step: int) -> epath.Path:
        steps = self.steps()
        if step not in steps:
            raise UserError(
                f"{self.directory} has no checkpoint of step {step}; use {one_of(steps) if steps else 'another run'}"
            )
        return self.directory / str(step)

    def _sweep_when_saved(self) -> None:
        try:
            self._manager.wait_until_finished()
        except ORBAX_EXCEPTIONS:
            return  # nothing was replaced; Orbax raises the error again in `wait`, which reports it
        self._sweep()

    def _sweep(self) -> None:
        rotated = self.directory / ROTATED_DIRECTORY
        if self._has_rename and jax.process_index() == 0 and rotated.exists():
            for old in rotated.iterdir():
                try:
                    old.rmtree()
                except OSError as error:
                    problem = f"warning: {old} cannot be deleted: {error.strerror}"
                    say(f"{problem}; delete it, or old checkpoints fill the disk")
