"""What a GPU's memories can hold and hand over, and what the kernels of a training step ask of them.

A kernel of so many operations a byte takes as long as the slower of the two: its operations at the peak rate, or its
bytes at the memory's. Where both take equally long the roof has its corner; left of it a device waits for memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxmem.config import load_config
from jaxmem.lab.tour.stops import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from jaxmem.machine.gpus import Gpu
    from jaxmem.planning import Target
    from jaxmem.planning.hlo import Instruction

BASE: dict[str, Any] = {
    "name": "tour",
    "model": {"preset": "llama3-8b"},
    "data": {"source": "tokens", "path": "unused", "sequence_length": 4096},
    "batch": {"global_size": 1},
    "precision": {"parameters": "bfloat16", "rounding": "stochastic"},
    "memory": {"remat": "full", "attention": "triton"},
    "train": {"steps": 1000},
}
# Which files made a kernel, the innermost first; those with products of weights are told from those without.
PARTS = {"kernels/fused_attention": "attention", "jaxmem/vocabulary": "logits and loss", "jaxmem/optim": "the update"}
PRODUCTS, ELEMENTWISE = "products with weights", "norms, activations, copies"
REGISTERS = 65536 * 4  # bytes of a multiprocessor
BANKS = 32 * 4  # bytes that a multiprocessor's shared memory hands over in a clock


def levels(gpu: Gpu) -> list[Row]:
    """From the nearest memory to the farthest: its bytes, and GB/s of a GPU from there, in one direction."""
    from jaxmem.planning.targets import shared_memory

    near = [
        ("registers", gpu.cores * REGISTERS, None),
        ("shared memory", gpu.cores * shared_memory(gpu), gpu.cores * BANKS * gpu.clock_ghz),
        ("L2 cache", int(gpu.l2_mib * 2**20), None),
        ("its memory", gpu.memory, gpu.bandwidth_gb_s),
    ]
    far = [
        ("another GPU of its host", gpu.memory, gpu.link_gb_s),
        ("its share of the host's memory", gpu.host_memory, gpu.host_link_gb_s),
        ("another host", None, gpu.network_gb_s),
    ]
    return [
        {"name": name, "bytes": size, "speed": speed, "operations": gpu.flops / (speed * 1e9) if speed else None}
        for name, size, speed in (*near, *far)
    ]


def operations(aim: Target, base: dict[str, Any] = BASE) -> list[Row]:
    """Of one compiled step by what its kernels do: products' operations, bytes, and the estimated time."""
    from jaxmem.planning.compile import compile_all
    from jaxmem.planning.hlo import dot_flops
    from jaxmem.planning.targets import target_devices
    from jaxmem.planning.timeline import fused_instructions, moved_bytes, timeline
    from jaxmem.step import program

    built = program(load_config(base), target_devices(aim, 1000 * aim.memory)[:1])
    module = compile_all(built.lower_step(), {}, here=aim.is_here, code=False)[0].module
    found: dict[str, Row] = {}
    for one, seconds in timeline(module, aim.gpu, 1, 1).seconds_in.items():
        if one.opcode in ("while", "call", "conditional"):  # what is in them is counted
            continue
        times, products = module.executions[one.computation], sum(map(dot_flops, (one, *fused_instructions(one))))
        name = _part(one, products > 0)
        row = found.setdefault(name, {"name": name, "flops": 0.0, "bytes": 0.0, "seconds": 0.0})
        for field, value in (("flops", products), ("bytes", moved_bytes(one)), ("seconds", seconds)):
            row[field] += float(times * value) if field != "seconds" else float(times) * value
    return sorted(found.values(), key=lambda row: -row["seconds"])


def _part(one: Instruction, multiplies: bool) -> str:
    for frame in one.frames:
        for file, part in PARTS.items():
            if file in frame.file:
                return part
    return PRODUCTS if multiplies else ELEMENTWISE


def draw(axes: Axes, gpu: Gpu, rows: Sequence[Row]) -> None:
    """The roof, and what lies under it."""
    corner = gpu.flops / (gpu.bandwidth_gb_s * 1e9)
    ends = (0.2, corner, 20 * corner)
    axes.plot(ends, [min(gpu.flops, x * gpu.bandwidth_gb_s * 1e9) / 1e12 for x in ends], c="gray")
    axes.axvline(corner, c="gray", ls=":", lw=1)
    for row, marker in zip(rows, "o^sxv", strict=False):
        at = row["flops"] / row["bytes"]
        roof = min(gpu.flops, at * gpu.bandwidth_gb_s * 1e9)
        axes.plot(at, roof / 1e12, marker, label=row["name"], ms=9, mfc="none", mew=2)
    axes.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s at most")
    axes.legend(fontsize=8, loc="lower right")
