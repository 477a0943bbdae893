"""Commands that use a trained model: `jaxmem generate`, `chat`, `evaluate` and `export`."""

import itertools
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from jaxmem.cli.options import Json, Model, Overrides, Seed, Simulate, StopTexts, Temperature, Tokens, TopK, TopP
from jaxmem.cli.start import is_first_process, joined, only_json, print_text, run_config, show, take_devices
from jaxmem.errors import UserError
from jaxmem.machine.terminal import say, say_text


def generate(
    run: Model,
    overrides: Overrides = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="The text to continue.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file with one prompt per line; the results are printed as JSONL."),
    ] = None,
    tokens: Tokens = 200,
    temperature: Temperature = 0.8,
    top_k: TopK = None,
    top_p: TopP = 1.0,
    stop: StopTexts = None,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="With --prompts: prompts per batch.")] = 8,
    seed: Seed = 0,
    simulate: Simulate = None,
) -> None:
    """Generate text that continues a prompt."""
    if prompt is None and prompts is None:
        raise UserError("generate: the prompt is missing; use --prompt TEXT or --prompts FILE")
    if prompt is not None and prompts is not None:
        raise UserError("generate: --prompt and --prompts are both set; use one of them")
    take_devices(simulate)
    with joined(run_config(run)):
        from jaxmem.inference.chat import TextGenerator, read_prompts
        from jaxmem.inference.generate import Sampling

        sampling = Sampling(temperature, top_k, top_p, seed)
        model = TextGenerator(run, sampling, tokens=tokens, stops=stop or (), overrides=overrides or ())
        if prompt is not None:
            for text in itertools.chain([prompt], model.complete(prompt), ["\n"]):
                print_text(text)
            return
        texts = read_prompts(prompts or "")
        for prompt_text, text in zip(texts, model.complete_all(texts, batch), strict=True):
            print_text(json.dumps({"prompt": prompt_text, "text": text}, ensure_ascii=False) + "\n")


def chat(
    run: Model,
    overrides: Overrides = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.")] = None,
    tokens: Tokens = 512,
    temperature: Temperature = 0.7,
    top_k: TopK = None,
    top_p: TopP = 0.9,
    stop: StopTexts = None,
    seed: Seed = 0,
    simulate: Simulate = None,
) -> None:
    """Chat with a model that has a chat template.

    /new starts a new conversation; Ctrl-D quits.
    """
    take_devices(simulate)
    from jaxmem.inference.chat import TextGenerator
    from jaxmem.inference.generate import Sampling

    sampling = Sampling(temperature, top_k, top_p, seed)
    model = TextGenerator(run, sampling, tokens=tokens, stops=stop or (), overrides=overrides or ())
    model.check_template()  # before the first message is typed
    first = [{"role": "system", "content": system}] if system else []
    messages = list(first)
    while (line := _read_line()) is not None:
        if line == "/new":
            messages = list(first)
        elif line:
            question = {"role": "user", "content": line}
            try:
                texts = model.answer([*messages, question])
            except UserError as error:  # of this message, such as a special token in it
                if not sys.stdin.isatty():
                    raise
                say_text(f"error: {error}", file=sys.stderr)
                continue
            messages.append(question)
            answer = ""
            for text in texts:
                answer += text
                print_text(text)
            print_text("\n")
            if model.is_cut and is_first_process():
                say(f"(cut off after {tokens} tokens; --tokens N allows longer answers)", file=sys.stderr)
            messages.append({"role": "assistant", "content": model.content(answer)})


def evaluate(
    run: Model,
    overrides: Overrides = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="A text, JSONL or Parquet file to use instead of the held-out data."),
    ] = None,
    simulate: Simulate = None,
    as_json: Json = False,
) -> None:
    """Measure the loss and other metrics of a model, such as perplexity or accuracy."""
    take_devices(simulate)
    with joined(run_config(run)):
        from jaxmem.inference.evaluate import evaluate

        with only_json(as_json):
            result = evaluate(run, data, overrides or ())
        if not is_first_process():
            return
        if as_json:
            from jaxmem.checkpoint.metrics import finite_or_null

            show(finite_or_null(result))
        else:
            say("  ".join(f"{name} {value:.4g}" for name, value in result.items()))


def export(
    run: Model,
    target: Annotated[Path, typer.Argument(metavar="DIR", help="The directory to write, or a GGUF file (FILE.gguf).")],
    overrides: Overrides = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="D",
            help="float32, float16 or bfloat16; GGUF also q8_0, q5_1, q5_0, q4_1 or q4_0. "
            "[default: the dtype of model.hf or of the run; GGUF: float16]",
        ),
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write only the adapters, for PEFT.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Write weights with the adapters merged into them.")] = False,
    simulate: Simulate = None,
) -> None:
    """Export a model for transformers, llama.cpp (GGUF) or PEFT."""
    take_devices(simulate)
    from jaxmem.inference.export import export_model

    say(export_model(run, target, dtype, adapter, merge, overrides or ()))


def _read_line() -> str | None:
    """The next line of the input; None at its end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
