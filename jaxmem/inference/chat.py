"""A model with its tokenizer: continues texts, and answers in conversations."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from jaxmem.config.sections import SOURCES
from jaxmem.data.chat import end_of_answer
from jaxmem.data.chat_template import ChatTemplate, Message, TemplateError, template_for
from jaxmem.data.jsonl import read_objects
from jaxmem.data.tokenizer import tokenizer_for
from jaxmem.errors import UserError
from jaxmem.inference.generate import ENDED, Conversation, Generator, Sampling
from jaxmem.inference.load import open_model

CHANNEL = "<|channel|>"  # special tokens around the name of a channel
MESSAGE = "<|message|>"


class TextGenerator:
    """A run or a Hugging Face directory, ready to generate text."""

    def __init__(
        self,
        directory: str | Path,
        sampling: Sampling = Sampling(),
        *,
        tokens: int = 200,
        stops: Sequence[str] = (),
        overrides: Sequence[str] = (),
    ) -> None:
        """Opens a model.

        Args:
            directory: A run, or a Hugging Face directory.
            sampling: How tokens are chosen.
            tokens: Largest number of tokens per answer.
            stops: Texts before which the output ends.
            overrides: Settings that replace those of the run.
        """
        program, params = open_model(directory, overrides)
        self._generate = Generator(program, params, sampling)
        self._conversation = Conversation(self._generate)
        self._tokenizer = tokenizer_for(program.cfg.data.tokenizer, getattr(program.cfg.model, "vocab", None))
        self._template_file = program.cfg.data.chat_template
        self._tokens = tokens
        self._stops = tuple(stop for stop in stops if stop)
        self._answer: list[int] = []  # the tokens of the last answer
        self.is_cut = False  # whether the last answer ended only because it had `tokens` tokens

    def check_template(self) -> None:
        """Refuses a model without a valid chat template."""
        _ = self._template

    @cached_property
    def _template(self) -> ChatTemplate:
        return template_for(self._tokenizer, self._template_file)

    @cached_property
    def _answer_ends(self) -> frozenset[int]:
        """The tokens that end an answer in a conversation."""
        return self._tokenizer.ends | end_of_answer(self._tokenizer, self._template)

    def complete(self, prompt: str) -> Iterator[str]:
        """The continuation of a text, token by token."""
        ids = self._encode(prompt)
        steps = self._generate([ids], self._tokens, self._tokenizer.ends)
        return self._decode((int(tokens[0]) for tokens in steps), ids)

    def complete_all(self, prompts: Sequence[str], batch: int = 8) -> Iterator[str]:
        """The continuation of each text, `batch` at a time."""
        texts = [self._encode(prompt) for prompt in prompts]
        answers = self._continue_all(texts, self._tokenizer.ends, batch)
        return ("".join(self._decode(answer, ids)) for answer, ids in zip(answers, texts, strict=True))

    def answer(self, messages: Sequence[Message]) -> Iterator[str]:
        """The answer to a conversation, token by token. The KV cache of the previous conversation is reused for the
        common first tokens of both."""
        ids = self._rendered(messages)
        return self._decode(self._watched(self._conversation(ids, self._tokens, self._answer_ends)))

    def answer_all(self, conversations: Sequence[Sequence[Message]], batch: int = 8) -> Iterator[str]:
        """The answer to each conversation, `batch` at a time."""
        texts = [self._rendered(messages) for messages in conversations]
        return ("".join(self._decode(answer)) for answer in self._continue_all(texts, self._answer_ends, batch))

    def _continue_all(self, texts: Sequence[np.ndarray], ends: Collection[int], batch: int) -> Iterator[list[int]]:
        """The tokens that continue each text, `batch` texts at a time."""
        for number, start in enumerate(range(0, len(texts), batch)):
            prompts = texts[start : start + batch]
            generated = list(self._generate(prompts, self._tokens, ends, batch=number))
            for ids in np.stack(generated).T:
                yield [int(i) for i in ids if i != ENDED]

    def _rendered(self, messages: Sequence[Message]) -> np.ndarray:
        """The tokens of a conversation up to the beginning of the answer."""
        for token in self._tokenizer.special:
            if token in messages[-1]["content"]:
                raise UserError(f"{token} is a special token of the model; remove it from the message")
        try:
            text, _ = self._template.render(messages, answer=True)
        except TemplateError as error:
            raise UserError(f"{error}") from error
        return self._tokenizer.encode_with_offsets(text)[0]

    def _watched(self, ids: Iterable[int]) -> Iterator[int]:
        """The same tokens. Not read to the end if a stop ends the answer, which then is not cut."""
        self.is_cut = False
        self._answer = []
        for token in ids:
            self._answer.append(token)
            yield token
        self.is_cut = len(self._answer) == self._tokens and self._answer[-1] not in self._answer_ends

    def content(self, answer: str) -> str:
        """The text of the last answer in the history of a conversation. If the model has channels (gpt-oss), it is that
        of the last channel `final`, since other channels have the reasoning. The text has no marks of channels."""
        special = self._tokenizer.special
        if not special.keys() >= {CHANNEL, MESSAGE}:
            return answer
        mark = [special[CHANNEL], *self._tokenizer.encode("final").tolist(), special[MESSAGE]]
        ends = [n for n in range(len(mark), len(self._answer) + 1) if self._answer[n - len(mark) : n] == mark]
        return answer[len(self._tokenizer.decode(self._answer[: ends[-1]])) :] if ends else answer

    def _encode(self, prompt: str) -> np.ndarray:
        return np.array([*self._tokenizer.begin, *self._tokenizer.encode(prompt)], np.int32)

    def _decode(self, ids: Iterable[int], prompt: Sequence[int] | np.ndarray = ()) -> Iterator[str]:
        """The text of tokens as they are generated, as the continuation of `prompt`. The decoders of Llama 2 and
        Mistral remove a space at the beginning of a text, so the last token of the prompt is decoded with the others,
        and its text is cut off."""
        last = [int(token) for token in prompt[-1:]]
        before = self._tokenizer.decode(last)
        if before.endswith("\ufffd"):  # a part of a character, whose text depends on the next token
            last = []
            before = ""

        def decode(answer: list[int]) -> str:
            return self._tokenizer.decode([*last, *answer])[len(before) :]

        return decode_stream(decode, ids, self._stops)


def read_prompts(file: str | Path) -> list[str]:
    """One prompt per line: text, or JSON with a `prompt` if the name ends in .jsonl."""
    path = Path(file)
    if path.suffix.lower() in SOURCES["jsonl"].suffixes:
        prompts = []
        for number, record in read_objects(path, "prompt"):
            if not isinstance(record.get("prompt"), str):
                raise UserError(f"{file}, line {number}: prompt is missing or not a string")
            prompts.append(record["prompt"])
        return prompts
    try:
        lines = [line for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: is not text in UTF-8: {error}; convert it") from error
    if not lines:
        raise UserError(f"{file}: is empty; write one prompt per line")
    return lines


def decode_stream(decode: Callable[[list[int]], str], ids: Iterable[int], stops: Sequence[str] = ()) -> Iterator[str]:
    """The text of tokens as they are generated. A character is returned with its last byte. The text ends before the
    first of `stops`; text that may be the beginning of a stop is returned later.

    >>> spell = lambda ids: bytes(ids).decode(errors="replace")
    >>> list(decode_stream(spell, [104, 195, 169]))
    ['h', '', 'é']
    >>> list(decode_stream(spell, b"one, two", [", t"]))
    ['o', 'n', 'e', '', '', '']
    """
    seen = []
    shown = 0
    for token in ids:
        seen.append(token)
        text = decode(seen)
        ends = [place for stop in stops if (place := text.find(stop, max(0, shown - len(stop)))) >= 0]
        if ends:
            yield text[shown : min(ends)]
            return
        # The number of characters at the end that may be the beginning of a stop.
        pending = max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        certain = shown if text.endswith("\ufffd") else len(text) - pending
        yield text[shown:certain]
        shown = max(shown, certain)
    last_text = decode(seen)[shown:].rstrip("\ufffd")  # without an incomplete character
    if last_text:
        yield last_text
