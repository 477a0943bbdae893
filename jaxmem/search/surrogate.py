"""A surrogate of the compiler: a Gaussian process that corrects the estimates of configs that are not compiled.

It models log(compiled / estimated) as a function of the settings of a config (Rasmussen and Williams, 2006), with a
covariance that is the sum of a constant (all estimates share an error), a term for each setting in common (a recompute
policy, a mesh axis), and a term for nearly identical configs. So one compiled config corrects the estimates of all
similar configs. `expected_improvement` (Jones et al., 1998) chooses the config to compile next. This takes milliseconds
for thousands of configs. The regressor of scikit-learn supports only numbers and would need the same covariance.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# Variances of the terms: of the error of all configs; in proportion to the share of equal settings; of nearly identical
# configs.
COMMON_VARIANCE, SHARED_VARIANCE, NEAR_VARIANCE = 0.02, 0.06, 0.005
DECAY = 0.6  # factor of NEAR_VARIANCE for each setting that differs
NOISE_VARIANCE = 1e-4  # variance that settings do not explain
PRIOR_STD = math.sqrt(COMMON_VARIANCE + SHARED_VARIANCE + NEAR_VARIANCE)


def encode(settings: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """The settings of each config as numbers that are equal for equal values, [configs, settings]."""
    known: dict[str, int] = {}
    return np.array([[known.setdefault(repr(value), len(known)) for value in one.values()] for one in settings])


def posterior(encoded: np.ndarray, log_errors: Mapping[int, float]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of log(compiled / estimated) for every config. `encoded`: the result of `encode`.
    `log_errors`: the known values, by index."""
    observed = list(log_errors)
    same = encoded[:, None, :] == encoded[None, observed, :]
    differ = same.shape[2] - same.sum(axis=2)
    to_all = (
        COMMON_VARIANCE + SHARED_VARIANCE * same.mean(axis=2) + NEAR_VARIANCE * DECAY**differ
    )  # covariance [configs, observed]
    own = to_all[observed] + NOISE_VARIANCE * np.eye(len(observed))
    solved = np.linalg.solve(own, np.column_stack([list(log_errors.values()), to_all.T]))
    variance = PRIOR_STD**2 - np.einsum("ak,ka->a", to_all, solved[:, 1:])
    return (to_all @ solved[:, 0]).tolist(), np.sqrt(np.maximum(variance, NOISE_VARIANCE)).tolist()


def probability_below(margin: float, std: float) -> float:
    """P(x < mean + margin) of a normal variable.

    >>> probability_below(0.0, 0.1), round(probability_below(0.1, 0.1), 3)
    (0.5, 0.841)
    """
    return (1 + math.erf(margin / std / math.sqrt(2))) / 2


def expected_improvement(margin: float, std: float) -> float:
    """E[max(0, mean + margin - x)] of a normal variable.

    >>> [round(expected_improvement(margin, 0.1), 4) for margin in (0.0, 1.0, -1.0)]
    [0.0399, 1.0, 0.0]
    """
    z = margin / std
    return margin * probability_below(margin, std) + std * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
