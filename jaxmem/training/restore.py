"""The state of a run from its checkpoints, to resume."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from etils import epath

from jaxmem.checkpoint.manager import Checkpoints
from jaxmem.checkpoint.record import named_leaves, to_device
from jaxmem.checkpoint.same_run import refuse_changes
from jaxmem.checkpoint.saved_state import SavedState
from jaxmem.config import Config
from jaxmem.config.load import load_config
from jaxmem.data.corpus import fingerprint
from jaxmem.distributed.agree import gather_objects
from jaxmem.distributed.cluster import jobs
from jaxmem.errors import UserError
from jaxmem.step.programs import Program
from jaxmem.step.state import TrainState
from jaxmem.training.telemetry import DivergedError
from jaxmem.typing import JsonDict, Tree


def data_fingerprint(cfg: Config) -> str:
    """The fingerprint of the data, which must be the same in all processes."""
    mine = fingerprint(cfg)
    for process, other in enumerate(gather_objects(mine)):
        if other != mine:
            raise UserError(
                f"data.path: the files differ between processes: fingerprint {mine} in process {jax.process_index()},"
                f" {other} in process {process}; copy the same files to all hosts"
            )
    return mine


class SavedRecord(NamedTuple):
    """What a checkpoint says beside its arrays."""

    step: int
    position: JsonDict  # in the data
    config: JsonDict


def latest_of_same_run(built: Program, directory: Path, path: epath.Path, fingerprint: str) -> SavedRecord | None:
    """The record of the newest checkpoint; None without checkpoints. Refuses a checkpoint if its config differs in
    fields that must not change."""
    latest = _read_latest(path)
    if latest is None:
        return None
    before = load_config(latest.config).model_dump(mode="json")  # adds settings that did not exist when it was saved
    after = built.cfg.model_dump(mode="json")
    refuse_changes(before, after, directory, (latest.position["fingerprint"], fingerprint))
    SavedState(built).check_base(latest.position, directory)
    return latest._replace(config=before)


def resume_if_started_again(cfg: Config, path: epath.Path) -> Config:
    """The config with `checkpoint.resume: auto` if this job has saved the checkpoints, and is started again: `never` is
    about its first start."""
    if cfg.checkpoint.resume == "auto" or (latest := _read_latest(path)) is None:
        return cfg
    is_own = not set(jobs(started_again=True)).isdisjoint(latest.position.get("jobs", []))
    return cfg.replace(checkpoint={"resume": "auto"}) if is_own else cfg


def _read_latest(path: epath.Path) -> SavedRecord | None:
    if not all(gather_objects(path.is_dir())):
        return None
    with Checkpoints(path, read_only=True) as checkpoints:
        latest = checkpoints.read_latest()
    return None if latest is None else SavedRecord(*latest)


def restore(built: Program, checkpoints: Checkpoints) -> tuple[int, TrainState, JsonDict] | None:
    """Step, state and data position of the newest complete checkpoint; None if there is no checkpoint."""
    latest = latest_state(built, checkpoints)
    return None if latest is None else (latest.step, latest.read_state(), latest.position)


class LatestState(NamedTuple):
    """The newest complete checkpoint."""

    step: int
    read_state: Callable[[], TrainState]
    position: JsonDict  # in the data


def latest_state(built: Program, checkpoints: Checkpoints) -> LatestState | None:
    """Like `restore`, but the frozen base is read only by `read_state`."""
    saved = SavedState(built)
    latest = checkpoints.restore_latest(saved.shapes_to_restore)
    if latest is None:
        return None
    step, state, position, config = latest
    return LatestState(step, lambda: saved.complete(state, config), position)


def check_finite(params: Tree, step: int) -> None:
    """Raises an error that names a weight with a value that is not finite, so that no such checkpoint is saved: the
    loss and the gradients of a step can be finite, and its update not."""
    floats = {name: x for name, x in named_leaves(params).items() if jnp.issubdtype(x.dtype, jnp.floating)}
    for name, leaf in floats.items():
        if not _is_finite(to_device(leaf)).addressable_data(0):
            raise DivergedError(f"the update of step {step} made {name} infinite or NaN")


@jax.jit
def _is_finite(x: jax.Array) -> jax.Array:
    return jnp.all(jnp.isfinite(x))
