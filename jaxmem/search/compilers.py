"""A pool of compiler processes, with a cache of their answers on disk.

`concurrent.futures` is not used for two reasons: a killed process would break the entire pool, and processes would
import the calling script, which fails without a `__main__` guard.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Self, TypeVar

from jaxmem.config import Config
from jaxmem.errors import UserError
from jaxmem.machine import devices
from jaxmem.machine.gpus import GIB
from jaxmem.planning.targets import Target, check_compiler, local_target, parse_target, reserved_memory
from jaxmem.search import worker
from jaxmem.search.worker import StepCost
from jaxmem.typing import JsonDict

Answer = TypeVar("Answer")
WORKER_BYTES = 3 << 29  # bytes of memory that a process may need


class RefusedError(Exception):
    """The target does not support a valid config, or the config's program does not compile. The message is the
    reason."""


def compile_target(target: str | None) -> Target:
    """A target by name, by default the devices of this machine. It is checked once, before processes start."""
    if target is not None:
        aim = parse_target(target)
        check_compiler(aim)
        return aim
    import jax

    devices.reserve_gpu_memory()
    here = local_target(jax.devices())
    if here.gpu is None and not here.is_cpu:
        raise UserError(
            f"{here.name} is an unknown GPU; use --target with a known GPU, or with a YAML file that describes this one"
        )
    return dataclasses.replace(here, here=None)  # the compiler processes do not touch the devices


class CompilerPool:
    """with CompilerPool(target) as compilers: cost = compilers.step(cfg)"""

    def __init__(self, target: Target, reserve_gib: float | None = None, processes: int | None = None) -> None:
        self.target = target
        # The processes know the target by name, without what jax reports of the devices of this machine.
        is_measured = reserve_gib is None and target.withheld is not None
        self.reserve_gib = reserved_memory(target) / GIB if is_measured else reserve_gib
        memory = devices.host_memory()["available"]
        # One process per core if the memory is sufficient.
        self.processes = processes or max(1, min(devices.cores(), memory // WORKER_BYTES))
        self.compiled = 0  # number of compiled programs, without answers from the cache
        self._started: list[_CompilerProcess] = []
        self._idle: list[_CompilerProcess] = []
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(self.processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:  # do not wait for programs that are being compiled
            self._threads.shutdown(wait=False, cancel_futures=True)
            for process in self._started:
                process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._idle:
            process.stop()

    def step(self, cfg: Config) -> StepCost:
        return StepCost(**self._answer("step", cfg))

    def phases(self, cfg: Config) -> dict[str, int]:
        """Bytes per device of the phases other than the step."""
        return self._answer("phases", cfg)

    def plan(self, cfg: Config) -> JsonDict:
        """The plan of the step as JSON, compiled without a memory limit."""
        return self._answer("plan", cfg)

    def ask_all(
        self, ask: Callable[[Config], Answer], cfgs: Iterable[Config]
    ) -> Iterator[tuple[Config, Answer | RefusedError]]:
        """Pairs of a config and its answer, in the order in which answers arrive. If a config has no answer, the
        `RefusedError` is yielded instead of raised."""
        futures: dict[Future[Answer], Config] = {self._threads.submit(ask, cfg): cfg for cfg in cfgs}
        for future in as_completed(futures):
            error = future.exception()
            if isinstance(error, RefusedError):
                yield futures[future], error
            else:
                yield futures[future], future.result()

    def _answer(self, question: str, cfg: Config) -> JsonDict:
        key = worker.config_key(question, cfg, self.target, self.reserve_gib)
        answer: JsonDict | None
        if cfg.is_registered or not cfg.user.is_empty:  # other processes lack what a script passes or registers
            with self._lock:
                answer = worker.answer(question, cfg, self.target, self.reserve_gib)
        elif (answer := worker.read_answer(key)) is None:
            with self._process() as process:
                answer = process.ask({"question": question, "config": cfg.model_dump(mode="json")})
            self.compiled += 1
            if not answer.pop("is_temporary", False):
                worker.write_answer(key, answer)
        if "refused" in answer:
            raise RefusedError(answer["refused"])
        return answer

    @contextlib.contextmanager
    def _process(self) -> Iterator[_CompilerProcess]:
        with self._lock:
            if self._idle:
                process = self._idle.pop()
            else:
                process = _CompilerProcess(self.target.name, self.reserve_gib)
                self._started.append(process)
        try:
            yield process
        except BaseException:
            process.stop()
            raise
        with self._lock:
            self._idle.append(process)


class _CompilerProcess:
    def __init__(self, target: str, reserve_gib: float | None) -> None:
        arguments = [target] if reserve_gib is None else [target, str(reserve_gib)]
        self._process = subprocess.Popen(  # noqa: S603 - this package's own module
            [sys.executable, "-m", "jaxmem.search.worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},  # must be set before it imports jax
            start_new_session=True,  # Ctrl-C reaches only the command, which then ends its processes
        )

    def ask(self, question: JsonDict) -> JsonDict:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if answer.endswith("\n"):
            return json.loads(answer)
        needs = f"it needs {WORKER_BYTES / 2**30:.1f} GiB of memory"
        code = self._process.wait()
        if code < 0:  # killed by the kernel for its memory, or by a crash in XLA: only this config is refused
            raise RefusedError(f"the compiler process was killed by {signal.Signals(-code).name}; {needs}")
        raise UserError(f"a compiler process exited with code {code}; its output is above; {needs}")

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        self.kill()
        with contextlib.suppress(BrokenPipeError), self._process:  # closes its pipes and waits for it
            pass
