"""Speed, against what else there is: `jaxmem bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from jaxmem import devices
from jaxmem.cli.options import Json, Overrides
from jaxmem.cli.printing import only_json, show
from jaxmem.cli.starting import load
from jaxmem.errors import UserError


def bench_step(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A decoder.")] = Path("configs/bench.yaml"),
    overrides: Overrides = None,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to measure, about.")] = 60.0,
    as_json: Json = False,
) -> None:
    """Tokens a second of the compiled step, against PyTorch."""
    cfg = load(config, overrides, None)
    from jaxmem.bench import step

    with only_json(as_json):
        found = step.bench_step(cfg, seconds=seconds)
    if as_json:
        show(found)
        return
    print(f"jaxmem         {found['jaxmem']:8,.0f} tokens/s")
    for peer in ("eager", "compile"):
        if f"torch_{peer}" in found:
            print(f"torch {peer:8} {found[f'torch_{peer}']:8,.0f} tokens/s  jaxmem: {found[f'ratio_{peer}']:.2f} x")
    print(f"losses differ by {found['largest_loss_difference']:.1e} at most")


Operation = Annotated[
    str | None, typer.Option(metavar="OPERATION", help="attention dequant_matmul", show_default=False)
]


def bench_kernels(
    shapes: Annotated[
        list[str] | None, typer.Argument(metavar="[SHAPE]...", help="long llama3-8b", show_default=False)
    ] = None,
    operation: Operation = None,
    explain: Annotated[bool, typer.Option(help="Only say what is picked for each shape, and why.")] = False,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to measure each, about.")] = 5.0,
    as_json: Json = False,
) -> None:
    """Whether kernels (by default attention) are right on this device, and how fast, beside cuDNN and PyTorch."""
    devices.stay_on_cpu_without_gpu()
    from jaxmem.bench import kernels

    with only_json(as_json):
        if explain:
            found: dict[str, Any] = {"choices": kernels.explain(shapes or [], operation=operation)}
        else:
            found = kernels.bench_kernels(shapes or [], operation=operation or "attention", seconds=seconds)
    if as_json:
        show(found)
    elif explain:
        for row in found["choices"]:
            print(f"{row['operation']:14} {row['shape']:20} {row['implementation']:10} {row['why']}")
    else:
        _print_rates(found)


def bench_tune(
    operation: Operation = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to measure each shape, about.")] = 5.0,
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="By default kernels/tuned.json.")] = None,
    as_json: Json = False,
) -> None:
    """Measure the kernels on this GPU; keep how each is best cut, and which implementation is the fastest for what."""
    devices.stay_on_cpu_without_gpu()
    import jax

    from jaxmem.bench import kernels
    from jaxmem.kernels import choice

    path = write or Path(choice.__file__).with_name("tuned.json")
    if write is None and jax.default_backend() == "cpu":
        raise UserError("bench tune: measures the kernels of a GPU, and there is none here; --write FILE runs it dry")
    with only_json(as_json):
        table = kernels.tune(path, operation=operation, seconds=seconds)
    if as_json:
        show(table)
    else:
        print(f"{path}: {', '.join(f'{name} on {len(kinds)} kinds of device' for name, kinds in table.items())}")


def _print_rates(found: dict[str, Any]) -> None:
    dry = ": a dry run on small shapes, its speeds mean nothing" if found["dry_run"] else ""
    print(f"{found['device']}{dry}")
    print("ceilings: {matmul_tflops:.1f} TFLOP/s, {copy_gb_s:.0f} GB/s".format(**found["ceilings"]))
    for row in found["rows"]:
        who = f"{row['operation']:14} {row['shape']:20} {row['contestant']:14}"
        if "why_not" in row:
            print(f"{who} not: {row['why_not']}")
            continue
        error = "" if row["error"] is None else f"  error {row['error']:.1f} steps"
        print(f"{who} {row['pass']:8} {row['rate']:10.3f} {row['unit']}{error}")
