"""A decoder as a Hugging Face directory, which transformers opens.

It is written tensor by tensor, with one in host memory at a time. The directory appears when it is complete.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict

from jaxmem.adapters.low_rank import Lora, merged_weight, weights_to_merge
from jaxmem.adapters.trained_parts import base_of
from jaxmem.config.hf_values import read_json
from jaxmem.config.hub import is_tokenizer_of
from jaxmem.config.hugging_face import DTYPES, config_json, family_of
from jaxmem.errors import UserError
from jaxmem.hf.files import copy_chat_template, copy_metadata, copy_tokenizer, storage_dtype
from jaxmem.hf.names import FileTensor, FileWeight, WeightPath, decoder_weights
from jaxmem.hf.quantized import mxfp4_tensors
from jaxmem.hf.tensors import MAX_FILE_BYTES, MXFP4, OutputTensor, fuse_tensors, refuse_infinite, write_tensors
from jaxmem.machine.files import atomic_directory
from jaxmem.models.decoder import Decoder
from jaxmem.quant import QTensor
from jaxmem.sharding.host import fetch_from_host
from jaxmem.sharding.weights import is_encoded
from jaxmem.typing import JsonDict

# Dimensions of the arrays of an adapter of one matrix.
DIMS = {"a": 2, "b": 2, "bias": 1, "magnitude": 1, "layer_scale": 0}
Adapter = tuple[dict[str, jax.Array], float]  # the weights of an adapter, and its scale


def save(
    model: Decoder,
    directory: str | Path,
    *,
    base: str | Path | None = None,
    tokenizer: str | None = None,
    chat_template: str | None = None,
    dtype: str | None = None,
    length: int | None = None,
    indices: Sequence[int] | None = None,
    ends: Collection[int] = (),
) -> None:
    """Writes a model, adapters merged. If the base has experts in MXFP4, `dtype` is None and no expert has an adapter,
    the experts of the model are written as they are stored.

    Args:
        model: The network with its weights.
        directory: It must not exist, or be empty.
        base: The directory of the model, whose settings, tokenizer and dtype are kept.
        tokenizer: The value of `data.tokenizer`; by default the tokenizer of the base.
        chat_template: The value of `data.chat_template`.
        dtype: float32, float16 or bfloat16; by default the dtype of the base, or of the weights.
        length: The longest sequence of a training; a smaller `max_position_embeddings` of the base becomes this value.
        indices: The position of each layer in a stack, by default in order.
        ends: Tokens that end an answer, in addition to those of the tokenizer.
    """
    if jax.process_count() > 1:
        raise UserError("export does not support several processes; run it in one process")
    stored = str(jax.tree.leaves(nnx.to_pure_dict(nnx.state(model)), is_leaf=is_encoded)[0].dtype)
    settings_of_base = read_json(Path(base, "config.json")) if base else None
    quantization = (settings_of_base or {}).get("quantization_config") or {}
    keeps_mxfp4 = dtype is None and quantization.get("quant_method") == "mxfp4" and _has_only_mxfp4_experts(model)
    dtype = dtype or (storage_dtype(base) if base else stored)
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype} is not supported; use {', '.join(DTYPES)}")
    settings = config_json(model.cfg, settings_of_base, length)
    settings = {key: value for key, value in settings.items() if key not in ("dtype", "torch_dtype")}
    settings |= {"quantization_config": quantization} if keeps_mxfp4 else {}
    with atomic_directory(directory) as place:
        if base and (not tokenizer or is_tokenizer_of(tokenizer, base)):
            copy_metadata(base, place)
        else:
            # Without these ids, transformers would use the defaults of the family's class. The generation settings of
            # the base have ids of its tokenizer, so they are not copied.
            settings |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
            if tokenizer:
                from jaxmem.data.tokenizer import tokenizer_for

                copy_tokenizer(tokenizer, place)
                known = tokenizer_for(tokenizer)
                settings |= {"bos_token_id": known.begin[0] if known.begin else None, "eos_token_id": known.end}
                ends = [*sorted(known.ends), *ends]
        if chat_template:
            copy_chat_template(chat_template, place)
        _write_json(place / "config.json", {**_with_ends(settings, ends), "torch_dtype": dtype})
        if ends and (file := place / "generation_config.json").is_file():
            _write_json(file, _with_ends(read_json(file), ends))
        tensors = model_tensors(model, dtype, indices, keeps_mxfp4=keeps_mxfp4)
        write_tensors(place, fuse_tensors(tensors, family_of(settings).fused), MAX_FILE_BYTES)


def _with_ends(settings: JsonDict, ends: Iterable[int]) -> JsonDict:
    """The settings with these tokens, too, in `eos_token_id`."""
    before = settings.get("eos_token_id")
    known = before if isinstance(before, list) else [] if before is None else [before]
    added = [end for end in dict.fromkeys(ends) if end not in known]
    return {**settings, "eos_token_id": [*known, *added]} if added else settings


def _write_json(file: Path, settings: JsonDict) -> None:
    file.write_text(json.dumps(settings, indent=2) + "\n")


def _has_only_mxfp4_experts(model: Decoder) -> bool:
    """Whether all matrices of experts are stored in MXFP4, and have no adapters."""
    adapters = _adapters(model)
    params = base_of(nnx.to_pure_dict(nnx.state(model)))
    experts = [weight for weight in decoder_weights(params) if _is_expert(weight)]
    stored = [weight.array.format for weight in experts if isinstance(weight.array, QTensor)]
    return stored == ["mxfp4"] * len(experts) and not any(weight.path in adapters for weight in experts)


def _is_expert(weight: FileWeight) -> bool:
    """Whether one tensor has the matrices of all experts of a layer (gpt-oss)."""
    return len(weight.shape) == 3


def model_tensors(
    model: Decoder, dtype: str, indices: Sequence[int] | None = None, *, keeps_mxfp4: bool = False
) -> list[OutputTensor]:
    """The tensors of a model, adapters merged. `indices`: the position of each layer in a stack, by default in order;
    `keeps_mxfp4`: whether experts are written as they are stored."""
    params = base_of(nnx.to_pure_dict(nnx.state(model)))
    adapters = _adapters(model)
    if model.prompt is not None:
        raise UserError("the model has a soft prompt, which no weight can contain; use hf.save_adapter, or --adapter")
    if adapters.keys() - flatten_dict(params).keys():
        raise UserError("--merge does not support adapter.lora_bias for layers without a bias; use --adapter")
    tensors = []
    for weight in decoder_weights(params, indices):
        if keeps_mxfp4 and _is_expert(weight):
            tensors += _mxfp4_tensors(weight)
        else:
            tensors += output_tensors([weight], dtype, adapters)
    return tensors


def _mxfp4_tensors(weight: FileWeight) -> list[OutputTensor]:
    tensors = []
    for tensor in weight.tensors:
        count, inputs, outputs = tensor.shape
        for part, (end, dims) in enumerate(zip(MXFP4, ((16,), ()), strict=True)):
            values = partial(_mxfp4_values, weight, tensor, part)
            shape = (count, outputs, inputs // 32, *dims)
            tensors.append(OutputTensor(tensor.name + end, np.dtype(np.uint8), shape, values))
    return tensors


def _mxfp4_values(weight: FileWeight, tensor: FileTensor, part: int) -> np.ndarray:
    return np.asarray(_stored_layer(weight.array, np.asarray(tensor.position, np.int32), weight.depth)[part])


@partial(jax.jit, static_argnums=2)
def _stored_layer(q: QTensor, place: jax.Array, depth: int) -> tuple[jax.Array, jax.Array]:
    return mxfp4_tensors(fetch_from_host(jax.tree.map(lambda x: _take(x, place, depth), q)))


def _adapters(model: Decoder) -> dict[WeightPath, Adapter]:
    """The adapters of a model, by the path of the weight that they change."""
    adapters = {}
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Lora):
            for name, weights in weights_to_merge(module).items():
                adapters[(*map(str, path[:-1]), name)] = weights, module.scale
    return adapters


def output_tensors(
    weights: Iterable[FileWeight], dtype: str, adapters: Mapping[WeightPath, Adapter] = MappingProxyType({})
) -> list[OutputTensor]:
    """The tensors of weights, with `adapters` merged."""
    tensors = []
    for weight in weights:
        adapter, scale = adapters.get(weight.path, (None, 0.0))
        convert = partial(_converter(weight.depth, weight.is_transposed, dtype, scale), weight.array, adapter)
        tensors += [
            OutputTensor(tensor.name, jnp.dtype(dtype), tensor.shape, partial(_values, convert, tensor))
            for tensor in weight.tensors
        ]
    return tensors


def _values(convert: Callable[[np.ndarray], jax.Array], tensor: FileTensor) -> np.ndarray:
    """The values of a tensor, without the zeros that pad lower ranks of adapters."""
    values = np.asarray(convert(np.asarray(tensor.position, np.int32)))[tuple(map(slice, tensor.shape))]
    return refuse_infinite(tensor.name, values)


@cache
def _converter(depth: int, is_transposed: bool, dtype: str, scale: float) -> Callable[..., jax.Array]:
    def convert(x: jax.Array | QTensor, adapter: dict[str, jax.Array] | None, place: jax.Array) -> jax.Array:
        x = jax.tree.map(lambda x: _take(x, place, depth), x)
        if adapter is not None:  # an A that experts share has a dimension less
            adapter = {name: _take(x, place, min(depth, x.ndim - DIMS[name])) for name, x in adapter.items()}
        x = fetch_from_host(x)
        full = x.dequantize(jnp.float32) if isinstance(x, QTensor) else x
        full = full if adapter is None else merged_weight(full, adapter, scale)
        return (full.T if is_transposed else full).astype(dtype)

    return jax.jit(convert)


def _take(x: jax.Array, place: jax.Array, dims: int) -> jax.Array:
    """The entry at `place` of a stack, whose first `dims` dimensions are layers and experts."""
    for dim in range(dims):
        x = jax.lax.dynamic_index_in_dim(x, place[dim], keepdims=False)
    return x
