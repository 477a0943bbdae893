"""The one kind of error that is the user's to mend, and how to name the nearest right thing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake in what was given. Its text is one clear line; the command line exits with 2."""

    exit_code = 2


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
