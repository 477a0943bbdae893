"""The table of docs/layouts.md: one model under many layouts, compiled for GPUs that need not be there.

    python scripts/measure/layouts.py                       # Llama 3 8B on 8 x H100, some minutes
    python scripts/measure/layouts.py CONFIG TARGET key=value ...

Bytes and messages are of one device and one update. `theory` is `jaxmem.planning.volume`'s. `exposed` is what no kernel
hides, in bytes and as a share of the messages' time.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jaxmem
from jaxmem.errors import UserError
from jaxmem.planning.compile import compile_all
from jaxmem.planning.targets import parse_target, target_devices
from jaxmem.planning.timeline import timeline
from jaxmem.planning.volume import volume
from jaxmem.step import program

LAYOUTS = {
    "data parallel": "zero=0 mesh.fsdp=8",
    "ZeRO-1": "zero=1 mesh.fsdp=8",
    "ZeRO-2": "zero=2 mesh.fsdp=8",
    "ZeRO-3": "zero=3 mesh.fsdp=8",
    "hybrid": "zero=3 mesh.replica=2 mesh.fsdp=4",
    "tensor": "mesh.fsdp=1 mesh.tensor=8",
    "context": "mesh.fsdp=1 mesh.context=8",
    "stages": "zero=1 mesh.fsdp=1 mesh.stage=8",
    "ZeRO-3 x tensor": "mesh.fsdp=4 mesh.tensor=2",
    "ZeRO-3 x context": "mesh.fsdp=4 mesh.context=2",
    "context x tensor": "mesh.fsdp=1 mesh.context=2 mesh.tensor=4",
    "ZeRO-3 x context x tensor": "mesh.fsdp=2 mesh.context=2 mesh.tensor=2",
    "stages x ZeRO-1": "zero=1 mesh.stage=4 mesh.fsdp=2",
    "stages x ZeRO-1, 2 rounds": "zero=1 mesh.stage=4 mesh.fsdp=2 pipeline.rounds=2",
    "stages x tensor": "zero=1 mesh.fsdp=1 mesh.stage=2 mesh.tensor=4",
}
DEFAULT = ["configs/llama3-8b.yaml", "h100-80gb:8"]


def main(config: str, target: str, *overrides: str) -> None:
    print("| layout | overrides | GiB a device | messages, GiB | theory, GiB | exposed, GiB | of time | step, s |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    gpus = parse_target(target)
    devices = target_devices(gpus, 1000 * gpus.memory)  # what a layout takes, whether it fits or not
    for name, changes in LAYOUTS.items():
        built = program(jaxmem.load_config(config, [*overrides, *changes.split()]), devices)
        step, _ = compile_all(built.lower_step(), {}, here=False, code=False)
        run = timeline(step.module, gpus.gpu, gpus.count, gpus.per_host)
        sent, exposed = (sum(getattr(one, what) for one in run.collectives) for what in ("wire_bytes", "exposed_bytes"))
        try:
            theory = f"{volume(built).total / 2**30:.1f}"
        except UserError:
            theory = "not derived"
        total, sent, exposed = (f"{size / 2**30:.1f}" for size in (step.total, sent, exposed))
        cells = f"{total} | {sent} | {theory} | {exposed}"
        print(f"| {name} | `{changes}` | {cells} | {run.exposed_share:.0%} | {run.seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main(*(sys.argv[1:] or DEFAULT))
