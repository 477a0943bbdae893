"""A plan for people."""

import pytest
from rich.console import Console

from jaxmem.planning.result import Plan


def shown(plan: Plan, width: int) -> str:
    console = Console(width=width, file=None)
    with console.capture() as screen:
        console.print(plan.table())
    return screen.get()


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [80, 100])
def test_it_is_no_wider_than_the_terminal(width: int, cpu_plan: Plan) -> None:
    text = shown(cpu_plan, width)
    assert max(map(len, text.splitlines())) <= width
    for word in (
        "weights",
        "optimizer",
        "activations",
        "total",
        "parameter",
        "other phases: initialise",
        "fits in",
        "x the minimum",
    ):
        assert word in text


def test_it_has_what_arithmetic_predicts_beside(cpu_plan: Plan) -> None:
    wide = shown(cpu_plan, 100)
    assert "predicted" in wide
    assert "difference" in wide
    assert "exposed" in wide


def test_print_and_a_notebook_show_the_table(cpu_plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert [line.split() for line in str(cpu_plan).splitlines()] == [
        line.split() for line in shown(cpu_plan, 100).splitlines()
    ]
    assert str(cpu_plan.table()) == str(cpu_plan)
    page = cpu_plan._repr_html_()
    assert page.startswith("<pre")
    assert "optimizer" in page
