"""Four kinds of network and six of error: what each is made of, what a step of it does, and how well it learns.

The same loop, the same optimizers and the same memory savers train all of them: a network is a function with named
weights, an error is a function of what it says. Pictures are 1,797 handwritten digits, text is the Python standard
library's.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxmem.tour.stops import Columns, Found, Row, Shown, Stop, only_here
from jaxmem.tour.trained import DECODER, trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DIGITS = {"data": {"source": "digits", "held_out": 0.2}, "batch": {"global_size": 64}}
TEXT = {"data": {"source": "stdlib", "sequence_length": 128}, "batch": {"global_size": 16}}
MLP = {"family": "mlp", "layers": 2, "embed": 64, "mlp": 128}
NETWORKS: Mapping[str, dict[str, Any]] = {
    "mlp": {**DIGITS, "objective": "classify", "model": MLP, "train": {"steps": 200}},
    "convnet": {
        **DIGITS,
        "objective": "classify",
        "model": {"family": "convnet", "stages": [16, 32], "blocks": 1},
        "train": {"steps": 100},
    },
    "vit": {
        **DIGITS,
        "objective": "classify",
        "model": {"family": "vit", "patch": 4, "layers": 2, "embed": 64, "mlp": 128, "heads": 4},
        "train": {"steps": 200},
    },
    "decoder": {
        **TEXT,
        "model": DECODER,
        "train": {"steps": 120},
    },
}
# An error, what the last layer says for it, and what guessing comes to.
OBJECTIVES: Mapping[str, tuple[dict[str, Any], str]] = {  # beside one of ten, right, and the next token
    "binary": ({"outputs": 1}, "odd or even, right; guessing 50 %"),
    "regress_l1": ({"outputs": 1}, "digits it is off by; always 4.5: 2.5"),
    "regress_l2": ({"outputs": 1}, "squared; always 4.5: 8.25"),
    "contrastive": ({"outputs": 32}, "itself, moved, found among 64; guessing 2 %"),
}
RATE = {"learning_rate": 5e-3, "warmup": 20}


def learnt(target: str | None = None, steps: int | None = None) -> Found:
    """Each network trained here, then each error on the smallest one. `steps`: of every run, by default its own."""
    only_here("networks", target)
    from jaxmem.planning.text import count, readable

    networks = list(_networks(steps))
    errors = list(_errors(steps))
    made: Columns = {
        "network": lambda row: row["name"],
        "parameters": lambda row: f"{row['parameters']:,}",
        "FLOP a step": lambda row: count(row["flops"]),
        "kept for backward": lambda row: readable(row["activations"]),
        "s": lambda row: f"{row['seconds']:.0f}",
        "held out": _result,
    }
    means: Columns = {"objective": lambda row: row["name"], "held out": _result, "what it is": lambda row: row["means"]}
    note = (
        "Kept for backward: the activations of a step as it is compiled. A convolution does many operations for each of"
        f" its weights, since it uses them at every place: {_per_weight(networks, 'convnet'):,.0f} a step for each,"
        f" the mlp {_per_weight(networks, 'mlp'):,.0f}. The decoder's error is in nats a byte; guessing among 257 is"
        " 5.5."
    )
    tables = [
        Shown("Networks, each trained here for some seconds", networks, made),
        Shown("Errors to minimise, with the mlp", errors, means),
    ]
    return Found(tables, note, partial(_draw, networks=networks))


def _networks(steps: int | None) -> Iterator[Row]:
    for name, given in NETWORKS.items():
        start = time.perf_counter()
        result = trained({**given, "optimizer": RATE, "train": {"steps": steps or given["train"]["steps"]}})
        plan = result.plan.as_json()
        yield {
            "name": name,
            "parameters": plan["model"]["parameters"],
            "flops": plan["flops_per_device"],
            "activations": plan["bytes_per_device"]["activations"],
            "seconds": time.perf_counter() - start,
            **_held_out(result.held_out),
        }


def _errors(steps: int | None) -> Iterator[Row]:
    for name, (last, means) in OBJECTIVES.items():
        given = {**DIGITS, "objective": name, "model": {**MLP, **last}, "optimizer": RATE}
        result = trained({**given, "train": {"steps": steps or 200}})
        yield {"name": name, "means": means, **_held_out(result.held_out)}


def _held_out(found: Mapping[str, float]) -> Row:
    return {"loss": found["loss"], "accuracy": found.get("accuracy")}


def _result(row: Row) -> str:
    return f"{row['loss']:.2f}" if row["accuracy"] is None else f"{row['accuracy']:.1%}"


def _per_weight(rows: Sequence[Row], name: str) -> float:
    (row,) = (row for row in rows if row["name"] == name)
    return row["flops"] / row["parameters"]


def _draw(drawn: Figure, networks: Sequence[Row]) -> None:
    for axes, (field, label) in zip(
        drawn.subplots(1, 3),
        (("parameters", "parameters"), ("flops", "FLOP a step"), ("activations", "bytes kept for backward")),
        strict=True,
    ):
        axes.bar([row["name"] for row in networks], [row[field] for row in networks])
        axes.set_title(label, fontsize=10)
        axes.tick_params(axis="x", labelsize=8)


STOP = Stop(
    "networks",
    "four kinds of network, and what there is to minimise, each trained here",
    learnt,
    uses="devices",
    config=["model.family=vit", "objective=classify"],
    read=["jaxmem/models/decoder.py", "jaxmem/losses.py"],
)
