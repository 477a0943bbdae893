"""Shapes that networks really have, by name: what tests compile and benchmarks measure."""

from typing import NamedTuple


class Shape(NamedTuple):
    tokens: int
    inputs: int
    outputs: int
    format: str = "nf4"
    block: int = 64
    double: bool = True

    @property
    def flops(self) -> int:
        """Of the matmul, forward or with respect to activations."""
        return 2 * self.tokens * self.inputs * self.outputs

    @property
    def weight_bytes(self) -> float:
        """As stored: codes and scales."""
        bits = 8 if self.format == "int8" else 4
        return self.inputs * self.outputs * (bits / 8 + (1 if self.double else 4) / self.block)

    @property
    def least_bytes(self) -> float:
        """Codes read once, x read and the result written once, both in 16 bits."""
        return self.weight_bytes + 2 * self.tokens * (self.inputs + self.outputs)


SHAPES = {
    "llama3-8b up": Shape(512, 4096, 14336),
    "llama3-8b down": Shape(512, 14336, 4096),
    "llama3-8b up, long": Shape(8192, 4096, 14336),
    "llama3-8b one token": Shape(1, 4096, 14336),
    "llama3-70b up": Shape(2048, 8192, 28672),
    "qwen2.5-7b int4": Shape(2048, 3584, 18944, "int4", double=False),
    "llama2-7b int8": Shape(2048, 4096, 11008, "int8", 256, double=False),
}
