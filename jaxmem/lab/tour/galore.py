"""All weights trained with a low-rank optimizer state: what GaLore and APOLLO store, and what they learn.

The gradient of a matrix is nearly of low rank, so Adam's moments are kept for its projection on r directions: r / m of
the state of a matrix with m rows. GaLore computes the directions from the gradient and moves weights along them; APOLLO
draws them at random and uses them only to scale the gradient, so that one direction is enough. Then gradients are the
largest part, and updating each layer during the backward pass removes them.
(Zhao et al., arXiv:2403.03507; Zhang et al., arXiv:2407.08296; Zhu et al., arXiv:2412.05270.)
"""

from collections.abc import Mapping
from typing import Any

from jaxmem.lab.tour import common
from jaxmem.lab.tour.panels import Bars
from jaxmem.lab.tour.stop import Findings
from jaxmem.lab.tour.table import Row, Table, gib

BASE = common.llm_config(
    "llama2-7b", 2048, precision=common.BFLOAT16, memory={"remat": "full"}, optimizer={"clip_by": "weight"}
)
DURING = "memory.update=during"
EIGHT_BIT, MINI = ("optimizer.name=galore_adamw8bit", "optimizer.rank=1024"), ("optimizer.name=apollo_mini",)
STEPS: common.Overrides = {
    "AdamW": (),
    "GaLore, rank 1024": ("optimizer.name=galore_adamw", "optimizer.rank=1024"),
    "8-bit GaLore": EIGHT_BIT,
    "Q-GaLore, int8 weights": ("optimizer.name=qgalore", "optimizer.rank=1024", *common.INT8),
    "APOLLO, rank 256": ("optimizer.name=apollo", "optimizer.rank=256"),
    "APOLLO-Mini, int8 weights": (*MINI, *common.INT8),
    "8-bit GaLore, update during backward": (*EIGHT_BIT, DURING),
    "APOLLO-Mini, int8 weights, update during backward": (*MINI, *common.INT8, DURING),
}
SMALL = {"model": common.DECODER, "data": common.TEXT, "batch": {"global_size": 8}, "train": {"steps": 150}}
LOW = ("optimizer.name=galore_adamw", "optimizer.rank=16", "optimizer.refresh_every=50")
RUNS: common.Overrides = {  # learning rates as in the papers
    "AdamW": ("optimizer.learning_rate=3e-3",),
    "GaLore, a quarter of the rank": (*LOW, "optimizer.learning_rate=1e-2"),
    "GaLore and the residual": (*LOW, "optimizer.learning_rate=1e-2", "optimizer.residual=true"),
    "APOLLO-Mini, rank 1": (*MINI, "optimizer.learning_rate=1e-2"),
}


def measure(target: str, base: Mapping[str, Any] = BASE) -> Findings:
    """Each optimizer's step compiled for a GPU, and short runs of some of them here."""
    plans = common.plans(target, base, STEPS)
    table = Table(f"{common.title(base)} on {target}, compiled", [_row(name, plan) for name, plan in plans.items()])
    runs = [
        {
            "optimizer": name,
            "state, bytes per parameter": outcome.plan["predicted"]["optimizer"] / outcome.plan["model"]["parameters"],
            "held-out loss": outcome.held_out["loss"],
        }
        for name, outcome in common.train_all(dict.fromkeys(RUNS, SMALL), RUNS).items()
    ]
    first, last = table.rows[0], table.rows[-1]
    return Findings(
        [table, Table(f"A small decoder, {SMALL['train']['steps']} updates here", runs)],
        f"From {first['optimizer']} to the last row a step shrinks from {first['total, GiB']:.1f} to"
        f" {last['total, GiB']:.1f} GiB, and every weight is still trained. Other: gradients, activations, logits."
        " Embedding and output matrices have the state of AdamW unless optimizer.project_embeddings is set. Loss: nats"
        " per byte.",
        [Bars(table, list(table.rows[0])[1:4], "Memory of a step, GiB")],
    )


def _row(name: str, plan: Mapping[str, Any]) -> Row:
    parts = plan["bytes_per_device"]
    weights, state = parts["parameters"] + parts["quantization"], parts["optimizer"] + parts["master"]
    return {
        "optimizer": name,
        "weights, GiB": gib(weights),
        "state, GiB": gib(state),
        "other, GiB": gib(parts["total"] - weights - state),
        "total, GiB": gib(parts["total"]),
        "bytes per parameter": parts["total"] / plan["model"]["parameters"],
        "measured, GiB": gib(plan["measured"]),
    }
