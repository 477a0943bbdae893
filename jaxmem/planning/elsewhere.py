"""Compiling for GPUs that are not here: XLA does all that decides on memory and time, and stops before it makes code.

A compilation has two halves. The first optimizes the program, schedules it and gives every value its place in memory;
the second makes a kernel of each instruction, through MLIR, LLVM and ptxas, and takes five times as long. Nothing of
the second changes a byte or the order of a single instruction, and nobody can run what it makes. Between the two XLA
writes down what it has decided, where it is asked to, and then opens its cache of kernels. It is given a file that is
no such cache, so it ends there. A version of XLA that does not mind makes the kernels as well, and the numbers are the
same (a test holds them together).
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
# jax 0.11 has no default for some products of several pieces, such as the gradient of joined weights. Asked to choose
# it looks at all kernels that each product may have, which takes some times as long.
CHOSEN: Options = {"xla_gpu_autotune_level": "1"}
_NO_DEFAULT = "No supported config found"
_NO_CACHE = "no-cache-of-kernels"  # a file's name, which XLA's complaint repeats
_NO_MESSAGE = b"\xff" * 2**16  # longer than what XLA reads of a file at once; no protobuf message begins so


def compile_elsewhere(lowered: jax.stages.Lowered) -> tuple[bytes, bytes]:
    """The scheduled module and its buffer assignment, as XLA serialized them."""
    try:
        return _compile(lowered, UNTIMED)
    except jax.errors.JaxRuntimeError as error:
        if _NO_DEFAULT not in str(error):
            raise
    return _compile(lowered, CHOSEN)


def _compile(lowered: jax.stages.Lowered, how: Options) -> tuple[bytes, bytes]:
    with tempfile.TemporaryDirectory(prefix="jaxmem-plan-") as name:
        directory = Path(name)
        no_cache = directory / _NO_CACHE
        no_cache.write_bytes(_NO_MESSAGE)
        asked: Options = {
            "xla_dump_to": name, "xla_dump_hlo_as_proto": True, "xla_gpu_kernel_cache_file": str(no_cache)
        }  # fmt: skip
        try:
            lowered.compile(compiler_options=how | asked)
        except jax.errors.JaxRuntimeError as error:
            if _NO_CACHE not in str(error):
                raise
        written = max(directory.glob("*after_optimizations.hlo.pb"), key=lambda file: file.stat().st_size)
        proto = HloProto.FromString(written.read_bytes())
    return proto.hlo_module, proto.buffer_assignment


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Such a program cannot be kept in jax's cache."""
    config: Any = jax.config
    before = config.jax_enable_compilation_cache
    config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax decides only once whether it uses one
    try:
        yield
    finally:
        config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
