"""How often loops and branches run, written into the names of operations and read from them again.

A compiled module does not say how often a branch is taken or how long a loop with a traced bound is. The code that
knows it opens a named scope with `run_count`; whoever counts FLOPs, bytes or seconds reads it with `mean_runs`.
"""

import re
from fractions import Fraction


def run_count(runs: int, of: int, longest: int | None = None) -> str:
    """The name of a scope for `jax.named_scope`: its loop or branch runs `runs` times in `of` turns. `longest`: in how
    many turns other devices wait for it.

    >>> run_count(9, 16), run_count(8, 22, longest=11)
    ('runs_9_in_16', 'runs_8_in_22_lasts_11')
    """
    return f"runs_{runs}_in_{of}" + ("" if longest is None else f"_lasts_{longest}")


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
