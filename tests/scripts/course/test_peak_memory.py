"""Planned and measured peaks: the complete path in a process of its own; a CPU reports no peak."""

import pytest

from jaxmem.config import load_config
from scripts.course.common import measure_apart
from tests.support.measured_configs import configs


def test_every_config_of_the_script_is_one_and_they_differ() -> None:
    raws = configs(tiny=False)
    assert len(raws) >= 12
    assert len({load_config(raw).model_dump_json(exclude={"name"}) for raw in raws}) == len(raws)


@pytest.mark.exhaustive
def test_one_config_runs_in_a_process_of_its_own() -> None:
    (raw, *_) = configs(tiny=True)
    found = measure_apart(raw, 1)
    assert found["name"] == raw["name"]
    assert found["planned"] > 12 * found["parameters"]
    assert found["measured"] is found["difference"] is None


def test_what_goes_wrong_there_is_a_line() -> None:
    raw = configs(tiny=True)[0] | {"zero": 9}
    assert "zero=9 must be" in measure_apart(raw, 1)["error"]
