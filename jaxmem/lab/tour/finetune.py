"""From nothing to a fine-tuned model that is talked to, on a CPU and without a network.

A small Llama is trained on the Python standard library's source text and exported as a Hugging Face directory, which
transformers opens where it is installed. QLoRA then teaches it to answer: its weights stay as they are, in 4 bits, and
what learns is a fiftieth of them. What it costs and what comes out is said step by step; every step is a command too,
which docs/finetune.md shows.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmem.config import load_config
from jaxmem.errors import UserError
from jaxmem.lab.tour.docstrings import VOCAB, questions, write_conversations, write_tokenizer
from jaxmem.lab.tour.stops import Columns, Found, Shown, Stop, only_here

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLACE = "runs/tour-finetune"
MODEL = {"vocab": VOCAB, "layers": 4, "embed": 128, "mlp": 384, "heads": 4, "kv_heads": 2, "head_dim": 32}
PRETRAIN = {
    "model": MODEL,
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
ASKED = 3  # of the held-out questions, to be answered at the end
PROMPT, NEW = "def ", 16  # what transformers continues, and by how many tokens

NOTE = (
    "What was learnt is how to answer: {place}/base continues a question as if it were source text, {place}/merged"
    " answers in the form of a docstring. A model of this size knows hardly any of the functions. The base has read"
    " their source, docstrings included; fine-tuning saw none of the questions that are held out."
    " Talk to it: jaxmem chat {place}/merged"
)

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


def fine_tuned(
    target: str | None = None,
    place: str | Path = PLACE,
    pretrain: dict[str, Any] = PRETRAIN,
    finetune: dict[str, Any] = FINETUNE,
) -> Found:
    """All of it, in `place`; what is there already is put aside."""
    only_here("finetune", target)
    from jaxmem.checkpoint import move_aside

    move_aside(Path(place))
    visit = _Visit(Path(place))
    visit.data()
    visit.pretrain(pretrain)
    visit.tune(finetune)
    visit.talk()
    columns: Columns = {"what": lambda row: row["what"], "s of CPU": _seconds, "result": lambda row: row["result"]}
    title = f"A model of one's own, fine-tuned, in {place}"
    return Found([Shown(title, visit.rows, columns)], NOTE.format(place=place), partial(_draw, place=Path(place)))


def _seconds(row: dict[str, Any]) -> str:
    return f"{row['cpu_seconds']:.0f}"


class _Visit:
    """The steps, each leaving its directory and a row."""

    def __init__(self, place: Path) -> None:
        self.place, self.rows = place, list[dict[str, Any]]()
        self._since = time.process_time()

    def _done(self, what: str, result: str, **numbers: Any) -> None:
        now = time.process_time()
        self.rows.append({"what": what, "result": result, "cpu_seconds": now - self._since, **numbers})
        self._since = now

    def data(self) -> None:
        from jaxmem.data.text import stdlib_files

        files = stdlib_files()
        root = files[0].parent
        while not all(file.is_relative_to(root) for file in files):
            root = root.parent
        self.place.mkdir(parents=True)
        write_tokenizer(files, self.place / "tokenizer")
        pairs = list(questions(files, root))
        write_conversations(pairs, self.place / "chats.jsonl")
        self._done("tokenizer and conversations", f"{VOCAB:,} tokens; {len(pairs):,} questions", questions=len(pairs))

    def pretrain(self, given: dict[str, Any]) -> None:
        from jaxmem.inference.export import export_model
        from jaxmem.training.run import run

        tokenizer = {"tokenizer": str(self.place / "tokenizer")}
        steps = given["train"]["steps"]
        result = run(
            load_config(
                {
                    **given,
                    **self._named("pretrained"),
                    "data": {**given["data"], **tokenizer},
                    "train": {**given["train"], "evaluate_every": steps},
                }
            )
        )
        loss = result.held_out["loss"]
        parameters = result.plan.program.model.parameters
        self._done(
            "a Llama, trained on the standard library",
            f"{parameters / 1e6:.1f} M parameters, {loss:.2f} nats a token held out",
            parameters=parameters,
            loss=loss,
        )
        export_model(self.place / "pretrained", self.place / "base")
        told, same = opened_by_transformers(self.place / "base")
        self._done("exported for transformers", told, same=same)

    def tune(self, given: dict[str, Any]) -> None:
        from jaxmem.inference.evaluate import evaluate
        from jaxmem.inference.export import export_model
        from jaxmem.training.run import run

        self._data = {**given["data"], "path": str(self.place / "chats.jsonl")}
        batch = {f"batch.{key}": value for key, value in given["batch"].items()}
        over = [f"{key}={json.dumps(value)}" for key, value in batch.items()]
        over += [f"data.{key}={json.dumps(value)}" for key, value in self._data.items()]
        before = evaluate(self.place / "base", overrides=over)["loss"]
        self._done("answers, before", f"{before:.2f} nats a token of held-out answers", loss=before)
        cfg = load_config(
            {**given, **self._named("tuned"), "model": {"hf": str(self.place / "base")}, "data": self._data}
        )
        result = run(cfg)
        learnt = result.plan.program.model.trainable
        after = evaluate(self.place / "tuned")["loss"]
        self._done(
            f"answers, after {cfg.steps} steps of QLoRA",
            f"{after:.2f}; {learnt:,} weights learnt beside {cfg.base_precision.parameters}",
            loss=after,
            trainable=learnt,
        )
        export_model(self.place / "tuned", self.place / "adapter", adapter=True)
        export_model(self.place / "tuned", self.place / "merged", merge=True)
        size = sum(file.stat().st_size for file in (self.place / "adapter").iterdir())
        merged = evaluate(self.place / "merged", overrides=over)["loss"]
        self._done("exported", f"adapter of {size / 2**20:.1f} MiB; merged: {merged:.2f}", loss=merged, bytes=size)

    def talk(self) -> None:
        from jaxmem.data.record_order import held_out_records
        from jaxmem.inference.chat import Speaker

        lines = (self.place / "chats.jsonl").read_text(encoding="utf-8").splitlines()
        speakers = [Speaker(self.place / name, tokens=40) for name in ("base", "merged")]
        held = held_out_records(len(lines), self._data["held_out"])
        for line in (lines[number] for number in held[:: max(1, len(held) // ASKED)][:ASKED]):
            asked, told = json.loads(line)["messages"]
            said = [" ".join("".join(speaker.answered([asked])).split()) for speaker in speakers]
            self._done(asked["content"], f"{said[1]!r}; the docstring: {told['content']!r}", answers=said)

    def _named(self, name: str) -> dict[str, Any]:
        return {"name": name, "output": str(self.place)}


def opened_by_transformers(directory: Path, python: Sequence[str] | None = None) -> tuple[str, bool | None]:
    """Whether transformers continues a text as this library does; None where it is not installed."""
    if python is None:
        if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
            return "transformers is not installed here: not opened", None
        python = [sys.executable]
    from jaxmem.data import tokenizer_for
    from jaxmem.inference.generate import generate
    from jaxmem.inference.load import open_model

    asked = [*python, "-c", PEER, str(directory), PROMPT, str(NEW)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)  # noqa: S603 - this Python, and our text
    if done.returncode:
        raise UserError(f"transformers does not open {directory}: {done.stderr.strip().splitlines()[-1]}")
    theirs = json.loads(done.stdout.splitlines()[-1])
    program, params = open_model(directory)
    ours = list(generate(program, params, tokenizer_for(str(directory)).encode(PROMPT), len(theirs)))
    same = ours == theirs
    return f"opened there: {NEW} tokens, {'the same' if same else 'others'}", same


def _draw(drawn: Figure, place: Path) -> None:
    """What each update's batch cost, as the runs logged it."""
    for axes, name in zip(drawn.subplots(1, 2), ("pretrained", "tuned"), strict=True):
        lines = (place / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        logged = [line for line in map(json.loads, lines) if "loss" in line]
        axes.plot([line["step"] for line in logged], [line["loss"] for line in logged], "o-")
        axes.set(xlabel="updates", ylabel="nats a token", title=f"{name}, as it learnt")
        axes.grid(alpha=0.3)


STOP = Stop(
    "finetune",
    "a small model trained, fine-tuned by QLoRA, exported and talked to, here",
    fine_tuned,
    uses="devices",
    config=["adapter.kind=qlora"],
    read=["jaxmem/lab/tour/finetune.py", "jaxmem/adapters/low_rank.py"],
    takes="about a minute",
)
