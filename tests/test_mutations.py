"""The list of planted faults: each can still be planted, the test that must notice is there, and none is missing."""

from pathlib import Path

from tests.support.mutations import FAULTS

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


def test_every_fault_can_be_planted_and_has_its_test():
    assert set(MUST.values()) <= FAULTS.keys()
    for name, fault in FAULTS.items():
        assert (ROOT / fault.file).read_text().count(fault.right) == 1, f"{name}: {fault.right!r} in {fault.file}"
        assert fault.wrong != fault.right
        for test in fault.tests.split():
            file, _, function = test.partition("::")
            assert (f"def {function}(" if function else "def test_") in (ROOT / file).read_text(), f"{name}: {test}"
