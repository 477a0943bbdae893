"""All weights trained, from gradients seen in few dimensions: what GaLore and APOLLO hold, and what they learn.

A gradient of a matrix is nearly of low rank, so the moments of its projection on r directions do for Adam: r / m of
the state of a matrix with m rows. GaLore finds the directions in the gradient and moves weights along them; APOLLO
draws them at random, and only scales the gradient by what Adam would have done there, so that one direction is enough.
What is then left are gradients, and those go when each layer is updated in the backward pass.
(Zhao et al., arXiv:2403.03507; Zhang et al., arXiv:2407.08296; Zhu et al., arXiv:2412.05270.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from jaxmem.config import load_config
from jaxmem.lab.tour import compiled
from jaxmem.lab.tour.bars import stacked
from jaxmem.lab.tour.stops import Columns, Found, Row, Shown, Stop
from jaxmem.lab.tour.trained import DECODER, Run, trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TARGET = "rtx4090-24gb"
BASE: dict[str, Any] = {
    "name": "tour",
    "model": {"preset": "llama2-7b"},
    "data": {"source": "tokens", "path": "unused", "sequence_length": 2048},
    "batch": {"global_size": 1},
    "precision": {"parameters": "bfloat16", "rounding": "stochastic"},
    "memory": {"remat": "full"},
    "optimizer": {"clip_by": "weight"},
    "train": {"steps": 1000},
}
INT8 = ("precision.parameters=int8", "precision.rounding=auto")
DURING = "memory.update=during"
STEPS: Mapping[str, tuple[str, ...]] = {
    "AdamW": (),
    "GaLore, rank 1024": ("optimizer.name=galore_adamw", "optimizer.rank=1024"),
    "GaLore, moments in 8 bits": ("optimizer.name=galore_adamw8bit", "optimizer.rank=1024"),
    "Q-GaLore, weights in int8": ("optimizer.name=qgalore", "optimizer.rank=1024", *INT8),
    "APOLLO, rank 256": ("optimizer.name=apollo", "optimizer.rank=256"),
    "APOLLO-Mini, weights in int8": ("optimizer.name=apollo_mini", *INT8),
}
UPDATED = ("GaLore, moments in 8 bits", "APOLLO-Mini, weights in int8")  # during the backward pass too
SMALL: dict[str, Any] = {
    "model": DECODER,
    "data": {"source": "stdlib", "sequence_length": 128},
    "batch": {"global_size": 8},
    "train": {"steps": 150},
}
LOW = ("optimizer.name=galore_adamw", "optimizer.rank=16", "optimizer.refresh_every=50")
RUNS: Mapping[str, tuple[str, ...]] = {  # rates as their papers have them
    "AdamW": ("optimizer.learning_rate=3e-3",),
    "GaLore, a quarter of the rank": (*LOW, "optimizer.learning_rate=1e-2"),
    "the same, and what is outside": (*LOW, "optimizer.learning_rate=1e-2", "optimizer.residual=true"),
    "APOLLO-Mini, rank 1": ("optimizer.name=apollo_mini", "optimizer.learning_rate=1e-2"),
}


def by_rank(target: str | None = None, base: Mapping[str, Any] = BASE, steps: int | None = None) -> Found:
    """Each optimizer's step for a GPU, and a short run of some of them here."""
    aim = target or TARGET
    settings = {**STEPS} | {f"{name}, during": (*STEPS[name], DURING) for name in UPDATED}
    plans = compiled.plans(aim, {name: load_config(base, overrides) for name, overrides in settings.items()})
    rows = [_row(name, settings[name], plan) for name, plan in plans.items()]
    runs = list(_runs(steps or SMALL["train"]["steps"]))
    holds: Columns = {
        "optimizer": lambda row: row["name"],
        "weights, GiB": lambda row: f"{row['weights'] / 2**30:.2f}",
        "state": lambda row: f"{row['state'] / 2**30:.2f}",
        "the rest": lambda row: f"{row['rest'] / 2**30:.2f}",
        "in all": lambda row: f"{row['total'] / 2**30:.2f}",
        "B/param": lambda row: f"{row['total'] / row['parameters']:.2f}",
    }
    holds |= compiled.measured(rows)
    learns: Columns = {
        "optimizer": lambda row: row["name"],
        "state, B/param": lambda row: f"{row['state']:.2f}",
        "loss": lambda row: f"{row['loss']:.3f}",
    }
    first, last = rows[0], rows[-1]
    model, length = base["model"].get("preset", base["name"]), base["data"]["sequence_length"]
    note = (
        f"From {first['name']} to {last['name']} a step goes from {first['total'] / 2**30:.1f} to"
        f" {last['total'] / 2**30:.1f} GiB, and every weight is still trained. The rest: gradients, activations,"
        " logits. Embedding and output projection have a state as AdamW's, unless optimizer.project_embeddings=true."
        f" Loss: nats a byte of text held out, after {runs[0]['steps']} updates of a small decoder; longer runs stand"
        " in docs/optimizers.md."
    )
    tables = [
        Shown(f"{model} on {aim}, {length:,} tokens", rows, holds),
        Shown("A small decoder, trained here", runs, learns),
    ]
    return Found(tables, note, partial(_draw, rows=rows))


def _row(name: str, overrides: Sequence[str], plan: dict[str, Any]) -> Row:
    parts = plan["bytes_per_device"]
    weights, state = parts["parameters"] + parts["quantization"], parts["optimizer"] + parts["master"]
    return {
        "name": name,
        "overrides": list(overrides),
        "parameters": plan["model"]["parameters"],
        "weights": weights,
        "state": state,
        "rest": parts["total"] - weights - state,
        "total": parts["total"],
        "measured": plan.get("measured"),
    }


def _runs(steps: int) -> Iterator[Row]:
    given = {**SMALL, "train": {"steps": steps}}
    for name, ran in trained({name: Run(given, overrides) for name, overrides in RUNS.items()}).items():
        yield {
            "name": name,
            "overrides": list(RUNS[name]),
            "steps": steps,
            "state": ran.plan["predicted"]["optimizer"] / ran.plan["model"]["parameters"],
            "loss": ran.held_out["loss"],
        }


def _draw(drawn: Figure, rows: Sequence[Row]) -> None:
    axes = drawn.subplots()
    stacked(axes, rows, {"weights": "weights", "state": "state", "rest": "gradients, activations, logits"})
    axes.set(xlabel="GiB in a step")
    axes.legend()


STOP = Stop(
    "galore",
    "all weights trained from gradients in few dimensions: GaLore, Q-GaLore, APOLLO",
    by_rank,
    uses="devices",
    config=["optimizer.name=galore_adamw8bit", "optimizer.rank=1024", "memory.update=during"],
    read=["jaxmem/optim/galore.py", "jaxmem/optim/apollo.py", "jaxmem/optim/projection.py"],
    takes="a little over a minute",
)
