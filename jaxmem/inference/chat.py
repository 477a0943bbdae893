"""Texts in, texts out: a model with its tokenizer, continuing prompts or answering in a conversation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from jaxmem.data.chat_template import Message, TemplateError, template_for
from jaxmem.errors import UserError
from jaxmem.inference.generate import ENDED, Generator, Sampling, Thread
from jaxmem.inference.load import open_model, tokenizer_of


class Speaker:
    """A run or a Hugging Face directory that speaks."""

    def __init__(
        self,
        directory: str | Path,
        sampling: Sampling = Sampling(),
        *,
        tokens: int = 200,
        stops: Sequence[str] = (),
        overrides: Sequence[str] = (),
    ) -> None:
        """`tokens`: the most that one answer has. `stops`: texts before which it is over."""
        program, params = open_model(directory, overrides)
        self._generate = Generator(program, params, sampling)
        self._thread = Thread(self._generate)
        self._tokenizer = tokenizer_of(program)
        self._file = program.cfg.data.chat_template
        self._tokens, self._stops = tokens, tuple(stop for stop in stops if stop)

    def continued(self, prompt: str) -> Iterator[str]:
        """What follows a text, piece by piece."""
        found = self._generate([self._encoded(prompt)], self._tokens, self._tokenizer.ends)
        return self._spoken(int(tokens[0]) for tokens in found)

    def continued_all(self, prompts: Sequence[str], rows: int = 8) -> Iterator[str]:
        """What follows each text, so many at a time."""
        for start in range(0, len(prompts), rows):
            given = [self._encoded(prompt) for prompt in prompts[start : start + rows]]
            made = list(self._generate(given, self._tokens, self._tokenizer.ends))
            for ids in np.stack(made).T:
                yield "".join(pieces(self._tokenizer.decode, (int(i) for i in ids if i != ENDED), self._stops))

    def answered(self, messages: Sequence[Message]) -> Iterator[str]:
        """The assistant's answer to a conversation, piece by piece. What the last one that was answered begins with,
        too, is not read again."""
        for text in self._tokenizer.special:
            if text in messages[-1]["content"]:
                raise UserError(f"{text!r} is a token of the model's own; leave it out")
        try:
            asked = template_for(self._tokenizer, self._file).render(messages, answer=True)
        except TemplateError as error:
            raise UserError(f"{error}") from error
        ids = self._tokenizer.encode_with_offsets(asked)[0]
        return self._spoken(self._thread(ids, self._tokens, self._tokenizer.ends))

    def _encoded(self, prompt: str) -> np.ndarray:
        return np.array([*self._tokenizer.begin, *self._tokenizer.encode(prompt)], np.int32)

    def _spoken(self, ids: Iterable[int]) -> Iterator[str]:
        return pieces(self._tokenizer.decode, ids, self._stops)


def read_prompts(file: str | Path) -> list[str]:
    """One a line: text, or JSON with a `prompt` where the name ends in .jsonl."""
    place = Path(file)
    try:
        lines = [line for line in place.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from error
    if not lines:
        raise UserError(f"{file}: empty, no prompts")
    if place.suffix != ".jsonl":
        return lines
    found = []
    for number, line in enumerate(lines, 1):
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise UserError(f"{file}, prompt {number}: no JSON object with a prompt: {error}") from error
        if not isinstance(prompt, str):
            raise UserError(f"{file}, prompt {number}: prompt is not text")
        found.append(prompt)
    return found


def pieces(decode: Callable[[list[int]], str], ids: Iterable[int], stops: Sequence[str] = ()) -> Iterator[str]:
    """The text of tokens as they come, each character when its last byte is there, until a text of `stops` comes; what
    may be the beginning of one waits.

    >>> spell = lambda ids: bytes(ids).decode(errors="replace")
    >>> list(pieces(spell, [104, 195, 169]))
    ['h', '', 'é']
    >>> list(pieces(spell, b"one, two", [", t"]))
    ['o', 'n', 'e', '', '', '']
    """
    seen, shown = [], 0
    for token in ids:
        seen.append(token)
        text = decode(seen)
        ends = [place for stop in stops if (place := text.find(stop, max(0, shown - len(stop)))) >= 0]
        if ends:
            yield text[shown : min(ends)]
            return
        sure = shown if text.endswith("\ufffd") else len(text) - _begun(text, stops)
        yield text[shown:sure]
        shown = max(shown, sure)
    yield from [rest for rest in [decode(seen)[shown:]] if rest and not rest.endswith("\ufffd")]


def _begun(text: str, stops: Sequence[str]) -> int:
    """How many characters at a text's end may be the beginning of a stop."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
