"""The arrays of a batch: their shapes, the rows of each process, and their transfer to the devices."""

from collections.abc import Mapping
from functools import partial

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxmem.config import Config
from jaxmem.config.networks import ImageInput, UserModel

Array = tuple[tuple[int, ...], DTypeLike, tuple[str | None, ...]]  # shape, dtype, logical axes
Spec = Mapping[str, jax.ShapeDtypeStruct]  # shape, dtype and sharding of every array of a batch


def batch_spec(cfg: Config) -> dict[str, Array]:
    """Shape, dtype and logical axes of each array of the global batch."""
    rows = (cfg.batch.accumulate, cfg.batch.global_size // cfg.batch.accumulate)
    axes = ("accumulate", "batch")
    mask: Array = (rows, np.float32, axes)
    if cfg.objective.name == "own" and cfg.user.data is not None:
        user_arrays: dict[str, Array] = {
            name: ((*rows, *x.shape[1:]), jax.dtypes.canonicalize_dtype(x.dtype), (*axes, *[None] * (x.ndim - 1)))
            for name, x in cfg.user.data.first.items()
        }
        return {"mask": mask, **user_arrays}
    if cfg.reads_text:
        tokens: Array = ((*rows, cfg.data.sequence_length), np.int32, (*axes, "time"))
        arrays = dict.fromkeys(("inputs", "targets", "positions", "segment_ids"), tokens)
        arrays["mask"] = (tokens[0], np.float32, tokens[2])
        return arrays | {"reference": mask} if cfg.objective.name == "dpo" else arrays
    model = ImageInput() if isinstance(cfg.model, UserModel) else cfg.model
    size = model.image_size  # type: ignore[union-attr]
    channels = model.channels  # type: ignore[union-attr]
    dtype = np.float32 if getattr(cfg.model, "inputs", "numbers") == "numbers" else np.int32  # numbers, or categories
    images: Array = ((*rows, size, size, channels), dtype, (*axes, "height", "width", "channels"))
    if cfg.objective.name == "contrastive":
        return {"inputs": images, "pairs": images, "mask": mask}
    labels: Array = (rows, np.int32 if cfg.objective.name in ("classify", "own") else np.float32, axes)
    return {"inputs": images, "targets": labels, "mask": mask}


def rows(spec: Spec) -> range:
    """The rows of the global batch on the devices of this process."""
    first_array = next(iter(spec.values()))
    indices = first_array.sharding.addressable_devices_indices_map(first_array.shape).values()
    starts, stops, _ = zip(*(index[1].indices(first_array.shape[1]) for index in indices), strict=True)
    return range(min(starts), max(stops))


def place(
    order: np.ndarray | None, rows_here: range, spec: Spec, batch: Mapping[str, np.ndarray]
) -> dict[str, jax.Array]:
    """The arrays of a batch on their devices. `rows_here`: the rows of this process, which `batch` has. `order`: the
    position at each index of the sequence; losses are sums over tokens, so their order does not matter."""
    if order is not None:  # reference log-probabilities have a value per row and no sequence dimension
        batch = {name: x[..., order] if x.ndim == 3 else x for name, x in batch.items()}

    def shard(x: np.ndarray, index: tuple[slice, ...]) -> np.ndarray:
        micro_batches, wanted, *other_dims = index
        start, stop, _ = wanted.indices(rows_here.start + x.shape[1])
        return x[micro_batches, start - rows_here.start : stop - rows_here.start, *other_dims]

    return {
        name: jax.make_array_from_callback(spec_of_array.shape, spec_of_array.sharding, partial(shard, batch[name]))
        for name, spec_of_array in spec.items()
    }
