"""Batches on the devices: of which rows of them a process's devices hold something, and how they get there."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import numpy as np

from jaxmem.config import Config, Decoder
from jaxmem.models.exchange import places
from jaxmem.sharding import Layout

Spec = Mapping[str, jax.ShapeDtypeStruct]  # shape, dtype and place of every array of a batch


def rows(spec: Spec) -> range:
    """The columns of the global batch of which this process's devices hold something."""
    one = next(iter(spec.values()))
    held = one.sharding.addressable_devices_indices_map(one.shape).values()
    starts, stops, _ = zip(*(index[1].indices(one.shape[1]) for index in held), strict=True)
    return range(min(starts), max(stops))


def place(cfg: Config, layout: Layout, own: range, spec: Spec, batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Of `own` rows, whole in all other dimensions. A time split over `context` is brought into the order in which
    every device has the same work: losses add up over tokens, whatever their order."""
    if isinstance(cfg.model, Decoder):
        order = places(layout, spec["inputs"].shape[2], cfg.model.window)
        batch = batch if order is None else {name: x[..., order] for name, x in batch.items()}

    def part(x: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
        over, wanted, *rest = index
        start, stop, _ = wanted.indices(own.start + x.shape[1])
        return x[over, start - own.start : stop - own.start, *rest]

    return {
        name: jax.make_array_from_callback(one.shape, one.sharding, partial(part, batch[name]))
        for name, one in spec.items()
    }
