"""Launching Triton kernels by jax-triton, on a GPU.

jax-triton is part of the extras `cuda12`, `cuda13`, `plan` and `dev`. To compile for a GPU that this machine does not
have, launch a kernel inside `jax.shard_map`: the mesh names the GPU, and the name determines its compute capability.
Tests set `INTERPRETER`, which runs the programs on a CPU.
"""

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters import partial_eval

from .support import MISSING_TRITON, capability

# Largest shared memory of a block in bytes, by compute capability (CUDA programming guide).
SHARED_MEMORY_BYTES = {"8.0": 166912, "8.6": 101376, "8.9": 101376, "9.0": 232448, "10.0": 232448, "12.0": 101376}
# The first PTX version with compute capability 12.0, and those of other capabilities. Triton would choose the newest
# version that it knows, which needs a newer ptxas.
PTX = 87
LATER_PTX = {103: 88, 110: 90, 121: 88}

INTERPRETER: Callable[..., Any] | None = None  # (kernel, how, shapes of results, *arrays) -> results


def _refuse(*_: Any) -> Any:
    raise ValueError("the triton implementation needs an NVIDIA GPU; use another implementation on a CPU")


def load_programs(module: str) -> Any:
    """A module `...<operation>.triton_programs`; ValueError if Triton or jax-triton is not installed."""
    try:
        importlib.import_module("jax_triton")
        return importlib.import_module(module)
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("triton", "jax_triton"):
            raise
        raise ValueError(f"{module.split('.')[-2]}: {MISSING_TRITON}") from error


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is compiled and launched. `static`: its compile-time values. `in_place`: indices of the arrays that
    the kernel overwrites. `flops`: operations per element of its first output, which the compiled program carries as
    metadata."""

    grid: tuple[int, ...]
    static: Any
    warps: int = 4
    stages: int = 1
    flops: float = 0.0
    in_place: tuple[int, ...] = ()


def launch(
    kernel: Any, arrays: Sequence[jax.Array], outputs: Sequence[jax.ShapeDtypeStruct], how: Launch
) -> list[jax.Array]:
    """Runs `kernel(*arrays, *outputs, *unused, s=how.static)` on a grid; returns the outputs, then the arrays in place.
    `unused`: one parameter for each array in place, since jax-triton 0.3 passes such an array a second time."""
    compute_capability = capability()
    results = [*outputs, *(jax.ShapeDtypeStruct(arrays[i].shape, arrays[i].dtype) for i in how.in_place)]

    def on_cpu(*arrays: jax.Array) -> list[jax.Array]:
        run = _refuse
        if INTERPRETER is not None:
            run = functools.partial(INTERPRETER, kernel, how, results)
        return list(jax.pure_callback(run, results, *arrays))

    def on_gpu(*arrays: jax.Array) -> list[jax.Array]:
        call = _triton_call()
        options: dict[str, Any] = {
            "compute_capability": compute_capability,
            "num_warps": how.warps,
            "num_stages": how.stages,
            "input_output_aliases": {array: len(outputs) + i for i, array in enumerate(how.in_place)},
            "s": how.static,
        }
        # jax-triton 0.4 renames two arguments.
        if "out_type" in inspect.signature(call).parameters:
            options |= {"out_type": results, "backend_options": {"enable_fp_fusion": True}}
            options |= dict.fromkeys(kernel.arg_names[len(arrays) + len(outputs) : -1])  # `unused`
        else:
            options |= {"out_shape": results, "enable_fp_fusion": True}
        return list(call(*arrays, kernel=kernel, grid=how.grid, **options))

    return list(_on_each_platform(kernel.__name__, how.flops, cpu=on_cpu, gpu=on_gpu)(*arrays))


def _on_each_platform(
    name: str, flops: float, *, cpu: Callable[..., Any], gpu: Callable[..., Any]
) -> Callable[..., Any]:
    """A kernel as a function of arrays. XLA cannot batch a kernel, so under `jax.vmap` it runs once per element. Its
    gradient raises an error: operations have separate kernels for first gradients, and support higher gradients in
    plain JAX only."""

    @jax.custom_batching.sequential_vmap
    def run(*arrays: jax.Array) -> Any:
        with set_xla_metadata(flops_per_output=str(flops)):
            return jax.lax.platform_dependent(*arrays, cpu=cpu, default=gpu)

    once = jax.custom_jvp(run)

    @once.defjvp
    def refuse(*_: Any) -> Any:
        raise ValueError(f"{name}: a kernel has no gradient; use implementation='reference'")

    return once


@functools.cache
def _triton_call() -> Any:
    """jax-triton's call, with a version of PTX that older ptxas know, and a check of the shared memory at compile time
    instead of at the launch."""
    library: Any = importlib.import_module("jax_triton.triton_lib")
    # jax-triton 0.4.1 removes dead code by a rule that jax 0.12 calls with one more argument. jax's own rule is right.
    partial_eval.dce_rules.pop(library.triton_kernel_call_p, None)
    compiled = library.compile_ttir_inplace

    def compile_checked(module: Any, backend: Any, options: Any, target: Any, *later_arguments: Any) -> Any:
        number = getattr(target, "arch", target)  # jax-triton 0.3 passes the compute capability itself: 90 for 9.0
        options = dataclasses.replace(options, ptx_version=LATER_PTX.get(number, PTX))
        made = compiled(module, backend, options, target, *later_arguments)
        name = f"{number // 10}.{number % 10}"
        needed = made.shared_mem_bytes
        if needed > SHARED_MEMORY_BYTES.get(name, needed):
            raise ValueError(
                f"{made.name}: a block needs {needed:,} bytes of shared memory; compute capability {name} has"
                f" {SHARED_MEMORY_BYTES[name]:,}; use smaller blocks or another implementation"
            )
        return made

    library.compile_ttir_inplace = compile_checked
    return library.triton_call


def next_power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()


def block_size(most: int, size: int) -> int:
    """`most`, or the next power of two of `size` if that is smaller; at least 16, for the tensor cores."""
    return min(most, max(16, next_power_of_2(size)))
