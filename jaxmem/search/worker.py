"""A compiler process: one JSON question per line in, one JSON answer per line out, until its input ends.

`python -m jaxmem.search.worker TARGET [RESERVE_GIB]` starts it. It needs about 1 GiB of memory and uses no accelerator.
All output of XLA and other libraries goes to standard error.

Answers are cached on disk, by config, target, versions of packages, flags and the sources of this package: small JSON
files in the user's cache directory ($XDG_CACHE_HOME, by default ~/.cache), written atomically, so that searches can
share them. The directory can be deleted at any time; configs are then compiled again.
"""

import contextlib
import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import jaxmem.kernels
from jaxmem.config import Config
from jaxmem.errors import one_line
from jaxmem.machine import devices
from jaxmem.machine.files import write_file
from jaxmem.machine.gpus import CPU
from jaxmem.planning.compile import compile_program, replicated_arrays
from jaxmem.planning.hlo import rematerialized
from jaxmem.planning.result import Plan, evaluate_bytes
from jaxmem.planning.targets import Target, parse_target, target_devices, usable_memory
from jaxmem.planning.timeline import timeline
from jaxmem.step.programs import program
from jaxmem.typing import JsonDict, JsonView

# Packages and variables of the environment that change programs.
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "jax-triton", "triton")
_FLAGS = ("XLA_FLAGS", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_ENABLE_X64")
_IRRELEVANT = {"name", "output", "seed", "checkpoint"}  # keys that do not change any program


def cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxmem" / "fit"


def config_key(question: str, cfg: Config, target: Target, reserve_gib: float | None) -> str:
    """The key of a question about a config; configs with the same answer have the same key."""
    config = cfg.model_dump(mode="json", exclude=_IRRELEVANT)
    return _key({"question": question, "config": config, "sources": _sources(), "reserve": reserve_gib}, target)


def program_key(text: str, target: Target, limit: int) -> str:
    """The key of a lowered program. `limit`: bytes of a device, to which XLA reduces the memory of a program for
    GPUs."""
    return _key({"program": text, "limit": limit if target.gpu else 0}, target)


def read_answer(key: str) -> JsonDict | None:
    """The answer; None if the file does not exist or is incomplete."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((cache_directory() / f"{key}.json").read_text())
    return None


def write_answer(key: str, answer: JsonDict) -> None:
    with contextlib.suppress(OSError):  # the disk is full or read-only: the next search compiles again
        write_file(cache_directory() / f"{key}.json", json.dumps(answer))


def _key(content: JsonView, target: Target) -> str:
    gpu = target.gpu  # programs for CPUs do not depend on the memory
    machine = {
        "target": [repr(gpu), target.count, target.per_host, target.memory if gpu else 0],
        "versions": devices.package_versions(_PACKAGES),
        "flags": {name: os.environ.get(name, "") for name in _FLAGS},
    }
    return hashlib.sha256(json.dumps({**content, **machine}, sort_keys=True).encode()).hexdigest()


@functools.cache
def _sources() -> str:
    digest = hashlib.sha256()
    for folder in (*jaxmem.__path__, *jaxmem.kernels.__path__):
        for file in sorted(Path(folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class StepCost:
    """The cost of a compiled step per device."""

    total: int  # bytes
    host: int  # bytes of host memory
    seconds: float  # estimated from the compiled program; seconds for CPUs are only comparable with each other
    kinds: Mapping[str, int]  # bytes by category, and of activations by kind
    recomputed: int  # number of values that XLA recomputes or moves by itself to stay within memory


def step_cost(cfg: Config, target: Target, reserve_gib: float | None) -> JsonDict:
    """The fields of `StepCost`. The step is compiled; nothing is allocated and no machine code is generated."""
    built = program(cfg, target_devices(target, usable_memory(target, cfg.memory, reserve_gib)))
    step = compile_program(built.lower_step(), here=target.is_here, runs=False)
    plan = Plan(built, target, step, 0.0, reserve_gib)
    timed = timeline(step.module, target.gpu or CPU, target.count, target.per_host)
    categories = {name: size for name, size in plan.bytes_per_device.items() if name not in ("activations", "total")}
    cost = StepCost(
        total=step.total,
        host=plan.host_bytes,
        seconds=timed.seconds,
        kinds=categories | plan.breakdown.kinds.get("activations", {}),
        recomputed=len(rematerialized(step.module)),
    )
    return vars(cost)


def step_plan(cfg: Config, target: Target, _: float | None) -> JsonDict:
    """The step in a plan, as JSON, and its `memory` over time; compiled without a memory limit, so that XLA recomputes
    nothing by itself."""
    built = program(cfg, target_devices(target, 1000 * target.memory))
    step = compile_program(built.lower_step(), here=target.is_here, runs=False)
    plan = Plan(built, target, step, 0.0)
    return {**plan.step_as_json(), "memory": plan.history}


def other_phases(cfg: Config, target: Target, reserve_gib: float | None) -> JsonDict:
    """Bytes per device of the phases other than the step. Many configs share these programs, so each program is cached
    by its text."""
    limit = usable_memory(target, cfg.memory, reserve_gib)
    built = program(cfg, target_devices(target, limit))
    sizes = {}
    for phase, lower in built.lower_others().items():
        lowered = lower()
        key = program_key(lowered.as_text(), target, limit)
        if (cached := read_answer(key)) is None:
            cached = {"total": compile_program(lowered, here=target.is_here, runs=False).total}
            write_answer(key, cached)
        sizes[phase] = cached["total"]
    if "evaluate" in sizes:
        sizes["evaluate"] = evaluate_bytes(built, sizes["evaluate"])
    return sizes


QUESTIONS = {"step": step_cost, "plan": step_plan, "phases": other_phases}


def answer(question: str, cfg: Config, target: Target, reserve_gib: float | None = None) -> JsonDict:
    """The answer to a question; if the config has no program, or its program does not compile, the reason, and whether
    it is temporary: the machine lacked memory or files."""
    try:
        with replicated_arrays():  # filters XLA's log
            return QUESTIONS[question](cfg, target, reserve_gib)
    except Exception as error:  # noqa: BLE001 - a config that fails must not end a search
        return {"refused": one_line(error), "is_temporary": _is_temporary(error)}


def _is_temporary(error: BaseException | None) -> bool:
    return error is not None and (isinstance(error, (OSError, MemoryError)) or _is_temporary(error.__cause__))


def serve(questions: Iterable[str], answers: TextIO, target: Target, reserve_gib: float | None = None) -> None:
    for line in questions:
        asked = json.loads(line)
        try:
            cfg = Config.model_validate_json(json.dumps(asked["config"]))
            reply = answer(asked["question"], cfg, target, reserve_gib)
        except ValueError as error:  # of pydantic, in several lines
            reply = {"refused": f"invalid in a compiler process: {' '.join(str(error).split())}", "is_temporary": True}
        answers.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    output = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    devices.collect_garbage_rarely()
    name, *reserve = sys.argv[1:]
    aim = parse_target(name)
    if aim.is_cpu:
        devices.simulate(aim.count)
    serve(sys.stdin, output, aim, float(reserve[0]) if reserve else None)
