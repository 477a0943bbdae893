"""A decoder as a Hugging Face directory, which transformers opens.

It is written tensor by tensor, with one in host memory at a time. The directory appears when it is complete.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict

from jaxmem import models
from jaxmem.adapters import Lora, TokenRows, base_of, merged_weight, weights_to_merge
from jaxmem.config.hf_values import read_json
from jaxmem.config.hugging_face import DTYPES, config_json, family_of
from jaxmem.errors import UserError
from jaxmem.hf.files import copy_metadata, copy_tokenizer, storage_dtype
from jaxmem.hf.names import FileTensor, FileWeight, WeightPath, decoder_weights
from jaxmem.hf.tensors import DTYPES as NUMPY_DTYPES
from jaxmem.hf.tensors import SHARD, OutputTensor, fuse_tensors, write_tensors
from jaxmem.machine.atomic_directory import atomic_directory
from jaxmem.quant import QTensor
from jaxmem.sharding.host import fetch_from_host
from jaxmem.sharding.weights import is_quantized

# Dimensions of the arrays of an adapter of one matrix.
DIMS = {"a": 2, "b": 2, "bias": 1, "magnitude": 1, "layer_scale": 0, "trained": 2, "tokens": 1}
Adapter = tuple[dict[str, jax.Array], float]  # the weights of an adapter, and its scale


def save(
    model: models.Decoder,
    directory: str | Path,
    *,
    base: str | Path | None = None,
    tokenizer: str | None = None,
    dtype: str | None = None,
    length: int = 2048,
    indices: Sequence[int] | None = None,
    shard: int = SHARD,
) -> None:
    """Writes a model, adapters merged.

    `base`: the directory of the model, whose settings, tokenizer and dtype are kept. `tokenizer`: the value of
    `data.tokenizer`, used if there is no base. `dtype`: float32, float16 or bfloat16; by default the dtype of the base,
    or of the weights. `length`: the longest sequence of the training. `indices`: the position of each layer in a
    stack, by default in order. `shard`: the largest number of bytes per file.
    """
    if jax.process_count() > 1:
        raise UserError("export does not support several processes; run it in one process")
    stored = str(jax.tree.leaves(nnx.to_pure_dict(nnx.state(model)), is_leaf=is_quantized)[0].dtype)
    dtype = dtype or (storage_dtype(base) if base else stored)
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype} is not supported; use {', '.join(DTYPES)}")
    settings = config_json(model.cfg, read_json(Path(base, "config.json")) if base else None, length)
    settings = {key: value for key, value in settings.items() if key not in ("dtype", "torch_dtype")}
    with atomic_directory(directory) as place:
        if base:
            copy_metadata(base, place)
        elif tokenizer:
            from jaxmem.data.tokenizer import tokenizer_for

            copy_tokenizer(tokenizer, place)
            known = tokenizer_for(tokenizer)
            # Without these ids, transformers would use the defaults of the family's class.
            settings |= {"bos_token_id": known.begin[0] if known.begin else None, "eos_token_id": known.end}
        (place / "config.json").write_text(json.dumps({**settings, "torch_dtype": dtype}, indent=2) + "\n")
        tensors = model_tensors(model, dtype, indices)
        write_tensors(place, fuse_tensors(tensors, family_of(settings).fused), shard)


def model_tensors(model: models.Decoder, dtype: str, indices: Sequence[int] | None = None) -> list[OutputTensor]:
    """The tensors of a model, adapters merged. `indices`: the position of each layer in a stack."""
    params, own = base_of(nnx.to_pure_dict(nnx.state(model))), _adapters(model)
    if own.keys() - flatten_dict(params).keys():
        raise UserError("--merge does not support adapter.lora_bias for layers without a bias; use --adapter")
    return output_tensors(decoder_weights(params, indices), dtype, own)


def _adapters(model: models.Decoder) -> dict[WeightPath, Adapter]:
    """The adapters of a model, by the path of the weight that they change."""
    return {
        (*map(str, path[:-1]), name): (own, module.scale)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, Lora | TokenRows)
        for name, own in weights_to_merge(module).items()
    }


def output_tensors(
    weights: Iterable[FileWeight], dtype: str, adapters: Mapping[WeightPath, Adapter] = MappingProxyType({})
) -> list[OutputTensor]:
    """The tensors of weights, with `adapters` merged."""
    numpy = next(one for one in NUMPY_DTYPES.values() if one.name == dtype)
    found = []
    for weight in weights:
        own, scale = adapters.get(weight.path, (None, 0.0))
        convert = partial(_converter(weight.depth, weight.is_transposed, dtype, scale), weight.array, own)
        found += [OutputTensor(one.name, numpy, one.shape, partial(_values, convert, one)) for one in weight.tensors]
    return found


def _values(convert: Callable[[np.ndarray], jax.Array], tensor: FileTensor) -> np.ndarray:
    """The values of a tensor, without the zeros that pad lower ranks of adapters."""
    return np.asarray(convert(np.asarray(tensor.position, np.int32)))[tuple(map(slice, tensor.shape))]


@cache
def _converter(depth: int, is_transposed: bool, dtype: str, scale: float) -> Any:
    def convert(x: jax.Array | QTensor, own: dict[str, jax.Array] | None, place: jax.Array) -> jax.Array:
        def take(x: jax.Array, dims: int) -> jax.Array:
            for dim in range(dims):
                x = jax.lax.dynamic_index_in_dim(x, place[dim], keepdims=False)
            return x

        x = jax.tree.map(lambda x: take(x, depth), x)
        if own is not None and depth:  # an A that experts share has a dimension less
            own = {name: take(array, array.ndim - DIMS[name]) for name, array in own.items()}
        x = fetch_from_host(x)
        full = x.dequantize(jnp.float32) if isinstance(x, QTensor) else x
        full = full if own is None else merged_weight(full, own, scale)
        return (full.T if is_transposed else full).astype(dtype)

    return jax.jit(convert)
