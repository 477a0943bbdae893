"""The tensors of a GGUF file under the names and in the order of a Hugging Face file.

A slice is decoded when it is read: only its rows, or for an expert only this expert. Decoded values are float32.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxmem.config import Decoder
from jaxmem.config.gguf import GgufTensor, read_gguf
from jaxmem.config.hf_modules import CONCATENATED, names_of
from jaxmem.config.hf_values import read_json
from jaxmem.config.hugging_face import decoder_fields, family_of
from jaxmem.errors import UserError

if TYPE_CHECKING:
    from gguf import TensorNameMap

# Tensors from which config.json was made.
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
EXPERTS = tuple(f"experts.{name}_proj{end}" for name in ("gate", "up", "down") for end in ("", "_bias"))
KEYS_AND_VALUES = "kv_b_proj"
PERMUTED = "llama"  # the architecture in which the two elements of a rotated pair are next to each other


def tensor_names(architecture: str, layers: int) -> "TensorNameMap":
    """Maps names of modules in a Hugging Face file to those in a GGUF file."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    [number] = [number for number, name in MODEL_ARCH_NAMES.items() if name == architecture]
    return get_tensor_name_map(number, layers)


@dataclass(frozen=True)
class GgufSlice:
    """A tensor, or an expert of it, with the methods of a slice of the library `safetensors`."""

    tensor: GgufTensor
    shape: tuple[int, ...]
    expert: int | None = None
    heads: int = 0  # number of heads whose rows alternate between their halves; 0: the rows are in order
    is_transposed: bool = False  # the last two dimensions are in the other order
    offset: float = 0.0  # added to the values

    def get_dtype(self) -> str:
        return "F32"

    def get_shape(self) -> tuple[int, ...]:
        return self.shape

    def __getitem__(self, index: tuple[Any, ...]) -> np.ndarray:
        from gguf import dequantize

        data = self.tensor.data if self.expert is None else self.tensor.data[self.expert]
        data = data.reshape(*self._stored(self.shape)[:-1], -1)
        if self.heads:
            in_file = np.arange(self.shape[0]).reshape(self.heads, -1, 2).swapaxes(1, 2).ravel()
            index = in_file[index[0]], *index[1:]
        *rows, columns = self._stored(index)
        values: np.ndarray = dequantize(np.ascontiguousarray(data[tuple(rows)]), self.tensor.kind)[..., columns]
        values = values + np.float32(self.offset) if self.offset else values
        return values.swapaxes(-1, -2) if self.is_transposed else values

    def _stored(self, dimensions: tuple[Any, ...]) -> tuple[Any, ...]:
        """Dimensions in the order of the file."""
        return (*dimensions[:-2], *dimensions[:-3:-1]) if self.is_transposed else dimensions


@dataclass(frozen=True)
class LatentSlice:
    """The matrix from latent vectors to keys and values, which files have as two tensors: for each head its rows for
    keys, transposed, and its rows for values. Both are decoded to read a part."""

    keys: GgufTensor  # [head, latent, key]
    values: GgufTensor  # [head, value, latent]

    @staticmethod
    def can_join(keys: tuple[int, ...], values: tuple[int, ...]) -> bool:
        """Whether tensors have such shapes."""
        return len(keys) == len(values) == 3 and keys[:2] == values[::2]

    def get_dtype(self) -> str:
        return "F32"

    def get_shape(self) -> tuple[int, ...]:
        heads, latent, key = self.keys.shape
        return (heads * (key + self.values.shape[1]), latent)

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        from gguf import dequantize

        keys = dequantize(self.keys.data, self.keys.kind).swapaxes(1, 2)
        values = dequantize(self.values.data, self.values.kind)
        return np.concatenate([keys, values], axis=1).reshape(self.get_shape())[index]


class GgufTensors:
    """An opened file, with those methods of an opened file of the library `safetensors` that read a model."""

    def __init__(self, file: Path) -> None:
        """`file`: in a directory with the config.json that `config.gguf` made from it."""
        self._file = read_gguf(file)
        self._model = Decoder(**decoder_fields(str(file.parent)))
        is_fused = family_of(read_json(file.parent / "config.json")).fused == CONCATENATED
        self._slices = dict(self._named(self._modules(is_fused=is_fused)))

    def keys(self) -> list[str]:
        return list(self._slices)

    def get_slice(self, name: str) -> GgufSlice | LatentSlice:
        return self._slices[name]

    def _modules(self, *, is_fused: bool) -> Iterator[str]:
        """The names of all modules and weights that `config.hf_modules` names. `is_fused`: of the matrices that several
        weights share."""
        ends = {part.removesuffix(".weight"): end for end, how in CONCATENATED.items() for part in how.parts}
        experts = 1 if self._model.experts is None else self._model.experts.count
        for layer, has_experts in enumerate(self._model.has_experts):
            for name in names_of(self._model, has_experts=has_experts).values():
                for expert in range(experts if name.count("{}") == 2 else 1):
                    module = name.format(layer, expert)
                    end = next((end for end in ends if is_fused and module.endswith(end)), None)
                    yield module if end is None else module.replace(end, ends[end].removesuffix(".weight"))

    def _named(self, modules: Iterator[str]) -> Iterator[tuple[str, GgufSlice | LatentSlice]]:
        """The tensors by their Hugging Face names; those that belong to no module, by the names in the file."""
        names = tensor_names(self._file.architecture, self._model.layers)
        tensors = self._file.tensors
        left = tensors.keys() - set(FACTORS)
        for module in dict.fromkeys(modules):
            number = re.search(r"\.experts\.(\d+)\.", module)
            expert = None if number is None else int(number[1])
            base = module if number is None else module.replace(number[0], ".experts.")
            # In gpt-oss, sinks and the weights of all experts are named without ".weight".
            is_parameter = self._model.attention_sinks and base.endswith(("sinks", *EXPERTS))
            leaves: tuple[str, ...] = ("weight", "bias")
            if is_parameter:
                leaves = ("bias",) if base.endswith("_bias") else ("weight",)
            for leaf in leaves:
                in_file = f"{names.get_name(base.removesuffix('_bias'))}.{leaf}"
                if in_file in tensors:
                    left.discard(in_file)
                    name = module if is_parameter else f"{module}.{leaf}"
                    yield name, self._slice(name, tensors[in_file], expert)
            if base.endswith(KEYS_AND_VALUES):
                parts = [names.get_name(f"{base.removesuffix(KEYS_AND_VALUES)}{part}_b_proj") for part in "kv"]
                keys, values = (tensors.get(f"{part}.weight") for part in parts)
                if keys is not None and values is not None and LatentSlice.can_join(keys.shape, values.shape):
                    left -= {f"{part}.weight" for part in parts}
                    yield f"{module}.weight", LatentSlice(keys, values)
        for name in left:
            yield name, GgufSlice(tensors[name], tensors[name].shape)

    def _slice(self, name: str, tensor: GgufTensor, expert: int | None) -> GgufSlice:
        model = self._model
        shape = tensor.shape if expert is None else tensor.shape[1:]
        if expert is not None and not (len(tensor.shape) == 3 and expert < tensor.shape[0]):
            raise UserError(f"{self._file.file}: {name}: a tensor of the shape {list(tensor.shape)} has no such expert")
        heads = {"q_proj": model.heads, "k_proj": model.kv_heads}.get(name.split(".")[-2], 0)
        is_permuted = self._file.architecture == PERMUTED and heads and shape[0] % (2 * heads) == 0
        is_transposed = name.endswith(EXPERTS) and len(shape) == 3
        if is_transposed:
            shape = (shape[0], shape[2], shape[1])
        if name.endswith("shared_expert_gate.weight") and len(shape) == 1:
            shape = (1, *shape)  # llama.cpp has no dimension of size 1 there
        return GgufSlice(
            tensor,
            shape,
            expert,
            heads=heads if is_permuted else 0,
            is_transposed=is_transposed,
            offset=-1.0 if model.norm_offset and name.endswith("norm.weight") else 0.0,
        )
