"""Only a part of a model learns: what that saves, and what it can learn.

A small decoder reads the Python standard library; then it is taught to answer questions about it, with all of its
weights, a few of them, or a few new ones beside them. What stays has no gradient and no optimizer's state, and the
backward pass ends where the first weight that learns stands.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmem.lab.tour.bars import stacked
from jaxmem.lab.tour.docstrings import questions
from jaxmem.lab.tour.stops import Columns, Found, Row, Shown, Stop, only_here
from jaxmem.lab.tour.trained import DECODER, Run, trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODEL = {**DECODER, "layers": 4, "embed": 96, "mlp": 256, "head_dim": 24}
BASE: dict[str, Any] = {
    "model": MODEL,
    "data": {"source": "stdlib", "sequence_length": 128},
    "batch": {"global_size": 16},
    "optimizer": {"learning_rate": 3e-3, "warmup": 10},
    "train": {"steps": 150},
}
KINDS: Mapping[str, tuple[str, ...]] = {
    "all weights": ("adapter.kind=patterns", "adapter.targets=['*']"),
    "last layer": ("adapter.kind=last_layers",),
    "head": ("adapter.kind=head",),
    "norms alone": ("adapter.kind=patterns", "adapter.targets=['*norm*']"),
    "prompt": ("adapter.kind=prompt", "data.packing=false", "optimizer.learning_rate=3e-2"),
    "LoRA": ("adapter.kind=lora", "adapter.rank=8", "optimizer.learning_rate=1e-2"),
    "QLoRA": ("adapter.kind=qlora", "adapter.rank=8", "optimizer.learning_rate=1e-2"),
}
STEPS = 60  # of each fine-tuning
RATE = 1e-2  # of a subset and what stands beside it; scripts/measure/random_subset.py tries others


def tuned(target: str | None = None, steps: int | None = None) -> Found:
    """Each kind here, from the same weights and for as many updates; then a random subset of the weights."""
    only_here("adapters", target)
    from jaxmem.lab.tour import subset
    from jaxmem.planning.text import readable

    kinds = list(_kinds(steps))
    subsets = list(subset.learnt(steps or subset.STEPS, rates=(RATE,)))
    saves: Columns = {
        "what learns": lambda row: row["name"],
        "numbers": lambda row: f"{row['trainable']:,}",
        "state": lambda row: readable(row["state"]),
        "gradients, kept": lambda row: readable(row["rest"]),
        "loss": lambda row: f"{row['loss']:.2f}",
        "config": lambda row: " ".join(row["overrides"]),
    }
    fails: Columns = {
        "what learns": lambda row: row["name"],
        "numbers": lambda row: f"{row['learns']:,}" if row["learns"] else "",
        "state": lambda row: readable(row["state"]) if row["learns"] else "",
        "temporaries": lambda row: readable(row["temporaries"]) if row["learns"] else "",
        "right": lambda row: f"{row['accuracy']:.1%}",
    }
    named = {row["name"]: row for row in subsets}
    spared = named["random subset"]["temporaries"] / named["all weights"]["temporaries"]
    note = (
        f"Loss: nats a byte of answers held out, {kinds[0]['before']:.2f} before. Gradients, kept: all that a step"
        " holds beside weights and state. A random subset of the weights learns, with as many numbers as the low-rank"
        f" adapter, and its step takes {spared:.1f} times the temporaries of training all: gradients are of whole"
        " matrices, whatever is done with them."
    )
    tables = [
        Shown("A decoder that has read source text learns to answer", kinds, saves),
        Shown("A random subset: digits whose pixels changed places", subsets, fails),
    ]
    return Found(tables, note, partial(_draw, kinds=kinds))


def _kinds(steps: int | None) -> Iterator[Row]:
    from jaxmem.data.text import stdlib_files
    from jaxmem.inference.evaluate import evaluate

    with tempfile.TemporaryDirectory() as place:
        files = stdlib_files()
        root = next(one for one in files[0].parents if all(file.is_relative_to(one) for file in files))
        texts = Path(place) / "answers"
        texts.mkdir()
        for number, (question, answer) in enumerate(questions(files, root)):
            (texts / f"{number}.txt").write_text(f"{question}\n{answer}\n", encoding="utf-8")
        base = {**BASE, "train": {"steps": steps or BASE["train"]["steps"]}}
        data = {"source": "text", "path": str(texts), "sequence_length": 64, "held_out": 0.05}
        trained({"base": Run(base, place=f"{place}/base")})
        before = evaluate(Path(place) / "base", overrides=[f"data={json.dumps(data)}"])["loss"]
        learns = {"adapter": {"base_run": f"{place}/base"}, "train": {"steps": steps or STEPS}}
        given = {**base, "data": data, **learns}
        for name, ran in trained({name: Run(given, overrides) for name, overrides in KINDS.items()}).items():
            parts = ran.plan["bytes_per_device"]
            yield {
                "name": name,
                "overrides": list(KINDS[name]),
                "trainable": ran.plan["model"]["trainable"],
                "state": parts["optimizer"] + parts["master"],
                "rest": parts["gradients"] + parts["activations"] + parts["other"],
                "before": before,
                "loss": ran.held_out["loss"],
            }


def _draw(drawn: Figure, kinds: Sequence[Row]) -> None:
    memory, losses = drawn.subplots(1, 2, sharey=True)
    stacked(memory, kinds, {"state": "state", "rest": "gradients, and what is kept"}, unit=2**20)
    memory.set(xlabel="MiB of a step beside weights")
    memory.legend(fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2)
    losses.barh([row["name"] for row in kinds], [row["before"] - row["loss"] for row in kinds])
    losses.set(xlabel="nats a byte learnt, of answers held out")


STOP = Stop(
    "adapters",
    "only a part of a model learns: frozen layers, head, prompt, LoRA, a random subset",
    tuned,
    uses="devices",
    config=["adapter.kind=lora", "optimizer.trainable=['*norm*']"],
    read=["jaxmem/adapters/low_rank.py", "jaxmem/optim/trainable.py", "jaxmem/lab/tour/subset.py"],
)
