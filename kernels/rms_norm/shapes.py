"""Shapes that networks really have, by name: what benchmarks measure."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    rows: int
    size: int

    @property
    def least_bytes(self) -> int:
        """Forward with a residual, in 16 bits: two arrays read, two written."""
        return 4 * 2 * self.rows * self.size


SHAPES = {
    "llama3-8b": Shape(8192, 4096),
    "llama3-70b": Shape(8192, 8192),
}
