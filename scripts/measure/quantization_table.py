"""Bits, error and speed of every format on normal values in blocks of 64: the table of docs/quantization.md.

python scripts/measure/quantization_table.py [--json]
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from common import parser, print_table

from jaxmem.machine.devices import use_cpu_without_gpu
from jaxmem.quant import FORMATS, quantize

SHAPE, BLOCK = (4096, 4096), 64
ROUNDS = 5
COLUMNS = ("format", "scales", ">bits", ">mean error", ">mean square", ">quantize, GB/s", ">dequantize, GB/s")


def seconds(call: Callable[..., Any], *args: Any) -> float:
    """Of the fastest call, compiling not included."""
    jax.block_until_ready(call(*args))
    durations = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(call(*args))
        durations.append(time.perf_counter() - start)
    return min(durations)


def rows() -> Iterator[dict[str, Any]]:
    normal = jax.random.normal(jax.random.key(0), SHAPE, jnp.float32)
    for name in FORMATS:
        x = jnp.abs(normal) if name.startswith("udynamic") else normal
        for double in (False, True):
            to = jax.jit(lambda x, name=name, double=double: quantize(x, name, BLOCK, double_quant=double))
            back = jax.jit(lambda q: q.dequantize())
            q = to(x)
            error = back(q) - x
            yield {
                "format": name,
                "double": double,
                "bits": q.nbytes * 8 / x.size,
                "mean_error": float(jnp.mean(jnp.abs(error))),
                "mean_square_error": float(jnp.mean(error**2)),
                "quantize_gb_s": 4 * x.size / seconds(to, x) / 1e9,
                "dequantize_gb_s": 4 * x.size / seconds(back, q) / 1e9,
            }


def cells(row: dict[str, Any]) -> Iterator[str]:
    yield from (f"`{row['format']}`", "8 bits" if row["double"] else "float32", f"{row['bits']:.3f}")
    yield from (f"{row['mean_error']:.4f}", f"{row['mean_square_error']:.5f}")
    yield from (f"{row['quantize_gb_s']:.2f}", f"{row['dequantize_gb_s']:.2f}")


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("--json", action="store_true", help="instead of the table")
    args = options.parse_args()
    use_cpu_without_gpu()
    if args.json:
        about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "shape": SHAPE, "block": BLOCK}
        print(json.dumps({**about, "rows": list(rows())}, indent=2))
    else:
        print_table(COLUMNS, map(cells, rows()))
