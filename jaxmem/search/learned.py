"""What compiled configs tell of those that are not: by how much their estimates are off, and how sure that is.

The logarithm of compiled to estimated is taken for a Gaussian process over a config's settings (Rasmussen and
Williams, 2006): all estimates are off alike, those that share a setting (a recomputation policy, an axis of the mesh)
more so, those that share nearly all of them most. So the first compile of a kind corrects the whole kind. Of what to
compile next it tells what is to be gained (Jones et al., 1998). Milliseconds, for thousands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Variances: of what all have in common, of what goes with each setting, of what goes with all of them together.
COMMON, SHARED, ALIKE = 0.02, 0.06, 0.005
NEAR = 0.6  # of ALIKE what is left for each setting that differs
NOISE = 1e-4  # what settings do not tell
SPREAD = math.sqrt(COMMON + SHARED + ALIKE)  # of an estimate that nothing is known of


class Alike:
    """How much each pair of configs has in common."""

    def __init__(self, settings: Sequence[Mapping[str, Any]]) -> None:
        codes: list[dict[str, int]] = [{} for _ in settings[0]]
        self._codes = np.array(
            [[known.setdefault(repr(value), len(known)) for known, value in zip(codes, one.values(), strict=True)]
             for one in settings]
        )  # fmt: skip

    def __call__(self, others: Sequence[int]) -> np.ndarray:
        """[all, others]"""
        same = self._codes[:, None, :] == self._codes[None, list(others), :]
        differ = same.shape[2] - same.sum(axis=2)
        return COMMON + SHARED * same.mean(axis=2) + ALIKE * NEAR**differ


def learned(alike: Alike, off: Mapping[int, float]) -> tuple[list[float], list[float]]:
    """Of every config the logarithm of the factor by which its estimate is off, as far as those in `off`, by their
    places, tell it; and its standard deviation."""
    told = list(off)
    to_all = alike(told)
    own = to_all[told] + NOISE * np.eye(len(told))
    solved = np.linalg.solve(own, np.column_stack([list(off.values()), to_all.T]))
    left = SPREAD**2 - np.einsum("ak,ka->a", to_all, solved[:, 1:])
    return (to_all @ solved[:, 0]).tolist(), np.sqrt(np.maximum(left, NOISE)).tolist()


def chance(below: float, spread: float) -> float:
    """That a normal variable is less than its mean + `below`.

    >>> chance(0.0, 0.1), round(chance(0.1, 0.1), 3)
    (0.5, 0.841)
    """
    return (1 + math.erf(below / spread / math.sqrt(2))) / 2


def gain(room: float, spread: float) -> float:
    """By how much a normal variable is below a mark in the mean, `room` above its own mean, where it is above it by 0.

    >>> round(gain(0.0, 0.1), 4), round(gain(1.0, 0.1), 4), round(gain(-1.0, 0.1), 4)
    (0.0399, 1.0, 0.0)
    """
    at = room / spread
    return room * chance(room, spread) + spread * math.exp(-at * at / 2) / math.sqrt(2 * math.pi)
