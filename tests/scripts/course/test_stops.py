"""The topics of the course: each with its page in docs, its settings and its files."""

import io
import re
import string
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from jaxmem.config import load_config
from jaxmem.errors import UserError
from scripts.course import STOPS, Findings, Visit, main, precision
from scripts.course.panels import Bars, LinePlot
from scripts.course.table import Table

ROOT = Path(__file__).parents[3]


def test_a_lecture_is_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What takes long says so first."""
    monkeypatch.setattr(precision, "measure", lambda: Findings([Table("All", [{"n": 1}])]))
    monkeypatch.setattr(Visit, "note", "Done.")
    main("scripts/course/precision.py", ["--write", str(tmp_path / "page.md")])
    out, err = capsys.readouterr()
    assert err == "precision takes about a minute on two cores without a GPU.\n"
    assert "Done." in out
    assert "Made by `python scripts/course/precision.py`." in (tmp_path / "page.md").read_text()
    with pytest.raises(SystemExit, match="error: precision does not support --target h100-80gb"):
        main("scripts/course/precision.py", ["--target", "h100-80gb"])


@pytest.mark.parametrize("topic", STOPS)
def test_where_an_idea_is_turned_on_and_read(topic: str) -> None:
    one = STOPS[topic]
    assert one.config
    for setting in one.config:
        key, _, value = setting.partition("=")
        assert key
        assert value
        with pytest.raises(UserError) as refused:  # the key is one: only its value is not
            load_config(ROOT / "configs/demo.yaml", [f"{key}={{nonsense: [1]}}"])
        assert f"{key}: unknown key" not in str(refused.value)
    assert one.read
    for file in one.read:
        assert (ROOT / file).is_file()


@pytest.mark.parametrize("topic", STOPS)
def test_its_page_in_docs_is_what_it_makes(topic: str) -> None:
    page = (ROOT / f"docs/tour/{topic}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {topic}: {STOPS[topic].about}\n\nMade by `python scripts/course/{topic}.py`.\n")
    for paragraph in STOPS[topic].idea.split("\n\n"):
        assert " ".join(paragraph.split()) in page
    texts = [text for text, *_ in string.Formatter().parse(STOPS[topic].note)]
    assert re.search(".+".join(map(re.escape, texts)), page)
    for picture in re.findall(r"!\[.*\]\((.*)\)", page):
        assert (ROOT / "docs/tour" / picture).is_file()
    assert f"[{topic}](tour/{topic}.md)" in (ROOT / "docs/tour.md").read_text(encoding="utf-8")


def test_a_narrow_terminal_breaks_no_word() -> None:
    """A table as wide as its words need; below that, one field under the other."""
    first = {"name": "shared memory", "GB/s": "33,454", "operations in its time": "1.5"}
    rows = [first, {"name": "another host", "GB/s": None, "operations in its time": None}]
    words = {word for row in rows for cell in row.values() if cell for word in cell.split()}
    for width in range(20, 60):
        printed = io.StringIO()
        Console(file=printed, width=width).print(Table("Title", rows))
        assert words <= set(printed.getvalue().replace("│", " ").split()), width
        assert max(map(len, printed.getvalue().splitlines())) <= width
        assert ("━" in printed.getvalue()) == (width >= 7 + 6 + 10 + 3 * 3 + 1)


def test_hidden_and_empty_columns_are_left_out() -> None:
    rows = [
        {"name": "a", "size, GiB": 1.5, "measured, GiB": None, "parts": 1},
        {"name": "b", "size, GiB": None, "measured, GiB": None, "parts": 2},
    ]
    table = Table("", rows, hidden=("parts",))
    assert (table.headings, table.cells) == (["name", "size, GiB"], [["a", "1.500"], ["b", ""]])


@pytest.mark.exhaustive
def test_a_page_and_a_figure_of_a_visit(tmp_path: Path) -> None:
    rows = [{"what": "1", "twice": "[x]", "size": 1.0}, {"what": "2", "twice": "[x]", "size": 2.0}]
    line = LinePlot("curve", "steps", "loss", {"long": [(x, 1.0) for x in range(30)], "point": [(1.0, 2.0)]}, "y")
    table = Table("Two rows", rows, ("size",))
    found = Findings([table], {"times": 2.0}, [line, Bars(table, ("size",)), Bars(table, ("size",) * 2, grouped=True)])
    stop = replace(STOPS["memory"], idea="An idea, in\ntwo lines.\n\nAnd more.\n", note="They grow {times:.1f} times.")
    visit = Visit(stop, found)
    assert visit.draw(tmp_path / "two.png")
    assert (tmp_path / "two.png").stat().st_size > 1000
    page = visit.markdown(tmp_path / "two.png")
    made = "Made by `python scripts/course/memory.py`."
    head = f"# memory: {STOPS['memory'].about}\n\n{made}\n\nAn idea, in two lines.\n\nAnd more.\n\n"
    assert page.startswith(head + "Two rows\n\n| what | twice |\n")
    file = "jaxmem/estimate/memory.py"
    for part in (
        "| 2 | [x] |",
        "![two](two.png)",
        "They grow 2.0 times.",
        "`memory.update=during`",
        f"[{file}](../../{file})",
    ):
        assert part in page.replace("![memory]", "![two]")
