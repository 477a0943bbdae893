"""A decoder as a Hugging Face directory, which transformers opens.

Written tensor by tensor: the host holds one at a time. The directory appears when it is whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmem import models
from jaxmem.adapters import Lora, base_of, merged
from jaxmem.config.hugging_face import config_json, read_json
from jaxmem.data import tokenizer_for
from jaxmem.errors import UserError
from jaxmem.hf.beside import DTYPES, copy_beside, copy_tokenizer, storage_dtype
from jaxmem.hf.names import Path as Path_
from jaxmem.hf.names import Weight, weights
from jaxmem.hf.tensors import DTYPES as NUMPY
from jaxmem.hf.tensors import SHARD, Given, write_tensors
from jaxmem.machine.atomic_directory import written_whole
from jaxmem.quant import QTensor
from jaxmem.sharding.host import brought
from jaxmem.sharding.weights import is_quantized


def save(
    model: models.Decoder,
    directory: str | Path,
    *,
    base: str | Path | None = None,
    tokenizer: str | None = None,
    dtype: str | None = None,
    length: int = 2048,
    order: Sequence[int] | None = None,
    shard: int = SHARD,
) -> None:
    """Writes a model. `base`: the directory that it came from, whose settings, tokenizer and dtype are kept.

    `tokenizer`: what `data.tokenizer` says, where there is no base. `dtype`: float32, float16 or bfloat16; by default
    the base's, or that of the weights. `length`: the positions that it was trained on. `order`: which layer lies at
    each place of the stack. `shard`: the most bytes of a file.
    """
    if jax.process_count() > 1:
        raise UserError("a Hugging Face directory is written by one process; start a single one")
    params, added = base_of(nnx.to_pure_dict(nnx.state(model))), _adapters(model)
    rest = str(jax.tree.leaves(params, is_leaf=is_quantized)[0].dtype)
    kept = dtype or (storage_dtype(base) if base else rest)
    if kept not in DTYPES:
        raise UserError(f"dtype {kept!r} is not one of {', '.join(DTYPES)}")
    settings = config_json(model.cfg, read_json(Path(base, "config.json")) if base else None, length)
    settings = {key: value for key, value in settings.items() if key not in ("dtype", "torch_dtype")}
    with written_whole(directory) as place:
        if base:
            copy_beside(base, place)
        elif tokenizer:
            copy_tokenizer(tokenizer, place)
            known = tokenizer_for(tokenizer)
            # Named, or the family's class would put numbers of its own there.
            settings |= {"bos_token_id": known.begin[0] if known.begin else None, "eos_token_id": known.end}
        (place / "config.json").write_text(json.dumps({**settings, "torch_dtype": kept}, indent=2) + "\n")
        write_tensors(place, given(list(weights(params)), kept, model.cfg.layers, order, added), shard)


Added = tuple[dict[str, jax.Array], float]  # an adapter's weights, and how much they count


def _adapters(model: models.Decoder) -> dict[Path_, Added]:
    """By the path of the weight that they change."""
    found: dict[Path_, Added] = {}
    for path, module in nnx.iter_modules(model):
        if isinstance(module, Lora):
            own = {name: x for name, x in nnx.to_pure_dict(nnx.state(module)).items() if x is not None}
            found[*map(str, path[:-1]), "weight"] = own, module.scale
    return found


def given(
    named: Sequence[tuple[Weight, Any]],
    dtype: str,
    layers: int,
    order: Sequence[int] | None,
    added: Mapping[Path_, Added] = MappingProxyType({}),
) -> list[Given]:
    """What is to be written of weights, those of adapters `added` to them. `order`: which layer lies at each place of a
    stack."""
    places = {layer: place for place, layer in enumerate(range(layers) if order is None else order)}
    numpy = next(one for one in NUMPY.values() if one.name == dtype)
    found = []
    for weight, leaf in named:
        shape = weight.there(leaf.shape)
        for layer in range(layers) if weight.stacked else (0,):
            values = partial(_values, weight, leaf, added.get(weight.path), places[layer], dtype)
            found.append(Given(weight.of_layer(layer), numpy, shape, values))
    return found


def _values(weight: Weight, leaf: jax.Array | QTensor, added: Added | None, place: int, dtype: str) -> np.ndarray:
    own, scale = added or (None, 0.0)
    return np.asarray(_there(weight.stacked, weight.transposed, dtype, scale)(leaf, own, np.int32(place)))


@cache
def _there(stacked: bool, transposed: bool, dtype: str, scale: float) -> Any:
    def turned(x: jax.Array | QTensor, own: dict[str, jax.Array] | None, place: jax.Array) -> jax.Array:
        if stacked:
            x, own = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, place, keepdims=False), (x, own))
        x = brought(x)
        one = x.dequantize(jnp.float32) if isinstance(x, QTensor) else x
        one = one if own is None else merged(one, own, scale)
        return (one.T if transposed else one).astype(dtype)

    return jax.jit(turned)
