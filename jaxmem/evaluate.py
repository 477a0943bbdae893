"""How good it is on documents it never saw: the objective's means over a number of batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import jax
import numpy as np

from jaxmem.data import Loader
from jaxmem.program import Program
from jaxmem.program.objective import Sums, means

Evaluate = Callable[[Any, dict[str, jax.Array]], Sums]


def held_out(program: Program, evaluate: Evaluate, params: Any, batches: int | None) -> dict[str, float]:
    """`evaluate` is the program's, compiled. The same documents in the same order each time; None: all of them."""
    with Loader(program.cfg, split="held_out") as loader:
        return over(program, evaluate, params, islice(loader, batches))


def over(
    program: Program, evaluate: Evaluate, params: Any, batches: Iterable[dict[str, np.ndarray]]
) -> dict[str, float]:
    """Means over batches, and the perplexity where the loss is one of tokens."""
    total: Sums | None = None
    for batch in batches:
        sums = evaluate(params, program.place(batch))
        total = sums if total is None else jax.tree.map(lambda a, b: a + b, total, sums)
    if total is None:
        return {}
    result = {name: float(value) for name, value in means(total).items()}
    if program.cfg.objective.name == "next_token":
        result["perplexity"] = math.exp(min(result["loss"], 700.0))
    return result | {"count": float(total["count"])}
