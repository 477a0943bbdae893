"""The weights of a decoder and their tensors in a Hugging Face file, for every family; used in both directions.

In jaxmem the weights of all layers are one array [layer, in, out], of experts [layer, expert, in, out]; in a file each
layer and each expert has its own tensor [out, in].
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, Self

from flax.traverse_util import flatten_dict

from jaxmem.config.hf_modules import names_with
from jaxmem.config.names import count_layers, is_last_stack, split_stack
from jaxmem.config.networks import Decoder
from jaxmem.typing import Tree

WeightPath = tuple[str, ...]
ADAPTER_PREFIX = "base_model.model."  # prefix of the names of tensors of an adapter

LEAVES = {"weight": "weight", "scale": "weight", "bias": "bias"}
# Buffers that older files contain; jaxmem computes them.
COMPUTED = ("rotary_emb.inv_freq",)


class FileTensor(NamedTuple):
    """A tensor in a file. `position`: the position of its layer in a stack, and the number of its expert; (): the
    weight is not a stack."""

    name: str
    shape: tuple[int, ...]
    position: tuple[int, ...]


@dataclass(frozen=True)
class FileWeight:
    """A weight of a network, and its tensors in a file: one, or for a stack one per layer, in order."""

    path: WeightPath
    array: Tree  # the values, or only shape, dtype and sharding
    shape: tuple[int, ...]  # the shape of a tensor in the file; for adapters, of the tensor of largest rank
    is_transposed: bool
    tensors: tuple[FileTensor, ...]

    @classmethod
    def of(
        cls, path: WeightPath, array: Tree, name: str, is_transposed: bool, indices: Sequence[int] | None = None
    ) -> Self:
        """`name`: the name of the tensor, with {} for the layer and for the expert. `indices`: the position of each
        layer in the stack, by default all positions in order."""
        depth = name.count("{}")
        shape = array.shape[depth:]
        shape = shape[::-1] if is_transposed else shape
        positions: list[Sequence[int]] = [range(size) for size in array.shape[:depth]]
        if depth and indices is not None:
            positions[0] = indices
        layers = split_stack(".".join(path))[1]
        ranges = [range(len(places)) for places in positions]
        numbers = product(*(ranges if layers is None else [layers, *ranges[1:]]))
        places = zip(numbers, product(*positions), strict=True)
        tensors = tuple(FileTensor(name.format(*number), shape, position) for number, position in places)
        return cls(path, array, shape, is_transposed, tensors)

    @property
    def depth(self) -> int:
        """The number of dimensions of the array before those of a tensor."""
        return len(self.tensors[0].position)


def stacks_of(params: Tree) -> dict[str, Tree]:
    """The parameters of each stack of layers, by its name."""
    stacks: dict[str, Tree] = {}
    for name, part in params.items():
        if name.startswith("blocks"):
            kinds = {kind: stack for kind, stack in part.items() if kind.startswith("[")}  # of layers that alternate
            stacks |= {f"{name}.{kind}": stack for kind, stack in kinds.items()} or {name: part}
    return stacks


def module_names(params: Tree) -> dict[str, str]:
    """The names of the modules of a decoder with these parameters, as `config.hf_modules.names_of`."""
    stacks = stacks_of(params)
    has_shared = any("shared" in blocks["mlp"] for blocks in stacks.values())
    by_path: dict[str, str] = {}
    for stack, blocks in stacks.items():
        names = names_with(
            experts="router" in blocks["mlp"],
            shared=has_shared,
            sinks="sinks" in blocks["attention"],
            latent="kv_b" in blocks["attention"],
            qk_norm="q_norm" in blocks["attention"],
            post_norms="mlp_post_norm" in blocks,
        )
        absent = () if "shared" in blocks["mlp"] else ("shared", "shared_gate")
        for path, name in names.items():
            if not path.startswith("blocks.mlp.") or path.split(".")[2] not in absent:
                by_path[path.replace("blocks", stack)] = name
    return by_path


def decoder_weights(params: Tree, indices: Sequence[int] | None = None) -> Iterator[FileWeight]:
    """Each weight of a decoder, whose parameters are a nested dict of arrays or shapes."""
    names = module_names(params)
    flat = flatten_dict(params)
    for path, array in flat.items():
        *module, kind = path
        layers = stack_indices(".".join(path), flat, indices)
        if (name := names.get(".".join(path))) is not None:
            yield FileWeight.of(path, array, name, is_transposed=False, indices=layers)
            continue
        is_transposed = kind == "weight" and module != ["embedding"]
        yield FileWeight.of(path, array, f"{names['.'.join(module)]}.{LEAVES[kind]}", is_transposed, layers)


def stack_indices(name: str, paths: Iterable[WeightPath], indices: Sequence[int] | None) -> Sequence[int] | None:
    """The position of each layer in the stack of this weight; `indices`: in the last stack, see `is_last_stack`."""
    return indices if is_last_stack(name, count_layers(map(".".join, paths))) else None


def tensor_shapes(weights: Iterable[FileWeight]) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors of these weights, by name."""
    return {tensor.name: tensor.shape for weight in weights for tensor in weight.tensors}


def is_ignored(cfg: Decoder, name: str) -> bool:
    """Whether a tensor is not a weight: a computed buffer, or the second name of a tied embedding."""
    return name.endswith(COMPUTED) or (cfg.tie_embeddings and name == "lm_head.weight")


def base_tensor_name(name: str) -> str:
    """The name in the base model of a tensor in the file of an adapter."""
    name = name.removeprefix(ADAPTER_PREFIX)
    return name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
