"""A model's chat template: from messages to the one text that it was trained on.

Templates are Jinja programs out of somebody else's directory. They run in Jinja's sandbox, which lets them neither
import, nor reach the insides of an object, nor change what they are given; they see no clock, so that the same data is
the same tokens on any day. The sandbox runs in a process of its own (`rendering`), so that one without end ends.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jaxmem.config.hugging_face import MAX_BYTES, read_json
from jaxmem.data.tokenizer import END_TEXT, Tokenizer
from jaxmem.errors import UserError

Message = Mapping[str, str]  # "role" and "content"
SECONDS = 5  # of a processor that a template may take for one conversation; a usual one takes a thousandth
MEMORY = 1 << 30  # bytes, likewise


class TemplateError(Exception):
    """What a template says of messages that it does not take."""


class ChatTemplate:
    """`render` gives the text of a conversation."""

    def __init__(self, source: str, origin: str, tokens: Mapping[str, str]) -> None:
        self.source, self._origin, self._tokens = source, origin, tokens
        self._asked({})

    def render(self, messages: Sequence[Message], *, answer: bool = False) -> str:
        """`answer`: with what begins the answer that is to be generated."""
        said = self._asked({"messages": list(messages), "answer": answer, "tokens": self._tokens})
        if "refused" in said:
            raise TemplateError(said["refused"])
        if "failed" in said:
            raise TemplateError(f"the chat template fails: {said['failed']}")
        return said["text"]

    def _asked(self, request: dict[str, Any]) -> dict[str, str]:
        said = _renderer().ask({"source": self.source, **request})
        if said is None:
            raise UserError(
                f"{self._origin}: this chat template does not end: a conversation takes it more than {SECONDS} s of a "
                f"processor, or more than {MEMORY >> 30} GiB"
            )
        if "invalid" in said:
            raise UserError(f"{self._origin}: no valid chat template: {said['invalid']}")
        return said


class _Renderer:
    """The process that renders, begun when it is first asked, and anew after it had to be ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self.close)

    def ask(self, request: Mapping[str, Any]) -> dict[str, str] | None:
        """Its answer; None where it was ended before it had one."""
        with self._lock:
            process = self._process = self._process or _started()
            assert process.stdin
            assert process.stdout
            try:
                print(json.dumps(request), file=process.stdin, flush=True)
                line = process.stdout.readline()
            except BrokenPipeError:
                line = ""
            if not line.endswith("\n"):
                self.close()
                return None
            found: dict[str, str] = json.loads(line)
            return found

    def close(self) -> None:
        if (process := self._process) is not None:
            self._process = None
            process.kill()
            process.communicate()


def _started() -> subprocess.Popen[str]:
    program = Path(__file__).with_name("rendering.py")
    return subprocess.Popen(  # noqa: S603, this very package
        [sys.executable, "-P", str(program), str(SECONDS), str(MEMORY)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@cache
def _renderer() -> _Renderer:
    return _Renderer()


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
        raise UserError(f"no chat template ({where}); give data.chat_template, a file of Jinja")
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
