"""The checkpoints of a run: saved, rotated, found and restored."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from etils import epath

from jaxmem.checkpoint.checksum import checksum
from jaxmem.checkpoint.failures import FAILURES, one_failure, why
from jaxmem.checkpoint.files import absolute, free_name, put_aside
from jaxmem.checkpoint.leaves import check_leaves, few, named
from jaxmem.checkpoint.policy import Best, Keep
from jaxmem.distributed.join import end_all
from jaxmem.distributed.watch import between_processes
from jaxmem.errors import TemporaryError, UserError

CHUNK = 64 << 20  # bytes; the most that is decoded at once to restore a part of an array
ROTATED = ".rotated"  # where replaced checkpoints are renamed to, to be deleted from there


class DamagedError(UserError):
    """A checkpoint that does not read back as it was written."""


class Checkpoints:
    """The checkpoints of one run, saved behind the training loop.

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
        say: Callable[[str], None] | None = None,
    ) -> None:
        """`read_only` looks without touching: it is safe beside a run that is writing. With `say` a save that failed
        is told there where the next one begins; without it, and in `wait`, it is raised."""
        self.directory = absolute(directory)
        self._in_bucket = "://" in str(self.directory)  # where a rename copies: there, what is replaced is deleted
        self.every, self.read_only, self._say = every, read_only, say
        self._policy = Keep(keep, keep_best, losses={})
        self._sweeper: threading.Thread | None = None
        try:
            self._manager = self._open()
        except FAILURES as error:
            _unless_others_have_gone(error)
            raise UserError(f"cannot keep checkpoints in {self.directory}: {why(error)}") from error
        self._sweep()

    def due(self, step: int, metrics: Mapping[str, float] | None = None, force: bool = False) -> bool:
        """Whether `save` would: asked first where the position must be gathered from all processes."""
        loss = None if metrics is None else metrics.get("loss")
        return bool(force or (self.every and step % self.every == 0) or self._policy.improved(loss))

    def save(
        self,
        step: int,
        state: Any,
        position: Mapping[str, Any],
        config: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        force: bool = False,
    ) -> bool:
        """Begin to save if this step is due, forced, or with `keep_best` better than all before, and not there yet;
        whether it did. `state` may be donated as soon as this returns. `metrics["loss"]` is the held-out loss of this
        very state, if it was just evaluated.

        A save that failed is told or raised by the next `save`, and raised by `wait`; the run may go on after it.
        """
        if not self.due(step, metrics, force):
            return False
        if self.read_only:
            raise ValueError("these checkpoints were opened with read_only=True")
        try:
            self.wait()
        except UserError as error:
            self._tell(error)
        if step in self._manager.all_steps():
            return False
        leaves = named(state)
        saved = {name: [x.shape, str(x.dtype), checksum(x)] for name, x in leaves.items()}
        record = _as_json({"position": position, "config": config, "metrics": metrics or {}, "leaves": saved})
        arrays = ocp.args.PyTreeSave(leaves, save_args={name: ocp.SaveArgs(chunk_byte_size=CHUNK) for name in leaves})
        args = ocp.args.Composite(state=arrays, run=ocp.args.JsonSave({**record, "crc32": _crc(record)}))
        self._policy.losses[step] = record["metrics"].get("loss")
        try:
            self._manager.save(step, args=args, force=True)
        except FAILURES as error:
            self._tell(self._failed(step, error))
            return False
        self._sweeper = threading.Thread(target=self._sweep_when_saved, name="checkpoint-sweep")
        self._sweeper.start()
        return True

    def steps(self) -> list[int]:
        """The steps with a whole checkpoint, oldest first."""
        self.wait()
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        return max(self.steps(), default=None)

    def best(self) -> Best | None:
        return self._policy.best(self.steps())

    def read(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The data position and the config inside, without the arrays: enough to refuse before anything is compiled."""
        self._expect(step)
        record = self._record(step)
        return record["position"], record["config"]

    def read_latest(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """`read` of the newest checkpoint in which these are whole; `restore_latest` says what is wrong with others."""
        for step in reversed(self.steps()):
            with suppress(DamagedError):
                return self.read(step)
        return None

    def restore(self, step: int, abstract_state: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        """State, data position, config. `abstract_state` is the state's tree with a jax.ShapeDtypeStruct and
        its sharding on the present mesh for each array, or gives it for the config of the checkpoint."""
        self._expect(step)
        record = self._record(step)
        wanted = abstract_state(record["config"]) if callable(abstract_state) else abstract_state
        return self._arrays(step, wanted, record["leaves"]), record["position"], record["config"]

    def restore_params(self, step: int, abstract_params: Any) -> Any:
        """Only the parameters; the optimizer's state is not read."""
        self._expect(step)
        saved = {name: leaf for name, leaf in self._record(step)["leaves"].items() if name.startswith("params.")}
        return self._arrays(step, {"params": abstract_params}, saved)["params"]

    def restore_latest(
        self, abstract_state: Any, say: Callable[[str], None] = print
    ) -> tuple[int, Any, dict[str, Any], dict[str, Any]] | None:
        """(step, state, position, config) of the newest whole checkpoint; None where there never was one.

        A damaged one is said and put aside for inspection, and the one before is used. If all are damaged
        it stops: a run must not silently begin from nothing.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                return step, *self.restore(step, abstract_state)
            except DamagedError as error:
                if jax.process_count() > 1:
                    self._leave_it(step, error, others=step != steps[0])
                aside = put_aside(self.directory / str(step))
                self._reopen()
                say(f"{error}; put aside as {aside}")
        if steps:
            raise DamagedError(f"none of the {len(steps)} checkpoints in {self.directory} can be read; see above")
        return None

    def wait(self) -> None:
        """Until the save that is under way is on disk."""
        if self._sweeper is not None:
            self._sweeper.join()
            self._sweeper = None
        try:
            self._manager.wait_until_finished()
        except FAILURES as error:
            raise self._failed(None, error) from error

    def close(self) -> None:
        try:
            self.wait()
        finally:
            self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -------------------------------------------------------------- inside

    def _open(self) -> Any:
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._policy,
            todelete_subdir=None if self.read_only or self._in_bucket else ROTATED,
            cleanup_tmp_directories=not self.read_only,  # what a killed run left half-written
            create=not self.read_only,
            lightweight_initialize=True,  # opening looks at names only, so that a damaged one does not prevent it
        )
        manager = _Manager(self.directory, options=options, failed=self._own_part_failed)
        self._policy.losses.clear()
        for step in manager.all_steps():
            try:
                self._policy.losses[step] = self._record(step)["metrics"].get("loss")
            except DamagedError:
                self._policy.losses[step] = None  # never the best; said when someone wants to read it
        return manager

    def _reopen(self) -> None:
        """Look at the disk afresh and clear half-written directories, which matter most on a full disk."""
        self._manager.close()
        self._manager = self._open()

    def _leave_it(self, step: int, error: DamagedError, others: bool) -> None:
        """What one process cannot read, the others may be reading together without it: so all must stop. The next
        start goes on from an older one, if there are `others`."""
        if not others:
            raise error
        path = self.directory / str(step)
        aside = free_name(path)
        with suppress(OSError):  # another process has renamed it already
            path.rename(aside)
        raise TemporaryError(f"{error}; put aside as {aside}; the same command goes on from the one before") from error

    def _tell(self, error: UserError) -> None:
        if self._say is None:
            raise error
        self._say(f"{error}; going on")

    def _own_part_failed(self, error: BaseException) -> None:
        if jax.process_count() > 1 and between_processes(error) is None:
            end_all(self._failed(None, error))

    def _failed(self, step: int | None, error: BaseException) -> UserError:
        _unless_others_have_gone(error)
        if jax.process_count() == 1:  # opening is done together, and the others know of no failure
            self._reopen()
        # As the disk has them: the manager counts the one that it was writing.
        last = max(ocp.utils.checkpoint_steps(self.directory), default=None)
        which = "a checkpoint" if step is None else f"the checkpoint of step {step}"
        whole = "there is none yet" if last is None else f"step {last} is whole"
        return UserError(f"{which} could not be written to {self.directory} ({whole}): {why(error)}")

    def _record(self, step: int) -> dict[str, Any]:
        file = self.directory / str(step) / "run" / "metadata"  # where Orbax's JsonSave puts the item `run`
        try:
            record = json.loads(file.read_text())
        except FAILURES as error:
            raise self._damaged(step, why(error)) from error
        if not isinstance(record, dict) or record.pop("crc32", None) != _crc(record):
            raise self._damaged(step, "its position and config do not match their checksum")
        return record

    def _arrays(self, step: int, abstract: Any, saved: dict[str, Any]) -> Any:
        wanted = named(abstract)
        check_leaves(self.directory / str(step), saved, wanted)
        restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
        args = ocp.args.PyTreeRestore(wanted, restore_args=restore_args, partial_restore=True)
        try:
            with one_failure():
                arrays = self._manager.restore(step, args=ocp.args.Composite(state=args)).state
        except Exception as error:  # it is what Orbax raises where a read fails
            if "RESOURCE_EXHAUSTED" in str(error):  # this device's memory, not the file's fault
                raise
            _unless_others_have_gone(error)
            raise self._damaged(step, why(error)) from None
        # Metadata that was changed can make something else of an array.
        found = {name: arrays[name] for name in wanted if isinstance(arrays.get(name), jax.Array)}
        wrong = [name for name in wanted if name not in found or checksum(found[name]) != saved[name][2]]
        if wrong:
            raise self._damaged(step, f"{few(wrong)} read back otherwise than written")
        return jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in wanted])

    def _expect(self, step: int) -> None:
        steps = self.steps()
        if step not in steps:
            raise UserError(f"no checkpoint of step {step} in {self.directory}; there are: {steps or 'none'}")

    def _damaged(self, step: int, why: str) -> DamagedError:
        return DamagedError(f"checkpoint {self.directory / str(step)} is damaged: {why}")

    def _sweep_when_saved(self) -> None:
        try:
            self._manager.wait_until_finished()
        except FAILURES:
            return  # nothing was replaced; Orbax raises it again in `wait`, where it is told
        self._sweep()

    def _sweep(self) -> None:
        rotated = self.directory / ROTATED
        if not (self.read_only or self._in_bucket) and jax.process_index() == 0 and rotated.exists():
            for old in rotated.iterdir():
                old.rmtree()


class _Manager(ocp.CheckpointManager):
    """Says at once when this process's part could not be written. Orbax would wait for the others first, who wait for
    that part."""

    def __init__(self, *args: Any, failed: Callable[[BaseException], None], **options: Any) -> None:
        self._failed = failed
        super().__init__(*args, **options)

    def _wait_for_checkpointers(self) -> None:
        try:
            super()._wait_for_checkpointers()
        except BaseException as error:
            self._failed(error)
            raise


def _unless_others_have_gone(error: BaseException) -> None:
    """Which is no fault of a file's, and said by the watch."""
    if jax.process_count() > 1 and (failure := between_processes(error)):
        raise failure


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _crc(record: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())
