"""The largest kernels of a step under the rooflines of two GPUs; their memories and warps; a matmul in tiles."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jaxmem.config import load_config
from jaxmem.machine.gpus import GPUS, Gpu
from jaxmem.planning.compile import compile_program
from jaxmem.planning.hlo import Instruction, dot_flops, is_kernel
from jaxmem.planning.targets import CORES, Target, parse_target, target_devices
from jaxmem.planning.timeline import moved_bytes, timeline
from jaxmem.step.programs import program
from scripts.course import Findings, common, main
from scripts.course.panels import LinePlot
from scripts.course.table import Row, Table, gib

TARGETS = ("a100-80gb", "h100-80gb")
STEP = common.CONFIGS["roofline"]["step"]
LARGEST = 10
SIZE = 8192  # rows and columns of the matrices of the matmul in tiles
TILES = (16, 32, 64, 128, 256)
TYPES = {"float32": 4, "bfloat16": 2}  # bytes per element
REGISTERS = 65536 * 4  # bytes of registers per multiprocessor
BANKS = 32 * 4  # bytes per clock from a multiprocessor's shared memory
WARP = 32  # threads
# KiB of the array that L1 and shared memory divide, by compute capability (CUDA programming guide).
L1 = {"8.0": 192, "8.6": 128, "8.9": 128, "9.0": 256, "10.0": 256, "12.0": 128}
# What a kernel is, by the functions of its source lines, innermost first.
MATMULS = {
    "GatedMlp": "MLP matmuls",
    "Attention._project": "Q, K, V matmuls",
    "Attention.__call__": "attention output matmul",
    "Loss": "logits matmuls",
}
OTHERS = {
    "sum_of_squares": "gradient norm",
    "apply_updates": "optimizer update",
    "apply_call": "copies of a layer's weights",
    "rotate": "rotary embedding",
    "RMSNorm": "norms",
    "GatedMlp": "SiLU and gate",
    "Loss": "softmax of the loss",
}
OTHER = "other kernels"
# Opcodes that count as one operation per element; others move, convert or compare.
ARITHMETIC = {
    "add", "and", "divide", "exponential", "log", "maximum", "minimum", "multiply", "negate", "power", "reduce",
    "rsqrt", "shift-left", "shift-right-logical", "sqrt", "subtract", "tanh", "xor",
}  # fmt: skip


class Kernel(NamedTuple):
    """An instruction of a compiled step, over all of its executions."""

    instruction: Instruction
    runs: float
    seconds: float  # estimated
    flops: int  # of matmuls
    bytes: int


@dataclass
class Total:
    """Kernels of one name, over a step."""

    seconds: float = 0.0
    operations: float = 0.0
    bytes: float = 0.0

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.operations / self.bytes if self.bytes else 0.0


def measure() -> Findings:
    gpus = {target: GPUS[target] for target in TARGETS}
    totals = {name: total(kernels(parse_target(f"{name}:1"))) for name in gpus}
    tables = [
        Table("One multiprocessor", [multiprocessor(gpu) for gpu in gpus.values()]),
        *(Table(f"Memory of {name}, and its speed in one direction", memory_levels(gpu)) for name, gpu in gpus.items()),
        *(
            Table(f"A step of llama3-8b on 4,096 tokens, compiled for {name}", rows(gpu, totals[name]))
            for name, gpu in gpus.items()
        ),
        Table(
            f"A matmul of {SIZE} x {SIZE} matrices: bytes from memory, GiB, and shared memory of two tiles, KiB",
            tiles(),
        ),
    ]
    a100, h100 = TARGETS
    return Findings(
        tables,
        {
            "a100": ridge(gpus[a100]),
            "h100": ridge(gpus[h100]),
            "memory_a100": bound_by_memory(gpus[a100], totals[a100]),
            "memory_h100": bound_by_memory(gpus[h100], totals[h100]),
            "largest": max(
                tile for tile in TILES if 2 * tile * tile * 2 <= CORES[gpus[h100].compute_capability].shared_memory
            ),
        },
        [*(roof(gpu, totals[name]) for name, gpu in gpus.items()), times_of_tiles(gpus.values()), warps(gpus[h100])],
        (6.5, 6.5),
    )


def ridge(gpu: Gpu) -> float:
    """Operations per byte where both limits are equal."""
    return gpu.flops / (gpu.bandwidth_gb_s * 1e9)


def vector_flops(gpu: Gpu) -> float:
    """The peak of float32 without tensor cores: a fused multiply and add per lane and clock."""
    lanes = CORES[gpu.compute_capability].lanes
    return 2 * gpu.cores * lanes * gpu.clock_ghz * 1e9


def multiprocessor(gpu: Gpu) -> Row:
    cores = CORES[gpu.compute_capability]
    return {
        "GPU": gpu.name,
        "multiprocessors": gpu.cores,
        "warps": cores.threads // WARP,
        "registers, KiB": REGISTERS // 2**10,
        "registers per thread of all warps": REGISTERS // 4 // cores.threads,
        "L1 and shared memory, KiB": L1[gpu.compute_capability],
        "shared at most, KiB": CORES[gpu.compute_capability].shared_memory // 2**10,
        "float32 lanes": cores.lanes,
        "float32, TFLOP/s of the GPU": vector_flops(gpu) / 1e12,
        "bfloat16 on tensor cores, TFLOP/s": gpu.bf16_tflops,
    }


def memory_levels(gpu: Gpu) -> list[Row]:
    """The memories from the nearest to the farthest, with the speed per GPU in one direction."""
    levels = [
        ("registers", gpu.cores * REGISTERS, None),
        ("shared memory", gpu.cores * CORES[gpu.compute_capability].shared_memory, gpu.cores * BANKS * gpu.clock_ghz),
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


def kernels(aim: Target) -> Iterator[Kernel]:
    """The kernels of a step, compiled for one GPU."""
    built = program(load_config(STEP), target_devices(aim, 1000 * aim.memory)[:1])
    module = compile_program(built.lower_step(), here=aim.is_here, runs=False).module
    for instruction, seconds in timeline(module, aim.gpu, 1, 1).seconds_in.items():
        if instruction.opcode in ("while", "call", "conditional"):  # their bodies are counted
            continue
        flops = sum(map(dot_flops, (instruction, *(instruction.inner() if instruction.is_fusion else ()))))
        runs = float(module.executions[instruction.computation])
        yield Kernel(instruction, runs, runs * seconds, round(runs * flops), round(runs * moved_bytes(instruction)))


def total(step: Iterable[Kernel]) -> Mapping[str, Total]:
    """The kernels of each name, in decreasing order of their time."""
    totals: dict[str, Total] = {}
    for kernel in step:
        named = totals.setdefault(name_of(kernel), Total())
        named.seconds += kernel.seconds
        named.operations += kernel.flops or kernel.runs * operations(kernel.instruction)
        named.bytes += kernel.bytes
    return dict(sorted(totals.items(), key=lambda item: -item[1].seconds))


def name_of(kernel: Kernel) -> str:
    instruction = kernel.instruction
    if is_kernel(instruction):
        is_backward = "transpose(" in instruction.op_name and "rematted_computation" not in instruction.op_name
        return f"attention, {'backward' if is_backward else 'forward'}"
    names = MATMULS if kernel.flops else OTHERS
    frames = (frame for part in (instruction, *instruction.inner()) for frame in part.frames)
    matches = (name for frame in frames for function, name in names.items() if function in frame.function)
    return next(matches, OTHER)


def operations(instruction: Instruction) -> int:
    """Operations of an elementwise kernel: one per element of each arithmetic instruction, of a reduction one per
    element that it reads."""
    parts = [part for part in (instruction, *instruction.inner()) if part.opcode in ARITHMETIC]
    return sum(part.operands[0].shape.elements if part.opcode == "reduce" else part.shape.elements for part in parts)


def bound_by_memory(gpu: Gpu, totals: Mapping[str, Total]) -> float:
    """The share of the time in kernels left of the ridge."""
    slow = sum(named.seconds for named in totals.values() if named.intensity < ridge(gpu))
    return slow / sum(named.seconds for named in totals.values())


def largest(totals: Mapping[str, Total]) -> dict[str, Total]:
    """The kernels with the most time."""
    return dict([(name, named) for name, named in totals.items() if name != OTHER][:LARGEST])


def rows(gpu: Gpu, totals: Mapping[str, Total]) -> list[Row]:
    step = sum(named.seconds for named in totals.values())
    return [
        {
            "kernel": name,
            "time, ms": 1e3 * named.seconds,
            "of the step, %": 100 * named.seconds / step,
            "bytes, GiB": gib(named.bytes),
            "operations per byte": named.intensity or None,
            "TFLOP/s, planned": named.operations / named.seconds / 1e12 or None,
            "limited by": "memory" if named.intensity < ridge(gpu) else "arithmetic",
        }
        for name, named in largest(totals).items()
    ]


def roof(gpu: Gpu, totals: Mapping[str, Total]) -> LinePlot:
    bandwidth = gpu.bandwidth_gb_s * 1e9
    ends = (0.3, 5e3)  # operations per byte
    peaks = {"bfloat16, tensor cores": gpu.flops, "float32, no tensor cores": vector_flops(gpu)}
    roofs = {
        name: [(at, min(peak, at * bandwidth) / 1e12) for at in (ends[0], peak / bandwidth, ends[1])]
        for name, peak in peaks.items()
    }
    points = {
        name: [(named.intensity, named.operations / named.seconds / 1e12)]
        for name, named in sorted(largest(totals).items())  # both GPUs have the same colours
        if named.intensity > ends[0]
    }
    return LinePlot(
        f"Roofline of {gpu.name}: the largest kernels of a step",
        "operations per byte",
        "TFLOP/s",
        {**roofs, **points},
        "xy",
        height=5.5,
    )


def matmul_bytes(size: int, tile: int, width: int) -> float:
    """Bytes that a matmul of square matrices in tiles reads and writes; its result is written once.

    >>> matmul_bytes(4096, 1, 4) / matmul_bytes(4096, 64, 4) > 60
    True
    """
    return width * (2 * size**3 / tile + size**2)


def tiles() -> list[Row]:
    return [
        {"tiles": tile}
        | {f"{dtype}, GiB": gib(matmul_bytes(SIZE, tile, width)) for dtype, width in TYPES.items()}
        | {f"{dtype}, KiB": 2 * tile * tile * width // 2**10 for dtype, width in TYPES.items()}
        for tile in TILES
    ]


def times_of_tiles(gpus: Iterable[Gpu]) -> LinePlot:
    """The least time of a matmul by its tiles."""
    series = {}
    limits = {}
    for gpu in gpus:
        for dtype, width in TYPES.items():
            series[f"{gpu.name}, {dtype}"] = [
                (float(tile), 1e3 * matmul_bytes(SIZE, tile, width) / (gpu.bandwidth_gb_s * 1e9)) for tile in TILES
            ]
        limits[f"arithmetic, {gpu.name}, bfloat16"] = 1e3 * 2 * SIZE**3 / gpu.flops
    title = f"A matmul of {SIZE} x {SIZE}: least time of its bytes"
    return LinePlot(title, "rows and columns of a tile", "ms", series, "xy", limits, height=5.5)


def warps(gpu: Gpu) -> LinePlot:
    """Resident warps by the registers that a thread needs; both GPUs have as many registers and threads."""
    threads = CORES[gpu.compute_capability].threads
    needs = (16, 32, 64, 128, 255)
    points = [(need, min(threads // WARP, REGISTERS // 4 // need // WARP)) for need in needs]
    title = "Warps of a multiprocessor by the registers of a thread"
    return LinePlot(title, "registers per thread", "resident warps", {"warps": points}, "x")


if __name__ == "__main__":
    main(__file__)
