"""The errors that are not the program's own, and their texts."""

import difflib
import errno
import os
from collections.abc import Iterable

MOST = 800  # characters of a line that people read


class UserError(Exception):
    """A mistake in what was given. Its text is one clear line; the command line exits with 2."""

    exit_code = 2

    def __init__(self, text: str) -> None:
        """Of a long line only its beginning and end are shown."""
        super().__init__("\n".join(map(_readable, text.split("\n"))))


def _readable(line: str) -> str:
    return line if len(line) <= MOST else f"{line[: MOST * 2 // 3]} ... {line[-MOST // 3 :]}"


class TemporaryError(UserError):
    """Nothing that was given is wrong: the same command goes on, when what is missing is back."""

    exit_code = 75  # EX_TEMPFAIL of sysexits.h, for whoever requeues


# What a system call reports for a file or directory that cannot be used, or for a limit of the machine.
_OF_THE_MACHINE = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ELOOP),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ESTALE),
)
_MORE_FILES = "too many open files: raise the limit with `ulimit -n 4096`"


def as_user_error(error: BaseException) -> BaseException:
    """A UserError where an error is one of the machine: a directory that cannot be written, a full disk, too few file
    descriptors. Otherwise the error itself."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _OF_THE_MACHINE:
            if cause.errno in (errno.EMFILE, errno.ENFILE):
                return UserError(_MORE_FILES)
            return UserError(f"{cause.filename}: {cause.strerror}" if cause.filename else str(cause.strerror))
        if not isinstance(cause, UserError) and os.strerror(errno.EMFILE) in str(cause):  # from a library in C++
            return UserError(_MORE_FILES)
        cause = cause.__cause__
    return error


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` where something close exists, otherwise the whole list.

    >>> nearest("adamww", ["adamw", "adam"])
    '; did you mean adamw?'
    >>> nearest("zzz", ["adamw", "adam"])
    '; known: adam, adamw'
    """
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}"


def one_line(error: BaseException) -> str:
    """The first line of an error, with its type if it is not a user's.

    >>> one_line(KeyError("axis")), one_line(UserError("no program"))
    ("KeyError: 'axis'", 'no program')
    """
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return kind + next(iter(str(error).splitlines()), "")


def as_yaml(value: object) -> str:
    """A config's value as it is written in YAML.

    >>> as_yaml(None), as_yaml(True), as_yaml(("fsdp", 1e-4)), as_yaml({"name": "lion"})
    ('null', 'true', '[fsdp, 0.0001]', '{name: lion}')
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
        case _:
            return str(value)


def unsupported(setting: str, other: str, use: str) -> str:
    """
    >>> unsupported("mesh.context=2", "memory.attention=triton", "auto")
    'mesh.context=2 does not support memory.attention=triton; use auto'
    """
    return f"{setting} does not support {other}; use {use}"


def required(setting: str, key: str, allowed: Iterable[str], actual: object) -> str:
    """
    >>> required("objective.beta=1", "objective.name", ("dpo",), "classify")
    'objective.beta=1 requires objective.name=dpo, not classify'
    """
    return f"{setting} requires {key}={' or '.join(allowed)}, not {as_yaml(actual)}"
