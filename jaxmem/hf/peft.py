"""Adapters as PEFT keeps them: adapter_config.json and adapter_model.safetensors, in and out.

Here A and B of all layers are arrays [layer, in, r] and [layer, r, out]; there each layer has its own, transposed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict

from jaxmem.config import Adapter
from jaxmem.config.peft import CONFIG, adapter_json
from jaxmem.hf.base import ADAPTER, KEY, mark
from jaxmem.hf.load import read
from jaxmem.hf.names import MODULES, Weight
from jaxmem.hf.save import given
from jaxmem.hf.tensors import Tensors, write_tensors
from jaxmem.machine.atomic_directory import written_whole
from jaxmem.sharding import Layout

LINEAR = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
PROMPT = "prompt_embeddings"
TABLE = {"a": "lora_embedding_A", "b": "lora_embedding_B"}


def weights(params: Any) -> Iterator[tuple[Weight, Any]]:
    """Each weight of a decoder's adapters, with its leaf; the model's own are passed over."""
    for path, leaf in flatten_dict(params).items():
        *module, inner, kind = path
        if inner == "prompt":
            yield Weight(path, PROMPT, stacked=False, transposed=False), leaf
        if inner == "lora":
            name = MODULES[".".join(module)]
            called = TABLE if module == ["embedding"] else LINEAR
            full = f"base_model.model.{name}.{called[kind]}"
            yield Weight(path, full, "{}" in name, transposed=kind != "magnitude"), leaf


def save_adapter(
    params: Any,
    adapter: Adapter,
    directory: str | Path,
    *,
    layers: int,
    base: str | None = None,
    order: Sequence[int] | None = None,
) -> dict[str, int]:
    """Writes the adapters among a decoder's parameters. `base`: where its own weights came from. `order`: which layer
    lies at each place of the stack. The rank of each adapter is given back, by the name of its layer."""
    own = list(weights(params))
    ranks = {".".join(weight.path[:-2]): leaf.shape[-1] for weight, leaf in own if weight.path[-1] == "a"}
    known = {KEY: mark(base)} if base else {}
    with written_whole(directory) as place:
        (place / CONFIG).write_text(json.dumps(adapter_json(adapter, ranks, base), indent=2) + "\n")
        dtype = str(jax.tree.leaves([leaf for _, leaf in own])[0].dtype)
        write_tensors(place, given(own, dtype, layers, order), single=ADAPTER, metadata=known)
    return ranks


def read_adapter(
    directory: str | Path,
    params: Any,
    axes: Any,
    layers: int,
    layout: Layout | None,
    order: Sequence[int] | None = None,
) -> dict[tuple[str, ...], Any]:
    """Arrays for the adapters among `params`, shapes with their dtypes and places; a flat dict, by path."""
    with Tensors(directory, ADAPTER) as tensors:
        known = lambda name: ".base_layer." in name  # noqa: E731 - the base's embedding, which PEFT may save as well
        return read(tensors, list(weights(params)), axes, layers, layout, order, CONFIG, known)
