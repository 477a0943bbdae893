"""From nothing to a fine-tuned model that answers, on a CPU and without a network.

A small Llama is trained on the Python standard library's source text and exported as a Hugging Face directory, which
transformers opens where it is installed. QLoRA then teaches it to answer: its weights stay frozen in 4 bits, and a
fiftieth of their number is trainable. Every step is a command too, which docs/finetune.md shows.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxmem.checkpoint import move_aside
from jaxmem.config import load_config
from jaxmem.data import tokenizer_for
from jaxmem.data.record_order import held_out_records
from jaxmem.errors import UserError
from jaxmem.inference.chat import TextGenerator
from jaxmem.inference.evaluate import evaluate
from jaxmem.inference.export import export_model
from jaxmem.inference.generate import generate
from jaxmem.inference.load import open_model
from jaxmem.lab.tour.docstrings import VOCAB, questions, source_files, write_conversations, write_tokenizer
from jaxmem.lab.tour.panels import Lines
from jaxmem.lab.tour.stop import Findings, refuse_target
from jaxmem.lab.tour.table import Table
from jaxmem.training.run import run

PLACE = "runs/tour-finetune"
PRETRAIN = {
    "model": {"vocab": VOCAB, "layers": 4, "embed": 128, "mlp": 384, "heads": 4, "kv_heads": 2, "head_dim": 32},
    "data": {"source": "stdlib", "sequence_length": 256},
    "batch": {"global_size": 8},
    "optimizer": {"learning_rate": 4e-3, "warmup": 20},
    "train": {"steps": 240, "log_every": 20},
}
FINETUNE = {
    "data": {"source": "chat", "sequence_length": 128, "held_out": 0.05},
    "batch": {"global_size": 16},
    "adapter": {"kind": "qlora", "rank": 8, "alpha": 16.0},
    "optimizer": {"learning_rate": 4e-3, "warmup": 10},
    "train": {"steps": 120, "log_every": 20},
}
ASKED = 3  # of the held-out questions, answered at the end
PROMPT, NEW = "def ", 16  # what transformers continues, and by how many tokens

# In a process of its own: what it prints is compared with what this library makes of the same directory.
PEER = """
import json, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
place, prompt, new = sys.argv[1], sys.argv[2], int(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(place)
model = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
given = tokenizer(prompt, return_tensors="pt")
made = model.generate(**given, max_new_tokens=new, do_sample=False)
print(json.dumps(made[0, given["input_ids"].shape[1]:].tolist()))
"""


def measure(
    target: str | None = None,
    place: str | Path = PLACE,
    pretrain: dict[str, Any] = PRETRAIN,
    finetune: dict[str, Any] = FINETUNE,
) -> Findings:
    """All steps, in `place`; an earlier directory is renamed."""
    refuse_target("finetune", target)
    place = Path(place)
    move_aside(place)
    example = _Example(place)
    example.write_data()
    example.pretrain(pretrain)
    example.fine_tune(finetune)
    example.answer()
    return Findings(
        [Table(f"A small model, fine-tuned, in {place}", example.rows, {"CPU time, s": ".0f"})],
        f"Fine-tuning teaches the form of an answer: {place}/base continues a question as if it were source text,"
        f" {place}/merged answers like a docstring. A model of this size knows hardly any of the functions. Pretraining"
        " has read their source with the docstrings; fine-tuning has not seen the held-out questions."
        f" Talk to it: jaxmem chat {place}/merged",
        [
            Lines(f"{name}: training loss", "updates", "nats per token", {name: _losses(place / name)})
            for name in ("pretrained", "tuned")
        ],
    )


def _losses(run: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


class _Example:
    """The steps; each leaves a directory and a row."""

    def __init__(self, place: Path) -> None:
        self.place, self.rows = place, list[dict[str, Any]]()
        self._since = time.process_time()

    def _add_row(self, step: str, result: str) -> None:
        now = time.process_time()
        self.rows.append({"step": step, "CPU time, s": now - self._since, "result": result})
        self._since = now

    def write_data(self) -> None:
        files, root = source_files()
        self.place.mkdir(parents=True)
        write_tokenizer(files, self.place / "tokenizer")
        pairs = list(questions(files, root))
        write_conversations(pairs, self.place / "chats.jsonl")
        self._add_row("tokenizer and conversations", f"{VOCAB:,} tokens; {len(pairs):,} questions")

    def pretrain(self, config: dict[str, Any]) -> None:
        data = {**config["data"], "tokenizer": str(self.place / "tokenizer")}
        train = {**config["train"], "evaluate_every": config["train"]["steps"]}
        result = run(load_config({**config, **self._named("pretrained"), "data": data, "train": train}))
        parameters, loss = result.plan.program.model.parameters, result.held_out["loss"]
        self._add_row(
            "a Llama, pretrained on the standard library",
            f"{parameters / 1e6:.1f} M parameters, held-out loss {loss:.2f} nats per token",
        )
        export_model(self.place / "pretrained", self.place / "base")
        self._add_row("exported for transformers", compare_transformers(self.place / "base")[0])

    def fine_tune(self, config: dict[str, Any]) -> None:
        self._data = {**config["data"], "path": str(self.place / "chats.jsonl")}
        overrides = [f"batch.{key}={json.dumps(value)}" for key, value in config["batch"].items()]
        overrides += [f"data.{key}={json.dumps(value)}" for key, value in self._data.items()]
        before = evaluate(self.place / "base", overrides=overrides)["loss"]
        self._add_row("held-out answers, before", f"loss {before:.2f} nats per token")
        cfg = load_config(
            {**config, **self._named("tuned"), "model": {"hf": str(self.place / "base")}, "data": self._data}
        )
        trainable = run(cfg).plan.program.model.trainable
        after = evaluate(self.place / "tuned")["loss"]
        self._add_row(
            f"held-out answers, after {cfg.steps} steps of QLoRA",
            f"loss {after:.2f}; {trainable:,} trainable parameters, frozen weights in {cfg.base_precision.parameters}",
        )
        export_model(self.place / "tuned", self.place / "adapter", adapter=True)
        export_model(self.place / "tuned", self.place / "merged", merge=True)
        size = sum(file.stat().st_size for file in (self.place / "adapter").iterdir())
        merged = evaluate(self.place / "merged", overrides=overrides)["loss"]
        self._add_row("exported", f"adapter of {size / 2**20:.1f} MiB; merged model: loss {merged:.2f}")

    def answer(self) -> None:
        lines = (self.place / "chats.jsonl").read_text(encoding="utf-8").splitlines()
        model = TextGenerator(self.place / "merged", tokens=40)
        held = held_out_records(len(lines), self._data["held_out"])
        for line in (lines[number] for number in held[:: max(1, len(held) // ASKED)][:ASKED]):
            question, docstring = json.loads(line)["messages"]
            answer = " ".join("".join(model.answer([question])).split())
            self._add_row(question["content"], f"{answer!r}; the docstring: {docstring['content']!r}")

    def _named(self, name: str) -> dict[str, Any]:
        return {"name": name, "output": str(self.place)}


def compare_transformers(directory: Path, python: Sequence[str] | None = None) -> tuple[str, bool | None]:
    """Whether transformers continues a text with the same tokens, in words and as a value; None if not installed."""
    if python is None:
        if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
            return "not opened: transformers is not installed here", None
        python = [sys.executable]
    command = [*python, "-c", PEER, str(directory), PROMPT, str(NEW)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - this Python, and our text
    if done.returncode:
        raise UserError(f"transformers does not open {directory}: {done.stderr.strip().splitlines()[-1]}")
    theirs = json.loads(done.stdout.splitlines()[-1])
    program, params = open_model(directory)
    ours = list(generate(program, params, tokenizer_for(str(directory)).encode(PROMPT), len(theirs)))
    same = ours == theirs
    return f"opened by transformers: {NEW} tokens, {'the same' if same else 'different ones'}", same
