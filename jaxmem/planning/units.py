"""Numbers with units, and commands for a shell, as text."""

import shlex
from collections.abc import Sequence

_BYTES = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B"))


def byte_unit(size: float) -> tuple[int, str]:
    """The unit in which to write a number of bytes, and its name."""
    return next((unit for unit in _BYTES if abs(size) >= unit[0]), _BYTES[-1])


def format_bytes(size: float) -> str:
    """A number of bytes as text.

    >>> format_bytes(1536), format_bytes(3 * 2**30), format_bytes(0), format_bytes(2**30 - 1)
    ('1.5 KiB', '3.0 GiB', '0 B', '1.0 GiB')
    """
    unit, name = byte_unit(size)
    unit, name = byte_unit(round(size / unit, 1) * unit)  # 1,024 of a unit are one of the next
    return f"{size / unit:.{1 if unit > 1 else 0}f} {name}"


def format_seconds(seconds: float) -> str:
    """A duration as text.

    >>> format_seconds(0.0123), format_seconds(2.5), format_seconds(43e-6), format_seconds(0.9999)
    ('12 ms', '2.5 s', '43 us', '1.0 s')
    """
    if seconds < 999.5e-6:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"


def last_overrides(words: Sequence[str]) -> list[str]:
    """The words of a command without the overrides that a later one replaces.

    >>> last_overrides(["a.yaml", "zero=1", "mesh.fsdp=2", "--batch", "2", "zero=3", "mesh={fsdp: 4}"])
    ['a.yaml', '--batch', '2', 'zero=3', 'mesh={fsdp: 4}']
    """
    left: list[str] = []
    for word in words:
        key, equals, _ = word.partition("=")
        if equals:
            left = [other for other in left if "=" not in other or not _is_in(other.partition("=")[0], key)]
        left.append(word)
    return left


def _is_in(key: str, section: str) -> bool:
    """Whether a key is that of a section, or of a setting in it."""
    return key == section or key.startswith(f"{section}.")


def format_command(words: Sequence[str]) -> str:
    """A command that can be pasted.

    >>> format_command(["jaxmem", "plan", "a b.yaml", "zero=3"])
    "  jaxmem plan 'a b.yaml' zero=3"
    """
    return f"  {shlex.join(words)}"


def format_count(number: float) -> str:
    """A number as text, with the prefix of a power of 1000.

    >>> format_count(1.19e14), format_count(850), format_count(999.9e9), format_count(1.2e18)
    ('119 T', '850', '1 T', '1.2 E')
    """
    for unit in ("", " k", " M", " G", " T", " P"):
        if abs(number) < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} E"
