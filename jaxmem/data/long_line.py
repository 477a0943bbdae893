"""A line of JSONL that is too long to be parsed as a whole: find a string in it and cut it into pieces.

A 200 MB line parsed by `json` needs a gigabyte. Here the line is read through a window of 64 KiB and every string in it
is replaced by a number, so that what remains is small and `json` can parse it. The string at the wanted field is cut so
that no escape (`\\n`, `\\u00e9`, a surrogate pair) and no UTF-8 character is split: each piece decodes on its own.
Streaming parsers (ijson) do not help: they give a string as a whole, in memory, and not its place in the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxmem.data.files import character_start
from jaxmem.data.records import InvalidRecordError

WINDOW = 64 * 1024
LONGEST_ESCAPE = 12  # bytes
MAX_STRUCTURE = 8 << 20  # bytes of a line outside its strings

Read = Callable[[int, int], bytes]  # (start, end) -> bytes of the file

# A run of whole characters of a JSON string. Possessive (`++`, `*+`), so it needs no memory to go back.
CHARACTERS = re.compile(
    rb'(?:[^"\\\x00-\x1f]++'
    rb'|\\["\\/bfnrt]'
    rb"|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+"
)


class _String(NamedTuple):
    start: int  # of the contents, in the file
    end: int
    after: int  # the length of the structure up to and with its number


def find_string(read: Read, start: int, end: int, field: str) -> tuple[int, int]:
    """Where the contents of the string at `field` are, in the line [start, end)."""
    structure, strings = _structure(read, start, end)
    try:
        found = json.loads(structure.decode())
    except json.JSONDecodeError as error:
        before = [string for string in strings if string.after <= error.pos]
        byte = before[-1].end + 1 + error.pos - before[-1].after if before else start + error.pos
        raise InvalidRecordError(f"invalid JSON at byte {byte}: {error.msg}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRecordError(f"invalid JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidRecordError(f"expected an object, found {type(found).__name__}")
    keys = [strings[int(number)] for number in found]
    names = [decode(read(key.start, key.end)) if key.end - key.start <= WINDOW else "" for key in keys]
    values = dict(zip(names, found.values(), strict=True))
    if field not in values:
        raise InvalidRecordError(missing_field(field, names))
    if not isinstance(values[field], str):
        raise InvalidRecordError(f"{field!r} is not a string")
    string = strings[int(values[field])]
    return string.start, string.end


def missing_field(field: str, names: list[str]) -> str:
    return f"no field {field!r}; fields: {', '.join(names[:8])} (set data.field)"


def _structure(read: Read, start: int, end: int) -> tuple[bytearray, list[_String]]:
    """The line with each string replaced by its number, and the strings."""
    structure, strings = bytearray(), list[_String]()
    string_start = -1  # of the string that is being read
    while start < end:
        window = read(start, min(start + WINDOW, end))
        is_last, at = start + len(window) == end, 0
        while at < len(window):
            if string_start < 0:
                quote = window.find(b'"', at)
                structure += window[at : quote if quote >= 0 else None]
                at = quote + 1 if quote >= 0 else len(window)
                string_start = start + at if quote >= 0 else -1
                continue
            match = CHARACTERS.match(window, at)
            at = match.end() if match else at
            if window[at : at + 1] != b'"':
                break
            structure += b'"%d"' % len(strings)
            strings.append(_String(string_start, start + at, len(structure)))
            string_start, at = -1, at + 1
        if len(structure) > MAX_STRUCTURE:
            raise InvalidRecordError(f"more than {MAX_STRUCTURE >> 20} MiB outside of strings, which is the most")
        if at < len(window) and (is_last or at + LONGEST_ESCAPE <= len(window)):  # or else the window cuts an escape
            raise InvalidRecordError(f"invalid JSON at byte {start + at}: invalid character or escape in a string")
        start += at
    if string_start >= 0:
        raise InvalidRecordError(f"invalid JSON at byte {end}: string without end")
    return structure, strings


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
    """The text of a JSON string's contents."""
    try:
        return str(json.loads(b'"' + contents + b'"'))
    except ValueError as error:
        raise InvalidRecordError(f"invalid JSON string: {error}") from error
