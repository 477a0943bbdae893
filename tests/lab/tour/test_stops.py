"""The tour's stops: listed, found by name, each with its page in docs, its settings and its files."""

from __future__ import annotations

import io
import json
import re
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from jaxmem.config import load_config
from jaxmem.errors import UserError
from jaxmem.lab.tour import STOPS, Found, Shown, Stop
from tests.test_cli import jaxmem

ROOT = Path(__file__).parents[3]


def test_the_list_of_stops(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = jaxmem("tour", "--json", capsys=capsys)
    assert (code, err) == (0, "")
    (listed,) = json.loads(out)["stops"]
    assert set(listed) == {"topic", "rows", "seconds"}
    assert [row["topic"] for row in listed["rows"]] == list(STOPS)


def test_no_such_stop(capsys: pytest.CaptureFixture[str]) -> None:
    assert jaxmem("tour", "memori", capsys=capsys) == (
        2,
        "",
        "error: tour: no stop is called 'memori'; did you mean memory?\n",
    )


def test_what_takes_long_says_so_first(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    table = Shown("All", [{"n": 1}], {"what": lambda row: str(row["n"])})
    one = Stop("slow", "waits", lambda _: Found([table]), "compiler", ["zero=3"], [], takes="an hour")
    monkeypatch.setitem(STOPS, "slow", one)
    code, out, err = jaxmem("tour", "slow", "--json", capsys=capsys)
    assert (code, err) == (0, "slow takes an hour on two cores without a GPU.\n")
    assert json.loads(out)["stops"][0]["rows"] == [{"n": 1}]


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
    assert page.startswith(f"# {topic}: {STOPS[topic].about}\n\nMade by `jaxmem tour {topic}`.\n")
    for picture in re.findall(r"!\[.*\]\((.*)\)", page):
        assert (ROOT / "docs/tour" / picture).is_file()
    assert f"[{topic}](tour/{topic}.md)" in (ROOT / "docs/tour.md").read_text(encoding="utf-8")


def test_a_narrow_terminal_breaks_no_word() -> None:
    """A table as wide as its words need; below that, one field under the other."""
    rows = [{"name": "shared memory", "GB/s": "33,454", "operations in its time": "1.5"}, {"name": "another host"}]
    columns = {name: partial(lambda row, name: row.get(name, ""), name=name) for name in rows[0]}
    words = {word for row in rows for cell in row.values() for word in cell.split()}
    for width in range(20, 60):
        printed = io.StringIO()
        Console(file=printed, width=width).print(Shown("Title", rows, columns))
        assert words <= set(printed.getvalue().replace("│", " ").split()), width
        assert max(map(len, printed.getvalue().splitlines())) <= width
        assert ("━" in printed.getvalue()) == (width >= 7 + 6 + 10 + 3 * 3 + 1)


def test_a_page_and_a_figure_of_a_visit(tmp_path: Path) -> None:
    table = Shown("Two rows", [{"n": 1}, {"n": 2}], {"what": lambda row: str(row["n"]), "twice": lambda _: "[x]"})
    found = Found([table], "They grow.", lambda drawn: drawn.subplots().plot([1, 2]))
    visit = Stop("two", "numbers", lambda _: found, "compiler", ["zero=3"], ["jaxmem/lab/tour/stops.py"]).visit()
    assert visit.draw(tmp_path / "two.png")
    assert (tmp_path / "two.png").stat().st_size > 1000
    page = visit.markdown(tmp_path / "two.png")
    assert page.startswith("# two: numbers\n\nMade by `jaxmem tour two`.\n\nTwo rows\n\n| what | twice |\n")
    for part in (
        "| 2 | [x] |",
        "![two](two.png)",
        "They grow.",
        "`zero=3`",
        "[jaxmem/lab/tour/stops.py](../../jaxmem/lab/tour/stops.py)",
    ):
        assert part in page
    assert visit.as_json()["rows"] == [{"n": 1}, {"n": 2}]
