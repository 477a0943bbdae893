"""Published figures beside what XLA allocates for the whole model: the ZeRO paper's table, 7.5 B on 64 GPUs.

    python scripts/measure/unit_figures.py [STAGE ...]      # some minutes; no GPU needed

Weights, their float32 copy and moments are arguments of the compiled step. Gradients are what it holds of them at its
fullest moment. At stages 1 and 2 the paper has no room for new weights, which are whole beside the old ones before
they take their place. `tests/planning/test_unit_figures.py` holds the figures to the layout of the arrays.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxmem import load_config
from jaxmem.machine import devices

devices.use_cpu_without_gpu(only_compile=True)

from jaxmem.planning import Plan  # noqa: E402
from jaxmem.planning.breakdown import UPDATES  # noqa: E402
from jaxmem.planning.compile import compile_all  # noqa: E402
from jaxmem.planning.targets import parse_target, target_devices  # noqa: E402
from jaxmem.step import program  # noqa: E402

PUBLISHED = {0: 120, 1: 31.4, 2: 16.6, 3: 1.9}  # GB a GPU (arXiv:1910.02054, figure 1)
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


def main(stages: list[int]) -> None:
    print("| stage | published, GB | weights, optimizer | gradients | together | new weights | all of a step |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    target = parse_target("h100-80gb:8x8")
    for zero in stages:
        built = program(load_config({**CONFIG, "zero": zero}), target_devices(target, 1000 * target.memory))
        step, _ = compile_all(built.lower_step(), {}, here=False, code=False)
        plan = Plan(built, target, step, 0.0)
        parts, new = plan.bytes_per_device, plan.kinds["gradients"].get(UPDATES, 0)
        state, gradients = parts["parameters"] + parts["master"] + parts["optimizer"], parts["gradients"] - new
        sizes = state, gradients, state + gradients, new, parts["total"]
        print(f"| {zero} | {PUBLISHED[zero]} | {' | '.join(f'{size / 1e9:.2f}' for size in sizes)} |", flush=True)


if __name__ == "__main__":
    main([int(stage) for stage in sys.argv[1:]] or list(PUBLISHED))
