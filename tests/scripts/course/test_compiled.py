"""What stops share: a column of what devices held, which only their own GPUs tell; runs in processes of their own."""

from typing import Any

import pytest

from jaxmem.errors import UserError
from jaxmem.machine import devices
from jaxmem.planning.targets import parse_target
from scripts.course import common
from scripts.course.memory import BASE
from scripts.course.table import Table

CARD = {"name": "NVIDIA GeForce RTX 4090", "driver": "1", "memory_in_use": 0, "memory": 24564 << 20}
SIZES = {"small": 2**30, "large": 30 * 2**30}


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a target, on a machine with these cards, where each run holds a gibibyte more than was compiled."""
    rows = {name: [f"train.steps={steps}"] for steps, name in enumerate(SIZES, 1)}
    sized = {name: {"bytes_per_device": {"total": size}} for name, size in SIZES.items()}
    monkeypatch.setattr(common, "compile_plans", lambda *_: sized)
    monkeypatch.setattr(common, "measure_apart", lambda raw: {"measured": (raw["train"]["steps"] + 1) * 2**30})

    def of(target: str, cards: int) -> Any:
        monkeypatch.setattr(devices, "nvidia_gpus", lambda: [CARD] * cards)
        return common.plans(target, BASE, rows)

    return of


def test_what_fits_on_the_gpus_that_are_here_runs(plans: Any) -> None:
    found = plans("rtx4090-24gb", 1)
    assert {name: plan["measured"] for name, plan in found.items()} == {"small": 2 * 2**30, "large": None}


@pytest.mark.parametrize(
    ("target", "cards"), [("rtx4090-24gb", 0), ("rtx4090-24gb:2", 1), ("h100-80gb", 1), ("cpu", 1)]
)
def test_elsewhere_nothing_runs_and_there_is_no_column(plans: Any, target: str, cards: int) -> None:
    found = plans(target, cards)
    assert [plan["measured"] for plan in found.values()] == [None, None]
    assert Table("", [{"name": name, "measured": plan["measured"]} for name, plan in found.items()]).headings == [
        "name"
    ]


def test_a_target_is_here_only_with_all_of_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "nvidia_gpus", lambda: [CARD] * 8)
    gpu = parse_target("rtx4090-24gb").gpu
    assert [common.is_this_machine(gpu, count) for count in (1, 8)] == [False, True]


def test_processor_time_is_labeled_as_such() -> None:
    assert common.clock_name() == "processor time here"
    assert 0 <= common.seconds(lambda x: x, 1, times=1) < 0.1


def test_a_run_that_fails_says_why() -> None:
    with pytest.raises(UserError, match=r"a run of the course failed: .*model\.family"):
        common.train_all({"one": {"model": {"family": "unheard of"}, "train": {"steps": 1}}})
