"""Shapes that networks really have, by name: what tests compile and benchmarks measure."""

from typing import NamedTuple


class Shape(NamedTuple):
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    dim: int
    causal: bool = True
    window: int | None = None

    @property
    def pairs(self) -> int:
        """(query, key) pairs that see each other, of one head and one row of the batch."""
        return pairs(self.queries, self.keys, causal=self.causal, window=self.window)

    @property
    def flops(self) -> int:
        """Of the forward pass: two matmuls of 2 dim operations per pair. The backward pass has five: 2.5 times."""
        return 4 * self.batch * self.heads * self.pairs * self.dim


def pairs(queries: int, keys: int, *, causal: bool, window: int | None) -> int:
    """(query, key) pairs that see each other."""
    if not causal and window is None:
        return queries * keys
    reach = keys if window is None else min(window, keys)

    def below(end: int) -> int:
        """Of queries that stand before `end` keys or fewer, down to none."""
        full, rising = max(end - reach, 0), max(min(end, reach), 0)
        return full * reach + rising * (rising + 1) // 2

    return below(keys) - below(keys - queries)


SHAPES = {
    "bench": Shape(8, 256, 256, 8, 8, 32),  # configs/bench.yaml
    "llama2-7b": Shape(1, 4096, 4096, 32, 32, 128),
    "llama3-8b": Shape(1, 8192, 8192, 32, 8, 128),
    "llama3.2-1b": Shape(4, 2048, 2048, 32, 8, 64),
    "llama3-70b": Shape(1, 8192, 8192, 64, 8, 128),
    "mistral-7b": Shape(1, 16384, 16384, 32, 8, 128, window=4096),
    "qwen2.5-7b": Shape(1, 8192, 8192, 28, 4, 128),
    "vit-b16": Shape(32, 197, 197, 12, 12, 64, causal=False),
    "probe": Shape(4, 4096, 4096, 16, 16, 128),  # what XLA's own attention needs 10 GiB for, backward
    "long": Shape(1, 16384, 16384, 16, 16, 128),
}
