"""Four network families and five objectives: what each consists of, what a step of it costs, and how well it learns.

The same loop, optimizers and memory savers train all of them: a network is a function with named weights, an objective
a function of its output. Images are 1,797 handwritten digits, text is the Python standard library's source.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxmem.lab.tour.panels import Bars
from jaxmem.lab.tour.stop import Findings, refuse_target
from jaxmem.lab.tour.table import Row, Table, cell
from jaxmem.lab.tour.training import DECODER, TEXT, Outcome, SmallRun, train_all

DIGITS = {"data": {"source": "digits", "held_out": 0.2}, "batch": {"global_size": 64}}
CLASSIFY = {**DIGITS, "objective": "classify"}
MLP = {"family": "mlp", "layers": 2, "embed": 64, "mlp": 128}
CONVNET = {"family": "convnet", "stages": [16, 32], "blocks": 1}
VIT = {"family": "vit", "patch": 4, "layers": 2, "embed": 64, "mlp": 128, "heads": 4}
NETWORKS: Mapping[str, dict[str, Any]] = {
    "mlp": {**CLASSIFY, "model": MLP, "train": {"steps": 200}},
    "convnet": {**CLASSIFY, "model": CONVNET, "train": {"steps": 100}},
    "vit": {**CLASSIFY, "model": VIT, "train": {"steps": 200}},
    "decoder": {"data": TEXT, "batch": {"global_size": 16}, "model": DECODER, "train": {"steps": 120}},
}
# The least accuracy of each; of the decoder the most nats per byte.
REQUIRED: Mapping[str, float] = {"mlp": 0.97, "convnet": 0.97, "vit": 0.97, "decoder": 2.6}
# An objective: the outputs of the last layer, and what its number means.
OBJECTIVES: Mapping[str, tuple[int, str]] = {
    "binary": (1, "accuracy: odd or even; guessing 50%"),
    "regress_l1": (1, "mean absolute error of the digit; always 4.5: 2.5"),
    "regress_l2": (1, "mean squared error of the digit; always 4.5: 8.25"),
    "contrastive": (32, "accuracy: its shifted copy found among 64; guessing 2%"),
}
RATE = {"learning_rate": 5e-3, "warmup": 20}


def measure(target: str | None = None, steps: int | None = None) -> Findings:
    """Each network trained here, then each objective with the smallest one. `steps`: of every run."""
    refuse_target("networks", target)
    outcomes = train_all(small_runs(steps))
    networks = [_network(name, outcomes[name]) for name in NETWORKS]
    objectives = [
        {"objective": name, "held out": _result(outcomes[name]), "meaning": OBJECTIVES[name][1]} for name in OBJECTIVES
    ]
    each = {row["network"]: row["FLOP per step"] / row["parameters"] for row in networks}
    formats = {"FLOP per step": "count", "activations": "bytes"}
    return Findings(
        [
            Table("Networks, each trained here for a few seconds", networks, formats),
            Table("Objectives, with the mlp", objectives),
        ],
        "Activations: saved for the backward pass, in the compiled step. A convolution uses each weight at every"
        f" position: {each['convnet']:,.0f} operations per weight and step, the mlp {each['mlp']:,.0f}. The decoder's"
        " loss is in nats per byte; guessing among 257 tokens is 5.5.",
        [Bars(name, networks, (name,), spec) for name, spec in (("parameters", "count"), *formats.items())],
    )


def small_runs(steps: int | None = None) -> dict[str, SmallRun]:
    """Each network, then each objective with the smallest one."""
    configs = {name: dict(config) for name, config in NETWORKS.items()}
    for name, (outputs, _) in OBJECTIVES.items():
        configs[name] = {**DIGITS, "objective": name, "model": {**MLP, "outputs": outputs}, "train": {"steps": 200}}
    if steps:
        configs = {name: {**config, "train": {"steps": steps}} for name, config in configs.items()}
    return {name: SmallRun({**config, "optimizer": RATE}) for name, config in configs.items()}


def _network(name: str, outcome: Outcome) -> Row:
    return {
        "network": name,
        "parameters": outcome.plan["model"]["parameters"],
        "FLOP per step": outcome.plan["flops_per_device"],
        "activations": outcome.plan["bytes_per_device"]["activations"],
        "held out": _result(outcome),
        "required": f"over {REQUIRED[name]:.0%}" if REQUIRED[name] < 1 else f"under {REQUIRED[name]:.2f}",
    }


def _result(outcome: Outcome) -> str:
    accuracy = outcome.held_out.get("accuracy")
    return cell(outcome.held_out["loss"], ".2f") if accuracy is None else cell(accuracy, ".1%")
