"""The table of docs/layouts.md: one model under many layouts, compiled for GPUs that need not be present.

    python scripts/measure/layouts.py                       # Llama 3 8B on 8 x H100, some minutes
    python scripts/measure/layouts.py CONFIG TARGET key=value ...

Communication is that of one device and one update. `theory` is `tests/support/communication_theory.py`'s; `exposed` is
not overlapped, in bytes and as a share of the communication time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from common import ROOT, print_table
from compiling import compile_step

import jaxmem
from jaxmem.errors import UserError
from jaxmem.planning import Plan

sys.path.append(str(ROOT))

from tests.support.communication_theory import volume

LAYOUTS = {
    "data parallel": "zero=0 mesh.fsdp=8",
    "ZeRO-1": "zero=1 mesh.fsdp=8",
    "ZeRO-2": "zero=2 mesh.fsdp=8",
    "ZeRO-3": "zero=3 mesh.fsdp=8",
    "hybrid": "zero=3 mesh.replica=2 mesh.fsdp=4",
    "tensor": "mesh.fsdp=1 mesh.tensor=8",
    "context": "mesh.fsdp=1 mesh.context=8",
    "pipeline": "zero=1 mesh.fsdp=1 mesh.stage=8",
    "ZeRO-3 x tensor": "mesh.fsdp=4 mesh.tensor=2",
    "ZeRO-3 x context": "mesh.fsdp=4 mesh.context=2",
    "context x tensor": "mesh.fsdp=1 mesh.context=2 mesh.tensor=4",
    "ZeRO-3 x context x tensor": "mesh.fsdp=2 mesh.context=2 mesh.tensor=2",
    "pipeline x ZeRO-1": "zero=1 mesh.stage=4 mesh.fsdp=2",
    "pipeline x ZeRO-1, 2 rounds": "zero=1 mesh.stage=4 mesh.fsdp=2 pipeline.rounds=2",
    "pipeline x tensor": "zero=1 mesh.fsdp=1 mesh.stage=2 mesh.tensor=4",
}
DEFAULT = ["configs/llama3-8b.yaml", "h100-80gb:8"]
COLUMNS = (
    "layout", "overrides", ">GiB per device", ">communication, GiB", ">theory, GiB", ">exposed, GiB", ">of its time",
    ">step, s",
)  # fmt: skip


def main(config: str, target: str, *overrides: str) -> None:
    def rows() -> Iterator[list[str]]:
        for name, changes in LAYOUTS.items():
            plan = compile_step(jaxmem.load_config(config, [*overrides, *changes.split()]), target)
            yield [name, f"`{changes}`", *cells(plan)]

    print_table(COLUMNS, rows())


def cells(plan: Plan) -> list[str]:
    time = plan.timeline
    sent, exposed = (sum(getattr(one, size) for one in time.collectives) for size in ("wire_bytes", "exposed_bytes"))
    try:
        theory = gib(volume(plan.program).total)
    except UserError:
        theory = "not derived"
    total = gib(plan.compiled_step.total)
    return [total, gib(sent), theory, gib(exposed), f"{time.exposed_share:.0%}", f"{time.seconds:.1f}"]


def gib(size: float) -> str:
    return f"{size / 2**30:.1f}"


if __name__ == "__main__":
    main(*(sys.argv[1:] or DEFAULT))
