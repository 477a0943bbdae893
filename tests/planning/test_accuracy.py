"""What plans say about their times: published runs on the same kind of target."""

from pathlib import Path

import pytest

from jaxmem.planning import accuracy
from jaxmem.planning.accuracy import kind_of, published_range
from jaxmem.planning.targets import parse_target


@pytest.mark.parametrize(
    ("target", "kind"),
    [("h100-80gb", "one GPU"), ("h100-80gb:8", "one host"), ("a100-40gb:2x4", "several hosts")],
)
def test_every_kind_of_target_has_published_runs(target: str, kind: str) -> None:
    aim = parse_target(target)
    assert kind_of(aim) == kind
    text = published_range(aim)
    assert text is not None
    assert kind in text


def test_the_range_is_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "accuracy.yaml"
    file.write_text("one host: {least: 0.97, most: 1.06, runs: 5}")
    monkeypatch.setattr(accuracy, "FILE", file)
    assert published_range(parse_target("h100-80gb:8")) == "5 published runs on one host took 3 % less to 6 % more"
    assert published_range(parse_target("h100-80gb:16")) is None


def test_simulated_devices_have_none() -> None:
    assert published_range(parse_target("cpu:8")) is None
