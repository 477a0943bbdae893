"""The speed of kernels on this device, compared with other implementations, and the errors of their results.

python scripts/bench/kernels.py long llama3-8b                 # attention, compared with cuDNN
python scripts/bench/kernels.py --operation adam8_update       # another operation
python scripts/bench/kernels.py long --check                   # only the results, with every option
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from jaxmem.cli.options import Json
from jaxmem.cli.start import show
from jaxmem.errors import UserError
from jaxmem.machine import devices
from jaxmem.typing import JsonDict

Shapes = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SHAPE]...", help="Names of shapes, e.g. long or llama3-8b. [default: a standard set]"),
]
Operation = Annotated[
    str | None,
    typer.Option(metavar="OPERATION", help="attention (default), adam8_update, int8_add or sliding_max."),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Measure only this implementation or pass, e.g. mosaic or 'mosaic forward'; may be repeated.",
    ),
]
Without = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Leave out this implementation, e.g. jax.nn; may be repeated.")
]
Seconds = Annotated[float, typer.Option(min=0.1, metavar="S", help="Approximate measuring time per shape, in seconds.")]


def bench_kernels(
    shapes: Shapes = None,
    operation: Operation = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Check results without measuring, with each option of a kernel (e.g. a window)."),
    ] = False,
    only: Only = None,
    without: Without = None,
    seconds: Seconds = 5.0,
    write: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Append each row to FILE as a line of JSON as soon as it is measured."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check kernels, and compare their speed with other implementations, e.g. cuDNN."""
    devices.use_cpu_without_gpu()
    from scripts.bench import kernel_rows
    from scripts.bench.kernel_rows import BenchSelection

    selection = BenchSelection(tuple(shapes or ()), operation, tuple(only or ()), tuple(without or ()), seconds)
    try:
        here, *rows = _collect(kernel_rows.bench_kernels(selection, check=check, write=write), as_json)
    except UserError as error:
        sys.exit(f"error: {error}")
    if as_json:
        show(here | {"rows": rows})


def _collect(rows: Iterable[JsonDict], as_json: bool) -> list[JsonDict]:
    """The rows. Each is printed when it is known, except with `--json`."""
    collected = []
    for row in rows:
        collected.append(row)
        if not as_json:
            _print_row(row)
    return collected


def _print_row(row: JsonDict) -> None:
    if "operation" not in row:
        dry = ": a dry run on small shapes; its speeds have no meaning" if row["dry_run"] else ""
        driver = "" if row["driver"] is None else f", driver {row['driver']}"
        print(f"{row['device']}{driver}, {row['time']}{dry}", flush=True)
        return
    who = f"{row['operation']:14} {row['shape']:18} {row.get('contestant', ''):14} {row.get('pass', ''):8}"
    print(f"{who} {_describe(row)}".rstrip(), flush=True)


def _describe(row: JsonDict) -> str:
    checked = f", {row['check']}" if "check" in row else ""
    if "why_not" in row:
        return f"not{checked}: {row['why_not']}"
    if "rate" not in row:
        error = "infinite" if row["error"] is None else f"{row['error']:.1f} steps"
        return f"{'right' if row['right'] else 'WRONG'}{checked}, error {error}"
    least, most = row["spread"]
    ratios = "".join(f"  {ratio:.2f} x {name}" for name, ratio in row["ratios"].items())
    marks = f"{'' if row.get('right', True) else '  WRONG'}{'  BY HOST' if row['by_host'] else ''}"
    return f"{row['rate']:9.3f} ({least:.3f} to {most:.3f}) {row['unit']}{marks}{ratios}"


if __name__ == "__main__":
    typer.run(bench_kernels)
