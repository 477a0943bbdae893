"""Tokens after one prompt, one by one."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxmem.inference.generate import Generator, Sampling
from jaxmem.step.programs import Program


def generate(
    program: Program,
    params: Any,
    prompt: np.ndarray,
    count: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    end: int | None = None,
) -> Iterator[int]:
    """Up to `count` tokens after one prompt, one by one; ends after the token `end`."""
    generator = Generator(program, params, Sampling(temperature, seed=seed))
    for tokens in generator([prompt], count, () if end is None else (end,)):
        yield int(tokens[0])
