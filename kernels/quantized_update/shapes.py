"""Shapes of known networks, which tests compile and benchmarks measure."""

import math
from typing import NamedTuple


class Shape(NamedTuple):
    dims: tuple[int, ...]
    along: int = -1
    block: int = 256

    @property
    def numbers(self) -> int:
        return math.prod(self.dims)

    @property
    def least_bytes(self) -> float:
        """Bytes of Adam with a 16-bit gradient if each array is read once and written once."""
        return self.numbers * (8 + 16 / self.block)


SHAPES = {
    "llama3-8b up": Shape((4096, 14336)),
    "llama2-7b down": Shape((11008, 4096), -2, 172),
    "llama3-8b all up": Shape((32, 4096, 14336)),
}
