"""Fine-tunes a Hugging Face model on conversations: trains adapters, evaluates, exports them, and answers a question.

    python scripts/finetune.py ./my-model chats.jsonl
    python scripts/finetune.py org/name chats.jsonl adapter.rank=32 train.steps=1000 mesh.fsdp=-1
    jaxmem launch -n 2 -- python scripts/finetune.py ./my-model chats.jsonl  # or without launch, by Slurm

`chats.jsonl` has a conversation per line, as OpenAI's API has them (docs/conversations.md).
The frozen weights are stored in 4 bits (QLoRA), and the loss counts the assistant's tokens. The same command again
resumes the run.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax

import jaxmem
from jaxmem.distributed.join import joined
from jaxmem.inference.chat import TextGenerator
from jaxmem.inference.export import export_model
from jaxmem.inference.generate import Sampling
from jaxmem.training.run import Result

SETTINGS = {
    "name": "finetuned",
    "adapter": {"kind": "qlora", "rank": 16},
    "batch": {"global_size": 8},
    "data": {"source": "chat", "sequence_length": 1024, "held_out": 0.05},
    "mesh": {"fsdp": -1},  # weights, gradients and optimizer state are sharded over all devices
    "optimizer": {"name": "adamw", "learning_rate": 2e-4},
    "train": {"steps": 200, "evaluate_every": 100},
}


def finetune(model: str, chats: str, overrides: Sequence[str] = ()) -> Result:
    """Trains, or returns the result of a run that is complete."""
    data = {**SETTINGS["data"], "path": chats}
    cfg = jaxmem.load_config({**SETTINGS, "model": {"hf": model}, "data": data}, overrides)
    with joined(cfg.cluster.heartbeat_timeout, cfg.cluster.start_timeout):
        result = jaxmem.train(cfg)
        losses = {"loss": result.metrics.get("loss"), "held out": result.held_out.get("loss")}
        lines = [f"{name} {loss:.3f}" for name, loss in losses.items() if loss is not None]
        if lines and jax.process_index() == 0:
            print(", ".join(lines))
    return result


def export(result: Result) -> Path:
    """Writes the adapters of this step in PEFT's format, unless they are written, and returns their directory."""
    target = result.directory / f"adapter-{result.step}"
    if not target.exists():
        print(export_model(result.directory, target, adapter=True))
    return target


def answer(directory: Path, question: str) -> str:
    """The answer of the fine-tuned model to a question."""
    chat = TextGenerator(directory, Sampling(temperature=0.0), tokens=100)
    return "".join(chat.answer([{"role": "user", "content": question}]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Fine-tune a Hugging Face model on conversations.")
    parser.add_argument("model", help="a Hugging Face directory, a GGUF file, or org/name")
    parser.add_argument("chats", help="a JSONL file of conversations")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--ask", metavar="QUESTION", help="also answer this question")
    options = parser.parse_intermixed_args()
    result = finetune(options.model, options.chats, options.overrides)
    if result.is_stopped:  # by a signal
        raise SystemExit(result.exit_code)
    run = result.directory
    if jax.process_count() == 1:
        export(result)
        if options.ask:
            print(answer(run, options.ask))
    elif jax.process_index() == 0:  # export and chat run in a single process
        print(f"next: jaxmem export {run} {run}/adapter-{result.step} --adapter")
