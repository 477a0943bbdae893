"""A small model is pretrained, exported, fine-tuned and asked questions, in the directory PLACE. If it exists already,
it is renamed first."""

import collections
import importlib.util
import json
import time
from collections.abc import Iterator
from pathlib import Path

from jaxmem.checkpoint import move_aside
from jaxmem.config import load_config
from jaxmem.data import tokenizer_for
from jaxmem.data.record_order import held_out_records
from jaxmem.inference.chat import TextGenerator
from jaxmem.inference.evaluate import evaluate
from jaxmem.inference.export import export_model
from jaxmem.inference.generate import Generator
from jaxmem.inference.load import open_model
from jaxmem.training.run import run
from scripts.course import Findings, main
from scripts.course.common import CONFIGS
from scripts.course.docstrings import kinds, source_files, write_conversations, write_tokenizer
from scripts.course.panels import LinePlot
from scripts.course.table import Table

PLACE = "runs/tour-finetune"
PRETRAIN = CONFIGS["finetune"]["pretrain"]
FINETUNE = CONFIGS["finetune"]["tune"]
VOCAB = PRETRAIN["model"]["vocab"]
QUESTIONS = 40  # the number of held-out questions that are answered at the end
PROMPT, NEW = "def ", 16  # the text that transformers continues, and the number of tokens


def measure() -> Findings:
    place = Path(PLACE)
    rows = []
    move_aside(place)
    start = time.process_time()
    for step, result in steps(place):
        rows.append({"step": step, "CPU time, s": round(time.process_time() - start), "result": result})
        start = time.process_time()
    return Findings(
        [Table(f"A small model, fine-tuned, in {place}", rows)],
        {"place": place},
        [
            LinePlot(f"{name}: training loss", "updates", "nats per token", {name: _losses(place / name)})
            for name in ("pretrained", "tuned")
        ],
    )


def steps(place: Path) -> Iterator[tuple[str, str]]:
    """(step, result); each step leaves a file or directory in `place`."""
    files, root = source_files()
    chats = place / "chats.jsonl"
    output = {"output": str(place)}
    write_tokenizer(files, place / "tokenizer", VOCAB)
    pairs = kinds(files, root)
    write_conversations(pairs, chats)
    yield "tokenizer and conversations", f"{VOCAB:,} tokens; {len(pairs):,} questions"

    data = {**PRETRAIN["data"], "tokenizer": str(place / "tokenizer")}
    train = {**PRETRAIN["train"], "evaluate_every": PRETRAIN["train"]["steps"]}
    result = run(load_config({**PRETRAIN, **output, "name": "pretrained", "data": data, "train": train}))
    size = result.plan.program.model.parameter_count / 1e6
    loss = result.held_out["loss"]
    yield "a Llama, pretrained on the standard library", f"{size:.1f} M parameters, held-out loss {loss:.2f}"
    export_model(place / "pretrained", place / "base")
    yield "exported for transformers", compare_transformers(place / "base")

    data = {**FINETUNE["data"], "path": str(chats)}
    overrides = [f"batch.global_size={FINETUNE['batch']['global_size']}", f"data={json.dumps(data)}"]
    yield "held-out answers, before", f"loss {evaluate(place / 'base', overrides=overrides)['loss']:.2f} nats per token"
    cfg = load_config({**FINETUNE, **output, "name": "tuned", "model": {"hf": str(place / "base")}, "data": data})
    trainable = run(cfg).plan.program.model.trainable_count
    loss = evaluate(place / "tuned")["loss"]
    yield (
        f"held-out answers, after {cfg.steps} steps of QLoRA",
        f"loss {loss:.2f}; {trainable:,} trainable parameters, frozen weights in {cfg.base_precision.parameters}",
    )
    export_model(place / "tuned", place / "adapter", adapter=True)
    export_model(place / "tuned", place / "merged", merge=True)
    size = sum(file.stat().st_size for file in (place / "adapter").iterdir()) / 2**20
    loss = evaluate(place / "merged", overrides=overrides)["loss"]
    yield "exported", f"adapter of {size:.1f} MiB; merged model: loss {loss:.2f}"

    lines = chats.read_text(encoding="utf-8").splitlines()
    held_out = held_out_records(len(lines), FINETUNE["data"]["held_out"])
    chosen = held_out[:: max(1, len(held_out) // QUESTIONS)][:QUESTIONS]
    conversations = [json.loads(lines[number])["messages"] for number in chosen]
    model = TextGenerator(place / "merged", tokens=20)
    answers = ["".join(model.answer([question])).strip() for question, _ in conversations]
    expected = [answer["content"] for _, answer in conversations]
    right = sum(map(str.__eq__, answers, expected))
    guessed = collections.Counter(expected).most_common(1)[0][1]
    yield (
        f"{len(conversations)} held-out questions, answered",
        f"{right} right; the most common answer is right for {guessed}",
    )
    first = {kind: number for number, kind in reversed(list(enumerate(expected)))}  # a question of each kind
    for number in sorted(first.values()):
        yield conversations[number][0]["content"], answers[number]


def _losses(run: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def compare_transformers(directory: Path) -> str:
    """Whether transformers, if it is installed, continues a text with the same tokens."""
    if not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        return "not opened: transformers is not installed here"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    prompt = AutoTokenizer.from_pretrained(directory)(PROMPT, return_tensors="pt")
    peer = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = peer.generate(**prompt, max_new_tokens=NEW, do_sample=False)[0].tolist()
    theirs = tokens[prompt["input_ids"].shape[1] :]
    program, params = open_model(directory)
    text = tokenizer_for(str(directory)).encode(PROMPT)
    ours = [int(row[0]) for row in Generator(program, params)([text], len(theirs))]
    return f"opened by transformers: {NEW} tokens, {'the same' if ours == theirs else 'different ones'}"


if __name__ == "__main__":
    main(__file__)
