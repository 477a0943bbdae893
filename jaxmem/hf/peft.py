"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, read and written.

In jaxmem A and B of all layers are arrays [layer, in, r] and [layer, r, out]; in a file each layer has its own tensors,
transposed and without the zeros that pad lower ranks. A file may also contain weights of the base model: those of
`modules_to_save`, biases, or an embedding.
"""

import dataclasses
import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from flax.traverse_util import flatten_dict

from jaxmem.adapters import base_of
from jaxmem.config import Decoder
from jaxmem.config.hf_modules import MODULES
from jaxmem.config.peft import CONFIG, adapter_json, initialization
from jaxmem.config.sections import Adapter
from jaxmem.config.targets import LowRank, low_rank_layers
from jaxmem.hf.adapter_base import KEY, fingerprint
from jaxmem.hf.names import ADAPTER, ADAPTER_PREFIX, FileWeight, WeightPath, base_tensor_name, decoder_weights
from jaxmem.hf.reader import expect_shapes, read_arrays
from jaxmem.hf.tensors import Tensors, write_tensors
from jaxmem.hf.writer import output_tensors
from jaxmem.machine.atomic_directory import atomic_directory
from jaxmem.sharding import Layout
from jaxmem.step import Program

LINEAR = {
    "a": "lora_A.weight", "b": "lora_B.weight", "bias": "lora_B.bias", "magnitude": "lora_magnitude_vector",
}  # fmt: skip
EMBEDDING = {**LINEAR, "a": "lora_embedding_A", "b": "lora_embedding_B"}
PROMPT = "prompt_embeddings"
TOKEN_ROWS = f"{ADAPTER_PREFIX}{MODULES['embedding']}.token_adapter.trainable_tokens_delta"


def adapter_layers(params: Any, adapter: Adapter, layers: int) -> dict[str, tuple[LowRank | None, ...]]:
    """The low-rank adapters among the parameters of a decoder, by module."""
    found = (".".join(path[:-2]) for path in flatten_dict(params) if path[-2:] == ("lora", "a"))
    return {name: low_rank_layers(adapter, name, layers if "{}" in MODULES[name] else None) for name in found}


def adapter_weights(params: Any, adapter: Adapter, layers: int) -> Iterator[tuple[FileWeight, Any]]:
    """(weight, leaf) for each weight of the adapters of a decoder, without the weights of the base."""
    low_rank = adapter_layers(params, adapter, layers)
    for path, leaf in flatten_dict(params).items():
        *module, parent, kind = path
        if parent == "prompt":
            yield FileWeight(path, PROMPT, is_transposed=False), leaf
        if parent == "lora" and kind == "trained":
            yield FileWeight(path, TOKEN_ROWS, is_transposed=False), leaf
        if parent == "lora" and kind in LINEAR:
            name = ".".join(module)
            ranks = tuple(own.rank if own else 0 for own in low_rank[name])
            file_name = f"{ADAPTER_PREFIX}{MODULES[name]}.{(EMBEDDING if module == ['embedding'] else LINEAR)[kind]}"
            yield FileWeight(path, file_name, kind in ("a", "b"), ranks, {"a": 0, "b": 1}.get(kind)), leaf


def base_weights(
    params: Any, names: Collection[str], low_rank: dict[str, tuple[LowRank | None, ...]], layers: int
) -> Iterator[tuple[FileWeight, Any]]:
    """The weights of the base model whose tensors have these names, with their names in the file of an adapter."""
    for weight, leaf in decoder_weights(base_of(params)):
        numbers = range(layers) if weight.is_stacked else range(1)
        selected = [weight.tensor_name(layer) in names for layer in numbers]
        adapted = low_rank.get(".".join(weight.path[:-1]), (None,) * len(selected))
        module, _, kind = weight.name.rpartition(".")
        for infix, has_adapter in (("", False), (".base_layer", True)):
            own = tuple(int(a and (b is not None) == has_adapter) for a, b in zip(selected, adapted, strict=True))
            if any(own):
                name = f"{ADAPTER_PREFIX}{module}{infix}.{kind}"
                yield dataclasses.replace(weight, name=name, ranks=own), leaf


def saved_names(program: Program) -> set[str]:
    """The names of the tensors of the base model that are saved with the adapters: trainable ones, and those that were
    read from the file of an adapter."""
    model, selection, directory = program.cfg.model, program.model.selection, program.cfg.adapter.hf
    assert isinstance(model, Decoder)
    base = list(decoder_weights(base_of(program.model.shapes)))
    found = set()
    for weight, _ in base:
        path = tuple(jax.tree_util.DictKey(name) for name in weight.path)
        if selection is not None and path in selection.layers:
            found |= {weight.tensor_name(layer) for layer in selection.layers[path] or range(model.layers)}
    if directory is not None:
        with Tensors(directory, ADAPTER) as tensors:
            names = {weight.tensor_name(layer) for weight, _ in base for layer in range(model.layers)}
            found |= names & set(map(base_tensor_name, tensors.entries))
    return found


def save_adapter(
    params: Any,
    adapter: Adapter,
    directory: str | Path,
    *,
    layers: int,
    base: str | None = None,
    order: Sequence[int] | None = None,
    saved: Collection[str] = (),
) -> set[int]:
    """Writes the adapters among the parameters of a decoder, and returns their ranks. `base`: the directory of the base
    model. `order`: the layer at each index of the stack. `saved`: the names of the tensors of the base model that are
    written too."""
    low_rank = adapter_layers(params, adapter, layers)
    own = list(adapter_weights(params, adapter, layers))
    others = list(base_weights(params, saved, low_rank, layers))
    modules, biases = set(), False
    for weight, leaf in others:
        module, _, kind = weight.name.removeprefix(ADAPTER_PREFIX).rpartition(".")
        is_complete = kind == "weight" and not module.endswith(".base_layer")
        biases = biases or kind == "bias"
        if is_complete:
            modules |= {module.format(layer) for layer, _ in weight.tensors(leaf.shape, layers)}
    metadata = {KEY: fingerprint(base)} if base else {}
    with atomic_directory(directory) as place:
        settings = adapter_json(adapter, low_rank, base, sorted(modules), has_biases=biases)
        (place / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
        dtype = str(jax.tree.leaves([leaf for _, leaf in own])[0].dtype)
        write_tensors(place, output_tensors([*own, *others], dtype, layers, order), single=ADAPTER, metadata=metadata)
    return {one.rank for stack in low_rank.values() for one in stack if one is not None}


def read_adapter(
    adapter: Adapter,
    params: Any,
    axes: Any,
    layers: int,
    layout: Layout | None,
    order: Sequence[int] | None = None,
    base: str | None = None,
) -> dict[WeightPath, Any]:
    """A flat dict by path of arrays for the adapters among `params`, a nested dict of shapes with dtypes and shardings.
    `adapter.hf` is the directory of the adapter, `base` the directory of the base model."""
    assert adapter.hf is not None
    named = list(adapter_weights(params, adapter, layers))
    known = {weight.tensor_name(layer) for weight, _ in decoder_weights(base_of(params)) for layer in range(layers)}
    with _open(adapter, adapter_layers(params, adapter, layers), base) as tensors:
        is_of_base = lambda name: base_tensor_name(name) in {*known, "lm_head.weight"}  # noqa: E731
        expect_shapes(tensors, named, layers, is_of_base, CONFIG)
        return read_arrays(tensors, named, axes, layout, range(layers) if order is None else order)


def _open(adapter: Adapter, low_rank: dict[str, tuple[LowRank | None, ...]], base: str | None) -> Tensors:
    assert adapter.hf is not None
    method = initialization(adapter.hf)
    if method is None or base is None:
        return Tensors(adapter.hf, ADAPTER)
    from jaxmem.hf.initialized import InitializedTensors

    stacks = ((MODULES[path], stack) for path, stack in low_rank.items())
    scales = {name.format(layer): own.scale for name, stack in stacks for layer, own in enumerate(stack) if own}
    return InitializedTensors(adapter.hf, base, method, scales)
