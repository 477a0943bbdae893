"""Parameter-efficient fine-tuning: the memory that it saves, and its losses.

A small decoder is pretrained on the source text of the Python standard library, then fine-tuned to answer questions
about it, with all of its weights, a few of them, or a few new ones. A frozen weight has no gradient and no optimizer
state, and the backward pass ends at the first trainable weight."""

import json
import tempfile
from pathlib import Path

from jaxmem.inference.evaluate import evaluate
from jaxmem.lab.tour import random_subset
from jaxmem.lab.tour.common import CONFIGS, rows_of, train_all
from jaxmem.lab.tour.docstrings import questions, source_files
from jaxmem.lab.tour.panels import Bars
from jaxmem.lab.tour.stop import Findings
from jaxmem.lab.tour.table import Row, Table

BASE, KINDS = CONFIGS["adapters"]["base"], rows_of("adapters", "kinds")
STEPS = 60  # of each fine-tuning run


def measure() -> Findings:
    """Each kind, from the same weights and with the same number of updates; then a random subset of the weights."""
    before, rows = _fine_tune()
    kinds = Table("A decoder pretrained on source text is fine-tuned to answer", rows)
    subsets = Table("A random subset of the weights, on digits with permuted pixels", list(random_subset.compare()))
    buffers = {row["trainable"]: row["temporary buffers, MiB"] for row in subsets.rows}
    return Findings(
        [kinds, subsets],
        f"Loss: nats per byte of held-out answers, {before:.2f} before fine-tuning. A random subset with as many"
        f" parameters as the low-rank adapter needs {buffers['random subset'] / buffers['all weights']:.1f} times the"
        " temporary buffers of training all weights, because gradients are computed for complete matrices.",
        [
            Bars(kinds, ("state, MiB", "gradients, activations, MiB"), "Memory of a step besides the weights, MiB"),
            Bars(kinds, ("loss",), "Held-out loss, nats per byte"),
        ],
    )


def _fine_tune() -> tuple[float, list[Row]]:
    """The loss before fine-tuning, and a row for each kind."""
    with tempfile.TemporaryDirectory() as place:
        texts, base = Path(place, "answers"), f"{place}/base"
        texts.mkdir()
        for number, (question, answer) in enumerate(questions(*source_files()).items()):
            (texts / f"{number}.txt").write_text(f"{question}\n{answer}\n", encoding="utf-8")
        data = {"source": "text", "path": str(texts), "sequence_length": 64, "held_out": 0.05}
        train_all({"base": BASE}, keep=base)
        before = evaluate(Path(base), overrides=[f"data={json.dumps(data)}"])["loss"]
        config = {**BASE, "data": data, "adapter": {"base_run": base}, "train": {"steps": STEPS}}
        outcomes = train_all(dict.fromkeys(KINDS, config), KINDS)
    rows: list[Row] = []
    for name, (plan, held_out) in outcomes.items():
        parts = plan["bytes_per_device"]
        rows.append(
            {
                "trainable": name,
                "parameters": plan["model"]["trainable"],
                "state, MiB": (parts["optimizer"] + parts["master"]) / 2**20,
                "gradients, activations, MiB": sum(parts[of] for of in ("gradients", "activations", "other")) / 2**20,
                "loss": held_out["loss"],
                "config": " ".join(KINDS[name]),
            }
        )
    return before, rows
