"""A line of JSONL that is too long to be parsed as a whole: find a string in it and cut it into pieces.

A 200 MB line parsed by `json` needs a gigabyte. Here the top-level object is scanned through a window of 64 KiB, the
string is located, and cut so that no escape (`\\n`, `\\u00e9`, a surrogate pair) and no UTF-8 character is split: each
piece decodes on its own. Strings, keys and brackets are checked, as is everything between the fields; the numbers and
commas inside other fields are not. Streaming parsers (ijson) do not help: they give a string as a whole, in memory, and
not where it is in the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import numpy as np

from jaxmem.data.records import InvalidRecordError
from jaxmem.data.text import character_start

WINDOW = 64 * 1024
DEEPEST = 1000

Read = Callable[[int, int], bytes]  # (start, end) -> bytes of the file

# A run of whole characters of a JSON string. Possessive (`++`, `*+`), so it needs no memory to go back.
CHARACTERS = re.compile(
    rb'(?:[^"\\\x00-\x1f]++'
    rb'|\\["\\/bfnrt]'
    rb"|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+"
)
SPACE = re.compile(rb"[ \t\r\n]*+")
SCALAR = re.compile(rb"[-+.0-9a-zA-Z]*+")
NOT_STRUCTURE = re.compile(rb'[^"{}\[\]]*+')
CLOSES = {ord("{"): ord("}"), ord("["): ord("]")}


class _Scanner:
    """A position in the line, and a window of the file around it."""

    def __init__(self, read: Read, start: int, end: int) -> None:
        self.read, self.position, self.end = read, start, end
        self._window, self._base = b"", start

    def run(self, pattern: re.Pattern[bytes]) -> None:
        """Moves past what the pattern matches, across windows."""
        while True:
            at = self.position - self._base
            # 16 bytes: an escape (12 at most) that the window cuts must not look broken.
            if at + 16 > len(self._window) and self._base + len(self._window) < self.end:
                self._base, at = self.position, 0
                self._window = self.read(self.position, min(self.position + WINDOW, self.end))
            match = pattern.match(self._window, at)
            if match is None or match.end() == at:
                return
            self.position = self._base + match.end()

    def byte(self) -> int:
        """The byte here, -1 at the line's end."""
        if self.position >= self.end:
            return -1
        at = self.position - self._base
        if at < len(self._window):
            return self._window[at]
        return self.read(self.position, self.position + 1)[0]

    def expect(self, *allowed: str) -> str:
        """Skips space, then takes one of the characters."""
        self.run(SPACE)
        byte = self.byte()
        if byte < 0 or chr(byte) not in allowed:
            found = "the line ends" if byte < 0 else f"found {chr(byte)!r}"
            raise InvalidRecordError(f"invalid JSON at byte {self.position}: expected {' or '.join(allowed)}, {found}")
        self.position += 1
        return chr(byte)

    def string(self) -> tuple[int, int]:
        """Moves past a string; its contents' start and end."""
        self.expect('"')
        start = self.position
        self.run(CHARACTERS)
        if self.byte() != ord('"'):
            what = "string without end" if self.byte() < 0 else "invalid character or escape in a string"
            raise InvalidRecordError(f"invalid JSON at byte {self.position}: {what}")
        self.position += 1
        return start, self.position - 1

    def skip_value(self) -> None:
        self.run(SPACE)
        if self.byte() == ord('"'):
            self.string()
        elif self.byte() not in CLOSES:
            start = self.position
            self.run(SCALAR)
            try:
                json.loads(self.read(start, min(self.position, start + WINDOW)))
            except ValueError as error:
                raise InvalidRecordError(f"invalid JSON at byte {start}: {error}") from error
        else:
            self._skip_nested()

    def _skip_nested(self) -> None:
        open_brackets = bytearray()
        while True:
            byte = self.byte()
            if byte == ord('"'):
                self.string()
            elif byte in CLOSES:
                if len(open_brackets) == DEEPEST:
                    raise InvalidRecordError(f"nested deeper than {DEEPEST} at byte {self.position}")
                open_brackets.append(CLOSES[byte])
                self.position += 1
            elif byte < 0 or open_brackets.pop() != byte:
                raise InvalidRecordError(f"invalid JSON at byte {self.position}: brackets do not match")
            else:
                self.position += 1
            if not open_brackets:
                return
            self.run(NOT_STRUCTURE)


def find_string(read: Read, start: int, end: int, field: str) -> tuple[int, int]:
    """Where the contents of the string at `field` lie, in the line [start, end)."""
    scanner = _Scanner(read, start, end)
    scanner.expect("{")
    found = None
    keys = []
    scanner.run(SPACE)
    separator = scanner.expect("}") if scanner.byte() == ord("}") else ","
    while separator == ",":
        scanner.run(SPACE)
        low, high = scanner.string()
        key = decode(read(low, high)) if high - low <= WINDOW else ""
        keys.append(key)
        scanner.expect(":")
        scanner.run(SPACE)
        if key == field and scanner.byte() == ord('"'):
            found = scanner.string()
        elif key == field:
            raise InvalidRecordError(f"{field!r} is not a string")
        else:
            scanner.skip_value()
        separator = scanner.expect(",", "}")
    scanner.run(SPACE)
    if scanner.position != end:
        raise InvalidRecordError(f"invalid JSON at byte {scanner.position}: more text after the object")
    if found is None:
        raise InvalidRecordError(missing_field(field, keys))
    return found


def missing_field(field: str, keys: list[str]) -> str:
    return f"no field {field!r}; fields: {', '.join(keys[:8])} (set data.field)"


def cut_string(read: Read, start: int, end: int, limit: int) -> np.ndarray:
    """Offsets of the pieces of a string's contents: piece i is [offsets[i], offsets[i + 1])."""
    step = -(-(end - start) // max(1, -(-(end - start) // limit)))
    offsets = [start]
    while end - offsets[-1] > step:
        window = read(offsets[-1], min(offsets[-1] + step + 1, end))
        match = CHARACTERS.match(window, 0, step)
        cut = character_start(window, match.end() if match else 0)
        if cut == 0:
            raise InvalidRecordError(f"invalid text at byte {offsets[-1]}")
        offsets.append(offsets[-1] + cut)
    return np.array([*offsets, end], np.int64)


def decode(contents: bytes) -> str:
    """The text that a JSON string's contents stand for."""
    try:
        return str(json.loads(b'"' + contents + b'"'))
    except ValueError as error:
        raise InvalidRecordError(f"invalid JSON string: {error}") from error
