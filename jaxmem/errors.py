"""Errors that a user can correct, and functions that write their texts."""

import difflib
import json
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Result = TypeVar("Result")

MAX_LINE_LENGTH = 800  # largest number of characters of a line that is shown completely


class UserError(Exception):
    """A mistake in the input. The message is one line per problem; the command line exits with 2."""

    exit_code = 2

    def __init__(self, text: str) -> None:
        """Shortens long lines to their beginning and end, and escapes control characters."""
        super().__init__("\n".join(map(_readable, text.split("\n"))))


def escaped(text: str) -> str:
    r"""The text with escapes for control characters other than tabs and line breaks, which could change a terminal, and
    for what cannot be encoded or seen.

    >>> escaped("\x1b[2J a.txt")
    '\\x1b[2J a.txt'
    """
    if text.isprintable():
        return text
    return "".join(x if x in "\n\t" or not _is_control(x) else ascii(x)[1:-1] for x in text)


def _is_control(character: str) -> bool:
    """Whether a character is of Unicode's categories C (control, format, surrogate, ...), Zl or Zp."""
    category = unicodedata.category(character)
    return category[0] == "C" or category in ("Zl", "Zp")


def _readable(line: str) -> str:
    """A line of limited length."""
    line = escaped(line)
    if len(line) <= MAX_LINE_LENGTH:
        return line
    return f"{line[: MAX_LINE_LENGTH * 2 // 3]} ... {line[-MAX_LINE_LENGTH // 3 :]}"


class TemporaryError(UserError):
    """The input is valid, but a resource is missing: the same command works as soon as it is available again."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h, for schedulers that requeue


def results_of(calls: Iterable[Callable[[], Result]]) -> list[Result]:
    """The results of all calls. If some of them raise a UserError: one error with the lines of all."""
    results = list[Result]()
    lines = list[str]()
    for call in calls:
        try:
            results.append(call())
        except UserError as error:
            lines += str(error).split("\n")
    if lines:
        raise UserError("\n".join(dict.fromkeys(lines)))
    return results


def one_of(choices: Iterable[object]) -> str:
    """Alternatives as text.

    >>> one_of(["adam", "adamw", "lion"]), one_of(["adam"])
    ('adam, adamw or lion', 'adam')
    """
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


def nearest(name: object, known: Iterable[str]) -> str:
    """`; did you mean X?` if a similar name, or a longer one, exists, otherwise the complete list.

    >>> nearest("adamww", ["adamw", "adam"])
    '; did you mean adamw?'
    >>> nearest("adam", ["adamw", "adam"])  # known, but not supported here
    '; did you mean adamw?'
    >>> nearest("zzz", ["adamw", "adam"])
    '; expected one of adam, adamw'
    >>> nearest("a100", ["a100-80gb", "a100-40gb", "h100-80gb"])
    '; did you mean a100-40gb or a100-80gb?'
    """
    known = sorted({*known} - {str(name)})
    longer = [candidate for candidate in known if len(str(name)) > 2 and str(name).lower() in candidate]
    close = longer[:3] or difflib.get_close_matches(str(name), known, n=1, cutoff=0.6)
    return f"; did you mean {one_of(close)}?" if close else f"; expected one of {', '.join(known)}"


def nearest_numbers(value: int, known: Iterable[int]) -> str:
    """The nearest number below a value and the nearest above it.

    >>> nearest_numbers(3, [1, 2, 4, 8])
    '2 or 4'
    """
    known = sorted(known)
    below = [number for number in known if number < value]
    above = [number for number in known if number > value]
    return one_of([*below[-1:], *above[:1]] or ["none"])


def abridge(items: Sequence[str], most: int = 4, separator: str = ", ") -> str:
    """The first items of a list.

    >>> abridge(["q", "k", "v"], most=2)
    'q, k and 1 more'
    """
    others = f" and {len(items) - most} more" if len(items) > most else ""
    return separator.join(items[:most]) + others


def one_line(error: BaseException) -> str:
    """The first line of an error, with its type unless it is a UserError.

    >>> one_line(KeyError("axis")), one_line(UserError("no program"))
    ("KeyError: 'axis'", 'no program')
    """
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return kind + next(iter(str(error).splitlines()), "")


def as_yaml(value: object) -> str:
    """A config's value as it is written in YAML.

    >>> as_yaml(None), as_yaml(True), as_yaml(("fsdp", 1e-4)), as_yaml({"name": "lion"}), as_yaml("1")
    ('null', 'true', '[fsdp, 0.0001]', '{name: lion}', '"1"')
    """
    match value:
        case None | bool():
            return {None: "null", True: "true", False: "false"}[value]
        case float():
            return f"{value:g}" if float(f"{value:g}") == value else repr(value)
        case tuple() | list():
            return f"[{', '.join(map(as_yaml, value))}]"
        case dict():
            return f"{{{', '.join(f'{key}: {as_yaml(item)}' for key, item in value.items())}}}"
        case str() if _needs_quotes(value):
            return json.dumps(value)
        case _:
            return str(value)


def _needs_quotes(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return text.lower() in ("", "~", "null", "true", "false") or not text.isprintable()
    return True


def unsupported(setting: str, other: str, use: str) -> str:
    """The message for two settings that exclude each other.

    >>> unsupported("mesh.context=2", "memory.attention=triton", "auto")
    'mesh.context=2 does not support memory.attention=triton; use auto'
    """
    return f"{setting} does not support {other}; use {use}"


def required(setting: str, key: str, allowed: Iterable[str], actual: object) -> str:
    """The message for a setting that requires a value of another setting.

    >>> required("objective.beta=1", "objective.name", ("dpo",), "classify")
    'objective.beta=1 requires objective.name=dpo, not classify; change objective.name or remove objective.beta'
    """
    remedy = f"change {key} or remove {setting.partition('=')[0]}"
    return f"{setting} requires {key}={one_of(allowed)}, not {as_yaml(actual)}; {remedy}"
