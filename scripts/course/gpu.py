"""Bytes and the least time that they need on a target; measured times are those of this machine."""

import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.config import load_config
from jaxmem.machine.gpus import Gpu
from jaxmem.planning import Target
from jaxmem.planning.compile import compile_all
from jaxmem.planning.hlo import Instruction, dot_flops
from jaxmem.planning.targets import parse_target, shared_memory, target_devices
from jaxmem.planning.timeline import moved_bytes, timeline
from jaxmem.step import program
from scripts.course import Findings, common, main
from scripts.course.panels import Bars, LinePlot
from scripts.course.sliding_max import HOST, requested_bytes, sliding_max
from scripts.course.table import Row, Table, gib

NUMBERS = 1 << 17
WINDOW = 256
SIZE = 8192
TILES = (16, 32, 64, 128, 256)
TYPES = {"float32": 4, "bfloat16": 2}
STEP = common.CONFIGS["gpu"]["step"]
# The part of a step that a kernel belongs to, by its source file (innermost frame first). Others: matmuls, elementwise.
PARTS = {
    "kernels/fused_attention": "attention",
    "models/cross_entropy": "logits and loss",
    "models/vocab_slices": "logits and loss",
    "jaxmem/optim": "optimizer update",
}
MATMULS, ELEMENTWISE = "matmuls", "norms, activations, copies"
REGISTERS = 65536 * 4  # bytes of registers per multiprocessor
BANKS = 32 * 4  # bytes per clock from a multiprocessor's shared memory


def measure(target: str) -> Findings:
    aim = parse_target(target)
    gpu = aim.gpu
    assert gpu is not None  # checked by Stop.visit
    bandwidth = gpu.bandwidth_gb_s * 1e9
    ridge = gpu.flops / bandwidth  # operations per byte where both limits are equal
    windows = Table(
        f"Maximum of each window of {WINDOW} in {NUMBERS:,} numbers on {gpu.name}", list(_windows(bandwidth))
    )
    matmuls = Table(f"A matmul of {SIZE} x {SIZE} matrices on {gpu.name}", list(_matmuls(bandwidth)))
    kernels = [
        {**row, "limited by": "memory" if (row["FLOP per byte"] or 0) < ridge else "arithmetic"}
        for row in kernels_of(aim)
    ]
    limited = sum(row["time, ms"] for row in kernels if row["limited by"] == "memory")
    roof = {"roof": [(at, min(gpu.flops, at * bandwidth) / 1e12) for at in (0.2, ridge, 20 * ridge)]}
    reach = {f"matmul, {row['tiles']}": row["FLOP per byte"] for row in matmuls.rows if row["tiles"].startswith("bf")}
    reach |= {row["kernels"]: row["FLOP per byte"] for row in kernels if row["FLOP per byte"]}
    points = {name: [(at, min(gpu.flops, at * bandwidth) / 1e12)] for name, at in reach.items()}
    timed = [row for row in windows.rows if row["here, ms"]]
    return Findings(
        [
            Table(f"Memory levels of {gpu.name}", memory_levels(gpu)),
            windows,
            matmuls,
            Table(f"A step of llama3-8b on 4,096 tokens, compiled for {gpu.name}", kernels),
        ],
        {"gpu": gpu.name, "ridge": ridge, "limited": limited / sum(row["time, ms"] for row in kernels)},
        [
            Bars(Table("Sliding maximum, here", timed), ("here, ms",)),
            LinePlot(f"Roofline of {gpu.name}", "operations per byte", "TFLOP/s", {**roof, **points}, "xy"),
        ],
    )


def memory_levels(gpu: Gpu) -> list[Row]:
    """The memories from the nearest to the farthest, with the speed per GPU in one direction."""
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
            "size, MiB": size and size / 2**20,
            "GB/s": speed,
            "operations per byte": speed and gpu.flops / (speed * 1e9),
        }
        for name, size, speed in levels
    ]


class Kernel(NamedTuple):
    """An instruction of a compiled step, over all of its executions."""

    instruction: Instruction
    runs: float
    seconds: float  # estimated
    flops: int  # of matmuls
    bytes: int


def kernels(aim: Target) -> Iterator[Kernel]:
    """The kernels of a step, compiled for one GPU."""
    built = program(load_config(STEP), target_devices(aim, 1000 * aim.memory)[:1])
    module = compile_all(built.lower_step(), {}, here=aim.is_here, code=False)[0].module
    for instruction, seconds in timeline(module, aim.gpu, 1, 1).seconds_in.items():
        if instruction.opcode in ("while", "call", "conditional"):  # their bodies are counted
            continue
        flops = sum(map(dot_flops, (instruction, *(instruction.inner() if instruction.is_fusion else ()))))
        runs = float(module.executions[instruction.computation])
        yield Kernel(instruction, runs, runs * seconds, round(runs * flops), round(runs * moved_bytes(instruction)))


def kernels_of(aim: Target) -> list[Row]:
    """The parts of a compiled step: FLOP of matmuls, bytes, estimated time."""
    totals: dict[str, np.ndarray] = {}
    for kernel in kernels(aim):
        name = _part(kernel.instruction, kernel.flops > 0)
        amounts = np.array([kernel.seconds, kernel.flops, kernel.bytes], np.float64)
        totals[name] = totals.get(name, np.zeros(3)) + amounts
    return [
        {
            "kernels": name,
            "TFLOP": flops / 1e12,
            "bytes, GiB": gib(moved),
            "time, ms": 1e3 * seconds,
            "FLOP per byte": flops / moved or None,
        }
        for name, (seconds, flops, moved) in sorted(totals.items(), key=lambda item: -item[1][0])
    ]


def _part(instruction: Instruction, multiplies: bool) -> str:
    for frame in instruction.frames:
        for file, part in PARTS.items():
            if file in frame.file:
                return part
    return MATMULS if multiplies else ELEMENTWISE


def _windows(bandwidth: float) -> Iterator[Row]:
    def row(name: str, operations: int, size: float | None = None, here: float | None = None) -> Row:
        least = {"bytes, MiB": size and size / 2**20, "least time, ms": size and 1e3 * size / bandwidth}
        return {"algorithm": name, "operations": operations, **least, "here, ms": here and 1e3 * here}

    numbers = np.random.default_rng(0).standard_normal(NUMBERS).astype(np.float32)
    listed = numbers.tolist()
    x = jnp.asarray(numbers)
    brute = NUMBERS * WINDOW
    levels = int(np.log2(WINDOW))
    # To add a number to a heap of w and remove one: two comparisons for each of log2 w levels.
    operations = {"brute force": brute, "heap": 2 * NUMBERS * levels, "monotonic deque": 2 * NUMBERS}
    for name, run in HOST.items():
        start = time.process_time()
        run(listed, WINDOW)
        yield row(f"{name}, one CPU", operations[name], here=time.process_time() - start)

    def seconds(implementation: str) -> float:
        return common.seconds(jax.jit(lambda x: sliding_max(x, WINDOW, implementation=implementation)), x)

    for name in ("straight", "shared"):
        here = seconds(name) if jax.default_backend() == "gpu" else None
        yield row(f"GPU, {name}", brute, requested_bytes(name, NUMBERS, WINDOW), here)
    yield row("XLA, here", brute, 8 * NUMBERS, seconds("reference"))


def _matmuls(bandwidth: float) -> Iterator[Row]:
    for name, width in TYPES.items():
        for tile in TILES:
            moved = matmul_bytes(SIZE, tile, width)
            yield {
                "tiles": f"{name}, {tile}",
                "FLOP per byte": 2 * SIZE**3 / moved,
                "bytes, GiB": gib(moved),
                "shared memory, KiB": 2 * tile * tile * width / 2**10,
                "least time, ms": 1e3 * moved / bandwidth,
            }


def matmul_bytes(size: int, tile: int, width: int) -> float:
    """Bytes that a matmul of square matrices reads and writes; its result is written once.

    >>> matmul_bytes(4096, 1, 4) / matmul_bytes(4096, 64, 4) > 60
    True
    """
    return width * (2 * size**3 / tile + size**2)


if __name__ == "__main__":
    main(__file__)
