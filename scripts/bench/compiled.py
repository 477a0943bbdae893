"""Tables of docs pages about training steps, compiled for GPUs that need not be installed, as Markdown.

    python scripts/bench/compiled.py layouts            # docs/layouts.md: one model under many layouts
    python scripts/bench/compiled.py few-bytes          # docs/update-during.md: large models in few bytes
    python scripts/bench/compiled.py optimizers         # docs/optimizers.md: the cost of optimizers in a step
    python scripts/bench/compiled.py zero               # docs/internals.md: compared with the ZeRO paper's table
    python scripts/bench/compiled.py layouts ZeRO       # only rows whose names begin with ZeRO

A row takes ten seconds to a minute on one core. Communication is that of one device and one update; `theory` is from
tests/support/communication_theory.py; `exposed` is not overlapped. Seconds are estimated from the rates of the target.
The steps are in compiled.yaml.
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jaxmem.typing import JsonDict

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import yaml

from jaxmem.config import Config, load_config
from jaxmem.errors import UserError
from jaxmem.planning.compile import compile_program
from jaxmem.planning.result import Plan, plan
from jaxmem.planning.targets import parse_target, target_devices
from jaxmem.step.programs import program
from scripts.course.table import Row, Table, gib

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))

from tests.support.communication_theory import volume  # noqa: E402


class Step(NamedTuple):
    """A config, or the name of one in configs/, changed by overrides, for a target."""

    target: str
    config: str | JsonDict
    overrides: str = ""

    @property
    def loaded(self) -> Config:
        config = ROOT / f"configs/{self.config}.yaml" if isinstance(self.config, str) else self.config
        return load_config(config, self.overrides.split())

    def compiled(self) -> Plan:
        """The plan of the training step alone, whether it fits on the target or not."""
        aim = parse_target(self.target)
        built = program(self.loaded, target_devices(aim, 1000 * aim.memory))
        step = compile_program(built.lower_step(), here=False)
        return Plan(built, aim, step, 0.0)


def layout(step: Step) -> Row:
    compiled = step.compiled()
    time = compiled.timeline
    try:
        theory = gib(volume(compiled.program).total)
    except UserError:
        theory = None  # not derived
    return {
        "overrides": f"`{step.overrides}`",
        "GiB per device": gib(compiled.compiled_step.total),
        "sent, GiB": gib(time.network.wire_bytes),
        "theory, GiB": theory,
        "exposed, GiB": gib(time.network.exposed_bytes),
        "exposed, % of time": 100 * time.network.exposed_share,
        "step, s": time.seconds,
    }


def few_bytes(step: Step) -> Row:
    planned = plan(step.loaded, target=step.target)
    parts = planned.bytes_per_device
    state = sum(parts[part] for part in ("parameters", "quantization", "master", "optimizer"))
    return {
        "on": step.target,
        "weights and state, GiB": gib(state),
        "other, GiB": gib(parts["total"] - state),
        "step per GPU, GiB": gib(parts["total"]),
        "initialise, GiB": gib(planned.phases["initialise"]),
        "bytes per parameter": parts["total"] * planned.target.count / planned.program.model.parameter_count,
        "fits": "yes" if planned.fits else "no",
    }


def optimizer(step: Step) -> Row:
    """The refresh of a projection counts with its average frequency."""
    time = step.compiled().timeline
    return {"TFLOP": time.flops / 1e12, "GB moved": time.kernel_bytes / 1e9, "step, s": time.seconds}


def zero(step: Step) -> Row:
    """Weights, their float32 copy and moments are arguments of the step; gradients are the values at its peak."""
    compiled = step.compiled()
    parts = compiled.bytes_per_device
    state = parts["parameters"] + parts["master"] + parts["optimizer"]
    gradients = parts["gradients"]
    sizes = {"weights, optimizer": state, "gradients": gradients, "sum": state + gradients, "step": parts["total"]}
    return {f"{name}, GB": size / 1e9 for name, size in sizes.items()}


TABLES = {"layouts": layout, "few-bytes": few_bytes, "optimizers": optimizer, "zero": zero}


def steps(table: JsonDict) -> Iterator[tuple[str, Step]]:
    """Each row of a table: its name and its step."""
    for batch in table.get("batches", [None]):
        for name, row in table["rows"].items():
            fields = table | (row if isinstance(row, dict) else {"overrides": row})
            overrides = [table.get("all", ""), fields.get("overrides", "")]
            if batch is not None:
                name = f"{name}, {2048 * batch:,} tokens"
                overrides.append(f"batch.global_size={batch}")
            yield name, Step(fields["target"], fields["config"], " ".join(filter(None, overrides)))


def main(name: str = "", *begins: str) -> None:
    if name not in TABLES:
        raise SystemExit(f"unknown table {name!r}; expected one of {', '.join(TABLES)}")
    rows = []
    for row, step in steps(yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())[name]):
        if row.startswith(begins or ("",)):
            print(row, file=sys.stderr, flush=True)
            rows.append({"": row, **TABLES[name](step)})
    print(Table("", rows).markdown())


if __name__ == "__main__":
    main(*sys.argv[1:])
