"""Published runs: rows are read and refused, figures are compared, and a difference needs a reason."""

from pathlib import Path

import pytest
import yaml

from jaxmem.errors import UserError
from jaxmem.report.figure import digest_of
from scripts.bench import published

ROW = {
    "name": "a run",
    "source": "https://example.org/runs",
    "software": "a program",
    "date": "2026",
    "program": "xla",
    "target": "h100-80gb:8",
    "config": {"model.preset": "tiny", "data.sequence_length": 128, "batch.global_size": 8},
    "published": {"tokens_per_second": 1000, "gib": 2.0},
}
BASE = {"name": "published", "train.steps": 1}
RESULT = {
    "name": "a run", "program": "xla", "seconds": 0.1, "published_seconds": 0.128, "seconds_ratio": 0.1 / 0.128,
    "tokens_per_second": 1280.0, "mfu": 0.4, "gib": 1.9, "published_gib": 2.0, "gib_ratio": 0.95,
}  # fmt: skip


def file_of(**changes: object) -> str:
    return yaml.safe_dump({"base": BASE, "rows": [{**ROW, **changes}]})


@pytest.mark.parametrize("source", [None, "", "a colleague"])
def test_a_row_without_a_source_is_refused(source: str | None, tmp_path: Path, capsys) -> None:
    rows = tmp_path / "rows.yaml"
    rows.write_text(file_of(source=source))
    assert published.main(["--rows", str(rows)]) == 2
    assert "'a run' has no source" in capsys.readouterr().err


def test_an_unknown_program_is_refused() -> None:
    with pytest.raises(UserError, match="unknown program 'jax'; expected xla, pytorch"):
        published.read_rows(file_of(program="jax"))


def test_a_row_whose_config_is_refused_is_printed(tmp_path: Path, capsys) -> None:
    rows = tmp_path / "rows.yaml"
    rows.write_text(file_of(config={**ROW["config"], "mesh.context": 3}))
    published.main(["--rows", str(rows)])
    assert "Not supported by jaxmem:" in capsys.readouterr().out


def test_seconds_are_those_of_the_tokens_of_a_gpu() -> None:
    (row,) = published.read_rows(file_of(gpu={"network_gb_s": 7.5}))
    assert row.tokens == 128
    assert row.seconds == pytest.approx(0.128)
    assert row.devices.gpu.network_gb_s == 7.5


def test_a_difference_of_more_than_a_tenth_needs_a_reason() -> None:
    (row,) = published.read_rows(file_of())
    assert published.differences(RESULT) == ["seconds -22%"]
    assert "a run: seconds -22%. Unexplained." in published.report([row], [RESULT])
    (row,) = published.read_rows(file_of(why="Its GPUs were slow."))
    assert "a run: seconds -22%. Its GPUs were slow." in published.report([row], [RESULT])


def test_ranges_are_those_of_programs_that_xla_compiled() -> None:
    rows = published.read_rows(
        yaml.safe_dump({"base": BASE, "rows": [ROW, {**ROW, "name": "b", "program": "pytorch"}]})
    )
    results = [RESULT, {**RESULT, "name": "b", "program": "pytorch", "seconds_ratio": 0.5}]
    assert published.ranges(rows, results) == {"one host": {"least": 1.28, "most": 1.28, "runs": 1}}


@pytest.mark.exhaustive
def test_the_page_its_figure_and_the_ranges_are_written(tmp_path: Path, monkeypatch) -> None:
    page, ranges = tmp_path / "page.md", tmp_path / "ranges.yaml"
    page.write_text(f"before\n{published.BEGIN}\nold\n{published.END}\nafter\n")
    monkeypatch.setattr(published, "PAGE", page)
    monkeypatch.setattr(published, "FILE", ranges)
    rows = published.read_rows(file_of())
    published.write(rows, [RESULT])
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert f"(page.png)<!-- figure {digest_of(tmp_path / 'page.png')} -->" in text
    assert published.report(rows, [RESULT]) in text
    assert yaml.safe_load(ranges.read_text()) == published.ranges(rows, [RESULT])


def test_every_row_has_a_config_that_loads() -> None:
    for row in published.read_rows(published.ROWS.read_text()):
        assert row.tokens > 0
        assert set(row.published) <= {"seconds", "tokens_per_second", "gib"}
