"""Published figures beside the bytes that XLA allocates for the whole model: the ZeRO paper's table, 7.5 B on 64 GPUs.

    python scripts/measure/unit_figures.py [STAGE ...]      # some minutes; no GPU needed

Weights, their float32 copy and moments are arguments of the compiled step. Gradients are those at its peak. At stages 1
and 2 the paper has no memory for new weights, which are replicated until they replace the old ones.
`tests/planning/test_unit_figures.py` checks the figures against the layout of the arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from common import print_table
from compiling import compile_step

from jaxmem import load_config
from jaxmem.planning.breakdown import UPDATES

PUBLISHED = {0: 120, 1: 31.4, 2: 16.6, 3: 1.9}  # GB per GPU (arXiv:1910.02054, figure 1)
CONFIG = {
    "name": "zero",
    "model": {"family": "decoder", "vocab": 26112, "layers": 36, "embed": 4096, "mlp": 11008, "heads": 32,
              "kv_heads": 32, "head_dim": 128},
    "data": {"source": "tokens", "path": "unused"},
    "batch": {"global_size": 64},
    "mesh": {"fsdp": 64},
    "precision": {"parameters": "bfloat16", "master": "float32"},
    "memory": {"remat": "full"},
    "train": {"steps": 10},
}  # fmt: skip
COLUMNS = (">stage", ">published, GB", ">weights, optimizer", ">gradients", ">sum", ">new weights", ">whole step")


def rows(stages: list[int]) -> Iterator[list[object]]:
    for zero in stages:
        plan = compile_step(load_config({**CONFIG, "zero": zero}), "h100-80gb:8x8")
        parts, new = plan.bytes_per_device, plan.kinds["gradients"].get(UPDATES, 0)
        state, gradients = parts["parameters"] + parts["master"] + parts["optimizer"], parts["gradients"] - new
        sizes = state, gradients, state + gradients, new, parts["total"]
        yield [zero, PUBLISHED[zero], *(f"{size / 1e9:.2f}" for size in sizes)]


if __name__ == "__main__":
    print_table(COLUMNS, rows([int(stage) for stage in sys.argv[1:]] or list(PUBLISHED)))
