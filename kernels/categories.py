"""What a value is for, written into the names of the operations that compute it and read from them again.

A compiled module does not say which of its values are logits. The code that computes them opens a named scope with
`category`; whoever counts bytes by category reads it with `category_of`.
"""

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import jax

Category = Literal["embedding", "logits", "attention", "all_scores", "update"]


@contextmanager
def category(name: Category) -> Iterator[None]:
    """A named scope for operations of a category, also as a decorator of a function.

    embedding: the lookup of its rows. logits: the output projection and the loss. attention: any implementation;
    all_scores: the scores of all pairs of positions. update: the optimizer.
    """
    with jax.named_scope(f"bytes_of_{name}"):
        yield


@functools.cache
def category_of(op_name: str) -> str | None:
    """The innermost category in an operation's name.

    >>> category_of("jit(step)/transpose(jvp(bytes_of_attention))/bytes_of_all_scores/exp")
    'all_scores'
    """
    names: list[str] = re.findall(r"\bbytes_of_([a-z_]+)", op_name)
    return names[-1] if names else None
