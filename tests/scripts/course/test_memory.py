"""The lecture on memory: every row is a config that compiles, and each holds what its arithmetic says."""

import re
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxmem.config import load_config
from jaxmem.config.devices import for_devices
from jaxmem.errors import UserError
from jaxmem.planning.targets import parse_target
from jaxmem.search.worker import step_plan
from scripts.course import common
from scripts.course.memory import BASE, ROWS, ZERO_GPUS, Technique, _overrides, measure
from tests.planning.conftest import SMALL

DOCS = Path(__file__).parents[3] / "docs"
TINY = {**BASE, "name": "tiny", "model": SMALL, "data": {"sequence_length": 16}}


def test_rows_compose_in_order_and_every_config_is_possible() -> None:
    for row, overrides in _overrides(ROWS):
        assert row.gpus in (1, ZERO_GPUS)
        assert for_devices(load_config(BASE, overrides), row.gpus).mesh.fsdp == row.gpus
        assert re.fullmatch(r"[\d+/ ()]+", row.formula)


@pytest.mark.exhaustive
def test_state_is_what_the_formula_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights and the optimizer's state are arguments of the step; its gradients are not."""

    def here(target: str, base: Any, rows: dict[str, Any]) -> dict[str, Any]:
        return {name: step_plan(load_config(base, own), parse_target(target), None) for name, own in rows.items()}

    monkeypatch.setattr(common, "plans", here)  # and not in processes of their own
    assert len(jax.devices()) == 8  # started, or the first row would decide how many there are
    sharded = Technique("sharded", "8/8", "batch.global_size=8", 8)
    found = [row for table in measure("cpu", TINY, (ROWS[0], sharded)).tables for row in table.rows]
    for row, each in zip(found, (12, 12 / 8), strict=True):
        state = row["parts"]["parameters"] + row["parts"]["master"] + row["parts"]["optimizer"]
        assert state / row["parameters"] == pytest.approx(each, rel=0.05)
    assert all(row["per GPU, GiB"] == row["parts"]["total"] / 2**30 for row in found)


def test_the_table_in_the_docs_is_of_these_rows() -> None:
    lines = [line.split(" | ") for line in (DOCS / "tour/memory.md").read_text().splitlines() if line.startswith("| ")]
    rows = {line[0].removeprefix("| "): line for line in lines if "+" in line[1] and line[1][0] != "w"}
    assert {name: row[1] for name, row in rows.items()} == {row.name: row.formula for row in ROWS}
    steps = [float(rows[row.name][4].removesuffix(" |")) for row in ROWS if row.gpus == 1 and not row.is_alternative]
    assert steps == sorted(steps, reverse=True)


def test_rows_of_several_gpus_need_several() -> None:
    with pytest.raises(UserError, match="its layouts are for 8 GPUs; remove the number"):
        measure("h100-80gb:1")


def test_the_figure_shows_the_memory_that_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of 10 GB reports 9.78 GiB, of which 0.75 are reserved."""
    plan = {"model": {"parameters": 1}, "bytes_per_device": {"total": 1}, "predicted": {"total": 1}}
    monkeypatch.setattr(common, "plans", lambda _target, _base, rows: dict.fromkeys(rows, plan))
    (bars,) = measure("h100-80gb").panels
    assert bars.limits["10 GB GPU"] == pytest.approx(9.03)
