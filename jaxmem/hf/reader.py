"""Weights from a Hugging Face directory; each shard of a tensor is read directly to its device.

Host memory contains the shard of one tensor for one device at a time, and the rest of the previous shard: less than
twice the largest tensor. The layers of a stack are written one by one into an array on the devices; they are also
transposed and cast there. A device needs memory for its weights and twice its shard of one tensor.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.typing import DTypeLike

from jaxmem.config import networks
from jaxmem.config.check import decoder_errors
from jaxmem.config.hf_families import text_name, text_settings
from jaxmem.config.hf_quantized import scheme_of
from jaxmem.config.hf_values import read_json
from jaxmem.config.hugging_face import decoder_fields, family_of
from jaxmem.config.peft import ADAPTER
from jaxmem.errors import UserError
from jaxmem.hf.names import (
    FileWeight,
    WeightPath,
    base_tensor_name,
    decoder_weights,
    is_ignored,
    tensor_shapes,
)
from jaxmem.hf.quantized import Encoded, mxfp4_weight, take_quantized
from jaxmem.hf.tensors import MXFP4, Tensors
from jaxmem.models.decoder import Decoder
from jaxmem.models.network import Execution
from jaxmem.quant import QTensor
from jaxmem.sharding.host import HOST_MEMORY, send_like, to_host, zeros_on_host
from jaxmem.sharding.layout import Layout
from jaxmem.sharding.table import Axes
from jaxmem.typing import AxesTree, Tree

# Shape, dtype and sharding of a weight, or of each array of a quantized weight.
Spec: TypeAlias = jax.ShapeDtypeStruct | QTensor
FileArray: TypeAlias = jax.Array | QTensor | Encoded  # a tensor as a file stores it
ReadSlice: TypeAlias = Callable[[tuple[slice, ...]], np.ndarray]


def load(
    directory: str | Path,
    *,
    layout: Layout | None = None,
    dtype: DTypeLike = jnp.float32,
    execution: Execution = Execution(),
) -> Decoder:
    """The model of a Hugging Face directory as a network.

    Args:
        directory: Contains config.json and safetensors files.
        layout: Shards the weights; None: they are on one device.
        dtype: Of the stored weights.
        execution: How the network is computed.
    """
    cfg = networks.Decoder(**decoder_fields(str(directory)))
    if errors := [*decoder_errors(cfg)]:
        raise UserError("\n".join(f"{directory}: {error}" for error in errors))
    network = nnx.eval_shape(lambda: Decoder(cfg, nnx.Rngs(0), execution))
    graphdef, state = nnx.split(network)
    axes = {path: v.get_metadata()["axes"] for path, v in nnx.to_flat_state(state)}
    first_device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def spec(path: WeightPath, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        sharding = layout.sharding("weights", axes[path], x.shape) if layout else first_device
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding)

    params = {path: spec(path, x) for path, x in flatten_dict(nnx.to_pure_dict(state)).items()}
    weights = read_weights(directory, cfg, unflatten_dict(params), unflatten_dict(axes), layout)
    return nnx.merge(graphdef, weights)


def read_weights(
    directory: str | Path,
    cfg: networks.Decoder,
    params: Tree,
    axes: AxesTree,
    layout: Layout | None,
    indices: Sequence[int] | None = None,
    adapter: str | Path | None = None,
) -> Tree:
    """Arrays for `params`, a nested dict of shapes with dtypes and shardings. `indices`: the position of each layer in
    a stack (default: 0, 1, ...); other positions are zeros. `adapter`: the directory of an adapter whose file may
    contain some of these weights, which replace those of the model."""
    # The two largest weights, embedding and output projection, are not read one after the other: jax releases a host
    # array only when the next array is copied.
    weights = sorted(decoder_weights(params, indices), key=lambda weight: weight.path[0] != "embedding")
    tensors = Tensors(directory)
    settings = read_json(Path(directory).expanduser() / "config.json")
    if text_settings(settings) is not settings:
        tensors.rename(text_name)
    scheme = scheme_of(settings)
    shapes = _file_shapes(weights, has_mxfp4=scheme is not None and scheme.method == "mxfp4")
    tensors.split(family_of(settings).fused, shapes)
    if adapter is not None:
        tensors.replace(Tensors(adapter, ADAPTER), base_tensor_name)
    quantized = {} if scheme is None else take_quantized(tensors, scheme, shapes)
    others = {name: shape for name, shape in shapes.items() if name not in quantized}
    tensors.expect(others, partial(is_ignored, cfg))
    return unflatten_dict(read_arrays(tensors, weights, axes, layout, quantized))


def _file_shapes(weights: Sequence[FileWeight], *, has_mxfp4: bool) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of these weights. In MXFP4, the matrices of experts are two tensors each."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in tensor_shapes(weights).items():
        if has_mxfp4 and len(shape) == 3:
            count, inputs, outputs = shape
            blocks = count, outputs, inputs // 32
            shapes |= {f"{name}{end}": size for end, size in zip(MXFP4, ((*blocks, 16), blocks), strict=True)}
        else:
            shapes[name] = shape
    return shapes


def read_arrays(
    tensors: Tensors,
    weights: Sequence[FileWeight],
    axes: AxesTree,
    layout: Layout | None,
    quantized: Mapping[str, Callable[[], Encoded]] = MappingProxyType({}),
) -> dict[WeightPath, Tree]:
    """The arrays of these weights, by path. `quantized`: functions that read the quantized ones, by name."""
    flat_axes = flatten_dict(axes)
    return {weight.path: _read(tensors, weight, flat_axes[weight.path], layout, quantized) for weight in weights}


def _read(
    tensors: Tensors,
    weight: FileWeight,
    axes: Axes,
    layout: Layout | None,
    quantized: Mapping[str, Callable[[], Encoded]],
) -> Tree:
    shape = weight.shape
    spec = weight.array
    axes = axes[weight.depth :]
    axes = axes[::-1] if weight.is_transposed else axes

    def on_devices(read: ReadSlice, axes: Axes, shape: tuple[int, ...]) -> jax.Array:
        sharding = layout.sharding("weights", axes, shape) if layout else jax.tree.leaves(_shardings(spec))[0]
        return _on_devices(read, shape, sharding)

    def read(name: str) -> FileArray:
        x: Tree
        if name in quantized:  # each device reads all codes, which are smaller than values
            x = jax.tree.map(lambda x: on_devices(lambda index: x[index], (None,) * x.ndim, x.shape), quantized[name]())
        elif name in tensors.entries:
            x = on_devices(partial(tensors.read, name, shape), axes, shape)
        else:
            parts = {name + end: tensors.entries[name + end].shape for end in MXFP4}
            x = mxfp4_weight(
                *(
                    on_devices(partial(tensors.read, part, ranges), (axes[0], *[None] * (len(ranges) - 1)), ranges)
                    for part, ranges in parts.items()
                )
            )
        if not _are_finite(x.scales if isinstance(x, QTensor) else x):
            raise UserError(f"{tensors.directory}: {name} contains NaN or infinite values; copy it again")
        return x

    if not weight.depth:
        return jax.block_until_ready(_converter(weight.is_transposed, spec)(read(weight.tensors[0].name)))
    stack = _zeros(spec)()
    write = _layer_writer(weight.is_transposed, spec)
    for tensor in weight.tensors:
        # Without waiting, the host would store all tensors that it reads ahead.
        stack = jax.block_until_ready(write(stack, read(tensor.name), jnp.asarray(tensor.position, jnp.int32)))
    return stack


def _on_devices(read: ReadSlice, shape: tuple[int, ...], sharding: Any) -> jax.Array:
    """Reads the shards one device after the other; a shard of several devices is read once. The shard is copied,
    because jax keeps an array that aliases host memory for some time."""
    shards: dict[tuple[tuple[int, ...], ...], np.ndarray] = {}
    arrays = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        key = tuple(part.indices(size) for part, size in zip(index, shape, strict=True))
        if key not in shards:
            shards = {key: read(index)}
        arrays.append(jax.device_put(shards[key], device, may_alias=False))
    return jax.make_array_from_single_device_arrays(shape, sharding, jax.block_until_ready(arrays))


@jax.jit
def _are_finite(tree: Tree) -> jax.Array:
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.isfinite(x).all() for x in floats]).all()


@cache
def _converter(is_transposed: bool, spec: Spec) -> Callable[[FileArray], Tree]:
    """A function that returns a tensor as the array of a weight."""

    def convert(x: FileArray) -> Tree:
        new = _as_spec(x, is_transposed, spec)
        return jax.tree.map(
            lambda x, target: to_host(x) if target.sharding.memory_kind == HOST_MEMORY else x, new, spec
        )

    return jax.jit(convert, out_shardings=_shardings(spec))


@cache
def _layer_writer(is_transposed: bool, spec: Spec) -> Callable[[Tree, FileArray, jax.Array], Tree]:
    """A function that writes the tensor of a layer into a stack, which it donates."""

    def write(stack: Tree, x: FileArray, position: jax.Array) -> Tree:
        new = send_like(_as_spec(x, is_transposed, spec), stack)

        def put(stack: jax.Array, tensor: jax.Array) -> jax.Array:
            tensor = tensor.reshape(*[1] * (stack.ndim - tensor.ndim), *tensor.shape)
            place = [position[dim] if dim < position.size else jnp.int32(0) for dim in range(stack.ndim)]
            return jax.lax.dynamic_update_slice(stack, tensor, place)

        return jax.tree.map(put, stack, new)

    return jax.jit(write, donate_argnums=0, out_shardings=_shardings(spec))


def _as_spec(x: FileArray, is_transposed: bool, spec: Spec) -> Tree:
    """The array, transposed if needed, and cast or quantized; unchanged if it is stored like `spec`."""
    if isinstance(x, Encoded):
        x = x.weight()
        is_transposed = False
    if isinstance(x, QTensor) and isinstance(spec, QTensor):
        x = dataclasses.replace(x, dtype=spec.dtype)
        structures: list[Any] = [jax.tree.structure(tree) for tree in (x, spec)]
        if structures[0] == structures[1]:
            return x
    full = x.dequantize(jnp.float32) if isinstance(x, QTensor) else x
    full = full.T if is_transposed else full
    return spec.requantize(full.astype(jnp.float32)) if isinstance(spec, QTensor) else full.astype(spec.dtype)


@cache
def _zeros(spec: Spec) -> Callable[[], Tree]:
    def zeros(x: Tree) -> jax.Array:
        if x.sharding.memory_kind != HOST_MEMORY:
            return jnp.zeros(x.shape, x.dtype)
        # Each device writes its shard: XLA cannot compile the loop in `zeros_on_host` over a dimension with shards.
        shard = partial(zeros_on_host, x.sharding.shard_shape(x.shape), x.dtype)
        mesh = x.sharding.mesh
        spec = x.sharding.spec
        return jax.shard_map(shard, mesh=mesh, in_specs=(), out_specs=spec, check_vma=False)()

    return jax.jit(lambda: jax.tree.map(zeros, spec), out_shardings=_shardings(spec))


def _shardings(spec: Spec) -> Tree:
    return jax.tree.map(lambda x: x.sharding, spec)
