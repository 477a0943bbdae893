"""Adapters beside frozen weights of fewer and fewer bits: what a step stores and computes.

A frozen weight has no gradient and no optimizer state, so its memory is its format: 2 bytes in bfloat16; 4 bits and its
share of a block's scale in nf4. Each matrix is dequantized where its matmul runs, one at a time, and again for the
backward pass: a few operations per weight beside two per weight and token. (Dettmers et al., arXiv:2305.14314.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.config import Config, load_config
from jaxmem.lab.tour import common
from jaxmem.lab.tour.panels import Bars
from jaxmem.lab.tour.stop import Findings
from jaxmem.lab.tour.table import Row, Table
from jaxmem.planning.state import state_of
from jaxmem.quant import quantize

TARGET = "rtx4090-24gb"
BASE = common.llm_config("llama3-8b", 2048, precision=common.BFLOAT16, memory={"remat": "full"})
BASES: dict[str, tuple[str, ...]] = {
    "bfloat16": ("adapter.kind=lora", "adapter.base=bfloat16"),
    "int8": ("adapter.kind=qlora", "adapter.base=int8", "adapter.double_quant=false"),
    "nf4": ("adapter.kind=qlora", "adapter.double_quant=false"),
    "nf4, double quantization": ("adapter.kind=qlora",),
    "the same, no recompute": ("adapter.kind=qlora", "memory.remat=none"),
}


def measure(
    target: str | None = None, base: Mapping[str, Any] = BASE, bases: Mapping[str, Sequence[str]] = BASES
) -> Findings:
    """A step for each format of the frozen weights, compiled for a GPU, and the cost of dequantizing them."""
    aim = target or TARGET
    rows = list(_rows(aim, {name: load_config(base, overrides) for name, overrides in bases.items()}))
    memory = ["frozen weights", "trainable", "activations", "total", "measured"]
    compute = ["bits per weight", "step", "times the minimum", "one dequantization"]
    first, small = rows[0], min((row for row in rows if row["one dequantization"]), key=lambda row: row["total"])
    model, length = base["model"].get("preset", base["name"]), base["data"]["sequence_length"]
    share = small["one dequantization"] / (small["step"] / 3)
    return Findings(
        [
            Table(
                f"{model} with adapters on {aim}, {length:,} tokens: memory of the step",
                [{key: row[key] for key in ("stored as", *memory)} for row in rows],
                dict.fromkeys(memory, "GiB"),
            ),
            Table(
                "Matmuls of the step, and dequantizing all frozen weights once",
                [{key: row[key] for key in ("stored as", *compute)} for row in rows],
                {"bits per weight": ".2f", "step": "TFLOP", "times the minimum": ".2f", "one dequantization": "TFLOP"},
            ),
        ],
        f"{small['parameters'] / 1e6:.1f} M parameters are trainable; 'trainable' has their weights, gradients and"
        f" AdamW state. From {first['stored as']} to {small['stored as']} the frozen weights shrink"
        f" {first['frozen weights'] / small['frozen weights']:.1f} times and the step"
        f" {first['total'] / small['total']:.1f} times. At {length:,} tokens dequantizing all weights once is"
        f" {share:.2%} of the matmuls of one pass; the cost is the bytes that it writes and reads. The embedding and"
        f" output matrices are quantized too: {small['embedding and output'] / 2**30:.2f} GiB in place of"
        f" {small['embedding and output in bfloat16'] / 2**30:.2f}.",
        [Bars(f"Memory of a step, {model} on {aim}", rows, ("layers", "embedding and output", *memory[1:3]), "GiB")],
    )


def _rows(target: str, cfgs: Mapping[str, Config]) -> Iterator[Row]:
    plans = common.plans(target, cfgs)
    for name, cfg in cfgs.items():
        plan, state = plans[name], state_of(cfg, "cuda")
        frozen = [leaf for leaf in (*state.params, *state.scales) if "rank" not in leaf.axes]
        weights = [leaf for leaf in state.weights if "rank" not in leaf.axes]
        vocabulary = _bytes(leaf for leaf in frozen if "vocab" in leaf.axes)
        parts, count, stored = plan["bytes_per_device"], sum(math.prod(leaf.shape) for leaf in weights), _bytes(frozen)
        yield {
            "stored as": name,
            "frozen weights": stored,
            "layers": stored - vocabulary,
            "embedding and output": vocabulary,
            "embedding and output in bfloat16": 2 * sum(math.prod(w.shape) for w in weights if "vocab" in w.axes),
            "trainable": parts["parameters"] + parts["quantization"] - stored + parts["gradients"] + parts["optimizer"],
            "parameters": plan["model"]["trainable"],
            "activations": parts["activations"],
            "total": parts["total"],
            "measured": plan.get("measured"),
            "bits per weight": 8 * stored / count,
            "step": plan["flops_per_device"],
            "times the minimum": plan["flops_per_device"] / plan["ideal_flops_per_device"],
            "one dequantization": _operations(cfg) * count or None,
        }


def _bytes(leaves: Any) -> int:
    return sum(leaf.itemsize * math.prod(leaf.shape) for leaf in leaves)


def _operations(cfg: Config, size: int = 1024) -> float:
    """Of dequantizing one weight, as XLA counts them in a matrix."""
    base = cfg.base_precision
    if not base.is_quantized:
        return 0.0
    block = base.block_size or (256 if base.parameters == "int8" else 64)
    matrix = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
    codes = jax.eval_shape(
        lambda x: quantize(x, base.parameters, block, -2, double_quant=cfg.adapter.double_quant), matrix
    )
    counted = jax.jit(lambda q: q.dequantize(jnp.bfloat16)).lower(codes).cost_analysis()
    assert counted is not None
    return counted["flops"] / size**2
