"""Weights and text, in and out: `jaxmem import`, `export` and `tokenize`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxmem.cli.options import ConfigFile, Overrides, Run, Simulate
from jaxmem.cli.starting import load, take_devices


def import_(
    source: Annotated[Path, typer.Argument(metavar="HF_DIR", help="config.json, *.safetensors", show_default=False)],
    target: Annotated[Path, typer.Argument(metavar="DIR", help="The run to write.", show_default=False)],
    simulate: Simulate = None,
) -> None:
    """A Hugging Face directory as a run, to train, generate from, evaluate."""
    take_devices(simulate)
    from jaxmem.inference.export import import_model

    import_model(source, target)
    print(f"{target}: try it with jaxmem generate {target} --prompt TEXT")


def export(
    run: Run,
    target: Annotated[Path, typer.Argument(metavar="DIR", help="The directory to write.", show_default=False)],
    dtype: Annotated[
        str | None, typer.Option(metavar="D", help="float32, float16, bfloat16; default: as it came, or rests.")
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Only its adapters, for PEFT.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Its weights with the adapters in them.")] = False,
    simulate: Simulate = None,
) -> None:
    """A run as a Hugging Face directory, which transformers opens, or its adapters as one that PEFT opens."""
    take_devices(simulate)
    from jaxmem.inference.export import export_model

    print(export_model(run, target, dtype, adapter, merge))


def tokenize(
    config: ConfigFile,
    output: Annotated[Path, typer.Option(help="The cache to write, for data.source: tokens.", show_default=False)],
    overrides: Overrides = None,
) -> None:
    """Tokenize a config's data once, to train from disk."""
    cfg = load(config, overrides, None)
    from rich.console import Console
    from rich.progress import Progress

    from jaxmem import data

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("records")
        made = data.tokenize(cfg, output, lambda done, total: progress.update(task, completed=done, total=total))
    print(f"{output}: {made['tokens']:,} tokens of {made['records']:,} records")
    print(f"train on it with: data.source=tokens data.path={output}")
