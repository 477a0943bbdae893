"""The errors and losses of few bits: the tables of docs/quantization.md.

    python scripts/bench/quantization.py formats                # bits, error, speed on normal values
    jaxmem train configs/quality.yaml
    python scripts/bench/quantization.py run runs/quality
    python scripts/bench/quantization.py draw                   # the recorded rows of a run

`run`: the held-out loss of a run whose matrices are quantized after training, in blocks of 64 along their inputs.
`--write`: also records the rows in docs/benchmarks, and draws docs/bits-curve.png.
"""

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

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

DOCS = Path(__file__).parents[2] / "docs"
RECORDS = {"formats": DOCS / "benchmarks/quantization.json", "run": DOCS / "benchmarks/bits-curve.json"}
FIGURE = DOCS / "bits-curve.png"
BATCHES = 64  # of held-out rows
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


def losses(run: str) -> Iterator[Row]:
    program, params = open_run(run)
    matrices = [x for x in jax.tree.leaves(params) if is_matrix(x)]
    with Evaluator(program) as held_out:
        trained = held_out(params, BATCHES)["loss"]
        yield {"format": "float32", "bits per weight": 32.0, "loss": trained, "above float32": 0.0}
        for form in (form for formats in SERIES.values() for form in formats):
            size = sum(quantize(x, form, BLOCK, -2, double_quant=True).nbytes for x in matrices)
            loss = held_out(jax.tree.map(lambda x, form=form: rounded(x, form), params), BATCHES)["loss"]
            bits = 8 * size / sum(x.size for x in matrices)
            yield {"format": form, "bits per weight": bits, "loss": loss, "above float32": loss - trained}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["formats", "run", "draw"])
    parser.add_argument("run", nargs="?", default="runs/quality", help="the directory of a run")
    parser.add_argument("--write", action="store_true", help="record the rows in docs/benchmarks, and draw the figure")
    args = parser.parse_args()
    if args.what == "draw":
        draw_losses(json.loads(RECORDS["run"].read_text())["rows"], FIGURE)
        return
    rows = list(formats() if args.what == "formats" else losses(args.run))
    print(Table("", rows).markdown())
    if args.write:
        about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "block": BLOCK}
        RECORDS[args.what].write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
        if args.what == "run":
            draw_losses(rows, FIGURE)


def draw_losses(rows: Sequence[Row], file: Path) -> None:
    points = {row["format"]: (row["bits per weight"], max(row["above float32"], SMALLEST)) for row in rows}
    series = {name: [points[form] for form in forms] for name, forms in SERIES.items()}
    title = "Loss of a model with quantized weights"
    draw(file, [LinePlot(title, "bits per weight, with scales", "loss above float32, nats per byte", series, "y")])


if __name__ == "__main__":
    main()
