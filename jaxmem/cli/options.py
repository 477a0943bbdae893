"""What several commands take, declared once: the same word, the same help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="A YAML file: configs/demo.yaml", show_default=False)
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="mesh.fsdp=8 memory.remat=full", show_default=False)
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory: runs/demo", show_default=False)]
Simulate = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="See N devices on this machine's CPU.", show_default=False)
]
Reserve = Annotated[
    float | None, typer.Option(metavar="GIB", min=0.0, help="Of each GPU, for CUDA and NCCL.", show_default=False)
]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Memory over a step, to look at.", show_default=False)]
Png = Annotated[Path | None, typer.Option(metavar="FILE", help="The same as a figure.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Model = Annotated[Path, typer.Argument(metavar="RUN_OR_HF_DIR", help="A run, or a Hugging Face directory.")]
