"""A table updated some entries at a time, by an optimizer that is written for all of it.

Most rules do with a number of a matrix what they do with any other, and need not know. A rule that sums over the
whole matrix (a norm, a mean of each column) asks `At.sums` for it. With all entries at hand those are plain sums. In
pieces, the table is gone through once for each such call, to measure, and then once more to apply: the same rule each
time, stopped where the next sums are not known yet, since what is not read is not computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

Total = Callable[[Any], Any]


class IndivisibleError(Exception):
    """A rule looks at a table in a way that no sum over pieces gives."""


@dataclass
class Totals:
    """The sums of a table that are known so far; of the next one, what the entries at hand add to it."""

    known: list[Any]
    asked: int = field(default=0, init=False)
    share: Any = field(default=None, init=False)

    def __call__(self, share: Any) -> Any:
        self.asked += 1
        if self.asked <= len(self.known):
            return self.known[self.asked - 1]
        if self.asked == len(self.known) + 1:
            self.share = share
        return share  # the rest is traced and never computed


@dataclass(frozen=True)
class Piece:
    """Entries of a table that are updated by themselves."""

    shape: tuple[int, ...]  # of the table
    dim: int  # that counts its entries
    entries: Int[Array, " entries"]  # which ones
    total: Total  # from sums over these entries to sums over all


def totals(update: Callable[[jax.Array, Total], Any], count: int) -> list[Any] | None:
    """All sums that `update(piece's number, total)` asks for, over `count` pieces. None: it cannot be in pieces."""
    first = jnp.zeros((), jnp.int32)

    def share(j: jax.Array, known: list[Any]) -> Totals:
        found = Totals(known)
        update(j, found)
        return found

    def next_sums(known: list[Any]) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(lambda: share(first, known).share))
        add = lambda j, sums: jax.tree.map(jnp.add, sums, share(j, known).share)  # noqa: E731
        return jax.lax.fori_loop(0, count, add, zeros)

    passes: list[int] = []
    try:
        jax.eval_shape(lambda: passes.append(share(first, []).asked))
    except IndivisibleError:
        return None
    known: list[Any] = []
    for _ in range(*passes):
        known = [*known, next_sums(known)]
    return known
