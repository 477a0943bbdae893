"""Weights from a Hugging Face directory, each part of each tensor straight to the device that holds it.

The host holds one tensor of the file at a time and what is left of the one before, and of each only one device's part:
less than twice the largest tensor, whatever the model. A stack of layers is written layer by layer into an array that
lies on its devices already; transposing and casting happen there too. Beside the weights a device needs its part of
one tensor, twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from jaxmem import models
from jaxmem.config import Decoder
from jaxmem.config.hugging_face import decoder_fields
from jaxmem.hf.names import COMPUTED, Weight, weights
from jaxmem.hf.tensors import Tensors
from jaxmem.quant import QTensor
from jaxmem.sharding import Axes, Layout
from jaxmem.sharding.host import HOST, empty, sent_as, to_host

Spec: TypeAlias = jax.ShapeDtypeStruct | QTensor  # shape, dtype and place of a weight; of what one in codes consists of


def load(
    directory: str | Path,
    *,
    layout: Layout | None = None,
    dtype: DTypeLike = jnp.float32,
    execution: models.Execution = models.Execution(),
) -> models.Decoder:
    """The model of a directory as a network whose weights rest in `dtype`, on one device or as a layout says."""
    cfg = Decoder(**decoder_fields(str(directory)))
    network = nnx.eval_shape(lambda: models.build(cfg, nnx.Rngs(0), execution))
    graphdef: Any
    graphdef, state = nnx.split(network)
    axes = unflatten_dict({path: v.get_metadata()["axes"] for path, v in nnx.to_flat_state(state)})
    one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def place(axes: Axes, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        where = layout.sharding("weights", axes, x.shape) if layout else one
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=where)

    params = nnx.to_pure_dict(state)
    flat_axes = flatten_dict(axes)
    placed = unflatten_dict({path: place(flat_axes[path], x) for path, x in flatten_dict(params).items()})
    merged: Any = nnx.merge(graphdef, read_weights(directory, cfg, placed, axes, layout))
    return merged


def read_weights(
    directory: str | Path,
    cfg: Decoder,
    params: Any,
    axes: Any,
    layout: Layout | None,
    order: Sequence[int] | None = None,
) -> Any:
    """Arrays for `params`, shapes with their dtypes and places. `order`: which layer lies at each place of a stack,
    by default its own; a number beyond the layers is a place that is filled up with zeros."""
    # The two largest, embedding and output projection, not one after the other: jax lets go of a host's array when
    # the next one comes.
    named = sorted(weights(params), key=lambda one: one[0].path[0] != "embedding")
    with Tensors(directory) as tensors:
        known = partial(is_known, cfg)
        return unflatten_dict(read(tensors, named, axes, cfg.layers, layout, order, ignored=known))


def read(
    tensors: Tensors,
    named: Sequence[tuple[Weight, Spec]],
    axes: Any,
    layers: int,
    layout: Layout | None,
    order: Sequence[int] | None,
    config: str = "config.json",
    ignored: Callable[[str], bool] = lambda _: False,
) -> dict[tuple[str, ...], Any]:
    """Arrays by their paths, of exactly these weights; `config` is the file that says their shapes."""
    order = range(layers) if order is None else order
    flat_axes, wanted = flatten_dict(axes), {}
    for weight, spec in named:
        for layer in range(layers) if weight.stacked else (0,):
            wanted[weight.of_layer(layer)] = weight.there(spec.shape)
    tensors.expect(wanted, ignored, config)
    return {
        weight.path: _read(tensors, weight, spec, flat_axes[weight.path], layout, layers, order)
        for weight, spec in named
    }


def is_known(cfg: Decoder, name: str) -> bool:
    """What a file may hold beside the weights: tables that are computed, and the other name of a tied embedding."""
    return name.endswith(COMPUTED) or (cfg.tie_embeddings and name == "lm_head.weight")


def _read(
    tensors: Tensors,
    weight: Weight,
    spec: Spec,
    axes: Axes,
    layout: Layout | None,
    layers: int,
    order: Sequence[int],
) -> Any:
    there = weight.there(spec.shape)
    own = axes[1:] if weight.stacked else axes
    own = own[::-1] if weight.transposed else own
    lies = layout.sharding("weights", own, there) if layout else jax.tree.leaves(_lies(spec))[0]

    def one(layer: int) -> jax.Array:
        return _array(partial(tensors.read, weight.of_layer(layer)), there, lies)

    if not weight.stacked:
        return jax.block_until_ready(_placed(weight.transposed, spec)(one(0)))
    whole = _zeros(spec)()
    write = _written(weight.transposed, spec)
    for place, layer in enumerate(order):
        if layer < layers:
            # Waited for, or the host would hold what it has read ahead.
            whole = jax.block_until_ready(write(whole, one(layer), jnp.asarray(place, jnp.int32)))
    return whole


def _array(read: Callable[[Any], np.ndarray], shape: tuple[int, ...], lies: Any) -> jax.Array:
    """One device's part after the other; devices that hold the same part share one read. Copied at once: what jax
    takes as it is, it keeps for a while."""
    parts: dict[Any, np.ndarray] = {}
    placed = []
    for device, index in lies.addressable_devices_indices_map(shape).items():
        key = tuple(part.indices(size) for part, size in zip(index, shape, strict=True))
        if key not in parts:
            parts = {key: read(index)}
        placed.append(jax.device_put(parts[key], device, may_alias=False))
    return jax.make_array_from_single_device_arrays(shape, lies, jax.block_until_ready(placed))


@cache
def _placed(transposed: bool, spec: Spec) -> Any:
    def place(x: jax.Array) -> Any:
        new = _turned(x, transposed, spec)
        return jax.tree.map(lambda x, own: to_host(x) if _is_away(own) else x, new, spec)

    return jax.jit(place, out_shardings=_lies(spec))


@cache
def _written(transposed: bool, spec: Spec) -> Any:
    def write(whole: Any, one: jax.Array, place: jax.Array) -> Any:
        new = sent_as(_turned(one, transposed, spec), whole)
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_index_in_dim(x, y, place, 0), whole, new)

    return jax.jit(write, donate_argnums=0, out_shardings=_lies(spec))


def _turned(x: jax.Array, transposed: bool, spec: Spec) -> Any:
    x = x.T if transposed else x
    return spec.requantize(x.astype(jnp.float32)) if isinstance(spec, QTensor) else x.astype(spec.dtype)


@cache
def _zeros(spec: Spec) -> Any:
    def zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
        return empty(x.shape, x.dtype) if _is_away(x) else jnp.zeros(x.shape, x.dtype)

    return jax.jit(lambda: jax.tree.map(zeros, spec), out_shardings=_lies(spec))


def _is_away(x: jax.ShapeDtypeStruct) -> bool:
    return bool(x.sharding.memory_kind == HOST)


def _lies(spec: Spec) -> Any:
    return jax.tree.map(lambda x: x.sharding, spec)
