"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, read and written.

In jaxmem A and B of all layers are arrays [layer, in, r] and [layer, r, out]; in a file each layer has its own tensors,
transposed and without the zeros that pad lower ranks. A file may also contain weights of the base model: those of
`modules_to_save`, biases, or an embedding.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from jaxmem.adapters.trained_parts import base_of
from jaxmem.config import Decoder
from jaxmem.config.adapter import Adapter, LowRank, low_rank_layers
from jaxmem.config.hf_families import text_settings
from jaxmem.config.hf_modules import ALL_MODULES, CONCATENATED, EXPERT, MODULES
from jaxmem.config.hf_values import read_json
from jaxmem.config.hub import cached_id
from jaxmem.config.hugging_face import decoder_fields, family_of
from jaxmem.config.names import count_layers, split_stack
from jaxmem.config.peft import ADAPTER, CONFIG, base_directory
from jaxmem.errors import UserError
from jaxmem.hf.files import copy_chat_template
from jaxmem.hf.names import (
    ADAPTER_PREFIX,
    FileWeight,
    WeightPath,
    base_tensor_name,
    decoder_weights,
    is_ignored,
    module_names,
    stack_indices,
    stacks_of,
    tensor_shapes,
)
from jaxmem.hf.reader import read_arrays, read_weights
from jaxmem.hf.tensors import DTYPES, Tensors, write_tensors
from jaxmem.hf.writer import output_tensors
from jaxmem.machine.files import atomic_directory
from jaxmem.quant.precision import Params
from jaxmem.sharding.trees import replace_at
from jaxmem.step.programs import Program
from jaxmem.typing import JsonDict, Tree

LINEAR = {
    "a": "lora_A.weight", "b": "lora_B.weight", "bias": "lora_B.bias", "magnitude": "lora_magnitude_vector",
}  # fmt: skip
EMBEDDING = {**LINEAR, "a": "lora_embedding_A", "b": "lora_embedding_B"}
RANK_DIMS = {"a": 0, "b": 1}  # the dimension of a tensor in the file that is the rank
FINGERPRINT_ELEMENTS = 2048  # elements of each tensor in the fingerprint
FINGERPRINT_KEY = "base"  # key in the metadata of the safetensors file of an adapter

LowRankStacks = dict[str, tuple[LowRank | None, ...]]  # the adapters of the layers of each module


def _low_rank_stacks(params: Tree, adapter: Adapter, indices: Sequence[int] | None) -> LowRankStacks:
    """The low-rank adapters among the parameters of a decoder."""
    stacks_by_name = {}
    flat = flatten_dict(params)
    total = count_layers(map(".".join, flat))
    for path, array in flat.items():
        if path[-2:] == ("lora", "a"):
            name = ".".join(path[:-2])
            stack_layers = stack_indices(name, flat, indices)
            layers = array.shape[0] if stack_layers is None else len(stack_layers)
            is_stacked = "{}" in ALL_MODULES[split_stack(name)[0]]
            stacks_by_name[name] = low_rank_layers(adapter, name, layers if is_stacked else None, total)
    return stacks_by_name


def _check_exportable(params: Tree, adapters: LowRankStacks, base: str | None, saved: Collection[str]) -> None:
    """Refuses adapters, and weights of the base model with the names `saved`, that PEFT cannot load."""
    settings = {} if base is None else read_json(Path(base).expanduser() / "config.json")
    if text_settings(settings) is not settings:
        raise UserError(
            f"--adapter does not support {base}, which also reads images: its layers have other names in PEFT; use"
            " --merge"
        )
    if base is not None and family_of(settings).fused is CONCATENATED:
        raise UserError(
            f"--adapter does not support {base}, whose queries, keys and values are one matrix (qkv_proj); use --merge"
        )
    if any(EXPERT in name for name in saved):
        raise UserError("PEFT cannot load trained weights of experts; use --merge")
    if "head" not in params and f"{MODULES['embedding']}.weight" in saved:
        raise UserError("PEFT does not tie a trained embedding to the output projection; use --merge")
    stacks = stacks_of(params)
    if experts := [stack for stack, blocks in stacks.items() if "router" in blocks["mlp"]]:
        _check_experts(adapters, params, experts, list(stacks))


def _check_experts(adapters: LowRankStacks, params: Tree, experts: Sequence[str], stacks: Sequence[str]) -> None:
    """Refuses adapters of experts that PEFT cannot load. `experts`: the stacks of layers with experts."""
    by_matrix: dict[str, set[LowRank | None]] = {}  # the adapters of gate, up and down in the MLPs of all layers
    for name in ("gate", "up", "down"):
        if any(f"{stack}.mlp.{name}" in adapters for stack in experts):
            by_matrix[name] = {adapter for stack in stacks for adapter in adapters.get(f"{stack}.mlp.{name}", (None,))}
    if by_matrix and "sinks" in stacks_of(params)[experts[0]]["attention"]:
        raise UserError("PEFT has no format for separate adapters of gate and up of gpt-oss's experts; use --merge")
    if by_matrix.get("gate") != by_matrix.get("up") or len(set().union(*by_matrix.values())) > 1:
        raise UserError(
            "PEFT can store adapters of experts only if gate and up have adapters and all layers have the same rank and"
            " alpha; train with adapter.targets=[blocks.attention.*, blocks.mlp.*], or export with --merge"
        )


def _per_tensor(weight: FileWeight, stack: Sequence[LowRank | None]) -> list[LowRank | None]:
    """For each tensor of a weight in the file, the adapter of its layer. A layer with n experts has n tensors."""
    return [adapter for adapter in stack for _ in range(len(weight.tensors) // len(stack))]


def _adapter_weights(params: Tree, stacks: LowRankStacks, indices: Sequence[int] | None) -> Iterator[FileWeight]:
    """The weights of the adapters of a decoder, without the weights of the base."""
    flat = flatten_dict(params)
    names = module_names(params)
    for path, array in flat.items():
        *module, parent, kind = path
        name = ".".join(module)
        if parent == "prompt":
            yield FileWeight.of(path, array, "prompt_embeddings", is_transposed=False)
        elif parent == "lora" and kind in LINEAR:
            file_name = f"{ADAPTER_PREFIX}{names[name]}.{(EMBEDDING if name == 'embedding' else LINEAR)[kind]}"
            is_shared = kind == "a" and file_name.count("{}") > 1 and array.ndim == 3  # one A of all experts
            if is_shared:
                file_name = file_name.replace("experts.{}", "experts.#")
            weight = FileWeight.of(path, array, file_name, kind in RANK_DIMS, stack_indices(name, flat, indices))
            if is_shared:
                experts = range(flat[(*path[:-1], "b")].shape[1])
                of_experts = [
                    tensor._replace(name=tensor.name.replace("#", str(n))) for tensor in weight.tensors for n in experts
                ]
                weight = replace(weight, tensors=tuple(of_experts))
            dim = RANK_DIMS.get(kind)
            tensors = []
            for tensor, adapter in zip(weight.tensors, _per_tensor(weight, stacks[name]), strict=True):
                if adapter is not None:
                    shape = (adapter.rank if n == dim else size for n, size in enumerate(tensor.shape))
                    tensors.append(tensor._replace(shape=tuple(shape)))
            yield replace(weight, tensors=tuple(tensors))


def _base_weights(
    params: Tree, names: Collection[str], stacks: LowRankStacks, indices: Sequence[int] | None
) -> Iterator[FileWeight]:
    """The weights of the base model whose tensors have these names, with their names in the file of an adapter."""
    for weight in decoder_weights(base_of(params), indices):
        adapted = _per_tensor(weight, stacks.get(".".join(weight.path[:-1]), (None,)))
        tensors = []
        for tensor, is_adapted in zip(weight.tensors, adapted, strict=True):
            if tensor.name in names:
                module, _, kind = tensor.name.rpartition(".")
                name = f"{ADAPTER_PREFIX}{module}{'.base_layer' if is_adapted else ''}.{kind}"
                tensors.append(tensor._replace(name=name))
        if tensors:
            yield replace(weight, tensors=tuple(tensors))


def saved_names(program: Program) -> set[str]:
    """The names of the tensors of the base model that are saved with the adapters: trainable ones, and those that were
    read from the file of an adapter."""
    model = program.model
    directory = program.cfg.adapter.hf
    in_file = set()
    if directory is not None:
        in_file = set(map(base_tensor_name, Tensors(directory, ADAPTER).entries))
    saved = set()
    for weight in decoder_weights(base_of(model.shapes), model.execution.layer_indices):
        saved |= in_file.intersection(tensor.name for tensor in weight.tensors)
        path = tuple(jax.tree_util.DictKey(name) for name in weight.path)
        if path in model.selection.layers:
            layers = model.selection.layers[path]
            saved |= {tensor.name for tensor in weight.tensors if layers is None or tensor.position[0] in layers}
    return saved


def save_adapter(
    params: Tree,
    adapter: Adapter,
    directory: str | Path,
    *,
    base: str | None = None,
    indices: Sequence[int] | None = None,
    saved: Collection[str] = (),
    chat_template: str | None = None,
) -> set[int]:
    """Writes the adapters among the parameters of a decoder in PEFT's format.

    Args:
        params: The parameters of the model.
        adapter: The config's section.
        directory: It must not exist, or be empty.
        base: The directory of the base model.
        indices: The position of each layer in a stack, by default in order.
        saved: The names of the tensors of the base model that are written too.
        chat_template: The value of `data.chat_template`.

    Returns:
        The ranks of the adapters.
    """
    stacks = _low_rank_stacks(params, adapter, indices)
    if adapter.kind != "prompt":  # a prompt names no layers
        _check_exportable(params, stacks, base, saved)
    elif saved:
        raise UserError("PEFT loads only the prompt of such an adapter; train it without optimizer.trainable")
    weights = list(_adapter_weights(params, stacks, indices))
    dtype = str(jax.tree.leaves(weights[0].array)[0].dtype)
    others = list(_base_weights(params, saved, stacks, indices))
    parts = [name.removeprefix(ADAPTER_PREFIX).rpartition(".") for name in tensor_shapes(others)]
    modules = {module for module, _, kind in parts if kind == "weight" and not module.endswith(".base_layer")}
    metadata = {FINGERPRINT_KEY: fingerprint(base)} if base else {}
    with atomic_directory(directory) as place:
        has_biases = any(kind == "bias" for _, _, kind in parts)
        settings = _adapter_json(adapter, stacks, base, sorted(modules), module_names(params), has_biases=has_biases)
        (place / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
        if chat_template:
            copy_chat_template(chat_template, place)
        write_tensors(place, output_tensors([*weights, *others], dtype), single=ADAPTER, metadata=metadata)
    return {adapter.rank for stack in stacks.values() for adapter in stack if adapter is not None}


def _adapter_json(
    adapter: Adapter,
    stacks: LowRankStacks,
    base: str | None,
    saved: Sequence[str],
    names: Mapping[str, str],
    *,
    has_biases: bool,
) -> JsonDict:
    """The adapter_config.json of adapters. `saved`: modules that are saved completely; `names`: of all modules of the
    family; `has_biases`: whether biases of other modules are saved too."""
    common = {"task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True}
    if base is not None and (id_and_commit := cached_id(Path(base))) is not None:
        common["base_model_name_or_path"], common["revision"] = id_and_commit
    if adapter.kind == "prompt":
        settings = {"num_virtual_tokens": adapter.virtual_tokens, "num_transformer_submodules": 1}
        return {"peft_type": "PROMPT_TUNING", **common, **settings}
    modules, parameters = _targets(stacks, names)
    targets = modules | parameters
    ranks = [lora.rank for lora in targets.values()]
    usual = adapter.rank if adapter.rank in ranks else max(ranks)
    # PEFT converts adapters of experts for transformers 5, which has one tensor for gate and up of all experts; it
    # requires that their rank is `r`.
    usual = next((stack[0].rank for path, stack in stacks.items() if names[path].count("{}") > 1 and stack[0]), usual)
    return {
        "peft_type": "LORA",
        **common,
        "r": usual,
        "lora_alpha": _number(adapter.alpha),
        "lora_dropout": adapter.dropout,
        "target_modules": list(modules),
        **({"target_parameters": list(parameters)} if parameters else {}),
        "rank_pattern": {name: lora.rank for name, lora in targets.items() if lora.rank != usual},
        "alpha_pattern": {name: _number(lora.alpha) for name, lora in targets.items() if lora.alpha != adapter.alpha},
        "modules_to_save": list(saved) or None,
        "use_rslora": adapter.rslora,
        "use_dora": adapter.kind == "dora",
        "lora_bias": adapter.lora_bias,
        "bias": "all" if has_biases else "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }


def _targets(stacks: LowRankStacks, names: Mapping[str, str]) -> tuple[dict[str, LowRank], dict[str, LowRank]]:
    """The adapters by the keys of `target_modules`, and by those of `target_parameters`. A key is the last part of a
    module's name or, if the adapters of its layers differ, the complete name.

    PEFT removes linear layers from `target_modules` if their names end like those of experts (dense layers, shared
    experts), so these are parameters.
    """
    of_experts = {name.rpartition(".")[2] for name in names.values() if name.count("{}") > 1}
    alike = {path for path, name in names.items() if name.count("{}") < 2 and name.rpartition(".")[2] in of_experts}
    ends = {path: ".".join(name.split(".")[-2 if path in alike else -1 :]) for path, name in names.items()}
    modules: dict[str, LowRank] = {}
    parameters: dict[str, LowRank] = {}
    for end in dict.fromkeys(ends[path] for path in stacks):
        paths = [path for path, other in ends.items() if other == end]
        with_end = {path: stacks.get(path, (None,)) for path in paths}
        different = {lora for stack in with_end.values() for lora in stack}
        shared = different.pop() if len(different) == 1 else None
        targets = {end: shared} if shared is not None else _by_layer(with_end, names)
        if paths[0] in alike:
            parameters |= {f"{name}.weight": lora for name, lora in targets.items()}
        else:
            modules |= targets
    return modules, parameters


def _by_layer(stacks: LowRankStacks, names: Mapping[str, str]) -> dict[str, LowRank]:
    """The adapters by the complete names of their modules."""
    adapters = {}
    for path, stack in stacks.items():
        layers = split_stack(path)[1] or range(len(stack))
        for layer, lora in zip(layers, stack, strict=False):
            if lora is not None:
                adapters[names[path].format(layer)] = lora
    return adapters


def _number(value: float) -> float:
    return int(value) if value.is_integer() else value


def read_adapter(program: Program) -> dict[WeightPath, Tree]:
    """The weights of the adapters in the directory `adapter.hf`, stored and sharded like those of the program."""
    params = program.spec.state.params
    model = program.model
    adapter = program.cfg.adapter
    base = program.cfg.model
    assert adapter.hf is not None
    assert isinstance(base, Decoder)
    stacks = _low_rank_stacks(params, adapter, model.execution.layer_indices)
    weights = list(_adapter_weights(params, stacks, model.execution.layer_indices))
    known = {*tensor_shapes(decoder_weights(base_of(params))), "lm_head.weight"}
    has_experts = any(module_names(params)[name].count("{}") > 1 for name in stacks)
    if has_experts and adapter.shared_a:
        raise UserError(f"adapter.hf={adapter.hf} does not support adapter.shared_a=true; remove adapter.shared_a")
    tensors = Tensors(adapter.hf, ADAPTER)
    tensors.expect(tensor_shapes(weights), lambda name: base_tensor_name(name) in known, CONFIG)
    return read_arrays(tensors, weights, model.axes, program.layout)


def fingerprint(directory: str | Path) -> str:
    """A fingerprint of the weights of a Hugging Face directory, which is stored with an adapter of this base model.

    It is a hash of the signs of the first 2,048 elements of every tensor: equal for copies in float32, float16 and
    bfloat16, and different after the weights are trained. Only a few rows of each tensor are read.
    """
    cfg = Decoder(**decoder_fields(str(directory)))
    digest = hashlib.blake2b(digest_size=16)
    tensors = Tensors(directory)
    for name, entry in sorted(tensors.entries.items()):
        if not is_ignored(cfg, name) and entry.dtype in DTYPES and entry.shape and 0 not in entry.shape:
            # The first rows, which contain FINGERPRINT_ELEMENTS elements, or the beginning of the first row.
            rows = -(-FINGERPRINT_ELEMENTS // entry.shape[-1])
            sizes = (*(min(rows, size) for size in entry.shape[:-1]), min(FINGERPRINT_ELEMENTS, entry.shape[-1]))
            sample = tensors.read(name, entry.shape, tuple(map(slice, sizes))).astype(np.float32)
            digest.update(f"{name} {entry.shape} ".encode() + np.packbits(np.signbit(sample)).tobytes())
    return digest.hexdigest()


def check_adapter(directory: str | Path, base: str | Path) -> None:
    """Refuses an adapter that was trained on other weights than `base`. An adapter of jaxmem stores the fingerprint of
    its base model; other adapters store its name, and are checked if the name is a directory on this machine."""
    expected = Tensors(directory, ADAPTER).metadata().get(FINGERPRINT_KEY)
    name, local = base_directory(directory)
    if expected is None and local is not None and any(local.glob("*.safetensors")):
        expected = fingerprint(local)
    if expected is not None and expected != fingerprint(base):
        raise UserError(
            f"adapter.hf={directory} was trained on other weights than model.hf={base}; set model.hf to its base"
            f" model{f' ({CONFIG} names {name})' if name else ''}"
        )


def read_base(program: Program) -> Params:
    """The weights of the model from `model.hf`, stored and sharded like those of the program."""
    model = program.cfg.model
    adapter = program.cfg.adapter
    spec = program.model
    assert isinstance(model, Decoder)
    assert model.hf is not None
    if adapter.hf is not None:
        check_adapter(adapter.hf, model.hf)
    base = base_of(program.spec.state.params)
    axes = base_of(spec.axes)
    return read_weights(model.hf, model, base, axes, program.layout, spec.execution.layer_indices, adapter.hf)


def add_adapters(program: Program, base: Params) -> Params:
    """Weights of the model, which are donated, with new adapters or those of `adapter.hf`."""
    params = program.add_adapters(base)
    adapter = program.cfg.adapter
    if adapter.hf is None or adapter.kind == "none":
        return params
    return replace_at(params, read_adapter(program))
