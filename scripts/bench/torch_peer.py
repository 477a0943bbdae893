"""The same work by torch on this machine's GPU: attention by `scaled_dot_product_attention`, and a training step of
decoder layers by torch.compile. scripts/bench/first_gpu.py runs it where torch is installed.

    python -m scripts.bench.torch_peer attention --rows FILE    # a row of JSON for each shape and pass
    python -m scripts.bench.torch_peer step --rows FILE
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from scripts.bench.contest import write_row
from scripts.bench.operations import PAPER_SHAPES

# As `8b-layers` in first_gpu.yaml.
VOCAB, LAYERS, EMBED, MLP, HEADS, KV_HEADS, TIME, ROWS = 128256, 8, 4096, 14336, 32, 8, 4096, 2
TINY = (264, 2, 32, 64, 4, 2, 16, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("attention", "step"))
    parser.add_argument("--rows", type=Path, required=True, metavar="FILE")
    parser.add_argument("--tiny", action="store_true", help="small sizes, on a CPU")
    options = parser.parse_args()
    device = "cpu" if options.tiny else "cuda"
    rows = attention(device) if options.what == "attention" else [step(device)]
    for row in rows:
        write_row(options.rows, row | {"contestant": "torch"})


def seconds_of(call: Callable[[], object], device: str, times: int = 10) -> list[float]:
    """Seconds of each call, after two that compile."""
    durations = []
    for _ in range(times + 2):
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        durations.append(time.perf_counter() - start)
    return durations[2:]


def attention(device: str) -> list[dict[str, object]]:
    rows = []
    for name, shape in PAPER_SHAPES.items():
        length, heads, batch = (16, 2, 1) if device == "cpu" else (shape.queries, shape.heads, shape.batch)
        q, k, v = (
            torch.randn(batch, heads, length, shape.dim, dtype=torch.bfloat16, device=device, requires_grad=True)
            for _ in range(3)
        )
        run = torch.compile(
            lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=True), disable=device == "cpu"
        )
        out = run(q, k, v)
        gradient = torch.randn_like(out)
        passes: dict[str, tuple[Callable[[], object], float]] = {
            "forward": (lambda: run(q, k, v), shape.flops),  # noqa: B023
            "backward": (lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True), 2.5 * shape.flops),  # noqa: B023
        }
        for of, (call, flops) in passes.items():
            seconds = statistics.median(seconds_of(call, device))
            rows.append({"shape": name, "pass": of, "rate": flops / 1e12 / seconds, "unit": "TFLOP/s"})
    return rows


class Layer(nn.Module):
    def __init__(self, embed: int, mlp: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.kv_heads = kv_heads
        self.dim = embed // heads
        self.attention_norm = nn.RMSNorm(embed)
        self.mlp_norm = nn.RMSNorm(embed)
        self.qkv = nn.Linear(embed, (heads + 2 * kv_heads) * self.dim, bias=False)
        self.out = nn.Linear(embed, embed, bias=False)
        self.gate_up = nn.Linear(embed, 2 * mlp, bias=False)
        self.down = nn.Linear(mlp, embed, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:  # x: [rows, time, embed]
        rows, length, _ = x.shape
        heads = self.qkv(self.attention_norm(x)).view(rows, length, -1, self.dim).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), 1)
        mixed = functional.scaled_dot_product_attention(
            rotated(q, turn), rotated(k, turn), v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary positions: halves of a head are turned by the angles [time, dim / 2]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * turn.cos() - b * turn.sin(), b * turn.cos() + a * turn.sin()), -1).to(x.dtype)


def step(device: str) -> dict[str, object]:
    """AdamW on bfloat16 weights, each layer recomputed."""
    vocab, layers, embed, mlp, heads, kv_heads, length, rows = (
        TINY if device == "cpu" else (VOCAB, LAYERS, EMBED, MLP, HEADS, KV_HEADS, TIME, ROWS)
    )
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        table = nn.Embedding(vocab, embed)
        head = nn.Linear(embed, vocab, bias=False)
        stack = nn.ModuleList(Layer(embed, mlp, heads, kv_heads) for _ in range(layers))
        norm = nn.RMSNorm(embed)
        dim = embed // heads
        angles = torch.arange(length).float()[:, None] * 500_000.0 ** (-torch.arange(0, dim, 2).float() / dim)
        tokens = torch.randint(vocab, (rows, length + 1))
    network = nn.ModuleList([table, stack, norm, head])
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, fused=device == "cuda")

    def loss_of(tokens: Tensor) -> Tensor:
        x = table(tokens[:, :-1])
        for layer in stack:
            x = torch.utils.checkpoint.checkpoint(layer, x, angles, use_reentrant=False)
        return functional.cross_entropy(head(norm(x)).float().flatten(0, 1), tokens[:, 1:].flatten())

    compiled = torch.compile(loss_of, disable=device == "cpu")

    def update() -> None:
        compiled(tokens).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds = statistics.median(seconds_of(update, device))
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return {
        "name": "8b-layers",
        "parameters": sum(weight.numel() for weight in network.parameters()),
        "seconds": seconds,
        "tokens_per_second": rows * length / seconds,
        "measured": peak,
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()
