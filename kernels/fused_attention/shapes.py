"""Shapes of known networks, which tests compile and benchmarks measure."""

from typing import NamedTuple


class AttentionShape(NamedTuple):
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    dim: int
    causal: bool = True
    window: int | None = None

    @property
    def flops(self) -> int:
        """Operations of the two matmuls of the forward pass. The backward pass has five, so 2.5 times as many."""
        visible = pairs(self.queries, self.keys, causal=self.causal, window=self.window)
        return 4 * self.batch * self.heads * visible * self.dim


def pairs(queries: int, keys: int, *, causal: bool, window: int | None) -> int:
    """The number of (query, key) pairs that are not masked."""
    if not causal and window is None:
        return queries * keys
    reach = keys if window is None else min(window, keys)

    def below(end: int) -> int:
        """Keys that the queries at positions below `end` attend to."""
        full, rising = max(end - reach, 0), max(min(end, reach), 0)
        return full * reach + rising * (rising + 1) // 2

    return below(keys) - below(keys - queries)


ATTENTION_SHAPES = {
    "bench": AttentionShape(8, 256, 256, 8, 8, 32),  # configs/bench.yaml
    "llama2-7b": AttentionShape(1, 4096, 4096, 32, 32, 128),
    "llama3-8b": AttentionShape(1, 8192, 8192, 32, 8, 128),
    "llama3.2-1b": AttentionShape(4, 2048, 2048, 32, 8, 64),
    "llama3-70b": AttentionShape(1, 8192, 8192, 64, 8, 128),
    "mistral-7b": AttentionShape(1, 16384, 16384, 32, 8, 128, window=4096),
    "qwen2.5-7b": AttentionShape(1, 8192, 8192, 28, 4, 128),
    "vit-b16": AttentionShape(32, 197, 197, 12, 12, 64, causal=False),
    "probe": AttentionShape(4, 4096, 4096, 16, 16, 128),  # the backward pass of XLA's own attention needs 10 GiB
    "long": AttentionShape(1, 16384, 16384, 16, 16, 128),
}
