"""The worked examples of docs/contributing.md: their diffs, applied to a copy of the code, do what the page says."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxmem.machine.devices import simulation_environment
from tests.support.mutations import copy_code

PAGE = Path(__file__).parents[1] / "docs/contributing.md"


def apply_diff(diff: str, place: Path) -> None:
    """Each hunk where its context and removed lines are, which must be one place; line numbers are not looked at."""
    for header in re.split(r"^(?=--- )", diff, flags=re.MULTILINE)[1:]:
        before, after, *_ = header.splitlines()
        target = place / after.removeprefix("+++ b/")
        for hunk in re.split(r"^@@.*\n", header, flags=re.MULTILINE)[1:]:
            lines = hunk.splitlines(keepends=True)
            old = "".join(line[1:] for line in lines if line[0] in " -")
            new = "".join(line[1:] for line in lines if line[0] in " +")
            if before == "--- /dev/null":
                target.write_text(new)
                continue
            text = target.read_text()
            assert text.count(old) == 1, f"{target.relative_to(place)} has this {text.count(old)} times:\n{old}"
            target.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    place = copy_code(tmp_path_factory.mktemp("code"))
    diffs = re.findall(r"^```diff\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(diffs) == 4
    for diff in diffs:
        apply_diff(diff, place)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.worked_examples"],
        cwd=place,
        env=os.environ | simulation_environment(8) | {"PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def falls(losses: list[float]) -> bool:
    return losses[-1] < losses[0]


@pytest.mark.exhaustive
def test_an_optimizer_trains_and_its_state_is_predicted(results: dict[str, Any]) -> None:
    assert falls(results["optimizer"]["losses"])
    assert results["optimizer"]["bytes per parameter"] == pytest.approx(8, rel=1e-3)


@pytest.mark.exhaustive
def test_a_recompute_policy_gives_the_same_losses_in_less_memory(results: dict[str, Any]) -> None:
    assert results["policy"]["off"] < 2e-5
    assert results["policy"]["bytes"]["thirds"] < results["policy"]["bytes"]["full"]


@pytest.mark.exhaustive
def test_a_mesh_axis_gives_the_same_losses_and_must_divide_the_batch(results: dict[str, Any]) -> None:
    assert results["policy"]["off on a mesh"] < 2e-5
    others = {"stage": 1, "replica": 1, "expert": 1, "context": 1}
    assert results["mesh axis"]["mesh"] == {"pod": 2, "fsdp": 2, "tensor": 2, **others}
    assert "mesh.pod=3 x mesh.replica=1" in results["mesh axis"]["refused"]


@pytest.mark.exhaustive
def test_a_model_family_trains_on_one_device_and_sharded(results: dict[str, Any]) -> None:
    assert falls(results["family"]["losses"])
    assert results["family"]["off"] < 2e-5
