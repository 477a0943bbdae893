"""A model's chat template: from messages to the one text that it was trained on.

Templates are Jinja programs out of somebody else's directory. They run in Jinja's sandbox, which lets them neither
import, nor reach the insides of an object, nor change what they are given; they see no clock, so that the same data is
the same tokens on any day.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxmem.config.hugging_face import MAX_BYTES, read_json
from jaxmem.data.tokenizer import END_TEXT, Tokenizer
from jaxmem.errors import UserError

Message = Mapping[str, str]  # "role" and "content"
# What a program of somebody else's may end in.
FAILURES = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class TemplateError(Exception):
    """What a template says of messages that it does not take."""


class ChatTemplate:
    """`render` gives the text of a conversation."""

    def __init__(self, source: str, origin: str, tokens: Mapping[str, str]) -> None:
        from jinja2 import TemplateError as JinjaError
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """`{% generation %}` marks what the model says; here that is found without it."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self._error, self._tokens, self.source = JinjaError, tokens, source
        try:
            self._template = environment.from_string(source)
        except (JinjaError, *FAILURES) as error:
            raise UserError(f"{origin}: no valid chat template: {_line(error)}") from error

    def render(self, messages: Sequence[Message], *, answer: bool = False) -> str:
        """`answer`: with what begins the answer that is to be generated."""
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=answer, **self._tokens)
        except TemplateError:
            raise
        except (self._error, *FAILURES) as error:
            raise TemplateError(f"the chat template fails: {_line(error)}") from error


def template_for(tokenizer: Tokenizer, file: str | None = None) -> ChatTemplate:
    """The template of a file, or the one that lies with the tokenizer."""
    named: Mapping[str, Any] = {"eos_token": END_TEXT}
    place = tokenizer.directory
    if place is not None:
        found = [read_json(place / name) for name in BESIDE if (place / name).is_file()]
        named = {key: value for one in found for key, value in one.items()}
    tokens = {key: text for key, value in named.items() if key.endswith("_token") and (text := _text(value))}
    if file is not None:
        return ChatTemplate(_read(Path(file).expanduser()), file, tokens)
    if place is not None and (place / TEMPLATE).is_file():
        return ChatTemplate(_read(place / TEMPLATE), str(place / TEMPLATE), tokens)
    source = named.get("chat_template")
    if isinstance(source, list):  # several by name
        source = {one.get("name"): one.get("template") for one in source if isinstance(one, dict)}.get("default")
    if not isinstance(source, str):
        where = f"{place}: no {TEMPLATE} and no chat_template in tokenizer_config.json" if place else "bytes have none"
        raise UserError(f"no chat template ({where}); give data.template, a file of Jinja")
    return ChatTemplate(source, f"{place}/tokenizer_config.json", tokens)


TEMPLATE = "chat_template.jinja"
BESIDE = ("special_tokens_map.json", "tokenizer_config.json")


def _text(token: Any) -> str | None:
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


def _read(file: Path) -> str:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise UserError(f"{file}: larger than {MAX_BYTES >> 20} MiB, which no chat template is")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
