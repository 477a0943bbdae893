"""The list of planted faults: each can still be planted, its tests are there, and every room has some."""

from collections import Counter
from pathlib import Path

import pytest

from tests.support.mutations import Result, summarize
from tests.support.planted_faults import FAULTS

ROOT = Path(__file__).parents[1]
MUST = {  # what a training library gets wrong without anybody seeing it
    "a wrong sign in a bias correction": "adam",
    "LoRA without its scale": "lora",
    "a stale projection": "galore",
    "a lost mask of segments": "segments",
    "the last micro-batch dropped": "micro-batch",
    "two axes exchanged in a rule": "axes",
    "a loss mask counted twice": "mask",
}
ROOMS = (
    "step", "stack", "sharding", "optim", "quant", "models", "checkpoint", "data", "hf", "planning", "search",
    "kernels",
)  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_can_be_planted_and_has_its_tests(name):
    fault = FAULTS[name]
    assert (ROOT / fault.file).read_text().count(fault.right) == 1
    assert fault.wrong != fault.right
    assert all((ROOT / tests).exists() for tests in fault.tests.split())


def test_every_room_has_faults():
    assert len(FAULTS) >= 40
    assert set(MUST.values()) <= FAULTS.keys()
    rooms = Counter(fault.room for fault in FAULTS.values())
    assert {room for room in ROOMS if rooms[room] < 2} == set()


@pytest.mark.parametrize(
    ("tiers", "code"), [(["fast"] * 9 + ["all"], 0), (["fast"] * 9 + [""], 1), (["fast"] * 8 + ["all"] * 2, 1)]
)
def test_a_missed_fault_or_many_that_only_the_exhaustive_tests_notice_fail(tiers, code):
    assert summarize({str(number): Result(tier, {"fast": 0.1}) for number, tier in enumerate(tiers)}) == code
