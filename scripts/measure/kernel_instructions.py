"""Machine instructions a number of kernels that read and write each array once, compiled for GPUs that need not be
here, and what of the memory's bandwidth they leave. The table of docs/kernels.md.

    python scripts/measure/kernel_instructions.py [TARGET ...]  # a minute; default: h200-141gb rtx4090-24gb a100-80gb

XLA and Triton write PTX, ptxas makes instructions of it, Triton's nvdisasm lists them. A kernel without a loop executes
each once for its thread's numbers. A multiprocessor begins four instructions of a warp a cycle, 128 lanes: a slot is
one lane's part of that. Float32 has 128 lanes (64 on 8.0), whole numbers' products 64, comparing, selecting, shifting
and logic 64, exp2, reciprocals, roots and conversions 16, memory and shuffles 32, so that an instruction of these takes
1, 2, 2, 8 or 4 slots of its own unit's time ("throughput of native arithmetic instructions" in NVIDIA's CUDA
programming guide). The units work side by side: the time is that of what takes the longest of them, and of beginning
all instructions.

`slots there are`: SMs x clock x 128 lanes x bytes a number / bandwidth, by data sheets (`jaxmem/machine/gpus.py`), the
clock being the highest. `bandwidth left`: these by those that are taken, at most all. A copy itself attains some 85 %
of the data sheet's; that loads are waited for, and that units stand in each other's way, is not in it.
"""

from __future__ import annotations

import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from jaxmem.machine import devices

devices.stay_on_cpu_without_gpu(only_compile=True)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from jaxmem.errors import UserError  # noqa: E402
from jaxmem.kernels import Moments8, adam8_update, int8_add, rms_norm  # noqa: E402
from jaxmem.machine.gpus import Gpu  # noqa: E402
from jaxmem.planning.targets import parse_target, target_devices  # noqa: E402

TARGETS = ("h200-141gb", "rtx4090-24gb", "a100-80gb")
LANES = 128  # that begin an instruction each cycle
# By the first letters of an instruction's name; all others are halves: LOP3, SHF, LEA, PRMT, FMNMX, FSETP, FSEL, ...
FLOATS = ("FFMA", "FMUL", "FADD", "HFMA2", "HADD2", "HMUL2")
PRODUCTS = ("IMAD",)
SPECIAL = ("MUFU", "F2I", "I2F.", "FRND", "F2F.")
MEMORY = ("LDG", "STG", "LDS", "STS", "SHFL")
REST = ("BRA", "EXIT", "BAR", "BSSY", "BSYNC", "ACQBULK", "LDC", "ULDC", "S2")  # a few for each thread
COST = {"floats": 1, "products": 2, "halves": 2, "special": 8, "memory": 4, "rest": 1}


class Case(NamedTuple):
    name: str
    run: Callable[..., Any]
    arguments: Any
    numbers: int
    bytes: float  # of a number: read once and written once


class Counted(NamedTuple):
    """Of a number."""

    instructions: float
    slots: float


def cases() -> Iterator[Case]:
    array = jax.ShapeDtypeStruct
    for axis, (shape, block) in {-1: ((4096, 14336), 256), -2: ((4096, 14336), 256)}.items():
        least = [size // block if dim - 2 == axis else size for dim, size in enumerate(shape)]
        numbers, constants = shape[0] * shape[1], tuple(least)
        g, code = array(shape, jnp.bfloat16), array(shape, jnp.uint8)
        scale, seeds = array(constants, jnp.float32), array(constants, jnp.uint32)
        options = {"axis": axis, "block_size": block, "implementation": "pallas"}
        along = "rows" if axis == -2 else "columns"

        def adam(g: Any, state: Any, unbiased: Any, options: Any = options) -> Any:
            return adam8_update(g, state, unbiased, **options)

        def add(codes: Any, scale: Any, g: Any, seeds: Any, options: Any = options) -> Any:
            return int8_add(codes, scale, g, seeds, **options)

        state = Moments8(code, code, scale, scale)
        unbiased = array((2,), jnp.float32)
        yield Case(f"adam8_update along {along}", adam, (g, state, unbiased), numbers, 8 + 16 / block)
        yield Case(f"int8_add along {along}", add, (array(shape, jnp.int8), scale, g, seeds), numbers, 4 + 12 / block)
    x = array((8192, 4096), jnp.bfloat16)

    def norm(x: Any, scale: Any) -> Any:
        return rms_norm(x, scale, residual=x, implementation="pallas")

    yield Case("rms_norm", norm, (x, array((4096,), jnp.float32)), 8192 * 4096, 8)


def counted(case: Case, source: str, target: str) -> Counted:
    gpu = gpu_of(target)
    threads = int(re.search(r"\.reqntid (\d+)", source)[1])  # type: ignore[index]
    jaxpr = jax.make_jaxpr(case.run)(*case.arguments)
    each = case.numbers / (threads * math.prod(grid(jaxpr.jaxpr)))
    found = instructions(source, re.search(r"\.target (sm_\w+)", source)[1])  # type: ignore[index]
    units = Counter(unit(name) for name in found)
    cost = COST | ({"floats": 2} if gpu.compute_capability == "8.0" else {})
    slots = max(len(found), *(cost[one] * count for one, count in units.items()))
    return Counted(len(found) / each, slots / each)


def gpu_of(target: str) -> Gpu:
    gpu = parse_target(target).gpu
    if gpu is None:
        raise UserError(f"target {target}: no instructions to count; give a GPU, as {TARGETS[0]}")
    return gpu


def slots_there_are(case: Case, gpu: Gpu) -> float:
    return gpu.cores * gpu.clock_ghz * LANES * case.bytes / gpu.bandwidth_gb_s


def unit(name: str) -> str:
    known = {"floats": FLOATS, "products": PRODUCTS, "special": SPECIAL, "memory": MEMORY, "rest": REST}
    return next((one for one, names in known.items() if name.startswith(names)), "halves")


def ptx(case: Case, target: str) -> str:
    """What XLA and Triton make of it for the assembler."""
    kernel = case.name.split()[0]
    device = target_devices(parse_target(target), 60 * 2**30)[0]
    place = jax.sharding.SingleDeviceSharding(device)
    placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), case.arguments)
    with tempfile.TemporaryDirectory() as folder, devices.lowering_for(device):
        # As it would run, whatever level a test compiles other programs at.
        dump = {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx", "xla_backend_optimization_level": "3"}
        jax.jit(case.run).lower(*placed).compile(compiler_options={"xla_gpu_autotune_level": "0", **dump})
        sources = [file.read_text() for file in Path(folder).glob("*.ptx")]
    return next(text for text in sources if re.search(rf"\.entry {kernel}\b", text))


def grid(jaxpr: Any) -> tuple[int, ...]:
    """Of the kernel that a program calls."""
    for one in jaxpr.eqns:
        if one.primitive.name == "pallas_call":
            return one.params["grid_mapping"].grid
        for given in jax.tree.leaves(one.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(given, "jaxpr", given)
            if hasattr(inner, "eqns") and (found := grid(inner)):
                return found
    return ()


def instructions(source: str, name: str) -> list[str]:
    """The names of those that a thread goes through, each once."""
    line = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)")
    return [name for name in line.findall(listing(source, name)) if name != "NOP"]


def listing(source: str, name: str) -> str:
    """What ptxas makes of PTX for the GPU of this name, in words."""
    with tempfile.TemporaryDirectory() as folder:
        assembly, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        assembly.write_text(source)
        _said(tool("ptxas"), f"--gpu-name={name}", assembly, "-o", binary)
        return _said(tool("nvdisasm"), "-c", binary)


def tool(name: str) -> Path:
    """ptxas as jax's own wheels bring it, nvdisasm as Triton's does."""
    folders = {"ptxas": "nvidia", "nvdisasm": "triton"}
    spec = find_spec(folders[name])
    roots = spec.submodule_search_locations if spec else None
    found = next((path for root in roots or () for path in Path(root).rglob(f"bin/{name}")), None)
    if found is None:
        wheel = {"ptxas": "nvidia-cuda-nvcc", "nvdisasm": "triton"}[name]
        raise UserError(f"{name}, which comes with the wheel {wheel}, is not installed: pip install 'jaxmem[dev]'")
    return found


def _said(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main(*targets: str) -> None:
    print("| | device | instructions a number | slots taken | slots there are | bandwidth left |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for case in cases():
        for target in targets or TARGETS:
            gpu, found = gpu_of(target), counted(case, ptx(case, target), target)
            there = slots_there_are(case, gpu)
            left = f"{100 * min(1, there / found.slots):.0f} %"
            print(f"| {case.name} | {gpu.kind} | {found.instructions:.0f} | {found.slots:.0f} | {there:.0f} | {left} |")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except UserError as error:
        sys.exit(str(error))
