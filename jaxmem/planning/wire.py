"""Read protobuf messages without their schema: a message is its fields' numbers with their values, in order.

XLA hands out the compiled module and its buffer assignment in this form only. A megabyte takes tens of milliseconds.
https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from collections.abc import Sequence

Message = dict[int, list[int | bytes]]


def read(data: bytes) -> Message:
    """Field number -> values: an int for a varint, bytes for anything else.

    >>> read(bytes([0x08, 0x96, 0x01, 0x12, 0x02, 0x68, 0x69]))
    {1: [150], 2: [b'hi']}
    """
    found: Message = {}
    at, end = 0, len(data)
    while at < end:
        key, at = _varint(data, at)
        form = key & 7
        value: int | bytes
        if form == 0:
            value, at = _varint(data, at)
        else:
            if form == 2:
                size, at = _varint(data, at)
            elif form == 1:
                size = 8
            elif form == 5:
                size = 4
            else:
                raise ValueError(f"not a protobuf message: wire type {form} at byte {at}")
            value, at = data[at : at + size], at + size
            if at > end:
                raise ValueError(f"not a whole protobuf message: it ends at byte {end}, a field at {at}")
        found.setdefault(key >> 3, []).append(value)
    return found


def number(message: Message, field: int, default: int = 0) -> int:
    return int(message.get(field, (default,))[-1])


def text(message: Message, field: int) -> str:
    return data(message, field).decode(errors="replace")


def data(message: Message, field: int) -> bytes:
    return bytes(message.get(field, (b"",))[-1])


def messages(message: Message, field: int) -> list[Message]:
    return [read(value) for value in message.get(field, ()) if isinstance(value, bytes)]


def numbers(message: Message, field: int) -> tuple[int, ...]:
    """A repeated integer, whether packed into one value or not."""
    found: list[int] = []
    for value in message.get(field, ()):
        if isinstance(value, int):
            found.append(value)
            continue
        at = 0
        while at < len(value):
            one, at = _varint(value, at)
            found.append(one)
    return tuple(found)


def _varint(data: Sequence[int], at: int) -> tuple[int, int]:
    value = data[at]
    at += 1
    if value < 128:
        return value, at
    value &= 127
    shift = 7
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
