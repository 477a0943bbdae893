"""How few bits a trained weight needs: the held-out loss of a run, its weights in fewer and fewer bits.

    jaxmem train configs/quality.yaml
    python scripts/measure/bits_curve.py runs/quality [--batches 64] [--json FILE] [--png FILE]
    python scripts/measure/bits_curve.py runs/quality --embeddings nf4   # how much of that is due to the embedding
                                                                         # and output matrices alone

Every matrix, embedding and output projection included, is quantized once after training, in blocks of 64 along its
inputs; vectors are not. The table and the figure of docs/quantization.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from common import parser, print_table

from jaxmem.inference.evaluate import Evaluator
from jaxmem.inference.load import open_run
from jaxmem.lab.tour.quantization import BLOCK, is_matrix, rounded
from jaxmem.machine.devices import use_cpu_without_gpu
from jaxmem.quant import quantize
from jaxmem.report.matplotlib_figure import figure

SMALLEST = 1e-4  # nats per byte: differences below are drawn here
FLOATS = "not evenly spaced"
SERIES = {  # formats with more and more bits
    "symmetric": ("int2", "int3", "int4", "int5", "int6", "int8"),
    "affine": ("uint2", "uint3", "uint4", "uint5", "uint6", "uint8"),
    FLOATS: ("nf4", "fp4", "fp8_e4m3", "fp8_e5m2"),
}


def rows(run: str, batches: int) -> Iterator[dict[str, Any]]:
    program, params = open_run(run)
    matrices = [x for x in jax.tree.leaves(params) if is_matrix(x)]
    with Evaluator(program) as held_out:
        trained = held_out(params, batches)["loss"]
        yield {"format": "float32", "series": "", "bits": 32.0, "loss": trained, "above": 0.0}
        for series, formats in SERIES.items():
            for form in formats:
                size = sum(quantize(x, form, BLOCK, -2, double_quant=True).nbytes for x in matrices)
                loss = held_out(jax.tree.map(lambda x, form=form: rounded(x, form), params), batches)["loss"]
                bits = 8 * size / sum(x.size for x in matrices)
                yield {"format": form, "series": series, "bits": bits, "loss": loss, "above": loss - trained}


def print_parts(run: str, batches: int, form: str) -> None:
    """The loss above float32's with the embedding and output matrices alone quantized, and with the layers alone."""
    program, params = open_run(run)

    def quantized(name: str, part: Any) -> Any:
        axis = -1 if name == "embedding" else -2  # an embedding's blocks lie along its rows
        return jax.tree.map(lambda x: rounded(x, form, axis), part)

    with Evaluator(program) as held_out:
        trained = held_out(params, batches)["loss"]
        for part, is_layers in (("embedding and output", False), ("layers", True)):
            some = {name: quantized(name, x) if (name == "blocks") is is_layers else x for name, x in params.items()}
            print(f"{part} in {form}: {held_out(some, batches)['loss'] - trained:+.5f} nats")


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    with figure(file, 6, 4) as canvas:
        axes = canvas.subplots()
        for series in SERIES:
            own = [row for row in rows if row["series"] == series]
            bits, above = [row["bits"] for row in own], [max(row["above"], SMALLEST) for row in own]
            axes.plot(bits, above, "o" if series == FLOATS else "o-", label=series)
        for row in (row for row in rows if row["series"] == FLOATS):
            at, side = (row["bits"], max(row["above"], SMALLEST)), "right" if row["bits"] > 6 else "left"
            offset = (-6 if side == "right" else 6, -9 if row["format"] == "nf4" else 3)
            axes.annotate(row["format"], at, offset, textcoords="offset points", fontsize=8, ha=side)
        axes.set(xlabel="bits per weight, scales included", ylabel="loss above float32, nats per byte", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend()


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    return f"`{row['format']}`", f"{row['bits']:.2f}", f"{row['loss']:.4f}", f"{row['above']:+.4f}"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("run")
    options.add_argument("--batches", type=int, default=64)
    options.add_argument("--json", type=Path)
    options.add_argument("--png", type=Path)
    options.add_argument("--embeddings", metavar="FORMAT")
    args = options.parse_args()
    use_cpu_without_gpu()
    if args.embeddings:
        print_parts(args.run, args.batches, args.embeddings)
        return
    found = list(rows(args.run, args.batches))
    print_table(("format", ">bits per weight", ">loss", ">above float32"), map(cells, found))
    if args.json:
        args.json.write_text(json.dumps({"run": Path(args.run).name, "block": BLOCK, "rows": found}, indent=1) + "\n")
    if args.png:
        draw(found, args.png)


if __name__ == "__main__":
    main()
