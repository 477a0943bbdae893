"""Triton kernels on a CPU, for tests: Triton's interpreter, with bfloat16."""

import importlib
import threading
from typing import Any

import jax
import numpy as np

from jaxmem.kernels.triton_launch import Launch

_ONE = threading.Lock()  # the interpreter changes triton.language while it runs


class _Memory:
    """An array in the form that Triton's interpreter needs."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = array.dtype.name

    def data_ptr(self) -> int:
        return self.array.ctypes.data


def interpret(kernel: Any, how: Launch, results: Any, *arrays: Any) -> Any:
    """For `triton_launch.INTERPRETER`: the outputs of a kernel and its arrays in place."""
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
    made = [np.zeros(x.shape, x.dtype) for x in results]
    for i, copy in zip(how.in_place, made[len(made) - len(how.in_place) :], strict=True):
        copy[...], inputs[i] = inputs[i], copy
    with _ONE, np.errstate(all="ignore"):
        refused, jit.JITFunction.__call__ = jit.JITFunction.__call__, called
        builder = _with_bfloat16(interpreter)
        try:
            function = interpreter.InterpretedFunction(kernel.fn)
            run = Executor(function.rewrite(), function.arg_names, how.grid)
            run(*map(_Memory, [*inputs, *made]), s=how.static)
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
