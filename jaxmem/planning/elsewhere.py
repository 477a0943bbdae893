"""Compiling for GPUs that are not here: XLA makes all decisions on memory and time, and stops before code generation.

The first part of a compilation optimizes the program, schedules it and assigns every value its memory; the second
generates a kernel for each instruction, through MLIR, LLVM and ptxas, and takes five times as long without changing a
byte or the order of an instruction. Between the two XLA dumps its decisions if asked to, then opens its kernel cache.
The file named here is not such a cache, so XLA ends there. A version of XLA that ignores this generates code as well,
with the same numbers (a test compares them).
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxmem.planning.hlo_proto import HloProto

Options = dict[str, bool | str]

# Without a GPU nothing can be timed: XLA takes its default for each kernel.
UNTIMED: Options = {"xla_gpu_autotune_level": "0"}
# jax 0.11 has no default for some matmuls with concatenated operands, such as the gradient of joined weights. At this
# level XLA tries all kernels of each matmul, which takes several times as long.
TRY_ALL: Options = {"xla_gpu_autotune_level": "1"}
_NO_DEFAULT = "No supported config found"
_NO_CACHE = "no-cache-of-kernels"  # a file's name, which XLA's error message repeats
_NO_MESSAGE = b"\xff" * 2**16  # longer than what XLA reads of a file at once; no protobuf message begins like this


def compile_elsewhere(lowered: jax.stages.Lowered) -> tuple[bytes, bytes]:
    """The scheduled module and its buffer assignment, serialized by XLA."""
    try:
        return _compile(lowered, UNTIMED)
    except jax.errors.JaxRuntimeError as error:
        if _NO_DEFAULT not in str(error):
            raise
    return _compile(lowered, TRY_ALL)


def _compile(lowered: jax.stages.Lowered, options: Options) -> tuple[bytes, bytes]:
    with tempfile.TemporaryDirectory(prefix="jaxmem-plan-") as name:
        directory = Path(name)
        no_cache = directory / _NO_CACHE
        no_cache.write_bytes(_NO_MESSAGE)
        dump: Options = {
            "xla_dump_to": name, "xla_dump_hlo_as_proto": True, "xla_gpu_kernel_cache_file": str(no_cache)
        }  # fmt: skip
        try:
            lowered.compile(compiler_options=options | dump)
        except jax.errors.JaxRuntimeError as error:
            if _NO_CACHE not in str(error):
                raise
        dumped = max(directory.glob("*after_optimizations.hlo.pb"), key=lambda file: file.stat().st_size)
        proto = HloProto.FromString(dumped.read_bytes())
    return proto.hlo_module, proto.buffer_assignment


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Without jax's compilation cache, which cannot store such a program."""
    config: Any = jax.config
    before = config.jax_enable_compilation_cache
    config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax decides only once whether it uses one
    try:
        yield
    finally:
        config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
