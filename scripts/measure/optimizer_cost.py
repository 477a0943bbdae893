"""What optimizers add to a step, counted in its compiled module: operations, bytes moved, and seconds by the target's
rates. The table of docs/optimizers.md; no GPU needed.

    python scripts/measure/optimizer_cost.py [NAME ...]        # some minutes; names as in the table

The step is that of Llama 2 7B in bfloat16 with stochastic rounding, in sequences of 2,048 tokens. A projection's
search for a new basis counts as often as it happens in the mean.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxmem import load_config
from jaxmem.machine import devices

devices.stay_on_cpu_without_gpu(only_compile=True)

from jaxmem.planning import Plan  # noqa: E402
from jaxmem.planning.compile import compile_all  # noqa: E402
from jaxmem.planning.targets import parse_target, target_devices  # noqa: E402
from jaxmem.planning.timeline import Timeline  # noqa: E402
from jaxmem.step import program  # noqa: E402

TARGET = "h100-80gb"
SEQUENCE = 2048
BATCHES = (1, 16)
RANK = 1024
BASE = "adamw"
OPTIMIZERS = {
    BASE: "",
    "adamw8bit": "",
    "adamw8bit, kernel: pallas": "optimizer.kernel=pallas",
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
    "memory": {"attention": "pallas"},
    "train": {"steps": 1000},
}


def main(optimizers: list[str]) -> None:
    print("| optimizer | tokens an update | TFLOP | GB moved | step, s | operations | bytes | seconds |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for batch in BATCHES:
        base = counted(BASE, batch)
        for name in optimizers:
            one = base if name == BASE else counted(name, batch)
            sizes = f"{one.flops / 1e12:.1f} | {one.kernel_bytes / 1e9:.0f} | {one.seconds:.3f}"
            fields = "flops", "kernel_bytes", "seconds"
            more = [getattr(one, field) / getattr(base, field) - 1 for field in fields]
            beside = " | ".join("" if name == BASE else f"{100 * x:+.1f} %" for x in more)
            print(f"| `{name}` | {batch * SEQUENCE:,} | {sizes} | {beside} |", flush=True)


def counted(optimizer: str, batch: int) -> Timeline:
    target = parse_target(TARGET)
    name, *_ = optimizer.split(",")
    overrides = [f"optimizer.name={name}", f"batch.global_size={batch}", *OPTIMIZERS[optimizer].split()]
    built = program(load_config(CONFIG, overrides), target_devices(target, 1000 * target.memory))
    step, _ = compile_all(built.lower_step(), {}, here=False, code=False)
    return Plan(built, target, step, 0.0).timeline


if __name__ == "__main__":
    main(sys.argv[1:] or list(OPTIMIZERS))
