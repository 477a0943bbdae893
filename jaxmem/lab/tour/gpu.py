"""What a GPU waits for: the bytes that reach its processors, in two small problems and in a whole training step.

The maximum over a sliding window: on a CPU brute force, a heap and a monotonic deque, each with fewer operations than
the one before; on a GPU one thread per window, from global memory and through shared memory, which asks global memory
for a hundredth of the bytes.

A matmul of n x n matrices in tiles of t x t reads each number n / t times, 2 n^3 / t in all. Twice the tile halves that
and takes four times the shared memory; half the bytes per number do both without. A kernel takes as long as the slower
of two: its operations at the peak rate, or its bytes at the memory's bandwidth (the roofline).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.config import load_config
from jaxmem.lab.sliding_max import HOST, sliding_max, triton
from jaxmem.lab.tour import common
from jaxmem.lab.tour.panels import Bars, Lines
from jaxmem.lab.tour.stop import Findings, gpu_target
from jaxmem.lab.tour.table import Row, Table
from jaxmem.machine import devices
from jaxmem.machine.gpus import Gpu
from jaxmem.planning import Target
from jaxmem.planning.compile import compile_all
from jaxmem.planning.hlo import Instruction, dot_flops
from jaxmem.planning.targets import shared_memory, target_devices
from jaxmem.planning.timeline import fused_instructions, moved_bytes, timeline
from jaxmem.step import program

TARGET = "h100-80gb"
NUMBERS, WINDOW = 1 << 17, 256
SIZE, TILES = 8192, (16, 32, 64, 128, 256)
DRAWN = (16, 128)  # of these, in the roofline
TYPES = {"float32": 4, "bfloat16": 2}
HEAP_STEPS = 2  # comparisons of a number in and out of a heap of w: two for each of log2 w levels
STEP = common.llm_config("llama3-8b", 4096, precision=common.BFLOAT16, memory={"remat": "full", "attention": "triton"})
# The source file that a kernel comes from, the innermost frame first; the others by whether they multiply matrices.
PARTS = {
    "kernels/fused_attention": "attention",
    "models/cross_entropy": "logits and loss",
    "models/vocab_slices": "logits and loss",
    "jaxmem/optim": "optimizer update",
}
MATMULS, ELEMENTWISE = "matmuls", "norms, activations, copies"
REGISTERS = 65536 * 4  # bytes of a multiprocessor
BANKS = 32 * 4  # bytes per clock from a multiprocessor's shared memory


def measure(target: str | None = None) -> Findings:
    """Bytes and the least time that they take on a target; measured times are this machine's."""
    aim, gpu = gpu_target("gpu", target or TARGET)
    bandwidth = gpu.bandwidth_gb_s * 1e9
    ridge = gpu.flops / bandwidth  # operations per byte at which both limits are equal
    windows, matmuls, step = list(_windows(bandwidth)), list(_matmuls(bandwidth)), kernels_of(aim)
    kernels = [
        {
            **row,
            "FLOP": row["FLOP"] or None,
            "FLOP per byte": row["FLOP"] / row["bytes"] if row["FLOP"] else None,
            "limited by": "arithmetic" if row["FLOP"] > ridge * row["bytes"] else "memory",
        }
        for row in step
    ]
    limited = sum(row["time"] for row in kernels if row["limited by"] == "memory") / sum(row["time"] for row in kernels)
    sizes = {"operations": ".2g", "bytes": "bytes", "shared memory": "bytes", "least time": "time", "here": "time"}
    levels = {"size": "bytes", "GB/s": ",.0f", "operations per byte": ",.0f"}
    steps = {"FLOP": "count", "bytes": "bytes", "FLOP per byte": ",.0f", "time": "time"}
    reach = {f"matmul, tiles of {t}": 2 * SIZE**3 / matmul_bytes(SIZE, t, TYPES["bfloat16"]) for t in DRAWN}
    reach = {row["kernels"]: row["FLOP per byte"] for row in kernels if row["FLOP"]} | reach
    roof = {"roof": [(at, min(gpu.flops, at * bandwidth) / 1e12) for at in (0.2, ridge, 20 * ridge)]}
    points = {name: [(at, min(gpu.flops, at * bandwidth) / 1e12)] for name, at in reach.items()}
    return Findings(
        [
            Table(f"Memory levels of {gpu.name}", memory_levels(gpu), levels),
            Table(f"Maximum of each {WINDOW} of {NUMBERS:,} numbers on {gpu.name}", windows, sizes),
            Table(f"A matmul of {SIZE} x {SIZE} matrices on {gpu.name}", matmuls, {**sizes, "FLOP per byte": ",.1f"}),
            Table(f"A step of llama3-8b on 4,096 tokens, compiled for {gpu.name}", kernels, steps),
        ],
        "Bytes: read from global memory and written to it; least time: of these bytes; here: measured on this machine."
        f" {gpu.name} does {ridge:,.0f} bfloat16 operations in the time of a byte. A training step spends"
        f" {limited:.0%} of its estimated time in kernels with fewer operations per byte, which are limited by memory.",
        [
            Bars(
                f"Maximum of each {WINDOW} of {NUMBERS:,}, here",
                [r for r in windows if r["here"]],
                ("here",),
                "ms",
                log=True,
            ),
            Lines(f"Roofline of {gpu.name}", "operations per byte", "TFLOP/s", {**roof, **points}, "xy"),
        ],
    )


def memory_levels(gpu: Gpu) -> list[Row]:
    """From the nearest memory to the farthest: bytes, and GB/s per GPU in one direction."""
    levels = [
        ("registers", gpu.cores * REGISTERS, None),
        ("shared memory", gpu.cores * shared_memory(gpu), gpu.cores * BANKS * gpu.clock_ghz),
        ("L2 cache", int(gpu.l2_mib * 2**20), None),
        ("its memory", gpu.memory, gpu.bandwidth_gb_s),
        ("another GPU of its host", gpu.memory, gpu.link_gb_s),
        ("its share of host memory", gpu.host_memory, gpu.host_link_gb_s),
        ("another host", None, gpu.network_gb_s),
    ]
    return [
        {
            "memory": name,
            "size": size,
            "GB/s": speed,
            "operations per byte": gpu.flops / (speed * 1e9) if speed else None,
        }
        for name, size, speed in levels
    ]


def kernels_of(aim: Target, base: dict[str, Any] = STEP) -> list[Row]:
    """A compiled step by what its kernels do: FLOP of matmuls, bytes, estimated time."""
    built = program(load_config(base), target_devices(aim, 1000 * aim.memory)[:1])
    module = compile_all(built.lower_step(), {}, here=aim.is_here, code=False)[0].module
    found: dict[str, dict[str, Any]] = {}
    for one, seconds in timeline(module, aim.gpu, 1, 1).seconds_in.items():
        if one.opcode in ("while", "call", "conditional"):  # their bodies are counted
            continue
        times, flops = module.executions[one.computation], sum(map(dot_flops, (one, *fused_instructions(one))))
        name = _part(one, flops > 0)
        row = found.setdefault(name, {"kernels": name, "FLOP": 0.0, "bytes": 0.0, "time": 0.0})
        for key, value in (("FLOP", flops), ("bytes", moved_bytes(one)), ("time", seconds)):
            row[key] += float(times) * float(value)
    return sorted(found.values(), key=lambda row: -row["time"])


def _part(one: Instruction, multiplies: bool) -> str:
    for frame in one.frames:
        for file, part in PARTS.items():
            if file in frame.file:
                return part
    return MATMULS if multiplies else ELEMENTWISE


def _windows(bandwidth: float) -> Iterator[Row]:
    def row(
        name: str, operations: int, requested: float | None = None, shared: int | None = None, here: Any = None
    ) -> Row:
        least = requested / bandwidth if requested else None
        own = {"bytes": requested, "shared memory": shared, "least time": least, "here": here}
        return {"algorithm": name, "operations": float(operations), **own}

    numbers = np.random.default_rng(0).standard_normal(NUMBERS).astype(np.float32)
    listed, x = numbers.tolist(), jnp.asarray(numbers)
    work = {
        "brute force": NUMBERS * WINDOW,
        "heap": NUMBERS * HEAP_STEPS * int(np.log2(WINDOW)),
        "monotonic deque": 2 * NUMBERS,
    }
    for name, run in HOST.items():
        started = time.process_time()
        run(listed, WINDOW)
        yield row(f"{name}, one CPU", work[name], here=time.process_time() - started)
    for name, shared in (("straight", None), ("shared", 4 * (triton.OUTPUTS + triton.STRIP))):
        seconds = None
        if devices.has_nvidia_gpu() and jax.default_backend() == "gpu":
            seconds = common.seconds(jax.jit(lambda x, name=name: sliding_max(x, WINDOW, implementation=name)), x)
        yield row(f"GPU, {name}", NUMBERS * WINDOW, triton.requested_bytes(name, NUMBERS, WINDOW), shared, seconds)
    run = jax.jit(lambda x: sliding_max(x, WINDOW, implementation="reference"))
    yield row("XLA, here", NUMBERS * WINDOW, 8 * NUMBERS, here=common.seconds(run, x))


def _matmuls(bandwidth: float) -> Iterator[Row]:
    for name, width in TYPES.items():
        for tile in TILES:
            moved = matmul_bytes(SIZE, tile, width)
            yield {
                "tiles": f"{name}, {tile}",
                "FLOP per byte": 2 * SIZE**3 / moved,
                "bytes": moved,
                "shared memory": 2 * tile * tile * width,
                "least time": moved / bandwidth,
            }


def matmul_bytes(size: int, tile: int, width: int) -> float:
    """Read for a matmul of square matrices, and its result written once.

    >>> matmul_bytes(4096, 1, 4) / matmul_bytes(4096, 64, 4) > 60
    True
    """
    return width * (2 * size**3 / tile + size**2)
