"""metrics.jsonl reads as one run whatever was killed; other trackers are there or refused at the start."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxmem.config import Config
from jaxmem.errors import UserError
from jaxmem.training.trackers import MetricsFile, check_trackers, trackers_for


def config(*trackers: str) -> Config:
    return Config.model_validate(
        {"name": "x", "model": {"family": "mlp"}, "train": {"steps": 9, "trackers": list(trackers)}}
    )


def rows(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_numbers_of_any_kind_are_on_disk_at_once(tmp_path: Path) -> None:
    with trackers_for(config(), tmp_path) as trackers:
        assert trackers.seconds == 0
        trackers.log(3, {"loss": np.float32(1.5), "tokens": 7, "gradient_norm": float("nan"), "rate": np.int64(2)})
        assert rows(tmp_path) == [{"step": 3, "loss": 1.5, "tokens": 7, "gradient_norm": None, "rate": 2}]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_a_killed_run_and_its_second_half_read_as_one(tmp_path: Path) -> None:
    for first, last in ((1, 7), (5, 9)):  # killed after 7, back to the checkpoint of 4
        with trackers_for(config(), tmp_path, step=first - 1) as trackers:
            assert trackers.seconds == (40 if first == 5 else 0)
            for step in range(first, last + 1):
                trackers.log(step, {"loss": 9.0 - step, "seconds": step * 10})
                if step == 4:
                    trackers.log(step, {"held_out_loss": 9.0})  # a row without seconds
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write('{"step": 8, "lo')  # torn
    with trackers_for(config(), tmp_path, step=9):
        pass
    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == list(range(1, 10))
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_damaged_rows_are_dropped(tmp_path: Path) -> None:
    """Bytes that are not text, values of other types: of the file only rows are left, and reports read it."""
    good = b'{"step": 1, "loss": 2.5, "tokens": 7, "seconds": 1.5}\n'
    bad = [
        b"\xff\xfe{}\n", b'{"step": "1"}\n', b'{"step": 1, "seconds": "long"}\n', b'{"step": 1, "tokens": [3]}\n',
        b'{"step": true}\n', b'{"step": NaN}\n', b'{"step": 1e400}\n', b"[1]\n", b"[" * 100_000 + b"\n", b"\0\n",
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_bytes(b"".join([bad[0], good, *bad]))
    with trackers_for(config(), tmp_path, step=4) as trackers:
        assert trackers.seconds == 1.5
    assert (tmp_path / "metrics.jsonl").read_bytes() == good


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write .*metrics.jsonl: No such file"):
        trackers_for(config(), tmp_path / "absent")
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.close()
    file._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
    with pytest.raises(UserError, match="No space left"):
        file.log(1, {"loss": 1.0})
    file.close()


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_what_is_not_installed_is_refused(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(
        UserError, match=rf"train.trackers: {name} requires {package}; run pip install 'jaxmem\[{name}\]'"
    ):
        check_trackers(config(name).train.trackers)


def test_tensorboard_writes_events(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event

    for step in (0, 4):
        with trackers_for(config("tensorboard"), tmp_path, step=step) as trackers:
            trackers.log(step + 1, {"loss": 2.5, "tokens": 3})
    events = [event for file in sorted((tmp_path / "tensorboard").iterdir()) for event in read_events(file, Event)]
    scalars = [(event.step, value.tag, value.simple_value) for event in events for value in event.summary.value]
    assert sorted(scalars) == [(1, "loss", 2.5), (1, "tokens", 3.0), (5, "loss", 2.5), (5, "tokens", 3.0)]
    assert [event.step for event in events if event.HasField("session_log")] == [1, 5]  # hides what is from there on


def read_events(file: Path, kind: Any) -> list[Any]:
    """TensorBoard's records: length, its checksum, the event, its checksum."""
    data, found = file.read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")
        found.append(kind.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    return found


class FakeRun:
    def __init__(self) -> None:
        self.told: list[Any] = []

    def define_metric(self, name: str, step_metric: str) -> None:
        self.told.append((name, step_metric))

    def log(self, values: dict[str, Any]) -> None:
        self.told.append(values)

    def finish(self) -> None:
        self.told.append("finished")


class WandbError(Exception):
    pass


def test_wandb_goes_on_as_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[dict[str, Any], FakeRun]] = []

    def init(**given: Any) -> FakeRun:
        runs.append((given, FakeRun()))
        if given["name"] == "y":
            raise WandbError("no API\nkey")
        return runs[-1][1]

    fake = SimpleNamespace(
        init=init,
        Settings=lambda **given: given,
        errors=SimpleNamespace(Error=WandbError),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for step in (0, 4, 0):
        with trackers_for(config("wandb"), tmp_path, step=step) as trackers:
            trackers.log(step + 1, {"loss": 2.5})
    identity = tmp_path / "wandb" / "id"
    elsewhere = tmp_path / "elsewhere"
    identity.rename(elsewhere)
    identity.symlink_to(elsewhere)
    before = elsewhere.read_text()
    with trackers_for(config("wandb"), tmp_path):
        pass
    assert elsewhere.read_text() == before != identity.read_text()
    del runs[-1]
    first, on, anew = (given["id"] for given, _ in runs)
    assert first == on != anew
    assert runs[1][1].told == [("*", "step"), {"step": 5, "loss": 2.5}, "finished"]
    with pytest.raises(UserError, match="wandb: no API key; run `wandb login`, or set WANDB_MODE=offline"):
        trackers_for(config("wandb").model_copy(update={"name": "y"}), tmp_path)
