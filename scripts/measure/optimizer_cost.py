"""What optimizers add to a step, counted in its compiled module: operations, bytes moved, and seconds estimated from
the target's rates. The table of docs/optimizers.md; no GPU needed.

    python scripts/measure/optimizer_cost.py [NAME ...]        # some minutes; names as in the table

The step is that of Llama 2 7B in bfloat16 with stochastic rounding, in sequences of 2,048 tokens. The refresh of a
projection is counted as often as it happens on average.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from common import print_table
from compiling import compile_step

from jaxmem.config import load_config
from jaxmem.planning.timeline import Timeline

TARGET = "h100-80gb"
SEQUENCE = 2048
BATCHES = (1, 16)
RANK = 1024
BASE = "adamw"
OPTIMIZERS = {
    BASE: "",
    "adamw8bit": "",
    "adamw8bit, kernel: triton": "optimizer.kernel=triton",
    "adamw4bit": "",
    "galore_adamw": f"optimizer.rank={RANK}",
    "galore_adamw8bit": f"optimizer.rank={RANK}",
    "qgalore": f"optimizer.rank={RANK}",
    "apollo": "optimizer.rank=256",
    "apollo_mini": "",
}  # the name before a comma is the optimizer's
CONFIG = {
    "name": "cost",
    "model": {"preset": "llama2-7b"},
    "data": {"source": "tokens", "path": "unused", "sequence_length": SEQUENCE},
    "precision": {"parameters": "bfloat16", "rounding": "stochastic"},
    "memory": {"attention": "triton"},
    "train": {"steps": 1000},
}
COLUMNS = (
    *("optimizer", ">tokens per update", ">TFLOP", ">GB moved", ">step, s"),
    *(">operations", ">bytes", ">seconds"),
)


def rows(optimizers: list[str]) -> Iterator[tuple[str, ...]]:
    for batch in BATCHES:
        base = timeline(BASE, batch)
        for name in optimizers:
            one = base if name == BASE else timeline(name, batch)
            ratios = (one.flops / base.flops, one.kernel_bytes / base.kernel_bytes, one.seconds / base.seconds)
            added = ["" if name == BASE else f"{100 * ratio - 100:+.1f} %" for ratio in ratios]
            amounts = (f"{one.flops / 1e12:.1f}", f"{one.kernel_bytes / 1e9:.0f}", f"{one.seconds:.3f}")
            yield (f"`{name}`", f"{batch * SEQUENCE:,}", *amounts, *added)


def timeline(optimizer: str, batch: int) -> Timeline:
    name, *_ = optimizer.split(",")
    overrides = [f"optimizer.name={name}", f"batch.global_size={batch}", *OPTIMIZERS[optimizer].split()]
    return compile_step(load_config(CONFIG, overrides), TARGET).timeline


if __name__ == "__main__":
    print_table(COLUMNS, rows(sys.argv[1:] or list(OPTIMIZERS)))
