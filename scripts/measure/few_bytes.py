"""Large models trained in full in a few bytes a parameter: compiled for their GPUs, one line of a table each.

    python scripts/measure/few_bytes.py [NAME ...]     # rows by the beginning of their names; none: all

Prints the table of docs/update-during.md. A row takes some ten seconds of a processor and no GPU.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxmem.config import load_config
from jaxmem.machine.gpus import GIB
from jaxmem.planning import plan

CONFIGS = Path(__file__).parents[2] / "configs"
# name: config, what is changed in it, target
ROWS = {
    "llama3-8b, 8-bit AdamW": ("llama3-8b-one-gpu", (), "a100-40gb"),
    "llama3-8b, 8-bit AdamW, remainder8": (
        "llama3-8b-one-gpu",
        ("precision.rounding=auto", "precision.master=remainder8", "memory.offload=activations"),
        "a100-40gb",
    ),
    "llama2-7b, 8-bit GaLore of rank 1024": ("llama2-7b-galore", (), "rtx4090-24gb"),
    "llama2-7b, Q-GaLore of rank 1024, int8": (
        "llama2-7b-galore",
        ("optimizer.name=qgalore", "precision.parameters=int8", "precision.rounding=auto"),
        "rtx4090-24gb",
    ),
    "llama3-8b, APOLLO-Mini, int8": ("llama3-8b-10gb", (), "rtx3080-10gb"),
    "llama3-70b, 8-bit AdamW, remainder8": (
        "llama3-8b-one-gpu",
        ("model.preset=llama3-70b", "precision.rounding=auto", "precision.master=remainder8", "batch.global_size=8"),
        "h100-80gb:8",
    ),
}


def main() -> None:
    print("| | on | weights and state | the rest | step, a GPU | initialise | bytes a parameter | fits |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |", flush=True)
    for name, (config, overrides, target) in ROWS.items():
        if len(sys.argv) == 1 or name.startswith(tuple(sys.argv[1:])):
            made = plan(load_config(str(CONFIGS / f"{config}.yaml"), list(overrides)), target=target)
            parts = made.bytes_per_device
            resting = sum(parts[part] for part in ("parameters", "quantization", "master", "optimizer"))
            sizes = (resting, parts["total"] - resting, parts["total"], made.phases["initialise"])
            each = parts["total"] * made.target.count / made.program.model.parameters
            row = (name, target, *(f"{size / GIB:.2f} GiB" for size in sizes), f"{each:.2f}")
            print(f"| {' | '.join((*row, 'yes' if made.fits else 'no'))} |", flush=True)


if __name__ == "__main__":
    main()
