"""A model's chat template: from messages to the text that the model was trained on.

Templates are Jinja programs of third parties. They run in Jinja's sandbox, in which they cannot import modules, access
the internals of an object or change their inputs. They have no clock, so that the same data has the same tokens on any
day. The sandbox runs in a separate process (`template_process`), so that an endless template can be ended.
"""

import atexit
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jaxmem.config.hf_values import MAX_BYTES, read_json
from jaxmem.data.records import InvalidRecordError
from jaxmem.data.tokenizer import END_TEXT, Tokenizer
from jaxmem.errors import UserError
from jaxmem.machine.files import read_file
from jaxmem.typing import JsonDict, JsonView

Message = Mapping[str, Any]  # "role", "content", and further keys that a template reads: "tool_calls", ...
MAX_SECONDS = 5  # limit of processor time per conversation; a usual template needs a thousandth
MAX_MEMORY = 1 << 30  # limit of memory in bytes; a usual template needs a thousandth
CHAT_TEMPLATE = "chat_template.jinja"
TOKEN_FILES = ("special_tokens_map.json", "tokenizer_config.json")


class TemplateError(InvalidRecordError):
    """A template refuses the messages, or fails."""


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    marks: list[tuple[int, int]] | None  # [start, end] of texts marked as the assistant's; None: no marks


class ChatTemplate:
    """The template of a tokenizer, or of a file."""

    def __init__(self, source: str, origin: str, tokens: Mapping[str, str]) -> None:
        """`origin`: the name of the template's file, for messages. `tokens`: names and texts of special tokens."""
        self.source = source
        self._origin = origin
        self._tokens = tokens
        self._request({})

    @property
    def identity(self) -> str:
        """Equal for templates that write the same texts: the source, and the special tokens that it names."""
        return self.source + "".join(
            f"\0{name}={self._tokens[name]}" for name in sorted(self._tokens) if name in self.source
        )

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, answer: bool = False, **options: Any
    ) -> Rendered:
        """The text of a conversation. `answer`: whether the generation prompt follows. `options`: other arguments of
        the template, e.g. `enable_thinking`."""
        arguments = {"messages": list(messages), "tools": tools, "documents": None, "add_generation_prompt": answer}
        try:
            reply = self._request({"arguments": {**options, **self._tokens, **arguments}})
        except RecursionError as error:
            raise TemplateError("the conversation is nested too deeply") from error
        if "refused" in reply:
            raise TemplateError(reply["refused"])
        if "failed" in reply:
            raise TemplateError(f"the chat template fails: {reply['failed']}")
        return Rendered(**reply)

    def _request(self, request: JsonDict) -> JsonDict:
        reply = _reply_to({"source": self.source, **request})
        if reply is None:
            raise UserError(
                f"{self._origin}: the chat template needs more than {MAX_SECONDS} s of processor time or "
                f"{MAX_MEMORY >> 30} GiB for a conversation; set another data.chat_template"
            )
        if "invalid" in reply:
            raise UserError(f"{self._origin}: not a valid chat template: {reply['invalid']}")
        return reply


_lock = threading.Lock()


def _reply_to(request: JsonView) -> JsonDict | None:
    """The reply of the process that renders; None if it was ended before it replied."""
    line = json.dumps(request)
    with _lock:
        process = _process()
        assert process.stdin
        assert process.stdout
        try:
            print(line, file=process.stdin, flush=True)
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line.endswith("\n"):
            _process.cache_clear()  # the next request starts another process
            _end(process)
            return None
        return json.loads(line)


@cache
def _process() -> subprocess.Popen[str]:
    program = Path(__file__).with_name("template_process.py")
    process = subprocess.Popen(  # noqa: S603, a module of this package
        [sys.executable, "-P", str(program), str(MAX_SECONDS), str(MAX_MEMORY)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def template_in(settings: JsonView) -> str | None:
    """The template in a tokenizer_config.json, which may have several with names."""
    source = settings.get("chat_template")
    if isinstance(source, list):
        source = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}.get(
            "default"
        )
    return source if isinstance(source, str) else None


def template_for(tokenizer: Tokenizer, file: str | None = None) -> ChatTemplate:
    """The template of a Jinja file or a tokenizer_config.json; without a file, that in the tokenizer's directory."""
    settings: JsonDict = {"eos_token": END_TEXT}
    place = tokenizer.directory
    if place is not None:
        present = [place / name for name in TOKEN_FILES if (place / name).is_file()]
        settings = {key: value for path in present for key, value in read_json(path).items()}
        if file is None and (place / CHAT_TEMPLATE).is_file():
            file = str(place / CHAT_TEMPLATE)
    if file is not None and file.endswith(".json"):
        settings |= {"chat_template": None} | read_json(Path(file).expanduser())
    elif file is not None:
        settings["chat_template"] = _read(Path(file).expanduser())
    source = template_in(settings)
    if source is None:
        where = f"{place} has no {CHAT_TEMPLATE} and no chat_template in tokenizer_config.json"
        where = f"{file} has none" if file else where if place else "data.tokenizer=bytes has none"
        raise UserError(f"data.tokenizer has no chat template ({where}); set data.chat_template to a Jinja file")
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in settings.items()}
    tokens = {key: text for key, text in texts.items() if key.endswith("_token") and text and isinstance(text, str)}
    return ChatTemplate(source, file or f"{place}/tokenizer_config.json", tokens)


def _read(file: Path) -> str:
    try:
        return read_file(file, MAX_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from error
