"""Commands for a terminal in names that jaxmem prints are escaped, in lines, tables, warnings and results."""

import io
import warnings

import pytest
from rich.table import Table
from rich.text import Text

from jaxmem.cli import main
from jaxmem.machine.console import Console, Printed
from jaxmem.machine.terminal import say, say_text
from jaxmem.training.progress import Progress, RunSpec, spinner

HOSTILE, SHOWN = "a\x1b]0;title\x07 \u202e.txt", "a\\x1b]0;title\\x07 \\u202e.txt"


class Result(Printed):
    def table(self) -> Table:
        table = Table(title="result")
        table.add_column("file", style="red")
        table.add_row(Text(HOSTILE))
        return table


def test_lines(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"{HOSTILE}\tand\n more", HOSTILE)
    assert capsys.readouterr().out == f"{SHOWN}\tand\n more\n{SHOWN}\n"
    with spinner(HOSTILE, enabled=True):
        assert SHOWN in capsys.readouterr().out


def test_sentences_break_between_words_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    text = f"error: {HOSTILE} is no file-of-any-kind\n  or a-word-that-is-longer-than-a-line"
    file, terminal = io.StringIO(), io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    say_text(text, file=file)
    assert file.getvalue() == text.replace(HOSTILE, SHOWN) + "\n"
    say_text(text, file=terminal)
    lines = terminal.getvalue().splitlines()
    assert lines[-3:] == ["file-of-any-kind", "  or", "a-word-that-is-longer-than-a-line"]
    assert " ".join(" ".join(lines).split()) == " ".join(file.getvalue().split())


def test_tables_keep_their_colors() -> None:
    console = Console(file=io.StringIO(), width=80, color_system="standard")
    console.print(Result().table())
    progress = Progress(RunSpec(1), console=console)
    progress.say(HOSTILE)
    text = console.file.getvalue()
    assert text.count("a\\x1b]0;title") == 2
    assert "\u202e" not in text
    assert "\x1b]" not in text
    assert "\x1b[31m" in text


def test_results_that_are_printed() -> None:
    assert "\x1b" not in str(Result())
    assert "a\\x1b]0;title" in str(Result())
    assert "\x1b" not in Result()._repr_html_()


def test_a_result_without_a_table_is_not_printed() -> None:
    with pytest.raises(NotImplementedError):
        str(Printed())


def test_warnings_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", None)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert warnings.formatwarning(HOSTILE, UserWarning, "a.py", 1) == f"warning: {SHOWN}\n"
