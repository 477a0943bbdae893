"""Shapes that networks really have, by name: what tests compile and benchmarks measure."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    tokens: int
    embed: int
    vocab: int

    @property
    def flops(self) -> int:
        """Of the forward pass; backward, where logits are made again, three times as many."""
        return 2 * self.tokens * self.embed * self.vocab

    @property
    def logits_bytes(self) -> int:
        """Of all logits, in float32."""
        return 4 * self.tokens * self.vocab


SHAPES = {
    "llama2-7b": Shape(4096, 4096, 32000),
    "llama3-8b": Shape(8192, 4096, 128256),
    "qwen2.5-7b": Shape(8192, 3584, 152064),
}
