"""Compile many configs side by side, each process its own; what is known already is not asked again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any, Self

from jaxmem.config import Config
from jaxmem.errors import UserError
from jaxmem.planning import Target
from jaxmem.search import kept
from jaxmem.search.facts import Facts

WORKER_BYTES = 3 << 29  # that a process may need


class RefusedError(Exception):
    """A config that is valid and yet has no program on this target, or none that could be made; says why."""


class Compilers:
    """with Compilers(target) as compilers: facts = compilers.step(cfg)"""

    def __init__(self, target: Target, reserve_gib: float | None = None, processes: int | None = None) -> None:
        self.target, self.reserve_gib = target, reserve_gib
        self.processes = processes or _processes()
        self.compiled = 0  # programs, this time; the others were known
        self._started: list[_Process] = []
        self._free: list[_Process] = []
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(self.processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:  # what still compiles is not waited for
            for process in self._started:
                process.kill()
        self._pool.shutdown(cancel_futures=True)
        for process in self._free:
            process.stop()

    def step(self, cfg: Config) -> Facts:
        answer = self._answer("step", cfg)
        return Facts(**answer)

    def phases(self, cfg: Config) -> dict[str, int]:
        return self._answer("phases", cfg)

    def plan(self, cfg: Config) -> dict[str, Any]:
        """Of the step, as JSON, with no limit on memory."""
        return self._answer("plan", cfg)

    def each(self, ask: Callable[[Config], Any], cfgs: Iterable[Config]) -> Iterator[tuple[Config, Any]]:
        """Answers as they come; `RefusedError` stands for one that there is none to."""
        futures: dict[Future[Any], Config] = {self._pool.submit(ask, cfg): cfg for cfg in cfgs}
        for future in as_completed(futures):
            error = future.exception()
            if error is not None and not isinstance(error, RefusedError):
                raise error
            yield futures[future], error or future.result()

    def _answer(self, question: str, cfg: Config) -> dict[str, Any]:
        name = kept.name_of(question, cfg, self.target, self.reserve_gib)
        answer = kept.read(name)
        if answer is None:
            with self._process() as process:
                answer = process.ask({"question": question, "config": cfg.model_dump(mode="json")})
            self.compiled += 1
            kept.write(name, answer)
        if "refused" in answer:
            raise RefusedError(answer["refused"])
        return answer

    @contextlib.contextmanager
    def _process(self) -> Iterator[_Process]:
        with self._lock:
            if self._free:
                process = self._free.pop()
            else:
                process = _Process(self.target.name, self.reserve_gib)
                self._started.append(process)
        try:
            yield process
        except BaseException:
            process.stop()
            raise
        with self._lock:
            self._free.append(process)


class _Process:
    def __init__(self, target: str, reserve_gib: float | None) -> None:
        arguments = [target] if reserve_gib is None else [target, str(reserve_gib)]
        self._process = subprocess.Popen(  # noqa: S603 - this package's own module
            [sys.executable, "-m", "jaxmem.search.worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},  # before it imports jax
            start_new_session=True,  # Ctrl-C is for the command alone, which then ends these
        )

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer.endswith("\n"):
            raise self._ended(self._process.wait())
        return json.loads(answer)

    def _ended(self, code: int) -> Exception:
        """What kills a process, the system for its memory or XLA for a program that it takes ill, says something of
        that config; an error of its own would meet every other one, too."""
        needs = f"it needs {WORKER_BYTES / 2**30:.1f} GiB of memory"
        if code < 0:
            return RefusedError(f"the process that compiled it was ended by {signal.Signals(-code).name}; {needs}")
        return UserError(f"the compiler's process ended with code {code}; its messages stand above; {needs}")

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        self.kill()
        with contextlib.suppress(BrokenPipeError), self._process:  # closes its pipes and waits for it
            pass


def _processes() -> int:
    """One a core, as long as there is memory for them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return max(1, min(cores, memory // WORKER_BYTES))
