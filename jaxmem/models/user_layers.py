"""Lists of equal blocks in the modules of a script, computed as stacks of layers.

`stack_lists` replaces a list by one block whose variables are stacked along a first axis. In a pass over a batch the
list is a `Blocks`: the call of the first block computes all blocks by `stack.apply.apply_call`, so that recompute,
offloading, `update: during` and dequantization work layer by layer. The calls of the other blocks return this result.
This equals the loop of the script if each block receives the output of the block before and the same other arguments,
and if nothing else uses the outputs in between, which is checked.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from jaxmem.errors import UserError, one_of
from jaxmem.models.layers import fold_keys, split_keys
from jaxmem.sharding.gathering import gather
from jaxmem.sharding.host import fetch_from_host
from jaxmem.sharding.table import Axes
from jaxmem.sharding.trees import Path
from jaxmem.sharding.weights import apply_hooks
from jaxmem.stack.apply import apply_call
from jaxmem.stack.call import StackCall, StackOptions
from jaxmem.typing import Tree


def stack_lists(network: Any, patterns: Sequence[str]) -> dict[Path, int]:
    """Replaces the lists of blocks whose names match by stacked blocks, in place; lists inside of the blocks of such a
    list stay lists. Returns the number of blocks of each, by its path."""
    lists = {dotted_name(path): path for path, node in nnx.iter_graph(network) if _is_list_of_blocks(node)}
    paths = [path for name, path in lists.items() if any(fnmatchcase(name, pattern) for pattern in patterns)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in lists):
            known = one_of(sorted(lists)) if lists else "no list of blocks of one class (nnx.List or nnx.Sequential)"
            raise UserError(f"layers={pattern} matches no list of blocks; the model has {known}")
    counts = {}
    outermost = [path for path in paths if not any(path[:depth] in paths for depth in range(len(path)))]
    for path in outermost:
        blocks = list(_at(network, path))
        counts[tuple(map(str, path))] = len(blocks)
        setattr(_at(network, path[:-1]), str(path[-1]), _stacked(dotted_name(path), blocks))
        _refuse_shared(dotted_name(path), blocks, network)
    return counts


def reseed(module: Any, keys: jax.Array) -> None:
    """Sets new keys of the random number generators of a module, from the key of the first row."""
    for number, (_, variable) in enumerate(nnx.to_flat_state(nnx.state(module, nnx.RngKey))):
        variable.set_value(jax.random.fold_in(keys.ravel()[0], number))


def new_randomness(states: Tree, dims: int = 0) -> Tree:
    """Values for the states of random number generators, until `reseed` sets them, without leading dimensions."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(
        lambda x: (
            jnp.broadcast_to(jax.random.key(0), x.shape[dims:]) if is_key(x) else jnp.zeros(x.shape[dims:], x.dtype)
        ),
        states,
    )


def flat_state(state: Tree) -> dict[Path, Any]:
    """The variables of a state, and the arrays that are plain attributes of a module, such as tables of positions."""
    flat = dict(nnx.to_flat_state(state))
    for path in flat:
        if key := next((key for key in path if not isinstance(key, str | int)), None):
            raise UserError(
                f"the model has a variable with the key {key!r} in {dotted_name(path[: path.index(key)])}; use strings"
                " or integers as keys of dicts (nnx.WeightNorm has tuples)"
            )
    return {tuple(map(str, path)): variable for path, variable in flat.items()}


def value_of(variable: Tree) -> Any:
    """The value of a variable; an array or its shape in a state as it is."""
    return variable.get_value() if isinstance(variable, nnx.Variable) else variable


def numbered(arrays: Mapping[Path, Any]) -> dict[tuple[str | int, ...], Any]:
    """Arrays by their paths in the state of a module, where indices of lists are integers."""
    return {tuple(int(key) if key.isdigit() else key for key in path): x for path, x in arrays.items()}


@dataclass(eq=False, repr=False)
class Blocks(Sequence[Any]):
    """A stacked list of blocks of a module, as the script sees it in a pass over a batch. Paths of variables begin at a
    block."""

    module: Any
    path: Path  # of the list
    layers: int  # `count` is a method of a sequence
    weights: Mapping[Path, Any]  # weights as they are stored
    axes: Mapping[Path, Axes]
    state: Mapping[Path, Any]  # variables that the forward pass changes, and arrays
    options: StackOptions
    dtype: DTypeLike
    keys: jax.Array | None = None  # of the rows

    def __post_init__(self) -> None:
        self.block = _at(self.module, self.path)

    @property
    def name(self) -> str:
        return dotted_name(self.path)

    def error(self, text: str) -> UserError:
        return UserError(f"layers={self.name}: {text}, or remove the argument layers")

    def replace_in_module(self, keys: jax.Array | None) -> None:
        """Replaces the stacked block of the module by this list."""
        self.keys = keys
        # Not by the `setattr` of a module, which refuses values that are neither variables nor static.
        object.__setattr__(_at(self.module, self.path[:-1]), self.path[-1], self)

    def __len__(self) -> int:
        return self.layers

    def __getitem__(self, index: Tree) -> Tree:
        return [_Block(self, i) for i in range(len(self))][index]

    def call(self, index: int, x: Tree, arguments: Tree) -> Tree:
        """The output of a block. `arguments`: its other arguments, (positional, named)."""
        if index == 0:
            result = self._apply(x, arguments)
            (self.keys,) = fold_keys(self.keys, 1)  # another call of the list has other dropout masks
        elif not isinstance(x, _Output) or x.blocks is not self or x.index != index - 1:
            text = f"block {index} does not receive the output of block {index - 1}"
            raise self.error(f"{text}; use a loop `for block in self.{self.name}: x = block(x)`")
        elif not _is_same(arguments, x.arguments):
            text = f"block {index} is called with other arguments than block 0"
            raise self.error(f"{text}; use the same arguments for all blocks")
        else:
            result = x.result
        return result if index == len(self) - 1 else _Output(self, index, arguments, result)

    def _apply(self, x: Tree, arguments: Tree) -> Tree:
        """The output of the last block."""
        graphdef, randomness, _ = nnx.split(self.block, nnx.RngState, ...)  # type: ignore[misc]
        leaves, tree = jax.tree.flatten(arguments, is_leaf=lambda x: isinstance(x, nnx.Rngs))
        arrays = [leaf if isinstance(leaf, jax.Array | np.ndarray) else None for leaf in leaves]

        def run(weights: Tree, x: Tree, layer_inputs: Tree, shared: Tree) -> tuple[Tree, Tree]:
            keys, state = layer_inputs
            flat = flatten_dict(apply_hooks(fetch_from_host(weights)))
            gathered = {path: gather(w, self.axes[path][1:], self.dtype) for path, w in flat.items()}
            block = nnx.merge(graphdef, unflatten_dict(numbered(gathered | state)), new_randomness(randomness, 1))
            if keys is not None:
                reseed(block, keys)
            arguments = [_argument(leaf, array, keys) for leaf, array in zip(leaves, shared, strict=True)]
            positional, named = jax.tree.unflatten(tree, arguments)
            with jax.numpy_dtype_promotion("standard"):
                y = block(x, *positional, **named)
            if _form(y) != _form(x):
                raise UserError(
                    f"layers={self.name}: a block maps {_form(x)} to {_form(y)}; its output must have the shape and "
                    "dtype of its first argument"
                )
            after = flat_state(nnx.state(block))
            return y, {path: value_of(after[path]) for path in state}

        state = {path: value_of(variable) for path, variable in self.state.items()}
        inputs = (None if self.keys is None else split_keys(self.keys, self.layers), state)
        weights = unflatten_dict(dict(self.weights))
        y, after = apply_call(StackCall(run, weights, x, inputs, arrays, self.options))
        for path, value in (after or {}).items():
            if isinstance(self.state[path], nnx.Variable):
                self.state[path].set_value(value)
        return y


def _argument(leaf: Tree, array: Tree, keys: jax.Array | None) -> Tree:
    """An argument of a block. A random number generator has another key in each layer."""
    if isinstance(leaf, nnx.Rngs):
        return nnx.Rngs(jax.random.key(0) if keys is None else keys.ravel()[-1])
    return leaf if array is None else array


def _refuse_state(blocks: Blocks) -> Any:
    """Flax or jax flattens a module. The weights of its blocks would be missing in the result."""
    text = f"the loss or the model uses the state of a module that contains {blocks.name}"
    raise blocks.error(
        f"{text} (nnx.state, nnx.split, train(), ...), but all blocks are computed together; call the module"
    )


jax.tree_util.register_pytree_node(Blocks, _refuse_state, lambda blocks, _: blocks)


@dataclass(frozen=True)
class _Block:
    _blocks: Blocks
    _index: int

    def __call__(self, x: Tree, *arguments: Tree, **named: Any) -> Tree:
        return self._blocks.call(self._index, x, (arguments, named))

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._blocks.block, name)
        if isinstance(value, nnx.Variable | nnx.Pytree) or getattr(value, "__self__", None) is self._blocks.block:
            text = f"the model uses {name} of a block, but all blocks are computed together"
            raise self._blocks.error(f"{text}; call the blocks")
        return value


@dataclass(eq=False)
class _Output:
    """The output of a block that is not the last one. It exists only inside of the computation of all blocks, whose
    result it has."""

    blocks: Blocks
    index: int
    arguments: Tree
    result: Tree

    def _refuse(self, *_: Any) -> Any:
        text = f"the model uses the output of block {self.index} outside of the next block"
        raise self.blocks.error(f"{text}; use a loop `for block in self.{self.blocks.name}: x = block(x)`")

    __getattr__ = __getitem__ = __iter__ = __len__ = __bool__ = __jax_array__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __neg__ = _refuse


jax.tree_util.register_pytree_node(_Output, _Output._refuse, lambda output, _: output)  # arguments of jitted functions


def _stacked(name: str, blocks: list[Any]) -> Tree:
    for number, other in enumerate(blocks[1:], 1):
        if (where := _difference(blocks[0], other)) is not None:
            raise UserError(
                f"layers={name}: block {number} differs from block 0 in {where.lstrip('.')}; layers requires equal "
                "blocks with their own weights"
            )
    graphdef, _ = nnx.split(blocks[0])
    states = [nnx.to_pure_dict(nnx.state(block)) for block in blocks]
    return nnx.merge(graphdef, jax.tree.map(lambda *layers: jnp.stack(layers), *states))


def _refuse_shared(name: str, blocks: list[Any], network: Any) -> None:
    """Refuses blocks whose weights other parts of the network have too: a stack has copies of them."""
    variables = {id(node) for block in blocks for _, node in nnx.iter_graph(block) if isinstance(node, nnx.Variable)}
    for path, node in nnx.iter_graph(network):
        if id(node) in variables and not isinstance(node, nnx.RngState):
            raise UserError(
                f"layers={name}: {dotted_name(path)} is also a weight of a block; layers requires equal blocks with "
                "their own weights"
            )


def _difference(a: Tree, b: Tree) -> str | None:
    """The attribute in which two modules differ; None: they are equal except for the values of variables."""
    if type(a) is not type(b):
        return ""
    if isinstance(a, nnx.RngState):
        return None
    if isinstance(a, nnx.Variable):
        return None if a is not b and (a.shape, a.dtype) == (b.shape, b.dtype) else ""
    if not isinstance(a, nnx.Pytree):
        return None if _is_same(a, b) else ""
    fields, others = ({k: v for k, v in vars(x).items() if not k.startswith("_pytree__")} for x in (a, b))
    for key in sorted(fields.keys() | others.keys()):
        if (where := _difference(fields.get(key), others.get(key))) is not None:
            return f".{key}{where}"
    return None


def _is_same(a: Tree, b: Tree) -> bool:
    """Whether two values of the configuration of a module, or two arguments, are equal."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_is_same, a, b))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_is_same(a[key], b[key]) for key in a)
    if isinstance(a, types.FunctionType):  # for example two initializers that one function returned
        cells = [tuple(cell.cell_contents for cell in f.__closure__ or ()) for f in (a, b)]
        return a.__code__ is b.__code__ and _is_same(*cells) and _is_same(a.__defaults__, b.__defaults__)
    if isinstance(a, functools.partial):
        return _is_same((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    return not isinstance(a, jax.Array) and bool(a == b)


def _is_list_of_blocks(node: Tree) -> bool:
    is_list = isinstance(node, nnx.List) and len({type(x) for x in node}) == 1 and callable(node[0])
    return is_list and bool(jax.tree.leaves(nnx.state(node, nnx.Param)))


def _at(node: Tree, path: tuple[Any, ...]) -> Tree:
    return functools.reduce(lambda node, key: getattr(node, str(key)), path, node)


def dotted_name(path: KeyPath) -> str:
    return ".".join(map(str, path))


def _form(x: Tree) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else type(x).__name__
