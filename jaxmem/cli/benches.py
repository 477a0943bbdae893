"""Speed, against what else there is: `jaxmem bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxmem.cli.options import Json, Overrides
from jaxmem.cli.printing import only_json, show
from jaxmem.cli.starting import load


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


def bench_kernels(
    shapes: Annotated[
        list[str] | None, typer.Argument(metavar="[SHAPE]...", help="long llama3-8b", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to measure each, about.")] = 5.0,
    as_json: Json = False,
) -> None:
    """Whether attention is right on this device, and how fast, beside cuDNN and PyTorch."""
    from jaxmem.bench import kernels

    with only_json(as_json):
        found = kernels.bench_kernels(shapes or [], seconds=seconds)
    if as_json:
        show(found)
        return
    dry = ": a dry run on small shapes, its speeds mean nothing" if found["dry_run"] else ""
    print(f"{found['device']}{dry}")
    print("ceilings: {matmul_tflops:.1f} TFLOP/s, {copy_gb_s:.0f} GB/s".format(**found["ceilings"]))
    for row in found["rows"]:
        if "why_not" in row:
            print(f"{row['shape']:13} {row['contestant']:14} not: {row['why_not']}")
            continue
        error = "" if row["error"] is None else f"  error {row['error']:.1f} steps"
        print(f"{row['shape']:13} {row['contestant']:14} {row['pass']:8} {row['tflops']:8.3f} TFLOP/s{error}")
