"""All weights trained with a low-rank optimizer state: the memory and the losses of GaLore and APOLLO.

The gradient of a matrix has nearly low rank, so Adam's moments are stored for its projection on r directions: r / m of
the state of a matrix with m rows. GaLore computes the directions from the gradient and updates weights along them;
APOLLO draws them at random and only uses them to scale the gradient, so one direction is enough. Gradients are then the
largest part; updating each layer during the backward pass removes them.
(Zhao et al., arXiv:2403.03507; Zhang et al., arXiv:2407.08296; Zhu et al., arXiv:2412.05270.)
"""

from collections.abc import Mapping
from typing import Any

from jaxmem.lab.tour import Findings, common
from jaxmem.lab.tour.table import Bars, Row, Table, gib

CONFIGS = common.CONFIGS["galore"]
BASE, SMALL = CONFIGS["base"], CONFIGS["small"]
STEPS, RUNS = common.rows_of("galore", "steps"), common.rows_of("galore", "runs")


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
        f"From {first['optimizer']} to the last row the step shrinks from {first['total, GiB']:.1f} to"
        f" {last['total, GiB']:.1f} GiB; all weights are trained. Other: gradients, activations, logits. Embedding and"
        " output matrices have the state of AdamW unless optimizer.project_embeddings is set. The residual is the part"
        " of the gradient outside of the basis (Fira). Loss: nats per byte.",
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
