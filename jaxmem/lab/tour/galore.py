"""All weights trained with a low-rank optimizer state: what GaLore and APOLLO store, and what they learn.

The gradient of a matrix is nearly of low rank, so Adam's moments are kept for its projection on r directions: r / m of
the state of a matrix with m rows. GaLore takes the directions from the gradient and moves weights along them; APOLLO
draws them at random and uses them only to scale the gradient, so that one direction is enough. Then gradients are the
largest part, and updating each layer during the backward pass removes them.
(Zhao et al., arXiv:2403.03507; Zhang et al., arXiv:2407.08296; Zhu et al., arXiv:2412.05270.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxmem.config import load_config
from jaxmem.lab.tour import common
from jaxmem.lab.tour.panels import Bars
from jaxmem.lab.tour.stop import Findings
from jaxmem.lab.tour.table import Row, Table
from jaxmem.lab.tour.training import DECODER, TEXT, train_each

TARGET = "rtx4090-24gb"
BASE = common.llm_config(
    "llama2-7b", 2048, precision=common.BFLOAT16, memory={"remat": "full"}, optimizer={"clip_by": "weight"}
)
INT8 = ("precision.parameters=int8", "precision.rounding=auto")
DURING = "memory.update=during"
STEPS: Mapping[str, tuple[str, ...]] = {
    "AdamW": (),
    "GaLore, rank 1024": ("optimizer.name=galore_adamw", "optimizer.rank=1024"),
    "8-bit GaLore": ("optimizer.name=galore_adamw8bit", "optimizer.rank=1024"),
    "Q-GaLore, int8 weights": ("optimizer.name=qgalore", "optimizer.rank=1024", *INT8),
    "APOLLO, rank 256": ("optimizer.name=apollo", "optimizer.rank=256"),
    "APOLLO-Mini, int8 weights": ("optimizer.name=apollo_mini", *INT8),
}
UPDATED = ("8-bit GaLore", "APOLLO-Mini, int8 weights")  # also with the update during the backward pass
SMALL: dict[str, Any] = {"model": DECODER, "data": TEXT, "batch": {"global_size": 8}, "train": {"steps": 150}}
LOW = ("optimizer.name=galore_adamw", "optimizer.rank=16", "optimizer.refresh_every=50")
RUNS: Mapping[str, tuple[str, ...]] = {  # learning rates as in the papers
    "AdamW": ("optimizer.learning_rate=3e-3",),
    "GaLore, a quarter of the rank": (*LOW, "optimizer.learning_rate=1e-2"),
    "GaLore and the residual": (*LOW, "optimizer.learning_rate=1e-2", "optimizer.residual=true"),
    "APOLLO-Mini, rank 1": ("optimizer.name=apollo_mini", "optimizer.learning_rate=1e-2"),
}


def measure(target: str | None = None, base: Mapping[str, Any] = BASE, steps: int | None = None) -> Findings:
    """Each optimizer's step compiled for a GPU, and short runs of some of them here."""
    aim = target or TARGET
    settings = {**STEPS} | {f"{name}, update during backward": (*STEPS[name], DURING) for name in UPDATED}
    plans = common.plans(aim, {name: load_config(base, overrides) for name, overrides in settings.items()})
    rows = [_row(name, plan) for name, plan in plans.items()]
    runs = [
        {
            "optimizer": name,
            "state, bytes per parameter": outcome.plan["predicted"]["optimizer"] / outcome.plan["model"]["parameters"],
            "loss": outcome.held_out["loss"],
        }
        for name, outcome in train_each(SMALL, steps, RUNS).items()
    ]
    first, last = rows[0], rows[-1]
    model, length = base["model"].get("preset", base["name"]), base["data"]["sequence_length"]
    formats = dict.fromkeys(("weights", "state", "other", "total", "measured"), "GiB")
    return Findings(
        [
            Table(f"{model} on {aim}, {length:,} tokens, compiled", rows, {**formats, "bytes per parameter": ".2f"}),
            Table("A small decoder, trained here", runs, {"state, bytes per parameter": ".2f", "loss": ".3f"}),
        ],
        f"From {first['optimizer']} to {last['optimizer']} a step shrinks from {first['total'] / 2**30:.1f} to"
        f" {last['total'] / 2**30:.1f} GiB, and every weight is still trained. Other: gradients, activations, logits."
        " Embedding and output matrices have the state of AdamW unless optimizer.project_embeddings is set. Loss: nats"
        f" per byte of held-out text after {steps or SMALL['train']['steps']} updates.",
        [Bars(f"Memory of a step, {model} on {aim}", rows, ("weights", "state", "other"), "GiB")],
    )


def _row(name: str, plan: dict[str, Any]) -> Row:
    parts = plan["bytes_per_device"]
    weights, state = parts["parameters"] + parts["quantization"], parts["optimizer"] + parts["master"]
    return {
        "optimizer": name,
        "weights": weights,
        "state": state,
        "other": parts["total"] - weights - state,
        "total": parts["total"],
        "bytes per parameter": parts["total"] / plan["model"]["parameters"],
        "measured": plan.get("measured"),
    }
