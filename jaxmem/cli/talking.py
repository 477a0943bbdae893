"""What was trained, put to use: `jaxmem generate`, `chat` and `evaluate`."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from jaxmem.cli.options import Json, Model, Overrides, Simulate
from jaxmem.cli.printing import is_first, only_json, say, show
from jaxmem.cli.starting import config_of, joined, take_devices
from jaxmem.errors import UserError

Tokens = Annotated[int, typer.Option(min=1, help="How many to add at most.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")]
TopK = Annotated[int | None, typer.Option(min=1, help="Only of the so many likeliest.", show_default=False)]
TopP = Annotated[float, typer.Option(help="Only of the likeliest that have this probability together.")]
Stops = Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="End before it.", show_default=False)]
Seed = Annotated[int, typer.Option(min=0, help="Another seed, another text.")]


def generate(
    run: Model,
    overrides: Overrides = None,
    prompt: Annotated[str | None, typer.Option(help="The text to continue.", show_default=False)] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="One a line; gives JSONL.", show_default=False)
    ] = None,
    tokens: Tokens = 200,
    temperature: Temperature = 0.8,
    top_k: TopK = None,
    top_p: TopP = 1.0,
    stop: Stops = None,
    batch: Annotated[int, typer.Option(min=1, help="Prompts of a file that run together.")] = 8,
    seed: Seed = 0,
    simulate: Simulate = None,
) -> None:
    """Continue a text with what was trained."""
    if (prompt is None) == (prompts is None):
        raise UserError("--prompt TEXT or --prompts FILE: give one of the two")
    take_devices(simulate)
    with joined(config_of(run)):
        from jaxmem.inference.chat import Speaker, read_prompts
        from jaxmem.inference.generate import Sampling

        sampling = Sampling(temperature, top_k, top_p, seed)
        speaker = Speaker(run, sampling, tokens=tokens, stops=stop or (), overrides=overrides or ())
        if prompt is not None:
            for piece in itertools.chain([prompt], speaker.continued(prompt), ["\n"]):
                say(piece)
            return
        given = read_prompts(prompts or "")
        for one, text in zip(given, speaker.continued_all(given, batch), strict=True):
            say(json.dumps({"prompt": one, "text": text}, ensure_ascii=False) + "\n")


def chat(
    run: Model,
    overrides: Overrides = None,
    system: Annotated[str | None, typer.Option(help="What it is told first.", show_default=False)] = None,
    tokens: Tokens = 512,
    temperature: Temperature = 0.7,
    top_k: TopK = None,
    top_p: TopP = 0.9,
    stop: Stops = None,
    seed: Seed = 0,
    simulate: Simulate = None,
) -> None:
    """Talk to a model that has a chat template. /new begins anew; the end of the input ends it."""
    take_devices(simulate)
    from jaxmem.inference.chat import Speaker
    from jaxmem.inference.generate import Sampling

    sampling = Sampling(temperature, top_k, top_p, seed)
    speaker = Speaker(run, sampling, tokens=tokens, stops=stop or (), overrides=overrides or ())
    begin = [{"role": "system", "content": system}] if system else []
    said = list(begin)
    while (line := _asked()) is not None:
        if line == "/new":
            said = list(begin)
        elif line:
            said.append({"role": "user", "content": line})
            answer = ""
            for piece in speaker.answered(said):
                answer += piece
                say(piece)
            say("\n")
            said.append({"role": "assistant", "content": answer})


def evaluate(
    run: Model,
    overrides: Overrides = None,
    data: Annotated[str | None, typer.Option(metavar="FILE", help="Text, in place of what was held out.")] = None,
    choices: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Multiple choice, JSONL.", show_default=False)
    ] = None,
    simulate: Simulate = None,
    as_json: Json = False,
) -> None:
    """Loss and perplexity on text it never saw, or the share of questions that it answers rightly."""
    if data is not None and choices is not None:
        raise UserError("--data and --choices: give one of the two")
    take_devices(simulate)
    with joined(config_of(run)):
        from jaxmem.inference.evaluate import evaluate
        from jaxmem.inference.multiple_choice import evaluate_choices

        with only_json(as_json):
            if choices is None:
                result = evaluate(run, data, overrides or ())
            else:
                result = evaluate_choices(run, choices, overrides or ())
        if not is_first():
            pass
        elif as_json:
            show(result)
        else:
            print("  ".join(f"{name} {value:.4g}" for name, value in result.items()))


def _asked() -> str | None:
    """The next line that is typed; None where the input ends."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
