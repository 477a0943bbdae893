"""Compile, and keep what the compiler knows: the scheduled module, who lies where in memory, what it complained of.

A program for devices that are here tells this itself. One for GPUs that are not here does not, and is asked to
write its module into a temporary directory. Such a program cannot be kept in jax's cache, so the cache is off.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxmem.planning import wire
from jaxmem.planning.assembler import sizes_only
from jaxmem.planning.hlo import Module, read_module

# Without a GPU nothing can be timed: XLA takes its default for each kernel.
_DEVICELESS: dict[str, bool | str] = {"xla_gpu_autotune_level": "0"}
# Lines of XLA's log that a plan says in its own words.
_REMARKS = {
    "replicated": re.compile(r"Involuntary full rematerialization.*?for HLO operation (?P<what>%\S+ = \S+)"),
    "state over the limit": re.compile(r"arguments \((?P<what>\d+)\) exceeds the base limit"),
    "over the limit": re.compile(r"Can't reduce memory use below (?P<what>\S+)"),
}


@dataclass(frozen=True)
class Compiled:
    """A program, its module, and its buffer assignment as XLA serialized it."""

    executable: jax.stages.Compiled
    module: Module
    assignment: bytes
    wants_host: bool  # the program as it was given to XLA places values in host memory

    @property
    def total(self) -> int:
        return total(self.executable)


def sizes(executable: jax.stages.Compiled) -> dict[str, int]:
    """Bytes of a device."""
    stats = _stats(executable)
    return {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
    }


def total(executable: jax.stages.Compiled) -> int:
    held = sizes(executable)
    return held["arguments"] + held["outputs"] - held["aliased"] + held["temporaries"]


def host_total(executable: jax.stages.Compiled) -> int:
    """Bytes of host memory for each device."""
    stats = _stats(executable)
    arguments, outputs = stats.host_argument_size_in_bytes, stats.host_output_size_in_bytes
    return arguments + outputs - stats.host_alias_size_in_bytes + stats.host_temp_size_in_bytes


def _stats(executable: jax.stages.Compiled) -> Any:
    return executable.memory_analysis()


def compile_all(
    step: jax.stages.Lowered,
    others: Mapping[str, Callable[[], jax.stages.Lowered]],
    *,
    here: bool,
    code: bool = True,
) -> tuple[Compiled, dict[str, jax.stages.Compiled]]:
    """The step with all that is to be known of it, other programs for their size, side by side: while XLA works on
    one, jax lowers the next.

    `here`: the devices are this machine's. `code` False: what is compiled is for its sizes and never run.
    """
    with contextlib.nullcontext() if here else _without_cache(), ThreadPoolExecutor(1 + len(others)) as pool:
        compiled = pool.submit(_compile_here if here else _compile_elsewhere, step, code)
        options = _options(here, code) or None
        sized = {name: pool.submit(lower().compile, options) for name, lower in others.items()}
        return compiled.result(), {name: one.result() for name, one in sized.items()}


def _compile_here(lowered: jax.stages.Lowered, code: bool) -> Compiled:
    executable = lowered.compile(_options(True, code) or None)
    runtime: Any = executable.runtime_executable()
    module = read_module(runtime.hlo_modules()[0].as_serialized_hlo_module_proto())
    return Compiled(executable, module, _stats(executable).serialized_buffer_assignment_proto, _wants_host(lowered))


def sized(lowered: jax.stages.Lowered, *, here: bool) -> int:
    """Bytes of a device that a program needs, without machine code of it where its devices are not here."""
    with contextlib.nullcontext() if here else _without_cache():
        return total(lowered.compile(_options(here, code=False)))


def _options(here: bool, code: bool) -> dict[str, bool | str]:
    return (_DEVICELESS if not here else {}) | ({} if code else sizes_only(on_gpu=not here))


def _compile_elsewhere(lowered: jax.stages.Lowered, code: bool) -> Compiled:
    with tempfile.TemporaryDirectory(prefix="jaxmem-plan-") as directory:
        options = _options(False, code) | {"xla_dump_to": directory, "xla_dump_hlo_as_proto": True}
        executable = lowered.compile(compiler_options=options)
        written = max(Path(directory).glob("*after_optimizations.hlo.pb"), key=lambda file: file.stat().st_size)
        proto = wire.read(written.read_bytes())
    return Compiled(executable, read_module(wire.data(proto, 1)), wire.data(proto, 3), _wants_host(lowered))


def _wants_host(lowered: jax.stages.Lowered) -> bool:
    return "pinned_host" in lowered.as_text()


@contextlib.contextmanager
def _without_cache() -> Iterator[None]:
    config: Any = jax.config
    before = config.jax_enable_compilation_cache
    config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax decides only once whether it uses one
    try:
        yield
    finally:
        config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


@dataclass
class Remarks:
    """What XLA's log said, by the keys above."""

    found: dict[str, list[str]] = field(default_factory=dict)


@contextlib.contextmanager
def listening() -> Iterator[Remarks]:
    """Catch the lines of XLA's log that a plan says in its own words; all others go on to standard error.

    XLA writes to the process's file descriptor, whatever Python thinks of sys.stderr.
    """
    remarks = Remarks()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as log:
        real = os.dup(2)
        os.dup2(log.fileno(), 2)
        try:
            yield remarks
        finally:
            sys.stderr.flush()
            os.dup2(real, 2)
            log.seek(0)
            for line in log.read().splitlines(keepends=True):
                if not _remarked(line.decode(errors="replace"), remarks):
                    os.write(2, line)
            os.close(real)


def _remarked(line: str, remarks: Remarks) -> bool:
    for key, pattern in _REMARKS.items():
        if found := pattern.search(line):
            said = remarks.found.setdefault(key, [])
            if found["what"] not in said:
                said.append(found["what"])
            return True
    return False
