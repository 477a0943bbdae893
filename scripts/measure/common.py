"""What the scripts of this folder share: arguments and Markdown tables."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of the script."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def print_table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> None:
    """A Markdown table, row by row as they are computed. A column is aligned right if its name begins with `>`."""
    columns = list(columns)
    _print_row(column.removeprefix(">") for column in columns)
    _print_row("---:" if column.startswith(">") else "---" for column in columns)
    for row in rows:
        _print_row(row)


def _print_row(cells: Iterable[object]) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)
