"""Four kinds of network and six of error: what each is made of, what a step of it does, and how well it learns.

The same loop, the same optimizers and the same memory savers train all of them: a network is a function with named
weights, an error is a function of what it says. Pictures are 1,797 handwritten digits, text is the Python standard
library's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxmem.lab.tour.stops import Columns, Found, Row, Shown, Stop, only_here
from jaxmem.lab.tour.trained import DECODER, Ran, Run, trained

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
# What each reaches at least: right answers, or of the decoder nats a byte at most.
STATED: Mapping[str, float] = {"mlp": 0.97, "convnet": 0.97, "vit": 0.97, "decoder": 2.6}
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

    ran = trained(runs(steps))
    networks = [_network(name, ran[name]) for name in NETWORKS]
    errors = [{"name": name, "means": means, **_held_out(ran[name])} for name, (_, means) in OBJECTIVES.items()]
    made: Columns = {
        "network": lambda row: row["name"],
        "parameters": lambda row: f"{row['parameters']:,}",
        "FLOP a step": lambda row: count(row["flops"]),
        "kept for backward": lambda row: readable(row["activations"]),
        "held out": _result,
        "stated": lambda row: f"over {row['stated']:.0%}" if row["accuracy"] else f"under {row['stated']:.2f}",
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


def runs(steps: int | None = None) -> dict[str, Run]:
    """Each network, then each error on the smallest one."""
    given = {name: dict(one) for name, one in NETWORKS.items()}
    for name, (last, _) in OBJECTIVES.items():
        given[name] = {**DIGITS, "objective": name, "model": {**MLP, **last}, "train": {"steps": 200}}
    if steps:
        given = {name: {**one, "train": {"steps": steps}} for name, one in given.items()}
    return {name: Run({**one, "optimizer": RATE}) for name, one in given.items()}


def _network(name: str, ran: Ran) -> Row:
    return {
        "name": name,
        "parameters": ran.plan["model"]["parameters"],
        "flops": ran.plan["flops_per_device"],
        "activations": ran.plan["bytes_per_device"]["activations"],
        "stated": STATED[name],
        **_held_out(ran),
    }


def _held_out(ran: Ran) -> Row:
    return {"loss": ran.held_out["loss"], "accuracy": ran.held_out.get("accuracy")}


def _result(row: Row) -> str:
    return f"{row['loss']:.2f}" if row["accuracy"] is None else f"{row['accuracy']:.1%}"


def _per_weight(rows: Sequence[Row], name: str) -> float:
    (row,) = (row for row in rows if row["name"] == name)
    return row["flops"] / row["parameters"]


def _draw(drawn: Figure, networks: Sequence[Row]) -> None:
    from jaxmem.planning.text import count, readable

    for axes, (field, title, said) in zip(
        drawn.subplots(1, 3),
        (
            ("parameters", "parameters", count),
            ("flops", "FLOP a step", count),
            ("activations", "bytes kept for backward", readable),
        ),
        strict=True,
    ):
        bars = axes.bar([row["name"] for row in networks], [row[field] for row in networks])
        axes.bar_label(bars, [said(row[field]) for row in networks], fontsize=9, padding=2)
        axes.set(title=title, yticks=[])


STOP = Stop(
    "networks",
    "four kinds of network, and what there is to minimise, each trained here",
    learnt,
    uses="devices",
    config=["model.family=vit", "objective=classify"],
    read=["jaxmem/models/decoder.py", "jaxmem/models/losses.py"],
)
