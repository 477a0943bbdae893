"""The stops that train here: their runs are configs, their arithmetic is right, their cheapest parts are run."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxmem.config import load_config
from jaxmem.config.devices import for_devices
from jaxmem.errors import UserError
from jaxmem.lab.tour import STOPS, adapters, galore, networks, parallel, precision

NETWORKS = Path(__file__).parents[3] / "docs/tour/networks.md"


@pytest.mark.parametrize("topic", ["networks", "precision", "adapters", "stack", "finetune"])
def test_what_trains_here_takes_no_target(topic: str) -> None:
    with pytest.raises(UserError, match=f"--target h100-80gb: tour {topic} trains on this machine; leave it out"):
        STOPS[topic].visit("h100-80gb")


def test_every_run_is_a_config(tmp_path) -> None:
    own = {"name": "run", "output": str(tmp_path)}
    for run in networks.runs().values():
        load_config({**run.given, **own}, run.overrides)
    assert {run.given["train"]["steps"] for run in networks.runs(steps=3).values()} == {3}
    for overrides in precision.RUNS.values():
        load_config({**precision.BASE, **own}, overrides)
    for overrides in adapters.KINDS.values():
        load_config({**adapters.BASE, **own, "data": {"source": "text", "path": ".", "sequence_length": 64}}, overrides)
    for overrides in galore.STEPS.values():
        load_config(galore.BASE, overrides)
    for name in galore.UPDATED:
        load_config(galore.BASE, (*galore.STEPS[name], galore.DURING))
    for overrides in galore.RUNS.values():
        load_config({**galore.SMALL, **own}, overrides)
    for overrides in parallel.LAYOUTS.values():
        for_devices(load_config(parallel.BASE, overrides), parallel.GPUS)


def test_networks_reach_what_is_stated() -> None:
    """In the page that a visit left."""
    lines = [line.split(" | ") for line in NETWORKS.read_text().splitlines() if line.startswith("| ")]
    for name, stated in networks.STATED.items():
        (held_out,) = (line[-2] for line in lines if line[0] == f"| {name}")
        if held_out.endswith("%"):
            assert float(held_out.removesuffix("%")) / 100 >= stated
        else:
            assert float(held_out) <= stated


def test_what_formats_hold() -> None:
    found = {name: precision._format(name) for name in precision.FORMATS}
    assert [row["bytes"] for row in found.values()] == [4, 2, 2, 1, 1]
    assert found["bfloat16"]["step"] == 2**16 * found["float32"]["step"]
    assert found["float16"]["largest"] == 65504
    assert found["float32"]["sum"] == pytest.approx(2, abs=1e-3)
    assert found["bfloat16"]["sum"] == found["float8_e5m2"]["sum"] == 1  # every update lost
    assert found["float16"]["gradient"] == 0
    assert found["float16"]["scaled"] == pytest.approx(1e-8, rel=1e-3)
    assert found["bfloat16"]["drawn"] == pytest.approx(2, abs=0.05)


def test_both_ways_to_split_a_product_are_right() -> None:
    columns, rows = parallel._products()
    assert max(columns["error"], rows["error"]) < 1e-5
    assert rows["wire"] == 2 * columns["wire"]


def test_layouts_are_of_eight() -> None:
    with pytest.raises(UserError, match="the tour's layouts are of 8 GPUs; leave the number out"):
        parallel.split("h100-80gb:4")
