"""What hangs, dies or fails costs its own rows; the others have theirs."""

import sys
import textwrap
import time

import pytest

from scripts.bench import contest, kernels

WORK = """
    import os, time

    def troubled(job, *, done, without, say):
        there = [row["name"] for row in done]
        for name in job:
            if name in there or name in without:
                continue
            say(name)
            if name == "hangs":
                time.sleep(1000)
            if name == "dies":
                os._exit(7)
            if name == "fails":
                raise NotImplementedError
            yield {"name": name}

    def gone(job, *, done, without, say):
        os._exit(3)
        yield {}
"""


@pytest.fixture
def works(tmp_path, monkeypatch):
    """A module that a process of its own finds too."""
    (tmp_path / "works_to_watch.py").write_text(textwrap.dedent(WORK))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "works_to_watch", raising=False)
    import works_to_watch

    return works_to_watch


def test_what_hangs_or_dies_is_left_out_and_the_rest_goes_on(works):
    without = []
    start = time.monotonic()
    found = list(contest.isolated_rows(works.troubled, ("a", "dies", "b", "hangs", "c"), without=without, limit=5.0))
    assert [row["name"] for row in found if "name" in row] == ["a", "b", "c"]
    why = {row["contestant"]: row["why_not"] for row in found if "why_not" in row}
    assert why == {"dies": "its process ended with code 7", "hangs": "no end within 5 s"}
    assert without == ["dies", "hangs"]
    assert time.monotonic() - start < 100
    assert [
        row["name"] for row in contest.isolated_rows(works.troubled, ("hangs", "d"), without=without, limit=5.0)
    ] == ["d"]


def test_a_work_that_fails_says_so_in_a_row(works):
    for limit in (None, 20.0):
        found = list(contest.isolated_rows(works.troubled, ("a", "fails"), without=[], limit=limit))
        assert found == [{"name": "a"}, {"why_not": "NotImplementedError"}]
    assert list(contest.isolated_rows(works.gone, (), without=[], limit=20.0)) == [
        {"why_not": "its process ended with code 3"}
    ]


def test_a_device_is_only_asked_in_a_process_that_ends(monkeypatch):
    """The parent of one that measures on a GPU takes none of its memory; what it is on comes first."""
    monkeypatch.setattr(kernels.devices, "has_nvidia_gpu", lambda: True)
    asked = []
    rows = contest.isolated_rows
    monkeypatch.setattr(
        contest,
        "isolated_rows",
        lambda work, *args, **given: asked.append(given["limit"]) or rows(work, *args, **given),
    )
    here = kernels.device_row()
    assert asked == [contest.MAX_TURN_SECONDS]
    assert here["dry_run"]
    assert {"jax", "jaxlib", "triton"} <= set(here["versions"])
    assert {"driver", "time", "device"} <= set(here)
    assert next(kernels.device_facts(None))["device"] == here["device"]
