"""Large models trained in full in a few bytes per parameter: the table of docs/update-during.md.

    python scripts/measure/few_bytes.py [NAME ...]     # rows whose names begin so; default: all

Each row is compiled for its GPU, which takes some ten seconds of a processor and no GPU.
"""

import os
import sys
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from common import ROOT, print_table

from jaxmem.config import load_config
from jaxmem.machine.gpus import GIB
from jaxmem.planning import plan

REMAINDER = ("precision.rounding=auto", "precision.master=remainder8")
INT8 = ("precision.rounding=auto", "precision.parameters=int8")
COLUMNS = ("", "on", ">weights and state", ">the rest", ">step, per GPU", ">initialise", ">bytes per parameter", "fits")
ROWS = {  # config, overrides, target
    "llama3-8b, 8-bit AdamW": ("llama3-8b-one-gpu", (), "a100-40gb"),
    "llama3-8b, 8-bit AdamW, remainder8": (
        "llama3-8b-one-gpu",
        (*REMAINDER, "memory.offload=activations"),
        "a100-40gb",
    ),
    "llama2-7b, 8-bit GaLore of rank 1024": ("llama2-7b-galore", (), "rtx4090-24gb"),
    "llama2-7b, Q-GaLore of rank 1024, int8": ("llama2-7b-galore", ("optimizer.name=qgalore", *INT8), "rtx4090-24gb"),
    "llama3-8b, APOLLO-Mini, int8": ("llama3-8b-10gb", (), "rtx3080-10gb"),
    "llama3-70b, 8-bit AdamW, remainder8": (
        "llama3-8b-one-gpu",
        ("model.preset=llama3-70b", *REMAINDER, "batch.global_size=8"),
        "h100-80gb:8",
    ),
}


def rows(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for name, (config, overrides, target) in ROWS.items():
        if name.startswith(names):
            planned = plan(load_config(ROOT / f"configs/{config}.yaml", overrides), target=target)
            parts = planned.bytes_per_device
            state = sum(parts[part] for part in ("parameters", "quantization", "master", "optimizer"))
            sizes = (state, parts["total"] - state, parts["total"], planned.phases["initialise"])
            each = parts["total"] * planned.target.count / planned.program.model.parameters
            fits = "yes" if planned.fits else "no"
            yield (name, target, *(f"{size / GIB:.2f} GiB" for size in sizes), f"{each:.2f}", fits)


if __name__ == "__main__":
    print_table(COLUMNS, rows(tuple(sys.argv[1:]) or ("",)))
