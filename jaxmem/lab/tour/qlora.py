"""A base that stays as it is, in fewer and fewer bits, and the thin matrices that learn beside it: a step by its parts.

A weight that does not learn has no gradient and no state, so what is left of it is how it rests: 2 bytes in bfloat16, 4
bits and its share of a block's constant in nf4. Each matrix is decoded where its product runs, one at a time, and again
for the product backward: a few operations a weight beside two for each token. (Dettmers et al., arXiv:2305.14314.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxmem.config import Config, load_config
from jaxmem.lab.tour import compiled
from jaxmem.lab.tour.bars import stacked
from jaxmem.lab.tour.stops import Columns, Found, Row, Shown, Stop

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from jaxmem.planning.state import Leaf

TARGET = "rtx4090-24gb"
BASE: dict[str, Any] = {
    "name": "tour",
    "model": {"preset": "llama3-8b"},
    "data": {"source": "tokens", "path": "unused", "sequence_length": 2048},
    "batch": {"global_size": 1},
    "precision": {"parameters": "bfloat16", "rounding": "stochastic"},
    "memory": {"remat": "full"},
    "train": {"steps": 1000},
}
BASES: dict[str, tuple[str, ...]] = {
    "bfloat16": ("adapter.kind=lora", "adapter.base=bfloat16"),
    "int8": ("adapter.kind=qlora", "adapter.base=int8", "adapter.double_quant=false"),
    "nf4": ("adapter.kind=qlora", "adapter.double_quant=false"),
    "nf4, constants in 8 bits": ("adapter.kind=qlora",),
    "the same, no layer again": ("adapter.kind=qlora", "memory.remat=none"),
}


def by_base(
    target: str | None = None, base: Mapping[str, Any] = BASE, bases: Mapping[str, Sequence[str]] = BASES
) -> Found:
    """A step of each for a GPU, and what decoding its base takes."""
    aim = target or TARGET
    cfgs = {name: load_config(base, overrides) for name, overrides in bases.items()}
    rows = list(_rows(aim, cfgs, bases))
    held: Columns = {
        "base rests in": lambda row: row["name"],
        "base, GiB": lambda row: f"{(row['layers'] + row['tables']) / 2**30:.2f}",
        "learns": lambda row: f"{row['learns'] / 2**30:.2f}",
        "activations": lambda row: f"{row['activations'] / 2**30:.2f}",
        "in all": lambda row: f"{row['total'] / 2**30:.2f}",
    }
    held |= compiled.measured(rows)
    done: Columns = {
        "base rests in": lambda row: row["name"],
        "bits a weight": lambda row: f"{row['bits']:.2f}",
        "TFLOP": lambda row: f"{row['flops'] / 1e12:.1f}",
        "of the least": lambda row: f"{row['flops'] / row['ideal']:.2f} x",
        "one decoding": lambda row: f"{row['decoding'] / 1e12:.2f}" if row["decoding"] else "",
    }
    model, length = base["model"].get("preset", base["name"]), base["data"]["sequence_length"]
    tables = [
        Shown(f"{model} with adapters on {aim}, {length:,} tokens: what the step holds", rows, held),
        Shown("The arithmetic of its products; decoding the base once, in the same unit", rows, done),
    ]
    return Found(tables, _note(rows, length), partial(_draw, rows=rows))


def _rows(target: str, cfgs: Mapping[str, Config], bases: Mapping[str, Sequence[str]]) -> Iterator[Row]:
    from jaxmem.planning.state import state_of

    plans = compiled.plans(target, cfgs)
    for name, cfg in cfgs.items():
        plan, state = plans[name], state_of(cfg, "cuda")
        frozen = [leaf for leaf in (*state.params, *state.constants) if "rank" not in leaf.axes]
        weights = [leaf for leaf in state.weights if "rank" not in leaf.axes]
        tables = [leaf for leaf in frozen if "vocab" in leaf.axes]
        parts, count = plan["bytes_per_device"], sum(math.prod(leaf.shape) for leaf in weights)
        held = _bytes(frozen)
        yield {
            "name": name,
            "overrides": list(bases[name]),
            "layers": held - _bytes(tables),
            "tables": _bytes(tables),
            "tables_in_bfloat16": 2 * sum(math.prod(leaf.shape) for leaf in weights if "vocab" in leaf.axes),
            "learns": parts["parameters"] + parts["quantization"] - held + parts["gradients"] + parts["optimizer"],
            "trainable": plan["model"]["trainable"],
            "activations": parts["activations"],
            "total": parts["total"],
            "measured": plan.get("measured"),
            "bits": 8 * held / count,
            "flops": plan["flops_per_device"],
            "ideal": plan["ideal_flops_per_device"],
            "decoding": _operations(cfg) * count,
            "estimated_step_seconds": plan["estimated_step_seconds"],
        }


def _bytes(leaves: Sequence[Leaf]) -> int:
    return sum(leaf.itemsize * math.prod(leaf.shape) for leaf in leaves)


def _operations(cfg: Config, size: int = 1024) -> float:
    """Of decoding one weight, as XLA counts them in a matrix."""
    import jax
    import jax.numpy as jnp

    from jaxmem.quant import quantize

    base = cfg.base_precision
    if not base.quantized:
        return 0.0
    block = base.block_size or (256 if base.parameters == "int8" else 64)
    matrix = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
    double_quant = cfg.adapter.double_quant
    codes = jax.eval_shape(lambda x: quantize(x, base.parameters, block, -2, double_quant=double_quant), matrix)
    counted = jax.jit(lambda q: q.dequantize(jnp.bfloat16)).lower(codes).cost_analysis()
    assert counted is not None
    return counted["flops"] / size**2


def _note(rows: Sequence[Row], length: int) -> str:
    first, codes = rows[0], [row for row in rows if row["decoding"]]
    small = min(codes, key=lambda row: row["total"])
    back = small["tables_in_bfloat16"] - small["tables"]
    share = small["decoding"] / (small["flops"] / 3)
    return (
        f"{small['trainable'] / 1e6:.1f} M weights learn: their weights, gradients and state of AdamW are under"
        f" 'learns', and the base has neither gradient nor state. From {first['name']} to {small['name']} the base"
        f" shrinks {(first['layers'] + first['tables']) / (small['layers'] + small['tables']):.1f} times and the step"
        f" {first['total'] / small['total']:.1f} times. Embedding and output projection are in codes too:"
        f" {small['tables'] / 2**30:.2f} GiB, which would be {small['tables_in_bfloat16'] / 2**30:.2f} in bfloat16 and"
        f" make it {(small['total'] + back) / 2**30:.2f} in all."
        f" Each matrix is decoded wherever its product runs, and at {length:,} tokens one decoding of all is"
        f" {share:.2%} of a pass of products: what it costs is the bytes that it writes and reads."
        " What is over the least is layers that run again; without that all that they make is kept."
    )


def _draw(drawn: Figure, rows: Sequence[Row]) -> None:
    axes = drawn.subplots()
    shown = {"layers": "base: layers", "tables": "base: tables", "learns": "learns", "activations": "activations"}
    stacked(axes, rows, shown)
    axes.set(xlabel="GiB in a step")
    axes.legend()


STOP = Stop(
    "qlora",
    "adapters beside a base in bfloat16, int8 and nf4: what a step holds and computes",
    by_base,
    uses="compiler",
    config=["adapter.kind=qlora", "adapter.base=nf4", "adapter.double_quant=true"],
    read=["jaxmem/adapters/low_rank.py", "jaxmem/quant/qtensor.py", "jaxmem/sharding/weights.py"],
)
