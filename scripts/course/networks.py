"""The result of each network, then of each objective with the smallest network."""

from scripts.course import Findings, main
from scripts.course.common import CONFIGS, Outcome, train_all
from scripts.course.panels import Bars
from scripts.course.table import Table

RUNS = CONFIGS["networks"]["runs"]
# The required accuracy of each network; for the decoder the highest loss, in nats per byte.
REQUIRED_SCORES = {"mlp": 0.97, "convnet": 0.97, "vit": 0.97, "decoder": 2.6}
OBJECTIVES = {
    "binary": "accuracy: odd or even; 0.5 by guessing",
    "regress_l1": "mean absolute error of the digit; 2.5 if the answer is always 4.5",
    "regress_l2": "mean squared error of the digit; 8.25 if the answer is always 4.5",
    "contrastive": "accuracy: the shifted copy of an image found among 64; 0.02 by guessing",
}


def measure() -> Findings:
    outcomes = train_all(RUNS)
    rows = [
        {
            "network": name,
            "parameters": outcomes[name].plan["model"]["parameters"],
            "MFLOP per step": outcomes[name].plan["flops_per_device"] / 1e6,
            "activations, MiB": outcomes[name].plan["bytes_per_device"]["activations"] / 2**20,
            "held out": _result(outcomes[name]),
            "required": f"{'over' if REQUIRED_SCORES[name] < 1 else 'under'} {REQUIRED_SCORES[name]}",
        }
        for name in REQUIRED_SCORES
    ]
    objectives = [
        {"objective": name, "held out": _result(outcomes[name]), "meaning": meaning}
        for name, meaning in OBJECTIVES.items()
    ]
    per_parameter = {row["network"]: 1e6 * row["MFLOP per step"] / row["parameters"] for row in rows}
    table = Table("Networks, each trained here for a few seconds", rows)
    return Findings(
        [table, Table("Objectives, with the mlp", objectives)],
        per_parameter,
        [Bars(table, (name,), name) for name in ("parameters", "MFLOP per step", "activations, MiB")],
    )


def _result(outcome: Outcome) -> float:
    return outcome.held_out.get("accuracy", outcome.held_out["loss"])


if __name__ == "__main__":
    main(__file__)
