"""The rank and the scale of low-rank adapters, by the layers that they change."""

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from jaxmem.config.names import split_layers
from jaxmem.config.sections import Adapter


class LowRank(NamedTuple):
    """The adapter of one layer: y = x W + scale (x A) B."""

    rank: int
    alpha: float
    scale: float


def low_rank_layers(settings: Adapter, name: str, layers: int | None) -> tuple[LowRank | None, ...]:
    """The adapter of each layer of a stack, or of a single layer (`layers`=None); None for a layer without adapter."""

    alphas = settings.alpha_pattern or {}

    def of(layer: int) -> LowRank | None:
        pattern = _first(settings.targets, name, layer, layers)
        if pattern is None:
            return None
        rank = settings.targets[pattern] if isinstance(settings.targets, Mapping) else settings.rank
        own = _first(alphas, name, layer, layers)
        alpha = settings.alpha if own is None else alphas[own]
        return LowRank(rank, alpha, alpha / (math.sqrt(rank) if settings.rslora else rank))

    return tuple(map(of, range(layers or 1)))


def is_match(pattern: str, name: str, layer: int, layers: int | None) -> bool:
    """
    >>> is_match("blocks[-1:].*.q", "blocks.attention.q", 3, 4), is_match("head", "head", 0, None)
    (True, True)
    """
    plain, some = split_layers(pattern)
    return fnmatchcase(name, plain) and (some is None or (layers is not None and layer in range(layers)[some]))


def _first(patterns: Iterable[str], name: str, layer: int, layers: int | None) -> str | None:
    return next((pattern for pattern in patterns if is_match(pattern, name, layer, layers)), None)
