"""What a GPU waits for: the bytes that reach its processors, on two small problems and in a whole training step.

The maximum over a sliding window: on one processor brute force, a heap and a monotonic deque, of which each does less;
on a GPU the plain way, every thread its own window, straight from global memory and through shared memory. There the
comparisons are the same, and the bytes asked of global memory a hundredth.

A product of n x n matrices in tiles of t x t: each number is read n / t times, 2 n^3 / t in all, times its bytes. Twice
the tile halves that and takes four times the shared memory; half the bytes a number do both without. A device is busy
where its operations for each byte read are at least its operations a second over its bytes a second.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from jaxmem.errors import UserError
from jaxmem.lab.tour import roofline, timed
from jaxmem.lab.tour.stops import Columns, Found, Row, Shown, Stop
from jaxmem.machine import devices

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jaxmem.machine.gpus import Gpu

TARGET = "h100-80gb"
NUMBERS, WINDOW = 1 << 17, 256
SIZE, TILES = 8192, (16, 32, 64, 128, 256)
DRAWN = (16, 128)  # of these, under the roof
TYPES = {"float32": 4, "bfloat16": 2}
HEAP_STEPS = 2  # comparisons of a number in and out of a heap of w: two for each of log2 w levels


def bytes_counted(target: str | None = None) -> Found:
    """The table, with the least time that the bytes take on a target; times are this machine's."""
    from jaxmem.planning.targets import parse_target
    from jaxmem.planning.text import count, readable

    aim = parse_target(target or TARGET)
    gpu = aim.gpu
    if gpu is None:
        raise UserError(f"target {target}: tour gpu counts what a GPU reads; give one, as {TARGET}")
    levels, windows, products = roofline.levels(gpu), list(_windows()), list(_products())
    step = roofline.operations(aim)
    for row in (*windows, *products):
        row["least_seconds"] = row["bytes"] / (gpu.bandwidth_gb_s * 1e9) if row["bytes"] else None
    nearness: Columns = {
        "from": lambda row: row["name"],
        "there is": lambda row: readable(row["bytes"]) if row["bytes"] else "",
        "GB/s": lambda row: f"{row['speed']:,.0f}" if row["speed"] else "",
        "operations in a byte's time": lambda row: f"{row['operations']:,.0f}" if row["operations"] else "",
    }
    asked: Columns = {
        "bytes": lambda row: readable(row["bytes"]) if row["bytes"] else "",
        "shared": lambda row: readable(row["shared"]) if row["shared"] else "",
        "at least": lambda row: _time(row["least_seconds"]),
    }
    scans: Columns = {
        "way": lambda row: row["name"],
        "operations": lambda row: f"{row['operations']:.2g}",
        **asked,
        "here": lambda row: _time(row["seconds"]),
    }
    tiles: Columns = {
        "tiles": lambda row: row["name"],
        "each byte": lambda row: f"{row['operations'] / row['bytes']:,.1f}",
        **asked,
    }
    needed = gpu.flops / (gpu.bandwidth_gb_s * 1e9)
    kinds: Columns = {
        "kernels": lambda row: row["name"],
        "FLOP": lambda row: count(row["flops"]) if row["flops"] else "",
        "bytes": lambda row: readable(row["bytes"]),
        "each byte": lambda row: f"{row['flops'] / row['bytes']:,.0f}" if row["flops"] else "",
        "wait for": lambda row: "arithmetic" if row["flops"] > needed * row["bytes"] else "memory",
        "about": lambda row: _time(row["seconds"]),
    }
    model, length = roofline.BASE["model"]["preset"], roofline.BASE["data"]["sequence_length"]
    tables = [
        Shown(f"Where a byte comes from, on {gpu.name}", levels, nearness),
        Shown(f"The largest of each {WINDOW} of {NUMBERS:,} numbers, and what {gpu.name} waits for", windows, scans),
        Shown(f"A product of {SIZE} x {SIZE} matrices on {gpu.name}", products, tiles),
        Shown(f"A step of {model} on {length:,} tokens, compiled for {gpu.name}", step, kinds),
    ]
    waits = sum(row["seconds"] for row in step if row["flops"] <= needed * row["bytes"])
    note = (
        "Bytes: asked of global memory; each byte: operations for it; shared: what a block holds in shared memory; at"
        " least: the time of the bytes; here: measured on this machine."
        f" {gpu.name} does {needed:,.0f} operations in bfloat16 in the time of a byte: a product with more operations a"
        f" byte than that waits for none. A training step spends {waits / sum(row['seconds'] for row in step):.0%} of"
        " its time in kernels that do wait. Kernels' times are measured where there is a GPU."
    )
    return Found(tables, note, partial(_draw, gpu=gpu, windows=windows, step=step))


def _windows() -> Iterator[Row]:
    import jax
    import jax.numpy as jnp

    from jaxmem.lab.sliding_max import HOST, sliding_max, triton

    numbers = np.random.default_rng(0).standard_normal(NUMBERS).astype(np.float32)
    listed = numbers.tolist()
    work = {
        "brute force": NUMBERS * WINDOW,
        "heap": NUMBERS * HEAP_STEPS * int(np.log2(WINDOW)),
        "monotonic deque": 2 * NUMBERS,
    }
    for name, run in HOST.items():
        started = time.process_time()
        run(listed, WINDOW)
        yield _row(f"{name}, one CPU", work[name], None, seconds=time.process_time() - started)
    x = jnp.asarray(numbers)
    for name in ("straight", "shared"):
        seconds = None
        if devices.has_nvidia_gpu() and jax.default_backend() == "gpu":
            seconds = timed.seconds(jax.jit(lambda x, name=name: sliding_max(x, WINDOW, implementation=name)), x)
        held = 4 * (triton.OUTPUTS + triton.STRIP) if name == "shared" else None
        asked = triton.requested_bytes(name, NUMBERS, WINDOW)
        yield _row(f"GPU, {name}", NUMBERS * WINDOW, asked, held, seconds)
    run = jax.jit(lambda x: sliding_max(x, WINDOW, implementation="reference"))
    yield _row("XLA, here", NUMBERS * WINDOW, 8 * NUMBERS, seconds=timed.seconds(run, x))


def _products() -> Iterator[Row]:
    for name, width in TYPES.items():
        for tile in TILES:
            held = 2 * tile * tile * width
            yield _row(f"{name}, {tile}", 2 * SIZE**3, product_bytes(SIZE, tile, width), held)


def product_bytes(size: int, tile: int, width: int) -> float:
    """Read for a product of square matrices, and its result written once.

    >>> product_bytes(4096, 1, 4) / product_bytes(4096, 64, 4) > 60
    True
    """
    return width * (2 * size**3 / tile + size**2)


def _row(
    name: str, operations: float, asked: float | None, shared: int | None = None, seconds: float | None = None
) -> Row:
    return {"name": name, "operations": operations, "bytes": asked, "shared": shared, "seconds": seconds}


def _draw(drawn: Figure, gpu: Gpu, windows: list[Row], step: list[Row]) -> None:
    scans, roof = drawn.subplots(1, 2, width_ratios=(1, 1.4))
    timed_rows = [row for row in windows if row["seconds"] is not None]
    bars = scans.barh([row["name"] for row in timed_rows], [1e3 * row["seconds"] for row in timed_rows])
    scans.bar_label(bars, [_time(row["seconds"]) for row in timed_rows], padding=3)
    scans.set(xscale="log", xlabel="ms, here", title=f"largest of each {WINDOW} of {NUMBERS:,}", xlim=(1, 1e4))
    scans.invert_yaxis()
    tiles = [
        {
            "name": f"product, tiles of {tile}",
            "flops": 2 * SIZE**3,
            "bytes": product_bytes(SIZE, tile, TYPES["bfloat16"]),
        }
        for tile in DRAWN
    ]
    roofline.draw(roof, gpu, [*(row for row in step if row["flops"]), *tiles])
    roof.set_title(f"{gpu.name}: kernels under its roof")


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e3:,.1f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:,.1f} us"


STOP = Stop(
    "gpu",
    "its memories; a sliding window, a product, a training step: the bytes they ask for, and times",
    bytes_counted,
    uses="devices",
    config=["optimizer.kernel=triton"],
    read=["jaxmem/lab/sliding_max/triton.py", "jaxmem/lab/tour/roofline.py", "jaxmem/planning/timeline.py"],
)
