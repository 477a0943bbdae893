"""What a GPU waits for: the bytes that reach its processors, on two small problems.

The maximum over a sliding window: on one processor brute force, a heap and a monotonic deque, of which each does less;
on a GPU the plain way, every thread its own window, straight from global memory and through shared memory. There the
comparisons are the same, and the bytes asked of global memory a hundredth.

A product of n x n matrices in tiles of t x t: each number is read n / t times, 2 n^3 / t in all, times its bytes. Twice
the tile halves that and takes four times the shared memory; half the bytes a number do both without. A device is busy
where its operations for each byte read are at least its operations a second over its bytes a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxmem import devices
from jaxmem.errors import UserError
from jaxmem.tour.stops import Columns, Found, Row, Shown, Stop

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TARGET = "h100-80gb"
NUMBERS, WINDOW = 1 << 17, 256
SIZE, TILES = 8192, (16, 32, 64, 128, 256)
TYPES = {"float32": 4, "bfloat16": 2}
HEAP_STEPS = 2  # comparisons of a number in and out of a heap of w: two for each of log2 w levels


def bytes_counted(target: str | None = None) -> Found:
    """The table, with the least time that the bytes take on a target; times are this machine's."""
    from jaxmem.planning.targets import parse_target
    from jaxmem.planning.text import readable

    gpu = parse_target(target or TARGET).gpu
    if gpu is None:
        raise UserError(f"target {target}: tour gpu counts what a GPU reads; give one, as {TARGET}")
    windows, products = list(_windows()), list(_products())
    for row in (*windows, *products):
        row["least_seconds"] = row["bytes"] / (gpu.bandwidth_gb_s * 1e9) if row["bytes"] else None
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
    tables = [
        Shown(f"The largest of each {WINDOW} of {NUMBERS:,} numbers, and what {gpu.name} waits for", windows, scans),
        Shown(f"A product of {SIZE} x {SIZE} matrices on {gpu.name}", products, tiles),
    ]
    needed = gpu.flops / (gpu.bandwidth_gb_s * 1e9)
    note = (
        "Bytes: asked of global memory; each byte: operations for it; shared: what a block holds in shared memory; at"
        " least: the time of the bytes; here: measured on this machine."
        f" {gpu.name} does {needed:,.0f} operations in bfloat16 in the time of a byte: a product with more operations a"
        " byte than that waits for none. Kernels' times are measured where there is a GPU."
    )
    return Found(tables, note, partial(_draw, windows=windows, products=products, needed=needed))


def _windows() -> Iterator[Row]:
    import jax
    import jax.numpy as jnp

    from jaxmem.kernels.sliding_max import HOST, pallas, sliding_max

    numbers = np.random.default_rng(0).standard_normal(NUMBERS).astype(np.float32)
    listed = numbers.tolist()
    work = {
        "brute force": NUMBERS * WINDOW,
        "heap": NUMBERS * HEAP_STEPS * int(np.log2(WINDOW)),
        "monotonic deque": 2 * NUMBERS,
    }
    for name, run in HOST.items():
        started = time.perf_counter()
        run(listed, WINDOW)
        yield _row(f"{name}, one CPU", work[name], None, seconds=time.perf_counter() - started)
    x = jnp.asarray(numbers)
    for name in ("straight", "shared"):
        seconds = None
        if devices.has_nvidia_gpu() and jax.default_backend() == "gpu":
            seconds = _measured(jax.jit(lambda x, name=name: sliding_max(x, WINDOW, implementation=name)), x)
        held = 4 * (pallas.OUTPUTS + pallas.STRIP) if name == "shared" else None
        asked = pallas.bytes_asked(name, NUMBERS, WINDOW)
        yield _row(f"GPU, {name}", NUMBERS * WINDOW, asked, held, seconds)
    run = jax.jit(lambda x: sliding_max(x, WINDOW, implementation="reference"))
    yield _row("XLA, here", NUMBERS * WINDOW, 8 * NUMBERS, seconds=_measured(run, x))


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


def _measured(run: Callable[[Any], Any], x: Any, times: int = 5) -> float:
    """The median of some calls, without the first."""
    run(x).block_until_ready()
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        run(x).block_until_ready()
        taken.append(time.perf_counter() - started)
    return sorted(taken)[times // 2]


def _draw(drawn: Figure, windows: list[Row], products: list[Row], needed: float) -> None:
    scans, tiles = drawn.subplots(1, 2, width_ratios=(1, 1.4))
    timed = [row for row in windows if row["seconds"] is not None]
    scans.barh([row["name"] for row in timed], [1e3 * row["seconds"] for row in timed])
    scans.set(xscale="log", xlabel="ms, here", title=f"largest of each {WINDOW} of {NUMBERS:,}")
    scans.invert_yaxis()
    for name in TYPES:
        own = [row for row in products if row["name"].startswith(f"{name}, ")]
        tiles.plot(TILES, [row["operations"] / row["bytes"] for row in own], "o-", label=name)
    tiles.axhline(needed, ls="--", c="tab:red", label="the device's own, bfloat16")
    tiles.set(xscale="log", yscale="log", xlabel="tile", title=f"operations a byte, product of {SIZE} x {SIZE}")
    tiles.set_xticks(TILES, [str(tile) for tile in TILES])
    tiles.minorticks_off()
    tiles.legend()


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds * 1e3:,.1f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:,.1f} us"


STOP = Stop(
    "gpu",
    "a sliding window, a matrix product: the bytes that they ask for, and times",
    bytes_counted,
    uses="devices",
    config=["optimizer.kernel=pallas"],
    read=["kernels/sliding_max/pallas.py", "jaxmem/planning/timeline.py"],
)
