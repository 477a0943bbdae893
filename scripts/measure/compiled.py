"""Tables of docs pages about training steps, compiled for GPUs that need not be present, as Markdown.

    python scripts/measure/compiled.py layouts            # docs/layouts.md: one model under many layouts
    python scripts/measure/compiled.py few-bytes          # docs/update-during.md: large models in few bytes
    python scripts/measure/compiled.py optimizers         # docs/optimizers.md: what optimizers add to a step
    python scripts/measure/compiled.py zero               # docs/plan.md: compared with the ZeRO paper's table
    python scripts/measure/compiled.py layouts ZeRO       # only rows whose names begin so

A row needs ten seconds to a minute of a core. Communication is that of one device and one update; `theory` is from
tests/support/communication_theory.py; `exposed` is not overlapped. Seconds are estimated from the target's rates.
"""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxmem.config import Config, load_config
from jaxmem.errors import UserError
from jaxmem.lab.tour.table import Row, Table, gib
from jaxmem.planning import Plan, plan
from jaxmem.planning.breakdown import UPDATES
from jaxmem.planning.compile import compile_all
from jaxmem.planning.targets import parse_target, target_devices
from jaxmem.step import program

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

from tests.support.communication_theory import volume  # noqa: E402


class Step(NamedTuple):
    """A config, or the name of one of configs/, changed by overrides, compiled for a target."""

    target: str
    config: str | dict[str, Any]
    overrides: str = ""

    @property
    def loaded(self) -> Config:
        config = ROOT / f"configs/{self.config}.yaml" if isinstance(self.config, str) else self.config
        return load_config(config, self.overrides.split())

    def compiled(self) -> Plan:
        """The plan of the training step alone, whether it fits on the target or not."""
        aim = parse_target(self.target)
        built = program(self.loaded, target_devices(aim, 1000 * aim.memory))
        step, _ = compile_all(built.lower_step(), {}, here=False, code=False)
        return Plan(built, aim, step, 0.0)


# ---------------------------------------------------------------- layouts

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


def layout(step: Step) -> Row:
    found = step.compiled()
    time = found.timeline
    try:
        theory = gib(volume(found.program).total)
    except UserError:
        theory = None  # not derived
    return {
        "overrides": f"`{step.overrides}`",
        "GiB per device": gib(found.compiled_step.total),
        "sent, GiB": gib(time.network.wire_bytes),
        "theory, GiB": theory,
        "exposed, GiB": gib(time.network.exposed_bytes),
        "of time, %": 100 * time.network.exposed_share,
        "step, s": time.seconds,
    }


# ---------------------------------------------------------------- few bytes

REMAINDER = "precision.rounding=auto precision.master=remainder8"
INT8 = "precision.rounding=auto precision.parameters=int8"
FEW_BYTES = {
    "llama3-8b, 8-bit AdamW": Step("a100-40gb", "llama3-8b-one-gpu"),
    "llama3-8b, 8-bit AdamW, remainder8": Step(
        "a100-40gb", "llama3-8b-one-gpu", f"{REMAINDER} memory.offload=activations"
    ),
    "llama2-7b, 8-bit GaLore of rank 1024": Step("rtx4090-24gb", "llama2-7b-galore"),
    "llama2-7b, Q-GaLore of rank 1024, int8": Step(
        "rtx4090-24gb", "llama2-7b-galore", f"optimizer.name=qgalore {INT8}"
    ),
    "llama3-8b, APOLLO-Mini, int8": Step("rtx3080-10gb", "llama3-8b-10gb"),
    "llama3-70b, 8-bit AdamW, remainder8": Step(
        "h100-80gb:8", "llama3-8b-one-gpu", f"model.preset=llama3-70b {REMAINDER} batch.global_size=8"
    ),
}


def few_bytes(step: Step) -> Row:
    found = plan(step.loaded, target=step.target)
    parts = found.bytes_per_device
    state = sum(parts[part] for part in ("parameters", "quantization", "master", "optimizer"))
    return {
        "on": step.target,
        "weights and state, GiB": gib(state),
        "other, GiB": gib(parts["total"] - state),
        "step per GPU, GiB": gib(parts["total"]),
        "initialise, GiB": gib(found.phases["initialise"]),
        "bytes per parameter": parts["total"] * found.target.count / found.program.model.parameters,
        "fits": "yes" if found.fits else "no",
    }


# ---------------------------------------------------------------- optimizers

COST = {
    "name": "cost",
    "model": {"preset": "llama2-7b"},
    "data": {"source": "tokens", "path": "unused", "sequence_length": 2048},
    "precision": {"parameters": "bfloat16", "rounding": "stochastic"},
    "memory": {"attention": "triton"},
    "train": {"steps": 1000},
}
OPTIMIZERS = {  # the first is what the others are compared with
    "adamw": "optimizer.name=adamw",
    "adamw8bit": "optimizer.name=adamw8bit",
    "adamw8bit, kernel: triton": "optimizer.name=adamw8bit optimizer.kernel=triton",
    "adamw4bit": "optimizer.name=adamw4bit",
    "galore_adamw": "optimizer.name=galore_adamw optimizer.rank=1024",
    "galore_adamw8bit": "optimizer.name=galore_adamw8bit optimizer.rank=1024",
    "qgalore": "optimizer.name=qgalore optimizer.rank=1024",
    "apollo": "optimizer.name=apollo optimizer.rank=256",
    "apollo_mini": "optimizer.name=apollo_mini",
}


def optimizer(step: Step) -> Row:
    """The refresh of a projection is counted as often as it happens on average."""
    time = step.compiled().timeline
    return {"TFLOP": time.flops / 1e12, "GB moved": time.kernel_bytes / 1e9, "step, s": time.seconds}


# ---------------------------------------------------------------- zero

PAPER = {  # 7.5 B parameters; tests/planning/test_unit_figures.py checks the figures against the layout of the arrays
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
PUBLISHED = {
    "stage 0": 120,
    "stage 1": 31.4,
    "stage 2": 16.6,
    "stage 3": 1.9,
}  # GB per GPU (arXiv:1910.02054, figure 1)


def zero(step: Step) -> Row:
    """Weights, their float32 copy and moments are arguments of the step; gradients are those at its peak. At stages 1
    and 2 the paper has no memory for new weights, which are replicated until they replace the old ones."""
    found = step.compiled()
    parts, new = found.bytes_per_device, found.breakdown.kinds["gradients"].get(UPDATES, 0)
    state, gradients = parts["parameters"] + parts["master"] + parts["optimizer"], parts["gradients"] - new
    sizes = {"weights, optimizer": state, "gradients": gradients, "sum": state + gradients, "new weights": new}
    return {f"{name}, GB": size / 1e9 for name, size in {**sizes, "step": parts["total"]}.items()}


TABLES: Mapping[str, tuple[Callable[[Step], Row], Mapping[str, Step]]] = {
    "layouts": (
        layout,
        {name: Step("h100-80gb:8", "llama3-8b", f"memory.remat=full {own}") for name, own in LAYOUTS.items()},
    ),
    "few-bytes": (few_bytes, FEW_BYTES),
    "optimizers": (
        optimizer,
        {
            f"{name}, {2048 * batch:,} tokens": Step("h100-80gb", COST, f"{own} batch.global_size={batch}")
            for batch in (1, 16)
            for name, own in OPTIMIZERS.items()
        },
    ),
    "zero": (
        zero,
        {
            f"{stage}: published {gb} GB": Step("h100-80gb:8x8", PAPER, f"zero={stage[-1]}")
            for stage, gb in PUBLISHED.items()
        },
    ),
}


def main(name: str = "", *begins: str) -> None:
    if name not in TABLES:
        raise SystemExit(f"unknown table {name!r}; expected one of {', '.join(TABLES)}")
    measured, steps = TABLES[name]
    rows = []
    for row, step in steps.items():
        if row.startswith(begins or ("",)):
            print(row, file=sys.stderr, flush=True)
            rows.append({"": row, **measured(step)})
    print(Table("", rows).markdown())


if __name__ == "__main__":
    main(*sys.argv[1:])
