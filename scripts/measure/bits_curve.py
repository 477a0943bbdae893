"""How few bits a trained weight can do with: the held-out loss of a run, its weights in fewer and fewer bits.

    jaxmem train configs/quality.yaml
    python scripts/measure/bits_curve.py runs/quality [--batches 64] [--json FILE] [--png FILE]
    python scripts/measure/bits_curve.py runs/quality --tables nf4    # what of that comes from the tables of tokens

Every matrix, embedding and output projection included, is quantized once after training, in blocks of 64 along its
inputs; vectors stay. The table and the figure of docs/quantization.md.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from jaxmem.inference.evaluate import HeldOut
from jaxmem.inference.load import open_run
from jaxmem.lab.tour.quantization import BLOCK, is_matrix, rounded
from jaxmem.machine import devices
from jaxmem.quant import quantize

LEAST = 1e-4  # nats: what a figure shows of less
SERIES = {  # of formats with more and more bits
    "by scale": ("int2", "int3", "int4", "int5", "int6", "int8"),
    "affine": ("uint2", "uint3", "uint4", "uint5", "uint6", "uint8"),
    "not even": ("nf4", "fp4", "fp8_e4m3", "fp8_e5m2"),
}


def rows(run: str, batches: int) -> Iterator[dict[str, Any]]:
    program, params = open_run(run)
    matrices = sum(x.size for x in jax.tree.leaves(params) if is_matrix(x))
    with HeldOut(program) as held_out:
        trained = held_out(params, batches)["loss"]
        yield {"format": "float32", "series": "", "bits": 32.0, "loss": trained, "above": 0.0}
        for series, formats in SERIES.items():
            for form in formats:
                codes = [
                    quantize(x, form, BLOCK, -2, double_quant=True).nbytes
                    for x in jax.tree.leaves(params)
                    if is_matrix(x)
                ]
                loss = held_out(jax.tree.map(lambda x, form=form: rounded(x, form), params), batches)["loss"]
                bits = 8 * sum(codes) / matrices
                yield {"format": form, "series": series, "bits": bits, "loss": loss, "above": loss - trained}


def tables(run: str, batches: int, form: str) -> None:
    """The loss above float32's with the tables of tokens alone in codes, and with the layers alone."""
    program, params = open_run(run)
    with HeldOut(program) as held_out:
        trained = held_out(params, batches)["loss"]
        for name, wanted in (("tables", True), ("layers", False)):
            coded = {key: of if (key == "blocks") is wanted else in_codes(key, of, form) for key, of in params.items()}
            print(f"{name} in {form}: {held_out(coded, batches)['loss'] - trained:+.5f} nats")


def in_codes(key: str, of: Any, form: str) -> Any:
    """A table's rows are blocks, as they rest."""
    return jax.tree.map(lambda x: rounded(x, form, -1 if key == "embedding" else -2), of)


def draw(found: list[dict[str, Any]], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for series in SERIES:
        own = [one for one in found if one["series"] == series]
        bits, above = [one["bits"] for one in own], [max(one["above"], LEAST) for one in own]
        axes.plot(bits, above, "o" if series == "not even" else "o-", label=series)
    for one in found:
        if one["series"] == "not even":
            at, side = (one["bits"], max(one["above"], LEAST)), "right" if one["bits"] > 6 else "left"
            away = (-6 if side == "right" else 6, -9 if one["format"] == "nf4" else 3)
            axes.annotate(one["format"], at, away, textcoords="offset points", fontsize=8, ha=side)
    axes.set(xlabel="bits a weight, constants included", ylabel="loss above float32's, nats a byte", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--batches", type=int, default=64)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--tables", metavar="FORMAT")
    given = parser.parse_args()
    devices.stay_on_cpu_without_gpu()
    if given.tables:
        tables(given.run, given.batches, given.tables)
        return
    print("| format | bits a weight | loss | above float32 |")
    print("| --- | ---: | ---: | ---: |")
    found = []
    for one in rows(given.run, given.batches):
        found.append(one)
        print(f"| `{one['format']}` | {one['bits']:.2f} | {one['loss']:.4f} | {one['above']:+.4f} |", flush=True)
    if given.json:
        given.json.write_text(json.dumps({"run": Path(given.run).name, "block": BLOCK, "rows": found}, indent=1) + "\n")
    if given.png:
        draw(found, given.png)


if __name__ == "__main__":
    main()
