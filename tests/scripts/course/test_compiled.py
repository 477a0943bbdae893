"""What stops share: times on this machine, and runs in processes of their own."""

import pytest

from jaxmem.errors import UserError
from scripts.course import common


def test_processor_time_is_labeled_as_such() -> None:
    assert common.clock_name() == "processor time here"
    assert 0 <= common.seconds(lambda x: x, 1, times=1) < 0.1


@pytest.mark.exhaustive
def test_a_run_that_fails_says_why() -> None:
    with pytest.raises(UserError, match=r"a run of the course failed: .*model\.family"):
        common.train_all({"one": {"model": {"family": "unheard of"}, "train": {"steps": 1}}})
