"""Where a run's numbers go: `metrics.jsonl` always, TensorBoard and Weights & Biases if asked.

Only process 0 writes. A run that goes on from step s first drops what the killed one had logged after s, so that a
file reads as one run. A logged step costs one short write.
"""

from __future__ import annotations

import importlib
import json
import math
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

import jax

from jaxmem.config import Config
from jaxmem.errors import UserError

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


class Tracker(Protocol):
    def log(self, step: int, values: Mapping[str, Any]) -> None: ...

    def back_to(self, step: int) -> None:
        """Forget what was logged of the steps after this one, where that can be."""

    def close(self) -> None: ...


def check_trackers(cfg: Config) -> None:
    """Refuse what is not installed, before anything is compiled."""
    for name in cfg.train.trackers:
        _package(name)


def trackers_for(cfg: Config, directory: str | Path, step: int = 0) -> Trackers:
    """The trackers of a run in `directory` that goes on after `step`; none in other processes than the first."""
    check_trackers(cfg)
    directory = Path(directory)
    if jax.process_index() != 0:
        return Trackers([], {})
    others: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoard(directory, step),
        "wandb": lambda: WeightsAndBiases(cfg, directory, step),
    }
    asked = [others[name]() for name in cfg.train.trackers]
    file = MetricsFile(directory / "metrics.jsonl", step, patient=cfg.checkpoint.on_failure == "continue")
    return Trackers([file, *asked], file.last)


class Trackers:
    """All of a run's trackers as one. `last` is the line that the run had logged last before, or empty."""

    def __init__(self, trackers: list[Tracker], last: dict[str, Any]) -> None:
        self._trackers, self.last = trackers, last

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        values = {name: _number(value) for name, value in values.items()}
        for tracker in self._trackers:
            tracker.log(step, values)

    def back_to(self, step: int) -> None:
        for tracker in self._trackers:
            tracker.back_to(step)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class MetricsFile:
    """One JSON object a line, on disk as soon as it is logged. What is not finite is null: JSON has no NaN.

    `patient`: what cannot be written (a full disk) is kept, and written with the next line; only what is left in the
    end is an error.
    """

    def __init__(self, path: str | Path, step: int = 0, *, patient: bool = False) -> None:
        self.path, self._patient, self._unwritten = Path(path), patient, b""
        try:
            self.last = self._open_after(step)
        except OSError as error:
            raise self._unwritable(error) from error

    def _open_after(self, step: int) -> dict[str, Any]:
        last = _drop_after(self.path, step)
        self._file = self.path.open("ab", buffering=0)
        return last

    def back_to(self, step: int) -> None:
        self.close()
        try:
            self._open_after(step)
        except OSError as error:
            raise self._unwritable(error) from error

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        row = {name: value if math.isfinite(value) else None for name, value in {"step": step, **values}.items()}
        self._unwritten += json.dumps(row).encode() + b"\n"
        try:
            self._write()
        except OSError as error:
            if not self._patient:
                raise self._unwritable(error) from error

    def _write(self) -> None:
        while self._unwritten:  # a disk that is nearly full takes a part
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        try:
            self._write()
        except OSError as error:
            raise self._unwritable(error) from error
        finally:
            self._file.close()

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"cannot write {self.path}: {error.strerror}")


class TensorBoard:
    """Event files in `tensorboard/`."""

    def __init__(self, directory: Path, step: int) -> None:
        self._directory = directory
        self._writer = self._after(step)

    def _after(self, step: int) -> Any:
        return _package("tensorboard").SummaryWriter(
            str(self._directory / "tensorboard"),
            purge_step=step + 1 if step else None,  # hides what was logged from there on
            # Names have seconds only: a quick restart would overwrite the file.
            filename_suffix=f".after-{step}-{secrets.token_hex(4)}",
        )

    def back_to(self, step: int) -> None:
        self._writer.close()
        self._writer = self._after(step)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project `jaxmem`; WANDB_MODE=offline keeps it in `wandb/`, to be sent later by `wandb sync`.

    Charts are over the logged `step`, not over W&B's own count, which cannot go back: what a killed run had
    logged after its last checkpoint is there twice, with the same values.
    """

    def __init__(self, cfg: Config, directory: Path, step: int) -> None:
        wandb = _package("wandb")
        identity = directory / "wandb" / "id"
        if not (step and identity.exists()):  # a run that starts anew is another one
            identity.parent.mkdir(parents=True, exist_ok=True)
            identity.write_text(secrets.token_hex(8))
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
            raise UserError(f"train.trackers: wandb: {text}; WANDB_MODE=offline needs no account") from error
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **values})

    def back_to(self, step: int) -> None:
        """Nothing can be taken back."""

    def close(self) -> None:
        self._run.finish()


def _package(tracker: str) -> Any:
    try:
        return importlib.import_module(_PACKAGES[tracker])
    except ImportError as error:
        raise UserError(
            f"train.trackers: {tracker} needs {_PACKAGES[tracker]}; pip install 'jaxmem[{tracker}]' or drop it"
        ) from error


def _drop_after(path: Path, step: int) -> dict[str, Any]:
    """Keep the whole lines up to `step`; the last of them."""
    if not path.exists():
        return {}
    last: dict[str, Any] = {}
    kept = path.with_name(f"{path.name}.kept")
    with path.open(encoding="utf-8", errors="replace") as old, kept.open("w", encoding="utf-8") as new:
        for line in old:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # the line in which the run was killed
            if isinstance(row, dict) and row.get("step", step + 1) <= step:
                new.write(line if line.endswith("\n") else f"{line}\n")
                last = row
    kept.replace(path)
    return last


def _number(value: Any) -> int | float:
    number = value.item() if hasattr(value, "item") else value
    return number if isinstance(number, int) else float(number)
