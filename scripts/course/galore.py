"""Each optimizer's step compiled for a GPU, and short runs of some of them here."""

from jaxmem.typing import JsonView
from scripts.course import Findings, common, main
from scripts.course.panels import Bars
from scripts.course.table import Row, Table, gib

CONFIGS = common.CONFIGS["galore"]
BASE = CONFIGS["base"]
SMALL = CONFIGS["small"]
STEPS = common.rows_of("galore", "steps")
RUNS = common.rows_of("galore", "runs")


def measure(target: str, base: JsonView = BASE) -> Findings:
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
    return Findings(
        [table, Table(f"A small decoder, {SMALL['train']['steps']} updates here", runs)],
        {"first": table.rows[0], "last": table.rows[-1]},
        [Bars(table, list(table.rows[0])[1:4], "Memory of a step, GiB")],
    )


def _row(name: str, plan: JsonView) -> Row:
    parts = plan["bytes_per_device"]
    weights = parts["parameters"] + parts["quantization"]
    state = parts["optimizer"] + parts["master"]
    return {
        "optimizer": name,
        "weights, GiB": gib(weights),
        "state, GiB": gib(state),
        "other, GiB": gib(parts["total"] - weights - state),
        "total, GiB": gib(parts["total"]),
        "bytes per parameter": parts["total"] / plan["model"]["parameters"],
    }


if __name__ == "__main__":
    main(__file__)
