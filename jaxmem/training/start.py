"""The start of a run: checks before anything is compiled, and the directory of the run."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from etils import epath

from jaxmem.checkpoint.manager import Checkpoints
from jaxmem.checkpoint.paths import move_aside
from jaxmem.checkpoint.resume import refuse_changes
from jaxmem.checkpoint.saved_state import SavedState
from jaxmem.config import Config, Decoder, save_config
from jaxmem.data.corpus import fingerprint
from jaxmem.distributed.agree import any_process, gather
from jaxmem.errors import UserError
from jaxmem.step import Program

if TYPE_CHECKING:
    from jaxmem.planning import Plan

WEIGHTS = ("model", "precision")  # the config sections that define the weights
PATIENCE = 60  # seconds until a directory that one host made must be visible to the others


def data_fingerprint(cfg: Config) -> str:
    """The fingerprint of the data, which must be the same in all processes."""
    mine = fingerprint(cfg)
    for process, other in enumerate(gather(mine)):
        if other != mine:
            raise UserError(
                f"data files differ from those of process {process}: fingerprint {mine} here, {other} there"
            )
    return mine


def refuse_another_run(built: Program, directory: Path, path: epath.Path, fingerprint: str) -> int:
    """The step of the newest checkpoint, or 0 without checkpoints. Refuses a checkpoint of
    another config, apart from fields that may change."""
    if not all(gather(path.is_dir())):
        return 0
    with Checkpoints(path, read_only=True) as checkpoints:
        found = checkpoints.read_latest()
    if found is None:
        return 0
    step, position, before = found
    cfg, after = built.cfg, built.cfg.model_dump(mode="json")
    if position:
        refuse_changes(before, after, directory, (position["fingerprint"], fingerprint))
        SavedState(built).check_base(position, directory)
    else:  # imported weights; a frozen base may be stored in another dtype
        own = WEIGHTS if cfg.adapter.kind == "none" else ("model",)
        refuse_changes({key: before[key] for key in own}, {key: after[key] for key in own}, directory)
    return step


@contextmanager
def run_directory(cfg: Config, directory: Path, path: epath.Path) -> Iterator[Callable[[], None]]:
    """A context with the directories of a run and of its checkpoints, which all processes must see. New directories are
    removed if the run fails before it calls the function that this yields."""
    if cfg.checkpoint.resume == "never":
        move_aside(directory)
        move_aside(path)
    new = [one for one in (epath.Path(directory), path) if not one.exists()]
    try:
        if jax.process_index() == 0:
            path.mkdir(parents=True, exist_ok=True)
        gather(None)  # process 0 has created it
        end = time.monotonic() + PATIENCE
        while blind := [process for process, sees in enumerate(gather(path.is_dir())) if not sees]:
            if any_process(time.monotonic() > end):
                raise UserError(
                    f"process {', '.join(map(str, blind))} does not see {path}, which process 0 made; "
                    "set output or checkpoint.path to a directory that all hosts share"
                )
            time.sleep(1)  # until a network file system shows it
        yield new.clear
    except BaseException:
        for one in new if jax.process_index() == 0 else ():
            one.rmtree(missing_ok=True)
        raise


def write_description(plan: Plan, directory: Path) -> None:
    """Writes everything except checkpoints and metrics, with the settings and tokenizer of imported weights, so that
    the run can be used without their source."""
    from jaxmem.inference.load import HF_FOLDER

    cfg = plan.program.cfg
    save_config(cfg, directory / "config.yaml")
    (directory / "plan.json").write_text(json.dumps(plan.as_json(), indent=2) + "\n")
    (directory / "memory.json").write_text(json.dumps(plan.history) + "\n")
    if isinstance(cfg.model, Decoder) and cfg.model.hf is not None and not (directory / HF_FOLDER).exists():
        from jaxmem import hf

        hf.copy_metadata(cfg.model.hf, directory / HF_FOLDER)
