"""Arguments and options that several commands share, with one help text each."""

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file, or the directory of a run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings that replace those of the config, e.g. mesh.fsdp=8."),
]
ModelOrConfig = Annotated[
    str | None,
    typer.Argument(
        metavar="CONFIG_OR_MODEL",
        help="A YAML file, a preset (e.g. llama3-8b), or a Hugging Face model (a directory or org/name).",
    ),
]
MethodName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Training method: full, full-bf16, full-8bit, full-int8, lora or qlora.",
    ),
]
SequenceLength = Annotated[int | None, typer.Option(metavar="N", min=1, help="Tokens per sequence.")]
BatchSize = Annotated[int | None, typer.Option(metavar="N", min=1, help="Sequences per update.")]
ConfigOutput = Annotated[
    Path | None,
    typer.Option(
        "--write",
        metavar="FILE",
        help="Write the resulting config to FILE, for `jaxmem train FILE`.",
    ),
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run, e.g. runs/demo.")]
Model = Annotated[Path, typer.Argument(metavar="RUN_OR_HF_DIR", help="The directory of a run or a Hugging Face model.")]
Target = Annotated[
    str | None,
    typer.Option(
        metavar="T",
        help="Devices, e.g. h100-80gb:16x8 (16 hosts of 8 GPUs) or cpu:8; `jaxmem plan --target list` prints all.",
    ),
]
Simulate = Annotated[int | None, typer.Option(metavar="N", min=1, help="Use N simulated CPU devices.")]
Reserve = Annotated[float | None, typer.Option(metavar="GIB", min=0.0, help="GiB of each GPU kept for CUDA and NCCL.")]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="Write an HTML page of the memory over a step.")]
Png = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a figure of the memory over a step.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

# Options of commands that generate text.
Tokens = Annotated[int, typer.Option(metavar="N", min=1, help="Generate at most N tokens.")]
Temperature = Annotated[float, typer.Option(metavar="X", min=0.0, help="Sampling temperature; 0 for greedy decoding.")]
TopK = Annotated[int | None, typer.Option(metavar="K", min=1, help="Sample from the K most likely tokens.")]
TopP = Annotated[float, typer.Option(metavar="P", help="Sample from the most likely tokens with total probability P.")]
StopTexts = Annotated[
    list[str] | None, typer.Option("--stop", metavar="TEXT", help="Stop generating before TEXT; may be repeated.")
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Random seed of the sampling.")]
