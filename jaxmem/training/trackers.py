"""Trackers of metrics: `metrics.jsonl` always, TensorBoard and Weights & Biases if configured.

Only process 0 writes. A run that resumes from step s first drops the metrics after s, so that a file contains each step
once. A logged step costs one short write.
"""

from __future__ import annotations

import importlib
import json
import secrets
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax

from jaxmem.checkpoint.metrics import finite_or_null, parse_row
from jaxmem.config import Config
from jaxmem.errors import UserError
from jaxmem.machine.files import atomic_file, write_file
from jaxmem.typing import JsonView

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def check_trackers(names: Iterable[str]) -> None:
    """Refuses trackers that are not installed, before anything is compiled."""
    for name in names:
        _package(name)


def trackers_for(cfg: Config, directory: str | Path, step: int = 0) -> Trackers:
    """The trackers of a run in `directory` that resumes after `step`; none in processes other than 0."""
    directory = Path(directory)
    if jax.process_index() != 0:
        return Trackers([])
    others = [
        TensorBoard(directory, step) if name == "tensorboard" else WeightsAndBiases(cfg, directory, step)
        for name in cfg.train.trackers
    ]
    file = MetricsFile(directory / "metrics.jsonl", step)
    return Trackers([file, *others], file.seconds)


class Trackers(AbstractContextManager["Trackers"]):
    """All trackers of a run as one. `seconds`: the duration of the run before a resume."""

    def __init__(self, trackers: Sequence[MetricsFile | TensorBoard | WeightsAndBiases], seconds: float = 0.0) -> None:
        self._trackers = trackers
        self.seconds = seconds

    def log(self, step: int, values: JsonView) -> None:
        plain = {name: value.item() if hasattr(value, "item") else value for name, value in values.items()}
        numbers = {name: x if isinstance(x, int) else float(x) for name, x in plain.items()}
        for tracker in self._trackers:
            tracker.log(step, numbers)

    def __exit__(self, *_: object) -> None:
        for tracker in self._trackers:
            tracker.close()


class MetricsFile:
    """Writes one JSON object per line, immediately. A value that is not finite is null, since JSON has no NaN."""

    def __init__(self, path: str | Path, step: int = 0) -> None:
        self.path = Path(path)
        try:
            self.seconds = _drop_after(self.path, step)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise self._cannot_write(error) from error

    def log(self, step: int, values: JsonView) -> None:
        unwritten = json.dumps(finite_or_null({"step": step, **values})).encode() + b"\n"
        try:
            while unwritten:  # a nearly full disk may accept only a part of the bytes
                unwritten = unwritten[self._file.write(unwritten) :]
        except OSError as error:
            raise self._cannot_write(error) from error

    def close(self) -> None:
        self._file.close()

    def _cannot_write(self, error: OSError) -> UserError:
        return UserError(f"cannot write {self.path}: {error.strerror}; free disk space, or set another output")


class TensorBoard:
    """Event files in `tensorboard/`."""

    def __init__(self, directory: Path, step: int) -> None:
        self._writer = _package("tensorboard").SummaryWriter(
            str(directory / "tensorboard"),
            purge_step=step + 1,  # hides the events from this step on
            # File names have a resolution of one second: a quick restart would overwrite the file.
            filename_suffix=f".after-{step}-{secrets.token_hex(4)}",
        )

    def log(self, step: int, values: JsonView) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run in the W&B project `jaxmem`; with WANDB_MODE=offline it is in `wandb/`, for `wandb sync`.

    Charts use the logged `step` instead of W&B's own count, which cannot decrease. Metrics that a killed run logged
    after its last checkpoint appear twice, with the same values.
    """

    def __init__(self, cfg: Config, directory: Path, step: int) -> None:
        wandb = _package("wandb")
        identity = directory / "wandb" / "id"
        if not (step and identity.exists()):  # a run that starts from step 0 is a new one
            write_file(identity, secrets.token_hex(8))
        try:
            self._run = wandb.init(
                project="jaxmem",
                name=cfg.name,
                id=identity.read_text(),
                resume="allow",
                dir=str(directory),
                config=cfg.model_dump(mode="json"),
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.errors.Error as error:
            text = " ".join(str(error).split())
            raise UserError(f"train.trackers: wandb: {text}; run `wandb login`, or set WANDB_MODE=offline") from error
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: JsonView) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


def _package(tracker: str) -> Any:
    try:
        return importlib.import_module(_PACKAGES[tracker])
    except ImportError as error:
        raise UserError(
            f"train.trackers: {tracker} requires {_PACKAGES[tracker]}; run pip install 'jaxmem[{tracker}]', "
            f"or remove {tracker}"
        ) from error


def _drop_after(path: Path, step: int) -> float:
    """Keeps the complete rows up to `step`, and returns the last `seconds` in them: rows of evaluations have none."""
    seconds = 0.0
    if not path.exists():
        return seconds
    with (
        atomic_file(path) as kept,
        path.open(encoding="utf-8", errors="replace") as old,
        kept.open("w", encoding="utf-8") as new,
    ):
        for line in old:
            row = parse_row(line)
            if row is not None and row["step"] <= step:
                new.write(line if line.endswith("\n") else f"{line}\n")
                seconds = row.get("seconds") or seconds
    return seconds
