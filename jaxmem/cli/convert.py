"""`jaxmem import`, `export` and `tokenize`."""

from pathlib import Path
from typing import Annotated

import typer

from jaxmem.cli.options import ConfigFile, Overrides, Run, Simulate
from jaxmem.cli.start import load, take_devices


def import_(
    source: Annotated[Path, typer.Argument(metavar="HF_DIR", help="A directory with config.json and *.safetensors.")],
    target: Annotated[Path, typer.Argument(metavar="DIR", help="The directory of the new run.")],
    simulate: Simulate = None,
) -> None:
    """Import a Hugging Face model as a run."""
    take_devices(simulate)
    from jaxmem.inference.export import import_model

    import_model(source, target)
    print(f"{target}: try it with jaxmem generate {target} --prompt TEXT")


def export(
    run: Run,
    target: Annotated[Path, typer.Argument(metavar="DIR", help="The directory to write, or a GGUF file (FILE.gguf).")],
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="D",
            help="float32, float16 or bfloat16; GGUF: float32, float16, q8_0, q4_0 or q4_k. "
            "[default: that of the imported model, otherwise of the run; GGUF: float16]",
        ),
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write only the adapters, for PEFT.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Write the weights with the adapters merged.")] = False,
    simulate: Simulate = None,
) -> None:
    """Export a run for transformers or llama.cpp (GGUF), or its adapters for PEFT."""
    take_devices(simulate)
    from jaxmem.inference.export import export_model

    print(export_model(run, target, dtype, adapter, merge))


def tokenize(
    config: ConfigFile,
    output: Annotated[Path, typer.Option(metavar="DIR", help="The token cache to write.")],
    overrides: Overrides = None,
) -> None:
    """Tokenize the data of a config and store the tokens."""
    cfg = load(config, overrides, None)
    from rich.console import Console
    from rich.progress import Progress

    from jaxmem import data

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("records")
        written = data.tokenize(cfg, output, lambda done, total: progress.update(task, completed=done, total=total))
    print(f"{output}: {written['tokens']:,} tokens from {written['records']:,} records")
    print(f"train on it with: data.source=tokens data.path={output}")
