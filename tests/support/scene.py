"""A place where small runs happen in processes of their own, to be disturbed and watched from outside.

All share what they compile, so that a start costs little more than its imports. When something is to happen to a run is
told in processor seconds, which are the same on a busy machine as on a quiet one.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from jaxmem.config import load_config, save_config
from jaxmem.distributed.launch import environments

PATIENCE = 1800  # s that any one thing may take, on a machine that does other things beside
TICK = os.sysconf("SC_CLK_TCK")


class StuckError(Exception):
    """What should happen does not."""


class Started:
    """Processes that are one run; what they say goes to one file."""

    def __init__(self, commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], log: Path) -> None:
        self._log, self._used = log, 0.0
        with log.open("wb") as target:
            self.processes = [
                subprocess.Popen(
                    command,
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=target,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                for command, environment in commands
            ]

    @property
    def told(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    @property
    def codes(self) -> list[int | None]:
        return [process.poll() for process in self.processes]

    def seconds(self) -> float:
        """Of a processor, that those which live have taken."""
        if found := [_seconds(process.pid) for process in self.processes if process.poll() is None]:
            self._used = max(self._used, sum(found))
        return self._used

    def until(self, happened: Callable[[], bool]) -> bool:
        """Whether it happened before they ended."""
        end = time.monotonic() + PATIENCE
        while not happened():
            if self.ended:
                return happened()
            if time.monotonic() > end:
                self.kill()
                raise StuckError(f"nothing happens any more:\n{self.told[-3000:]}")
            time.sleep(0.002)
        return True

    def wait(self) -> str:
        """Until all have ended; what they said."""
        self.until(lambda: self.ended)
        return self.told

    def send(self, number: int) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        for process in self.processes:
            process.wait()


def _seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended since
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICK  # utime and stime


class Disk:
    """A small disk of its own at `place`, which can be filled or made read-only; only what is run by it sees it."""

    def __init__(self, place: Path, size: str) -> None:
        place.mkdir()
        mount = f"mount -t tmpfs -o size={size} none '{place}' && echo ready && exec sleep infinity"
        self._anchor = subprocess.Popen(["unshare", "-rm", "sh", "-c", mount], stdout=subprocess.PIPE, text=True)
        assert self._anchor.stdout
        if self._anchor.stdout.readline() != "ready\n":
            raise StuckError("a disk of its own needs unshare(1) and the right to make a namespace")
        self._place = place
        self.seen = Path(f"/proc/{self._anchor.pid}/root{place}")  # from outside
        self._inside = ["nsenter", "--preserve-credentials", "-U", "-m", "-t", str(self._anchor.pid), "--"]
        self.prefix = [
            *self._inside,
            "setpriv",
            "--bounding-set=-dac_override,-dac_read_search",
            "--",
        ]  # root is nobody

    def fill(self) -> None:
        """To the last byte."""
        with (self.seen / "filler").open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(1 << 12))
            except OSError:
                return

    def empty(self) -> None:
        (self.seen / "filler").unlink()

    def make_read_only(self) -> None:
        subprocess.run([*self._inside, "mount", "-o", "remount,ro", str(self._place)], check=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._anchor.kill()
        self._anchor.wait()


class Network:
    """Two hosts, namespaces of this one, joined by a cable that can be cut."""

    names, addresses = ("jaxmem-a", "jaxmem-b"), ("10.231.0.1", "10.231.0.2")

    def __enter__(self) -> Self:
        self._remove()  # what a killed process has left
        for name in self.names:
            self._ip("netns", "add", name)
        ends = [["netns", name] for name in self.names]
        self._ip("link", "add", "cable", *ends[0], "type", "veth", "peer", "name", "cable", *ends[1])
        for name, address in zip(self.names, self.addresses, strict=True):
            self._ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                self._ip("-n", name, "link", "set", device, "up")
            hosts = Path("/etc/netns", name, "hosts")  # seen as /etc/hosts in the namespace
            hosts.parent.mkdir(parents=True)
            hosts.write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def cut(self) -> None:
        self._ip("-n", self.names[1], "link", "set", "cable", "down")

    def inside(self, host: int) -> list[str]:
        """What a command is run by."""
        return ["ip", "netns", "exec", self.names[host]]

    def _remove(self) -> None:
        for name in self.names:
            if Path("/run/netns", name).exists():
                self._ip("netns", "delete", name)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True)


class Scene:
    """A folder with text and pairs of answers to learn from, one of which the config names, and runs in it."""

    def __init__(self, place: Path, config: Mapping[str, Any]) -> None:
        self.place, self.runs, self._config = place, place / "runs", config
        self.environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(place / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "PYTHONUNBUFFERED": "1",
        }
        self._started = 0
        self.text = place / "text"
        self.text.mkdir(parents=True)
        for number in range(40):
            words = (f"{(number * 7 + i * i) % 101} bottles" for i in range(60 + 5 * number))
            (self.text / f"{number}.txt").write_text("\n".join(words))
        pairs = (
            {"prompt": f"{number}?", "chosen": f"{number} bottles", "rejected": f"{number} glasses"}
            for number in range(60)
        )
        (place / "preferences.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))

    def forget_compiled(self) -> None:
        shutil.rmtree(self.environment["JAX_COMPILATION_CACHE_DIR"])

    def write(self, name: str, sections: Mapping[str, Any] | None = None) -> Path:
        """The config file of a run."""
        path = self.place / self._config.get("data", {}).get("path", "text")
        base = {"name": name, "output": str(self.runs), "data": {"path": str(path)}}
        merged: dict[str, Any] = dict(self._config)
        for more in (base, sections or {}):
            for key, value in more.items():
                merged[key] = {**merged.get(key, {}), **value} if isinstance(value, Mapping) else value
        file = self.place / f"{name}.yaml"
        save_config(load_config(merged), file)
        return file

    def start(
        self,
        name: str,
        processes: int = 1,
        devices: int = 2,
        *,
        sections: Mapping[str, Any] | None = None,
        prefix: Sequence[str] = (),
    ) -> Started:
        """`prefix`: of the command, what it is run by."""
        train = [*prefix, sys.executable, "-m", "jaxmem", "train", str(self.write(name, sections))]
        self._started += 1
        log = self.place / f"{self._started}-{name}.log"
        if processes == 1:
            return Started([([*train, "--simulate", str(devices)], self.environment)], log)
        told = environments(processes, devices // processes)
        return Started([(train, self.environment | one) for one in told], log)

    def start_on(self, network: Network, name: str) -> Started:
        """A process on each host of a network."""
        train = [sys.executable, "-m", "jaxmem", "train", str(self.write(name))]
        self._started += 1
        commands = []
        for host, one in enumerate(environments(2, 1)):
            port = one["JAX_COORDINATOR_ADDRESS"].rpartition(":")[2]
            address = {"JAX_COORDINATOR_ADDRESS": f"{network.addresses[0]}:{port}"}
            commands.append(([*network.inside(host), *train], self.environment | one | address))
        return Started(commands, self.place / f"{self._started}-{name}.log")

    def finish(self, name: str, processes: int = 1, **options: Any) -> str:
        """Start until it is done, as a scheduler would; all that was said."""
        told = ""
        for _ in range(5):
            started = self.start(name, processes, **options)
            told += started.wait()
            if started.codes == [0] * processes:
                return told
        raise StuckError(f"{name} does not finish:\n{told[-3000:]}")

    def rows(self, name: str, runs: Path | None = None) -> list[dict[str, Any]]:
        file = (runs or self.runs) / name / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def until_step(self, started: Started, name: str, step: int, runs: Path | None = None) -> None:
        if not started.until(lambda: len(self.rows(name, runs)) >= step):
            raise StuckError(f"{name} does not come to step {step}:\n{started.told[-3000:]}")

    def checkpoints(self, name: str, runs: Path | None = None) -> list[Path]:
        kept = (runs or self.runs) / name / "checkpoints"
        return sorted((path for path in kept.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))

    def outcome(self, name: str, runs: Path | None = None) -> tuple[Any, ...]:
        """All losses, and the checksums of all arrays of the last state: two that are equal are equal to the bit."""
        losses = [(row["step"], row["loss"]) for row in self.rows(name, runs)]
        record = json.loads((self.checkpoints(name, runs)[-1] / "run" / "metadata").read_text())
        return losses, record["leaves"], record["position"]["step"]
