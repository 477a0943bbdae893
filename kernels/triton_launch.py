"""Launching Triton kernels: by jax-triton on a GPU, by Triton's interpreter on a CPU.

jax-triton is part of the extras `cuda12`, `cuda13`, `plan` and `dev`. To compile for a GPU that this machine does not
have, launch a kernel inside `jax.shard_map`: the mesh names the GPU, and the name determines its compute capability.
"""

import functools
import importlib
import inspect
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from .choice import capability
from .launch import on_each_platform
from .tuning import SHARED

PTX = 87  # the first version with compute capability 12.0; newer ones need a newer ptxas


def load_programs(module: str) -> Any:
    """A module `...<operation>.triton_programs`; ValueError if Triton or jax-triton is not installed."""
    try:
        importlib.import_module("jax_triton")
        return importlib.import_module(module)
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("triton", "jax_triton"):
            raise
        operation = module.split(".")[-2]
        text = f"{operation}: the triton implementation needs jax-triton: pip install 'jaxmem[cuda13]'"
        raise ValueError(text) from error


def launch(
    kernel: Any,
    arrays: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    grid: tuple[int, ...],
    static: Any,
    warps: int,
    stages: int,
    flops: float = 0.0,
    in_place: Mapping[int, int] | None = None,
) -> list[jax.Array]:
    """Runs `kernel(*arrays, *outputs, s=static)` on a grid. `in_place`: {index of an array: index of the output that
    reuses its memory}. `flops`: as in `on_each_platform`."""
    compute_capability = capability()

    def on_cpu(*arrays: jax.Array) -> list[jax.Array]:
        interpret = functools.partial(_interpret, kernel, grid, static, tuple(outputs))
        return list(jax.pure_callback(interpret, list(outputs), *arrays))

    def on_gpu(*arrays: jax.Array) -> list[jax.Array]:
        call = _triton_call()
        options: dict[str, Any] = {
            "compute_capability": compute_capability,
            "num_warps": warps,
            "num_stages": stages,
            "input_output_aliases": dict(in_place or {}),
            "s": static,
        }
        # jax-triton 0.4 renames two arguments; 0.3 leaves the version of PTX to Triton.
        if "out_type" in inspect.signature(call).parameters:
            options |= {"out_type": list(outputs), "backend_options": {"enable_fp_fusion": True, "ptx_version": PTX}}
        else:
            options |= {"out_shape": list(outputs), "enable_fp_fusion": True}
        return list(call(*arrays, kernel=kernel, grid=grid, **options))

    return list(on_each_platform(kernel.__name__, flops, cpu=on_cpu, gpu=on_gpu)(*arrays))


@functools.cache
def _triton_call() -> Any:
    """jax-triton's call, with a check of the shared memory at compile time instead of at the launch."""
    library: Any = importlib.import_module("jax_triton.triton_lib")
    compiled = library.compile_ttir_inplace

    def check_shared_memory(module: Any, backend: Any, options: Any, target: Any, *rest: Any) -> Any:
        made = compiled(module, backend, options, target, *rest)
        number = getattr(target, "arch", target)  # jax-triton 0.3 passes the compute capability itself: 90 for 9.0
        name = f"{number // 10}.{number % 10}"
        if (needed := made.shared_mem_bytes) > SHARED.get(name, needed):
            raise ValueError(
                f"{made.name}: a block needs {needed:,} bytes of shared memory; compute capability {name} has"
                f" {SHARED[name]:,}; use smaller blocks or another implementation"
            )
        return made

    library.compile_ttir_inplace = check_shared_memory
    return library.triton_call


# ---------------------------------------------------------------- interpreted

_ONE = threading.Lock()  # the interpreter changes triton.language while it runs


class _Memory:
    """An array in the form that Triton's interpreter needs."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = array.dtype.name

    def data_ptr(self) -> int:
        return self.array.ctypes.data


def _interpret(kernel: Any, grid: tuple[int, ...], static: Any, outputs: Any, *arrays: Any) -> Any:
    interpreter = importlib.import_module("triton.runtime.interpreter")
    jit = importlib.import_module("triton.runtime.jit")

    class Executor(interpreter.GridExecutor):  # type: ignore[name-defined]
        def _init_args_hst(self, args: Any, kwargs: Any) -> Any:
            return args, kwargs

        def _restore_args_dev(self, *_: Any) -> None:
            """Nothing to copy: programs write into the arrays."""

    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        """Interprets a function that a kernel calls; otherwise Triton refuses to call it from Python."""
        return interpreter.InterpretedFunction(function.fn).rewrite()(*args, **kwargs)

    inputs = [np.ascontiguousarray(x) for x in arrays]
    made = [np.zeros(x.shape, x.dtype) for x in outputs]
    with _ONE, np.errstate(all="ignore"):
        refused, jit.JITFunction.__call__ = jit.JITFunction.__call__, called
        builder = _with_bfloat16(interpreter)
        try:
            function = interpreter.InterpretedFunction(kernel.fn)
            run = Executor(function.rewrite(), function.arg_names, grid)
            run(*map(_Memory, [*inputs, *made]), s=static)
        finally:
            jit.JITFunction.__call__ = refused
            del builder.cast_impl, builder.create_dot
    return made


def _with_bfloat16(interpreter: Any) -> Any:
    """Corrects the interpreter, which stores bfloat16 as bits: it would multiply the bits, and truncate casts."""
    builder = interpreter.interpreter_builder
    kind, held, bits = type(builder), interpreter.TensorHandle, jax.numpy.bfloat16

    def wide(x: Any) -> Any:
        return x.data.view(bits).astype(np.float32) if x.dtype.scalar.name == "bf16" else x.data

    def cast_impl(source: Any, to: Any) -> Any:
        if (source.dtype.scalar.name, to.scalar.name) != ("fp32", "bf16"):
            return kind.cast_impl(builder, source, to)
        return held(source.data.astype(bits).view(np.uint16), to.scalar)

    def create_dot(a: Any, b: Any, d: Any, *_: Any) -> Any:
        return held(np.matmul(wide(a), wide(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot
    return builder
