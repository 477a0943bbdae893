"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, read and written.

Here A and B of all layers are arrays [layer, in, r] and [layer, r, out]; in a file each layer has its own, transposed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict

from jaxmem.config.peft import CONFIG, adapter_json
from jaxmem.config.sections import Adapter
from jaxmem.hf.adapter_base import ADAPTER, KEY, fingerprint
from jaxmem.hf.names import MODULES, FileWeight, WeightPath
from jaxmem.hf.reader import expect_shapes, read_arrays
from jaxmem.hf.tensors import Tensors, write_tensors
from jaxmem.hf.writer import output_tensors
from jaxmem.machine.atomic_directory import atomic_directory
from jaxmem.sharding import Layout

LINEAR = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
EMBEDDING = {"a": "lora_embedding_A", "b": "lora_embedding_B"}
PROMPT = "prompt_embeddings"


def adapter_weights(params: Any) -> Iterator[tuple[FileWeight, Any]]:
    """Each weight of a decoder's adapters, with its leaf; those of the base are left out."""
    for path, leaf in flatten_dict(params).items():
        *module, parent, kind = path
        if parent == "prompt":
            yield FileWeight(path, PROMPT, is_transposed=False), leaf
        if parent == "lora":
            suffix = (EMBEDDING if module == ["embedding"] else LINEAR)[kind]
            name = f"base_model.model.{MODULES['.'.join(module)]}.{suffix}"
            yield FileWeight(path, name, is_transposed=kind != "magnitude"), leaf


def save_adapter(
    params: Any,
    adapter: Adapter,
    directory: str | Path,
    *,
    layers: int,
    base: str | None = None,
    order: Sequence[int] | None = None,
) -> dict[str, int]:
    """Writes the adapters among a decoder's parameters; returns the rank of each, by the name of its layer. `base`: the
    directory of the base model. `order`: the layer at each index of the stack."""
    own = list(adapter_weights(params))
    ranks = {".".join(weight.path[:-2]): leaf.shape[-1] for weight, leaf in own if weight.path[-1] == "a"}
    metadata = {KEY: fingerprint(base)} if base else {}
    with atomic_directory(directory) as place:
        (place / CONFIG).write_text(json.dumps(adapter_json(adapter, ranks, base), indent=2) + "\n")
        dtype = str(jax.tree.leaves([leaf for _, leaf in own])[0].dtype)
        write_tensors(place, output_tensors(own, dtype, layers, order), single=ADAPTER, metadata=metadata)
    return ranks


def read_adapter(
    directory: str | Path,
    params: Any,
    axes: Any,
    layers: int,
    layout: Layout | None,
    order: Sequence[int] | None = None,
) -> dict[WeightPath, Any]:
    """Arrays for the adapters among `params`, a nested dict of shapes with dtypes and shardings; a flat dict, by
    path."""
    named = list(adapter_weights(params))
    with Tensors(directory, ADAPTER) as tensors:
        # PEFT may save the base's embedding as well.
        expect_shapes(tensors, named, layers, lambda name: ".base_layer." in name, CONFIG)
        return read_arrays(tensors, named, axes, layout, range(layers) if order is None else order)
