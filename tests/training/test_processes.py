"""A run by 2 processes of 2 devices each, then of 1, then by 1 process, some killed, one asked to stop: the losses of a
run that never moved.

`cluster.elastic` keeps the batches on a fourth of the devices."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxmem.checkpoint.manager import Checkpoints
from jaxmem.config import Config, load_config, save_config
from jaxmem.distributed.launch import environments
from jaxmem.training.run import run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    (folder / "text").mkdir()
    for number in range(40):
        words = (f"{(number * 7 + i * i) % 101} bottles" for i in range(60 + 5 * number))
        (folder / "text" / f"{number}.txt").write_text("\n".join(words))
    return folder


def config(place: Path, name: str, steps: int) -> Config:
    return load_config(
        {
            "name": name,
            "output": str(place),
            "model": {"preset": "tiny", "layers": 1, "embed": 32, "mlp": 64, "heads": 4, "kv_heads": 4, "head_dim": 8},
            "data": {"source": "text", "path": str(place / "text"), "sequence_length": 32, "held_out": 0.2},
            "batch": {"global_size": 16, "accumulate": 2},
            "mesh": {"fsdp": 4},
            "optimizer": {"name": "sgd", "momentum": 0.9, "schedule": "constant", "learning_rate": 0.1},
            "train": {"steps": steps, "log_every": 1, "evaluate_every": 5, "evaluate_batches": 2},
            "checkpoint": {"every": 2},
            "cluster": {"heartbeat_timeout": 4, "start_timeout": 120, "elastic": True},
        }
    )


def rows(place: Path, name: str) -> list[dict[str, float]]:
    """The logged lines, without what the clock says."""
    file = place / name / "metrics.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [{key: value for key, value in row.items() if "second" not in key} for row in found]


def until_step(place: Path, name: str, step: int, started: list[subprocess.Popen[bytes]], log: Path) -> None:
    end = time.monotonic() + 300
    while not any(row["step"] >= step for row in rows(place, name)):
        assert time.monotonic() < end
        assert all(process.poll() is None for process in started), log.read_text()[-3000:]
        time.sleep(0.05)


@pytest.mark.exhaustive
def test_processes_come_and_go(place: Path) -> None:
    file = place / "asked.yaml"

    # Two processes of two devices; one is killed in the middle.
    save_config(config(place, "moved", steps=100_000), file)
    command = [sys.executable, "-m", "jaxmem", "train", str(file)]
    logs = [place / f"process-{number}.log" for number in range(2)]
    started = []
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # to compile: every process does, for its own devices
    for log, told in zip(logs, environments(2, 2), strict=True):
        with log.open("wb") as target:
            started.append(subprocess.Popen(command, env=os.environ | quick | told, stdout=target, stderr=target))
    try:
        until_step(place, "moved", 5, started, logs[0])
        started[1].send_signal(signal.SIGKILL)
        killed = time.monotonic()
        codes = [process.wait(timeout=60) for process in started]
        assert time.monotonic() - killed < 60
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert codes == [75, -signal.SIGKILL]
    first, second = (log.read_text() for log in logs)
    assert "error: process 1 of 2 (" in first
    assert ") lost: no heartbeat for 4 s; checkpoints are complete" in first
    assert "2 processes on 1 host: all-reduce" in first
    assert "step 1/" in first
    assert "step 1/" not in second  # process 0 speaks for all

    # Two processes of one device continue. One is killed; the other is started again, until its time is nearly over.
    reached = max(row["step"] for row in rows(place, "moved"))
    log = place / "launch.log"
    with log.open("wb") as target:
        restarting = ["launch", "-n", "2", "--devices", "1", "--restarts", "1"]
        command = [sys.executable, "-m", "jaxmem", *restarting, "--", *command]
        launcher = subprocess.Popen(command, env=os.environ | quick, stdout=target, stderr=target)
    try:
        until_step(place, "moved", reached + 1, [launcher], log)
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        os.kill(int(children[1]), signal.SIGKILL)
        end = time.monotonic() + 60
        while "launch: starting again with 1 of 2 processes" not in log.read_text():
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.05)
        reached = max(row["step"] for row in rows(place, "moved"))
        until_step(place, "moved", reached + 1, [launcher], log)
        launcher.send_signal(signal.SIGUSR1)
        assert launcher.wait(timeout=300) == 75
    finally:
        launcher.terminate()
        launcher.wait()
    said = log.read_text()
    assert "[0] resuming after step" in said
    assert "run the same command again" in said
    changes = [line.partition("cluster.elastic: ")[2] for line in said.splitlines() if "cluster.elastic: " in line]
    assert [line.partition(";")[0] for line in changes] == [
        "batch.accumulate was 2, is 4, mesh.fsdp was 4, is 2",
        "batch.accumulate was 2, is 8, mesh.fsdp was 4, is 1",
    ]
    stopped = max(row["step"] for row in rows(place, "moved"))
    with Checkpoints(place / "moved" / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.latest() == stopped

    # One process goes on to the end; and what all of them logged is one run.
    steps = stopped + 2
    result = run(config(place, "moved", steps=steps))
    assert result.step == steps
    run(config(place, "steady", steps=steps))
    trained = {name: [row for row in rows(place, name) if "loss" in row] for name in ("moved", "steady")}
    assert [row["step"] for row in trained["moved"]] == list(range(1, steps + 1))
    for moved, steady in zip(trained["moved"], trained["steady"], strict=True):
        assert moved == pytest.approx(steady, rel=1e-5)
    held_out = {name: {row["step"]: row for row in rows(place, name) if "held_out_loss" in row} for name in trained}
    assert held_out["moved"][5] == pytest.approx(held_out["steady"][5], rel=1e-5)
