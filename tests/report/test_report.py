"""The page and the figure: their numbers are the plan's, they need nothing from outside, runs show their curves."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from jaxmem.checkpoint.metrics import parse_row
from jaxmem.config import save_config
from jaxmem.errors import UserError
from jaxmem.planning.history import BANDS
from jaxmem.planning.result import Plan
from jaxmem.planning.units import format_bytes
from jaxmem.report import figure, report_run, write_figure, write_page
from jaxmem.report.figure import digest, digest_of, draw_curves
from jaxmem.report.page import KINDS, _operations, _rows, page
from tests.planning.conftest import plan_here

ALONE = {"br", "img", "input", "link", "meta"}  # tags that have no end


class Page(HTMLParser):
    """What a page holds, if its tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ALONE:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data.strip())


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_here(mesh={"fsdp": 4, "tensor": 2}, memory={"remat": "full"})


@pytest.fixture(scope="module")
def text(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("page") / "plan.html"
    write_page(plan, file)
    return file.read_text()


@pytest.fixture
def run(plan: Plan, tmp_path: Path) -> Path:
    """What a run leaves, with a line that was being written when it was killed."""
    save_config(plan.program.cfg, tmp_path / "config.yaml")
    (tmp_path / "plan.json").write_text(json.dumps(plan.as_json() | {"measured": {"peak_bytes": 3 << 20}}))
    (tmp_path / "memory.json").write_text(json.dumps(plan.history))
    rows: list[dict[str, Any]] = [
        {"step": n, "loss": 4.0 / n, "learning_rate": 1e-3 * n, "tokens_per_second": 1000.0 + n} for n in (1, 2, 3, 4)
    ]
    rows[1]["loss"] = None  # was not finite
    lines = [json.dumps(row) for row in (*rows, {"step": 4, "held_out_loss": 1.25})]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 5, "lo')
    return tmp_path


@pytest.mark.exhaustive
def test_the_page_is_complete_and_loads_nothing(text: str) -> None:
    page = Page(text)
    assert text.startswith("<!doctype html>")
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"https?:|@import|url\(|\bhref=|<script", text)
    [image] = [attributes for tag, attributes in page.tags if tag == "img"]
    assert (image["src"] or "").startswith("data:image/png;base64,")
    assert "at its peak" in (image["alt"] or "")
    assert any("viewport" in (attributes.get("name") or "") for _, attributes in page.tags)


@pytest.mark.exhaustive
def test_the_page_says_what_the_plan_says(plan: Plan, text: str) -> None:
    words = Page(text).words
    total, share = plan.bytes_per_device["total"], plan.target.count / plan.program.model.parameter_count
    assert format_bytes(total) in words
    assert words[words.index("total") + 2] == f"{total * share:.2f}"
    assert [one["where"] for one in plan.history["largest"]] == [word for word in words if word in wheres(plan)][:10]


def wheres(plan: Plan) -> set[str]:
    return {one["where"] for one in plan.history["largest"]}


@pytest.mark.exhaustive
def test_a_run_shows_its_curves(run: Path) -> None:
    assert report_run(run) == run / "report.html"
    page = Page((run / "report.html").read_text())
    assert [tag for tag, _ in page.tags].count("img") == 2
    assert "4 of 10" in page.words
    assert any("measured" in word for word in page.words)
    assert any("global_size" in word for word in page.words)  # its config


def test_a_run_that_has_logged_nothing_yet(run: Path, tmp_path: Path) -> None:
    (run / "metrics.jsonl").unlink()
    page = Page(report_run(run, tmp_path / "elsewhere.html").read_text())
    assert [tag for tag, _ in page.tags].count("img") == 1


def test_curves_are_those_of_the_metrics(run: Path) -> None:
    from matplotlib.figure import Figure

    rows = [row for line in (run / "metrics.jsonl").read_text().splitlines() if (row := parse_row(line))]
    drawn = Figure()
    draw_curves(drawn, rows)
    lines = [line.get_xydata().tolist() for axes in drawn.axes for line in axes.lines]
    assert lines[0] == [[1, 4.0], [3, 4.0 / 3], [4, 1.0]]  # the loss of step 2 was not finite
    assert lines[1] == [[4, 1.25]]  # held out
    assert [len(points) for points in lines] == [3, 1, 4, 4]
    assert drawn.axes[0].get_ylim()[0] == 0
    draw_curves(negative := Figure(), [{"step": step, "loss": -1.0 - step} for step in range(3)])
    bottom, top = negative.axes[0].get_ylim()
    assert bottom < -3 < -1 < top


def test_without_matplotlib_a_page_names_the_extra(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figure, "can_draw", lambda: False)
    drawn = Page(page(plan.as_json(), plan.history))
    assert "img" not in {tag for tag, _ in drawn.tags}
    assert figure.MISSING in drawn.words


def test_mistakes_are_one_line(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run directory"):
        report_run(tmp_path / "none")
    (run / "memory.json").unlink()
    with pytest.raises(UserError, match=r"memory\.json is missing, which `jaxmem train` writes.*plan CONFIG --html"):
        report_run(run)


def test_the_figure_shows_the_bands_and_the_peak_of_the_plan(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure  # 2 s, which every process that collects the tests would spend

    drawn: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: Any, **options: Any) -> None:
        drawn.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    write_figure(plan, tmp_path / "plan.png")
    assert digest_of(tmp_path / "plan.png") == digest(drawn[0])
    axes = drawn[0].axes[0]
    heights = [band.get_paths()[0].vertices[:, 1] for band in axes.collections]
    peak = axes.texts[0].xy[1]
    assert max(map(max, heights)) == pytest.approx(peak)
    assert axes.texts[0].get_text() == f"peak {format_bytes(sum(plan.history['peak'][1:]))}"
    assert {text.get_text() for text in axes.get_legend().get_texts()} <= set(BANDS)


def test_a_timeline_is_drawn_where_something_is_transferred(plan: Plan) -> None:
    compute, network = [[0.0, 0.5, "kernel"], [0.5, 1.0, "wait"]], [[0.25, 1.0, "all-gather"]]
    (first, spans), (second, transfers) = _rows({"timeline": {"compute": compute, "network": network}})
    assert (first, second) == ("compute", "communication")
    assert [path for _, path in spans] == ["M0 0h500.00v1h-500.00z", "M500 0h500.00v1h-500.00z"]
    assert transfers == [(KINDS["transfer"][1], "M250 0h750.00v1h-750.00z")]
    assert _rows({"timeline": {"compute": compute}}) == _rows({}) == []
    drawn = page({**plan.as_json(), "timeline": {"compute": compute, "network": network}}, plan.history)
    assert KINDS["wait"][0] in Page(drawn).words


def test_a_schedule_is_drawn_with_a_cell_for_each_operation() -> None:
    operations = _operations({"schedule": {"stages": ["FF.FB.BB", ".FBFBFB."]}})
    assert [(name, path.count("M")) for name, _, path in operations] == [("forward", 6), ("backward", 6)]
    assert _operations({"schedule": None}) == []


@pytest.mark.parametrize("name", ["plan.json", "memory.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"columns": 1}'])
def test_damaged_files_of_a_run_are_named(run: Path, name: str, content: str) -> None:
    (run / name).write_text(content)
    with pytest.raises(UserError, match=rf"{run}: .*{name}.*damaged: .*; run jaxmem plan .*config\.yaml --html FILE"):
        report_run(run)
    assert not (run / "report.html").exists()
