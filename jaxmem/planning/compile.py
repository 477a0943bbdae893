"""Compiling a program, and reading what the compiler decided: the scheduled module, the buffer assignment, the log.

A program for local devices is compiled as it will run. For GPUs that are not installed, compilation stops before code
generation. The first part of a compilation optimizes the program, schedules it and assigns memory to each value. The
second part generates a kernel for each instruction, through MLIR, LLVM and ptxas: it takes five times as long, and
changes neither bytes nor the order of instructions. Between the two parts XLA dumps its decisions on request, and then
opens its kernel cache. jaxmem names a file that is not a valid cache, so XLA stops there with an error. A version of
XLA that ignores this file also generates code; the bytes are the same (a test compares them).
"""

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxmem.errors import UserError
from jaxmem.kernels.scopes import runs_on_some_devices
from jaxmem.machine.terminal import filtered_stderr
from jaxmem.planning.buffers import sizes_of
from jaxmem.planning.hlo import HloProto, Module, read_module
from jaxmem.step.programs import XlaOptions

# Lines of XLA's log that are not printed. A plan has its own warning about replicated arrays and about a program that
# exceeds the memory; and compilation is repeated with `TRY_ALL` if a matmul has no default kernel.
_REPLICATED = re.compile(rb"(?m)^.*Involuntary full rematerialization.*?for HLO operation (?P<array>%\S+ = \S+).*\n?")
_OVER_LIMIT = re.compile(rb"(?m)^.*(?:arguments \(\d+\) exceeds the base limit|Can't reduce memory use below).*\n?")
_NO_DEFAULT_LOG = re.compile(rb"(?ms)^E\d{4} [^\n]*\] Could not get config for HLO.*?(?=^[EIW]\d{4} |\Z)")
# Without LLVM's optimization, for programs that never run: it takes half of the compile time on CPUs.
_QUICK: XlaOptions = {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": True}
# Without a GPU no kernel can be timed, so XLA uses its default kernel for each matmul.
UNTIMED: XlaOptions = {"xla_gpu_autotune_level": "0"}
# jax 0.11 has no default kernel for some matmuls with concatenated operands, e.g. the gradient of joined weights. At
# this level XLA tries all kernels of each matmul, which takes several times as long.
TRY_ALL: XlaOptions = {"xla_gpu_autotune_level": "1"}
_NO_DEFAULT = "No supported config found"
_NO_CACHE = "no-cache-of-kernels"  # the name of the invalid cache file, which XLA's error message contains


@dataclass(frozen=True)
class CompiledProgram:
    """A program as XLA compiled it. XLA's module and buffer assignment are serialized."""

    serialized_module: bytes
    assignment: bytes
    wants_host: bool = False  # whether the program requests values in host memory
    executable: jax.stages.Compiled | None = None  # None: compiled for devices that are not installed

    @cached_property
    def module(self) -> Module:
        return read_module(self.serialized_module)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes per device by the keys of `sizes_of`: arguments, outputs, temporaries, ..."""
        return sizes_of(self.assignment, on_host=False)

    @property
    def total(self) -> int:
        """Bytes of device memory."""
        return _sum(self.sizes) if self.assignment else total_of(self.executable)

    @cached_property
    def host_total(self) -> int:
        """Bytes of host memory for each device."""
        return _sum(sizes_of(self.assignment, on_host=True))


def _sum(sizes: Mapping[str, int]) -> int:
    return sizes["arguments"] + sizes["outputs"] - sizes["aliased"] + sizes["temporaries"] + sizes["constants"]


def compile_program(lowered: jax.stages.Lowered, *, here: bool, runs: bool = True) -> CompiledProgram:
    """Compiles a program. `here`: whether the devices are those of this machine; `runs`: false if it never runs."""
    with contextlib.nullcontext() if here else without_cache():
        return _with_assignment(lowered, _compile(lowered, here, runs))


def compile_all(
    step: jax.stages.Lowered, others: Mapping[str, Callable[[], jax.stages.Lowered]], *, here: bool
) -> tuple[CompiledProgram, dict[str, int]]:
    """The compiled step, and bytes per device of other programs; `others`: functions that lower them, by name. Compiles
    in threads while jax lowers the next program."""
    with contextlib.nullcontext() if here else without_cache(), ThreadPoolExecutor(1 + len(others)) as pool:
        compiled = pool.submit(_compile, step, here, True)
        programs = {name: pool.submit(_compile, lower(), here, True) for name, lower in others.items()}
        totals = {name: program.result().total for name, program in programs.items()}
    return _with_assignment(step, compiled.result()), totals


def check_stages(module: Module, stages: int) -> None:
    """Refuses a program in which a pipeline stage would wait for the other stages: XLA lets all devices take part in a
    collective-permute, but at this time other stages run another operation. Other collectives are among the devices of
    one stage."""
    if stages == 1:
        return
    of_stage = [
        instruction
        for instruction in module.walk()
        if instruction.opcode.startswith("collective-permute") and runs_on_some_devices(instruction.op_name)
    ]
    if of_stage:
        raise UserError(
            f"mesh.stage={stages}: XLA moves {of_stage[0].shape} within a stage by a collective-permute, for which "
            "it would wait for other stages; use mesh.stage=1, or the default `rules`"
        )


def total_of(executable: Any) -> int:
    """Bytes of device memory that a compiled program needs. Without a buffer assignment (see `_with_assignment`) they
    lack the arrays that the program contains."""
    sizes = executable.memory_analysis()
    if sizes.serialized_buffer_assignment_proto:
        return _sum(sizes_of(sizes.serialized_buffer_assignment_proto, on_host=False))
    outputs = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return sizes.argument_size_in_bytes + outputs + sizes.temp_size_in_bytes


def _with_assignment(lowered: jax.stages.Lowered, program: CompiledProgram) -> CompiledProgram:
    """The program with its module and buffer assignment, which a GPU's program from jax's cache may not have; they are
    compiled again, without code generation."""
    if program.assignment:
        return program
    with without_cache():
        module, assignment = compile_elsewhere(lowered, kernels={})
    return replace(program, serialized_module=module, assignment=assignment)


def _compile(lowered: jax.stages.Lowered, here: bool, runs: bool) -> CompiledProgram:
    wants_host = "pinned_host" in lowered.as_text()
    try:
        if not here:
            return CompiledProgram(*compile_elsewhere(lowered), wants_host)
        executable: Any = lowered.compile(compiler_options=None if runs else _QUICK)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).partition("\n")[0] or "it states no reason"
        raise UserError(f"XLA cannot compile this program: {reason}") from error
    module = executable.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto()
    assignment = executable.memory_analysis().serialized_buffer_assignment_proto
    return CompiledProgram(module, assignment, wants_host, executable)


@contextlib.contextmanager
def replicated_arrays() -> Iterator[list[str]]:
    """A list of the arrays that XLA replicates on every device to reshard them, from its log, as `%name = dtype[dims]`.
    The other lines of the log are written to standard error at the end, except for lines that plans explain."""
    arrays: list[str] = []

    def other_lines(log: bytes) -> bytes:
        arrays.extend(dict.fromkeys(match["array"].decode() for match in _REPLICATED.finditer(log)))
        for pattern in (_REPLICATED, _OVER_LIMIT, _NO_DEFAULT_LOG):
            log = pattern.sub(b"", log)
        return log

    with filtered_stderr(other_lines):
        yield arrays


def compile_elsewhere(
    lowered: jax.stages.Lowered, options: XlaOptions | None = None, kernels: XlaOptions = UNTIMED
) -> tuple[bytes, bytes]:
    """The scheduled module and its buffer assignment, serialized by XLA, for devices that are not installed. `kernels`:
    how XLA chooses them."""
    with tempfile.TemporaryDirectory(prefix="jaxmem-plan-") as directory:
        no_cache = Path(directory, _NO_CACHE)
        # An invalid cache: no protobuf message begins with these bytes, and they exceed the block that XLA reads.
        no_cache.write_bytes(b"\xff" * 2**16)
        dump: XlaOptions = {
            "xla_dump_to": directory, "xla_dump_hlo_as_proto": True, "xla_gpu_kernel_cache_file": str(no_cache)
        }  # fmt: skip
        try:
            lowered.compile(compiler_options=(options or {}) | kernels | dump)
        except jax.errors.JaxRuntimeError as error:
            if _NO_DEFAULT in str(error) and kernels is UNTIMED:
                return compile_elsewhere(lowered, options, TRY_ALL)
            if _NO_CACHE not in str(error):
                raise
        dumped = max(Path(directory).glob("*after_optimizations.hlo.pb"), key=lambda file: file.stat().st_size)
        proto = HloProto.FromString(dumped.read_bytes())
    return proto.hlo_module, proto.buffer_assignment


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Turns off jax's compilation cache, which cannot store a program whose compilation was stopped."""
    config: Any = jax.config
    before = config.jax_enable_compilation_cache
    config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # otherwise jax would not read the setting again
    try:
        yield
    finally:
        config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
