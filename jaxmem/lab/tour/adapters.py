"""Parameter-efficient fine-tuning: what it saves and what it can learn.

A small decoder reads the Python standard library; then it is fine-tuned to answer questions about it, with all of its
weights, a few of them, or a few new ones beside them. A frozen weight has no gradient and no optimizer state, and the
backward pass ends at the first trainable weight.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxmem.inference.evaluate import evaluate
from jaxmem.lab.tour import random_subset
from jaxmem.lab.tour.docstrings import questions, source_files
from jaxmem.lab.tour.panels import Bars
from jaxmem.lab.tour.stop import Findings, refuse_target
from jaxmem.lab.tour.table import Row, Table
from jaxmem.lab.tour.training import DECODER, TEXT, SmallRun, train_all, train_each

BASE: dict[str, Any] = {
    "model": {**DECODER, "layers": 4, "embed": 96, "mlp": 256, "head_dim": 24},
    "data": TEXT,
    "batch": {"global_size": 16},
    "optimizer": {"learning_rate": 3e-3, "warmup": 10},
    "train": {"steps": 150},
}
KINDS: Mapping[str, tuple[str, ...]] = {
    "all weights": ("adapter.kind=patterns", "adapter.targets=['*']"),
    "last layer": ("adapter.kind=last_layers",),
    "head": ("adapter.kind=head",),
    "norms alone": ("adapter.kind=patterns", "adapter.targets=['*norm*']"),
    "soft prompt": ("adapter.kind=prompt", "data.packing=false", "optimizer.learning_rate=3e-2"),
    "LoRA": ("adapter.kind=lora", "adapter.rank=8", "optimizer.learning_rate=1e-2"),
    "QLoRA": ("adapter.kind=qlora", "adapter.rank=8", "optimizer.learning_rate=1e-2"),
}
STEPS = 60  # of each fine-tuning run
RATE = 1e-2  # of the random subset and of what it is compared with; scripts/measure/random_subset.py tries others


def measure(target: str | None = None, steps: int | None = None) -> Findings:
    """Every kind from the same weights and for the same number of updates; then a random subset of the weights."""
    refuse_target("adapters", target)
    kinds = list(_kinds(steps))
    subsets = list(random_subset.compare(steps or random_subset.STEPS, rates=(RATE,)))
    buffers = {row["trainable"]: row["temporary buffers"] for row in subsets}
    learned = [{"trainable": row["trainable"], "loss": row["loss before"] - row["loss"]} for row in kinds]
    formats = {"state": "bytes", "gradients, activations": "bytes", "loss": ".2f", "loss before": None}
    return Findings(
        [
            Table("A decoder pretrained on source text is fine-tuned to answer", kinds, formats),
            Table(
                "A random subset of the weights: digits whose pixels were permuted",
                subsets,
                {"state": "bytes", "temporary buffers": "bytes", "accuracy": ".1%"},
            ),
        ],
        f"Loss: nats per byte of held-out answers, {kinds[0]['loss before']:.2f} before. A frozen weight costs neither"
        " gradient nor optimizer state. A random subset with as many parameters as the low-rank adapter needs"
        f" {buffers['random subset'] / buffers['all weights']:.1f} times the temporary buffers of training all weights,"
        " because gradients are computed for whole matrices.",
        [
            Bars("Memory of a step beside the weights", kinds, ("state", "gradients, activations"), "MiB"),
            Bars("Decrease of the held-out loss, nats per byte", learned, ("loss",), ".2f"),
        ],
    )


def _kinds(steps: int | None) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as place:
        texts = Path(place) / "answers"
        texts.mkdir()
        for number, (question, answer) in enumerate(questions(*source_files())):
            (texts / f"{number}.txt").write_text(f"{question}\n{answer}\n", encoding="utf-8")
        base = {**BASE, "train": {"steps": steps or BASE["train"]["steps"]}}
        data = {"source": "text", "path": str(texts), "sequence_length": 64, "held_out": 0.05}
        train_all({"base": SmallRun(base, directory=f"{place}/base")})
        before = evaluate(Path(place) / "base", overrides=[f"data={json.dumps(data)}"])["loss"]
        config = {**base, "data": data, "adapter": {"base_run": f"{place}/base"}}
        for name, outcome in train_each(config, steps or STEPS, KINDS).items():
            parts = outcome.plan["bytes_per_device"]
            yield {
                "trainable": name,
                "parameters": outcome.plan["model"]["trainable"],
                "state": parts["optimizer"] + parts["master"],
                "gradients, activations": parts["gradients"] + parts["activations"] + parts["other"],
                "loss before": before,
                "loss": outcome.held_out["loss"],
                "config": " ".join(KINDS[name]),
            }
