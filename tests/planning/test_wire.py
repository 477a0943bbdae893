"""Protobuf's encoding, field by field."""

from __future__ import annotations

import pytest

from jaxmem.planning import wire


def encoded(number: int) -> bytes:
    parts = []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**31, 2**63 - 1])
def test_numbers_of_any_size(number: int) -> None:
    assert wire.number(wire.read(bytes([0x18]) + encoded(number)), 3) == number


def test_fields_above_15_take_two_bytes() -> None:
    assert wire.number(wire.read(encoded(93 << 3) + encoded(5)), 93) == 5


def test_what_is_not_there_is_empty() -> None:
    message = wire.read(b"")
    assert (wire.number(message, 1), wire.number(message, 1, 7), wire.text(message, 2)) == (0, 7, "")
    assert (wire.data(message, 3), wire.messages(message, 4), wire.numbers(message, 5)) == (b"", [], ())


def test_repeated_numbers_packed_or_not() -> None:
    packed = bytes([0x0A, 3]) + encoded(1) + encoded(300)
    apart = bytes([0x08]) + encoded(1) + bytes([0x08]) + encoded(300)
    assert wire.numbers(wire.read(packed), 1) == wire.numbers(wire.read(apart), 1) == (1, 300)


def test_messages_within_messages_and_fixed_widths() -> None:
    inner = bytes([0x12, 2]) + b"ab"
    outer = bytes([0x0A, len(inner)]) + inner + bytes([0x11]) + bytes(8) + bytes([0x1D]) + bytes(4)
    message = wire.read(outer)
    assert wire.text(wire.messages(message, 1)[0], 2) == "ab"
    assert (wire.data(message, 2), wire.data(message, 3)) == (bytes(8), bytes(4))


@pytest.mark.parametrize(("data", "error"), [(bytes([0x0A, 9, 1]), "whole"), (bytes([0x0B]), "wire type 3")])
def test_what_is_no_message(data: bytes, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        wire.read(data)
