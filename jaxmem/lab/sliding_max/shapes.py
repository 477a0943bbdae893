"""Shapes to measure: what benchmarks run, by name."""

from __future__ import annotations

from typing import NamedTuple


class SlidingMaxShape(NamedTuple):
    numbers: int
    window: int

    @property
    def least_bytes(self) -> int:
        """Each number read once, each result written once."""
        return 4 * (2 * self.numbers - self.window + 1)


SHAPES = {"256 of 64 M": SlidingMaxShape(1 << 26, 256)}
