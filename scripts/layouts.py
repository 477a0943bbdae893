"""The table of docs/layouts.md: one model under many layouts, compiled for GPUs that need not be there.

    python scripts/layouts.py                       # Llama 3.2 1B on 8 x H100, some minutes
    python scripts/layouts.py CONFIG TARGET key=value ...

Bytes and messages are of one device and one update. `theory` is `jaxmem.planning.volume`'s.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jaxmem
from jaxmem.errors import UserError
from jaxmem.planning.volume import volume

LAYOUTS = {
    "data parallel": "zero=0 mesh.fsdp=8",
    "ZeRO-1": "zero=1 mesh.fsdp=8",
    "ZeRO-2": "zero=2 mesh.fsdp=8",
    "ZeRO-3": "zero=3 mesh.fsdp=8",
    "hybrid": "zero=3 mesh.replica=2 mesh.fsdp=4",
    "tensor": "mesh.fsdp=1 mesh.tensor=8",
    "context": "mesh.fsdp=1 mesh.context=8",
    "ZeRO-3 x tensor": "mesh.fsdp=4 mesh.tensor=2",
    "ZeRO-3 x context": "mesh.fsdp=4 mesh.context=2",
    "context x tensor": "mesh.fsdp=1 mesh.context=2 mesh.tensor=4",
    "ZeRO-3 x context x tensor": "mesh.fsdp=2 mesh.context=2 mesh.tensor=2",
}
DEFAULT = [
    "configs/llama3-8b.yaml", "h100-80gb:8", "model.preset=llama3.2-1b", "batch.global_size=16", "batch.accumulate=2"
]  # fmt: skip


def main(config: str, target: str, *overrides: str) -> None:
    print("| layout | overrides | GiB a device | messages, GiB | theory, GiB | exposed, GiB | step, s |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for name, changes in LAYOUTS.items():
        try:
            plan = jaxmem.plan(jaxmem.load_config(config, [*overrides, *changes.split()]), target=target)
        except UserError as error:
            print(f"| {name} | `{changes}` | {str(error).splitlines()[0]} | | | | |")
            continue
        traffic = plan.timeline.traffic.values()
        sent, exposed = (sum(getattr(one, what) for one in traffic) for what in ("wire_bytes", "exposed_bytes"))
        sizes = (plan.bytes_per_device["total"], sent, volume(plan.program).total, exposed)
        cells = " | ".join(f"{size / 2**30:.2f}" for size in sizes)
        print(f"| {name} | `{changes}` | {cells} | {plan.timeline.seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main(*(sys.argv[1:] or DEFAULT))
