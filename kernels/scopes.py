"""What a compiled module does not say, written into the names of its operations and read from them again.

`purpose` names what a value is for, such as logits; whoever counts bytes reads it with `purpose_of`.
`run_count` names how often a branch is taken or a loop with a traced bound runs; whoever counts FLOPs, bytes or seconds
reads it with `mean_runs`.
"""

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Literal

import jax

Purpose = Literal["embedding", "logits", "attention", "all_scores", "update"]


@contextmanager
def purpose(name: Purpose) -> Iterator[None]:
    """A named scope for operations of one purpose, also as a decorator of a function.

    embedding: the lookup of its rows. logits: the output projection and the loss. attention: any implementation;
    all_scores: the scores of all pairs of positions. update: the optimizer.
    """
    with jax.named_scope(f"bytes_of_{name}"):
        yield


@functools.cache
def purpose_of(op_name: str) -> str | None:
    """The innermost purpose in an operation's name.

    >>> purpose_of("jit(step)/transpose(jvp(bytes_of_attention))/bytes_of_all_scores/exp")
    'all_scores'
    """
    names: list[str] = re.findall(r"\bbytes_of_([a-z_]+)", op_name)
    return names[-1] if names else None


def run_count(runs: int, of: int, longest: int | None = None) -> str:
    """The name of a scope for `jax.named_scope`: its loop or branch runs `runs` times in `of` turns. `longest`: in how
    many turns other devices wait for it.

    >>> run_count(9, 16), run_count(8, 22, longest=11)
    ('runs_9_in_16', 'runs_8_in_22_lasts_11')
    """
    return f"runs_{runs}_in_{of}" + ("" if longest is None else f"_lasts_{longest}")


def runs_on_some_devices(op_name: str) -> bool:
    """Whether an operation is in a branch that some devices take while others wait or take another one.

    >>> names = "jit(step)/while/body/runs_8_in_22_lasts_11/dot", "jit(step)/while/body/runs_9_in_16/dot"
    >>> [runs_on_some_devices(name) for name in names]
    [True, False]
    """
    return re.search(r"\bruns_\d+_in_\d+_lasts_\d+\b", op_name) is not None


def mean_runs(name: str, *, time: bool = False) -> Fraction | int:
    """The mean number of runs per turn in the innermost scope of an operation's name, 1 without a scope. With `time`,
    the share of the turns in which other devices wait for it.

    >>> mean_runs("jit(step)/while/body/runs_9_in_16"), mean_runs("jit(step)")
    (Fraction(9, 16), 1)
    >>> [mean_runs("runs_8_in_22_lasts_11", time=time) for time in (False, True)]
    [Fraction(4, 11), Fraction(1, 2)]
    """
    scope = re.search(r"\bruns_(\d+)_in_(\d+)(?:_lasts_(\d+))?$", name)
    if scope is None:
        return 1
    return Fraction(int(scope[3] if time and scope[3] else scope[1]), int(scope[2]))
