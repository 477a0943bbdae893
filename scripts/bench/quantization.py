"""The errors and losses of few bits: the tables of docs/quantization.md.

    python scripts/bench/quantization.py formats [--json FILE]    # bits, error, speed on normal values
    jaxmem train configs/quality.yaml
    python scripts/bench/quantization.py run runs/quality [--json FILE] [--png FILE]
    python scripts/bench/quantization.py run runs/quality --embeddings nf4
    python scripts/bench/quantization.py run --read docs/benchmarks/bits-curve.json --png docs/bits-curve.png

`run`: the held-out loss of a run whose matrices are quantized after training, in blocks of 64 along their inputs.
`--embeddings`: with only the embedding and output matrices quantized, and with only the layers.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from jaxmem.inference.evaluate import Evaluator
from jaxmem.inference.load import open_run
from jaxmem.quant import FORMATS, quantize
from scripts.course.common import seconds
from scripts.course.panels import LinePlot, draw
from scripts.course.quantization import BLOCK, is_matrix, rounded
from scripts.course.table import Row, Table

SHAPE = (4096, 4096)
SMALLEST = 1e-4  # nats per byte; smaller differences are drawn here
SERIES = {  # formats with more and more bits
    "symmetric": ("int2", "int3", "int4", "int5", "int6", "int8"),
    "affine": ("uint2", "uint3", "uint4", "uint5", "uint6", "uint8"),
    **{name: (name,) for name in ("nf4", "fp4", "fp8_e4m3", "fp8_e5m2")},
}


def formats() -> Iterator[Row]:
    """Bits, errors and speeds of each format; times are those of the fastest of five calls."""
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
                "scales": "8 bits" if double else "float32",
                "bits": q.nbytes * 8 / x.size,
                "mean error": float(jnp.mean(jnp.abs(error))),
                "mean square": float(jnp.mean(error**2)),
                "quantize, GB/s": 4e-9 * x.size / seconds(to, x, times=5),
                "dequantize, GB/s": 4e-9 * x.size / seconds(back, q, times=5),
            }


def losses(run: str, batches: int) -> Iterator[Row]:
    program, params = open_run(run)
    matrices = [x for x in jax.tree.leaves(params) if is_matrix(x)]
    with Evaluator(program) as held_out:
        trained = held_out(params, batches)["loss"]
        yield {"format": "float32", "bits per weight": 32.0, "loss": trained, "above float32": 0.0}
        for form in (form for formats in SERIES.values() for form in formats):
            size = sum(quantize(x, form, BLOCK, -2, double_quant=True).nbytes for x in matrices)
            loss = held_out(jax.tree.map(lambda x, form=form: rounded(x, form), params), batches)["loss"]
            bits = 8 * size / sum(x.size for x in matrices)
            yield {"format": form, "bits per weight": bits, "loss": loss, "above float32": loss - trained}


def by_part(run: str, batches: int, form: str) -> Iterator[Row]:
    """The loss above float32 with only the embedding and output matrices quantized, and with only the layers."""
    program, params = open_run(run)

    def quantized(name: str, part: Any) -> Any:
        axis = -1 if name == "embedding" else -2  # the blocks of an embedding are along its rows
        return jax.tree.map(lambda x: rounded(x, form, axis), part)

    with Evaluator(program) as held_out:
        trained = held_out(params, batches)["loss"]
        for part, is_layers in (("embedding and output", False), ("layers", True)):
            some = {name: quantized(name, x) if (name == "blocks") is is_layers else x for name, x in params.items()}
            yield {f"in {form}": part, "above float32": held_out(some, batches)["loss"] - trained}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["formats", "run"])
    parser.add_argument("run", nargs="?", help="the directory of a run")
    parser.add_argument("--read", type=Path, metavar="JSON", help="draw these rows of a run again; needs --png")
    parser.add_argument("--batches", type=int, default=64)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path, help="loss by bits")
    parser.add_argument("--embeddings", metavar="FORMAT")
    args = parser.parse_args()
    if args.read and not args.png:
        parser.error("--read needs --png")
    if args.read:
        draw_losses(json.loads(args.read.read_text())["rows"], args.png)
        return
    if args.what == "run" and args.run is None:
        parser.error("run needs the directory of a run")
    if args.what == "formats":
        rows = list(formats())
    elif args.embeddings:
        rows = list(by_part(args.run, args.batches, args.embeddings))
    else:
        rows = list(losses(args.run, args.batches))
    print(Table("", rows).markdown())
    if args.json:
        about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "block": BLOCK}
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    if args.png:
        draw_losses(rows, args.png)


def draw_losses(rows: Sequence[Row], file: Path) -> None:
    points = {row["format"]: (row["bits per weight"], max(row["above float32"], SMALLEST)) for row in rows}
    series = {name: [points[form] for form in forms] for name, forms in SERIES.items()}
    title = "Loss of a model with quantized weights"
    draw(file, [LinePlot(title, "bits per weight, with scales", "loss above float32, nats per byte", series, "y")])


if __name__ == "__main__":
    main()
