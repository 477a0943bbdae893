"""Four network families and five objectives: what each consists of, what a step of it costs, and how well it learns.

The same loop, optimizers and memory savers train all of them: a network is a function with named weights, an objective
a function of its output. Images are 1,797 handwritten digits, text is the Python standard library's source.
"""

from typing import Any

from jaxmem.lab.tour.common import DECODER, TEXT, Outcome, train_all
from jaxmem.lab.tour.panels import Bars
from jaxmem.lab.tour.stop import Findings
from jaxmem.lab.tour.table import Table

DIGITS = {"data": {"source": "digits", "held_out": 0.2}, "batch": {"global_size": 64}}
MLP = {"family": "mlp", "layers": 2, "embed": 64, "mlp": 128}
CONVNET = {"family": "convnet", "stages": [16, 32], "blocks": 1}
VIT = {"family": "vit", "patch": 4, "layers": 2, "embed": 64, "mlp": 128, "heads": 4}
NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {**DIGITS, "objective": "classify", "model": MLP, "train": {"steps": 200}},
    "convnet": {**DIGITS, "objective": "classify", "model": CONVNET, "train": {"steps": 100}},
    "vit": {**DIGITS, "objective": "classify", "model": VIT, "train": {"steps": 200}},
    "decoder": {"data": TEXT, "batch": {"global_size": 16}, "model": DECODER, "train": {"steps": 120}},
}
# The least accuracy of each; of the decoder the most nats per byte.
REQUIRED = {"mlp": 0.97, "convnet": 0.97, "vit": 0.97, "decoder": 2.6}
# An objective: the outputs of the last layer, and what its number means.
OBJECTIVES = {
    "binary": (1, "accuracy: odd or even; guessing 0.5"),
    "regress_l1": (1, "mean absolute error of the digit; always 4.5: 2.5"),
    "regress_l2": (1, "mean squared error of the digit; always 4.5: 8.25"),
    "contrastive": (32, "accuracy: its shifted copy found among 64; guessing 0.02"),
}
RATE = {"learning_rate": 5e-3, "warmup": 20}
RUNS = {name: {**config, "optimizer": RATE} for name, config in NETWORKS.items()} | {
    name: {
        **DIGITS, "objective": name, "model": {**MLP, "outputs": outputs}, "train": {"steps": 200}, "optimizer": RATE
    }
    for name, (outputs, _) in OBJECTIVES.items()
}  # fmt: skip


def measure() -> Findings:
    """Each network trained here, then each objective with the smallest one."""
    outcomes = train_all(RUNS)
    rows = [
        {
            "network": name,
            "parameters": outcomes[name].plan["model"]["parameters"],
            "MFLOP per step": outcomes[name].plan["flops_per_device"] / 1e6,
            "activations, MiB": outcomes[name].plan["bytes_per_device"]["activations"] / 2**20,
            "held out": _result(outcomes[name]),
            "required": f"{'over' if REQUIRED[name] < 1 else 'under'} {REQUIRED[name]}",
        }
        for name in NETWORKS
    ]
    objectives = [
        {"objective": name, "held out": _result(outcomes[name]), "meaning": meaning}
        for name, (_, meaning) in OBJECTIVES.items()
    ]
    each = {row["network"]: 1e6 * row["MFLOP per step"] / row["parameters"] for row in rows}
    table = Table("Networks, each trained here for a few seconds", rows)
    return Findings(
        [table, Table("Objectives, with the mlp", objectives)],
        "Activations: saved for the backward pass, in the compiled step. A convolution uses each weight at every"
        f" position: {each['convnet']:,.0f} operations per weight and step, the mlp {each['mlp']:,.0f}. Held out:"
        " accuracy; for the decoder the loss in nats per byte, and guessing among 257 tokens is 5.5.",
        [Bars(table, (name,), name) for name in ("parameters", "MFLOP per step", "activations, MiB")],
    )


def _result(outcome: Outcome) -> float:
    return outcome.held_out.get("accuracy", outcome.held_out["loss"])
