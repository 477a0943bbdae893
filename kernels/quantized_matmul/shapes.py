"""Shapes of known networks, which tests compile and benchmarks measure."""

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
        """Operations of the matmul, or of its gradient with respect to x."""
        return 2 * self.tokens * self.inputs * self.outputs


SHAPES = {
    "llama3-8b up": Shape(512, 4096, 14336),
    "llama3-8b down": Shape(512, 14336, 4096),
    "llama3-8b up, long": Shape(8192, 4096, 14336),
    "llama3-8b one token": Shape(1, 4096, 14336),
    "llama3-70b up": Shape(2048, 8192, 28672),
    "qwen2.5-7b int4": Shape(2048, 3584, 18944, "int4", double=False),
    "llama2-7b int8": Shape(2048, 4096, 11008, "int8", 256, double=False),
}
