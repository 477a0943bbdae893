"""Optimizers that are written for one matrix (`MatrixRule`); `by_layer` applies them to each layer of a stack.

AdamW, Adam, SGD and Lion are transformations of optax instead, elementwise over any array (rules/plain.py).

A weight [layer, m, n] is a stack of matrices; a rule sees one layer, with the rank, rows and norms of one matrix.
`by_layer` turns a rule into an optax transformation. It loops over the layers and overwrites the old state and the
gradient of each layer with its new state and update, so that at most one additional layer exists in float32, for any
format of the state.

In your own loop, name the dimensions of stacked weights: `axes` is a tree with the structure of the parameters and a
tuple of names for each, e.g. `("layer", None, None)` for a stack of matrices. Without `axes` no weight is a stack.
Four names have a meaning: `layer`, `vocab` for embedding and output matrices, `token` for embeddings whose rows no mesh
axis shards, and `bias` for the other dimensions of a bias that is no matrix, such as `("heads", "bias")`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from jaxmem.errors import UserError
from jaxmem.optim.apply import NotSeparableError, VocabSlice, axes_or_unnamed, leaf_key, widened
from jaxmem.optim.in_place import update_layers, update_rows
from jaxmem.quant.qtensor import with_sliced_sizes
from jaxmem.sharding.arrays import constrain
from jaxmem.sharding.layout import current
from jaxmem.sharding.leaves import StateArray, axes_of_state, is_declared
from jaxmem.sharding.table import Axes, axis_name, is_axes, is_stacked, path_name
from jaxmem.sharding.weights import is_encoded, is_matrix
from jaxmem.typing import AxesTree, Tree

if TYPE_CHECKING:
    from jaxmem.pipeline.stages import Pipeline


VOCABULARIES = ("vocab", "token")  # names of a dimension whose rows are those of single tokens


@dataclass(frozen=True)
class ParameterSpec:
    """Shape, dtype and axes of a weight, or of one layer of a stacked weight."""

    shape: tuple[int, ...]
    dtype: DTypeLike
    axes: Axes  # logical names, or None
    dims: tuple[int | str | None, ...]  # per axis: a dimension of the parameter without `layer`, or a logical name
    experts: int = 1  # matrices of this shape in a layer

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        return len(self.shape) == 2 and is_matrix(self.axes)

    @property
    def vocab_dim(self) -> int | None:
        """The dimension of the vocabulary, of an embedding or output matrix and of its adapters."""
        return next((dim for dim, axis in enumerate(self.axes) if axis and axis_name(axis) in VOCABULARIES), None)

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether both sides of this matrix are features of the network, so it is no embedding, of tokens or patches of
        an image, and no output matrix."""
        names = {axis_name(axis) for axis in self.axes if axis}
        return self.is_matrix and not names & {*VOCABULARIES, "classes", "patch"}

    def state_array(self, value: Tree, dims: tuple[int, ...] | None = None) -> StateArray:
        """Declares a state array, or a QTensor, along these dimensions of the weight, by default all."""
        return StateArray(value, self.dims if dims is None else tuple(self.dims[d] for d in dims))

    def zeros(self, dims: tuple[int, ...] | None = None, dtype: DTypeLike = jnp.float32) -> StateArray:
        over = range(len(self.shape)) if dims is None else dims
        return self.state_array(jnp.zeros([self.shape[d] for d in over], dtype), dims)


@dataclass(frozen=True)
class UpdateContext:
    """Inputs of an update besides the gradient and the state."""

    weight: Any  # an array, or a QTensor
    spec: ParameterSpec
    count: jax.Array  # the number of updates including this one, so 1 at the first update
    layer: jax.Array  # the number of the layer, the same on every mesh
    layers: int  # the number of layers of the stack
    key: jax.Array  # a random key: different for each layer, the same at every update
    vocab_slice: VocabSlice | None = None  # if the weight is a part of a vocabulary matrix: the rows of this part

    def sums(self, *terms: tuple[jax.Array, int | None]) -> tuple[jax.Array, ...]:
        """For each (array, dim), the sum over dimension `dim` of the complete matrix; if `dim` is None, over all
        dimensions. With a vocabulary slice, each call is one more pass over all slices."""
        partial = [jnp.sum(x, axis=dim) for x, dim in terms]
        if self.vocab_slice is None:
            return tuple(partial)
        over = [i for i, (_, dim) in enumerate(terms) if dim in (None, self.vocab_slice.dim)]
        total = dict(zip(over, self.vocab_slice.total([partial[i] for i in over]), strict=True))
        return tuple(total.get(i, x) for i, x in enumerate(partial))


State = dict[str, Any]  # the state arrays of a rule, by name


class MatrixRule:
    """An optimizer of one matrix (or vector, or scalar)."""

    elementwise: ClassVar[bool] = False  # whether rows can be updated separately, and the weight is not read
    updates_stacks: ClassVar[bool] = False  # whether the rule updates a stack of layers as one array

    def init(self, spec: ParameterSpec) -> State:
        """The initial state of a weight: a declared array for each name (`spec.zeros`, `spec.state_array`). It depends
        on the shape and dtype of the weight only, not on its values."""
        raise NotImplementedError

    def is_separable(self, dim: int, /) -> bool:
        """Whether slices along a dimension can be updated separately. Sums over all slices come from
        `UpdateContext.sums`."""
        del dim
        return True

    def update(self, g: jax.Array, state: State, context: UpdateContext, /) -> tuple[jax.Array, State]:
        """Returns the update before weight decay and learning rate, in any dtype, and the new state. `state` has the
        arrays and QTensors of `init`, without their declarations."""
        raise NotImplementedError


@dataclass(frozen=True)
class PerExpertRule(MatrixRule):
    """A rule applied to the matrix of each expert of a layer."""

    rule: MatrixRule
    expert: ParameterSpec

    def init(self, spec: ParameterSpec) -> State:
        def repeat(array: StateArray) -> StateArray:
            values = jax.tree.map(lambda x: jnp.broadcast_to(x, (spec.shape[0], *x.shape)), array.value)
            return StateArray(values, (0, *array.dims))

        return jax.tree.map(repeat, self.rule.init(self.expert), is_leaf=is_declared)

    def update(self, g: jax.Array, state: State, context: UpdateContext, /) -> tuple[jax.Array, State]:
        def update_expert(arrays: tuple[jax.Array, State], read_only: Tree, i: jax.Array) -> tuple[jax.Array, State]:
            g, state = arrays
            weight, count, layer, key = read_only
            key = jax.random.fold_in(key, i)
            expert_context = UpdateContext(weight, self.expert, count, layer, context.layers, key, context.vocab_slice)
            layout = current()
            with nullcontext() if layout is None else layout.without("expert"):
                u, new = self.rule.update(g, state, expert_context)
            return u.astype(g.dtype), new

        # Passed as arguments, since a nested `shard_map` (pipeline stages) cannot read scalars of the outer one.
        scalars = (jnp.broadcast_to(x, g.shape[:1]) for x in (context.count, context.layer, context.key))
        return update_layers(update_expert, (g, state), (context.weight, *scalars), "expert")


class ByLayerState(NamedTuple):
    """Plain arrays in trees with the structure of the parameters, like the states of optax, so that every library can
    take the state apart, store it and put it together again.

    A quantized moment `m` is stored as the trees `m_codes` and `m_scale`. A tree has `optax.MaskedNode()` for a
    parameter without this array.
    """

    step: jax.Array  # updates so far
    arrays: dict[str, Tree]  # name of a state array: a tree of the arrays of all parameters


def by_layer(
    rule_for: Callable[[ParameterSpec], MatrixRule], axes: AxesTree = None
) -> optax.GradientTransformationExtraArgs:
    """An optax transformation that applies a rule to each leaf. Besides the state of the rules, it needs memory for at
    most one layer in float32.

    With `update(..., layer=i, layers=n)`, gradients, state and parameters are those at position i of n of a stack. With
    `update(..., vocab_slice=s)`, they are some rows of the only parameter, a vocabulary matrix. With
    `update(..., pipeline_of=f)`, `f` returns the pipeline that orders the layers of a weight with this name; None: they
    are in order.
    """

    def axes_of(params: Tree) -> list[Axes]:
        return jax.tree.leaves(axes_or_unnamed(axes, params), is_leaf=is_axes)

    def init(params: Tree) -> ByLayerState:
        weights, treedef = jax.tree.flatten(params, is_leaf=is_encoded)
        state_of_weights = []
        for names, w in zip(axes_of(params), weights, strict=True):
            spec, layers = _one_layer(names, w)
            # An empty weight has no state: for it, rules cannot choose blocks, ranks or dimensions.
            state = {} if 0 in w.shape else _initial_state(_rule(rule_for, spec), spec)
            state_of_weights.append({name: _repeated(array, layers) for name, array in _by_name(state).items()})
        if not weights:  # optax.tree.map_params calls `init` with a placeholder for all parameters
            return ByLayerState(jnp.zeros((), jnp.int32), params)
        arrays = {}
        for name in sorted(set().union(*state_of_weights)):
            of_weights = [state.get(name, optax.MaskedNode()) for state in state_of_weights]
            arrays[name] = jax.tree.unflatten(treedef, of_weights)
        if not _keeps_declarations.get():
            arrays = jax.tree.map(lambda array: array.value, arrays, is_leaf=is_declared)
        return ByLayerState(jnp.zeros((), jnp.int32), arrays)

    def update(
        grads: Tree,
        state: ByLayerState,
        params: Tree = None,
        *,
        layer: jax.Array | None = None,
        layers: int = 1,
        vocab_slice: VocabSlice | None = None,
        pipeline_of: Callable[[str], Pipeline | None] = lambda _: None,
        **_: Any,
    ) -> tuple[Tree, ByLayerState]:
        treedef: Tree
        leaves, treedef = jax.tree_util.tree_flatten_with_path(widened(grads))
        weights = [g for _, g in leaves] if params is None else treedef.flatten_up_to(params)
        axes_of_weights = axes_of(grads if params is None else params)
        step = _Step(rule_for, optax.safe_increment(state.step), layer, layers, vocab_slice, pipeline_of)
        old = {name: iter(jax.tree.leaves(tree)) for name, tree in state.arrays.items()}
        new: dict[str, list[jax.Array]] = {name: [] for name in state.arrays}
        updates = []
        for (path, g), names, w in zip(leaves, axes_of_weights, weights, strict=True):
            u, arrays = step.update_leaf(path, names, g, w, old)
            updates.append(u)
            for name, array in arrays.items():
                new[name].append(array)
        # The trees keep the structure in which they came, whichever library has built it.
        structures = {name: jax.tree.structure(tree) for name, tree in state.arrays.items()}
        trees = {name: jax.tree.unflatten(structure, new[name]) for name, structure in structures.items()}
        return jax.tree.unflatten(treedef, updates), ByLayerState(step.count, trees)

    return optax.GradientTransformationExtraArgs(init, update)


@dataclass(frozen=True)
class _Step:
    """An update of all parameters, or of one layer of each, or of some rows of one."""

    rule_for: Callable[[ParameterSpec], MatrixRule]
    count: jax.Array
    layer: jax.Array | None
    layers: int
    vocab_slice: VocabSlice | None
    pipeline_of: Callable[[str], Pipeline | None]

    def update_leaf(
        self, path: KeyPath, names: Axes, g: jax.Array, w: Any, old: dict[str, Iterator[jax.Array]]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The update of a parameter and its new state arrays by name. `old`: the state arrays of this parameter, and of
        those after it."""
        if 0 in w.shape:
            return g, {}
        pipeline = self.pipeline_of(path_name(path)) if is_stacked(names) else None
        names = names[1:] if self.layer is not None and is_stacked(names) else names
        spec, stack = _one_layer(names, w)
        if self.vocab_slice is not None:
            spec = dataclasses.replace(spec, shape=self.vocab_slice.shape)
        rule = _rule(self.rule_for, spec)
        if self.vocab_slice is not None and not rule.is_separable(self.vocab_slice.dim):
            raise NotSeparableError
        # The key of a leaf depends only on its name, so that it is the same on every mesh and in every order.
        key = leaf_key(jax.random.key(0), path)
        declared = jax.eval_shape(lambda: _initial_state(rule, spec))
        array_names = list(_by_name(declared))
        is_one_array = bool(stack) and rule.updates_stacks
        updated_spec = dataclasses.replace(spec, shape=w.shape, axes=names) if is_one_array else spec

        layers = stack[0] if stack else self.layers
        if pipeline is not None:  # it orders the layers of the stack, and adds identity layers
            layers = pipeline.layers

        def update(
            arrays: tuple[jax.Array, State], weight: Any, position: jax.Array, _part: jax.Array | None = None
        ) -> tuple[jax.Array, State]:
            """(update, new state) of one layer, of some of its rows, or of a stack as one array."""
            gradient, state = arrays
            layer = position if pipeline is None else jnp.asarray(pipeline.order, jnp.int32)[position]
            layer_key = jax.random.fold_in(key, layer)
            context = UpdateContext(weight, updated_spec, self.count, layer, layers, layer_key, self.vocab_slice)
            change, new_state = rule.update(_as_state(gradient, updated_spec), state, context)
            return _as_state(change.astype(gradient.dtype), updated_spec), new_state

        pair = g, _with_values(declared, (next(old[name]) for name in array_names))
        if rule.elementwise and not is_one_array:
            u, new = update_rows(update, pair, None, names)
        elif stack and not is_one_array:
            u, new = update_layers(update, pair, w)
        else:
            u, new = update(pair, w, jnp.zeros((), jnp.int32) if self.layer is None else self.layer)
        return u, dict(zip(array_names, jax.tree.leaves(new), strict=True))


def state_axes(tx: optax.GradientTransformation, params: Tree, axes: AxesTree) -> AxesTree:
    """The logical axes of every array of the state of `tx`, a tree with the structure of `tx.init(params)`. `params`:
    arrays or their shapes. `axes`: the axes of each parameter. State that a rule does not declare and that has not the
    shape of its parameter is an error.

    >>> from jaxmem import optim
    >>> params, axes = {"w": jnp.zeros((64, 32))}, {"w": ("embed", "mlp")}
    >>> state_axes(optim.scale_by_adafactor(axes=axes), params, axes).arrays
    {'column': {'w': ('mlp',)}, 'row': {'w': ('embed',)}}
    """
    token = _keeps_declarations.set(True)
    try:
        # A new function, because jax caches the shapes that `init` returns, and those have no declarations.
        state = jax.eval_shape(partial(tx.init), params)
    finally:
        _keeps_declarations.reset(token)
    return axes_of_state(state, params, axes)


# Whether `init` of `by_layer` returns arrays with their declarations (`StateArray`). Transformations of optax call
# `init` of the transformations in them without further arguments.
_keeps_declarations = ContextVar("keeps_declarations", default=False)


def _initial_state(rule: MatrixRule, spec: ParameterSpec) -> State:
    """The declared state of one layer of a weight."""
    state = rule.init(spec)
    arrays = {name: jax.tree.leaves(x, is_leaf=is_declared) for name, x in state.items()}
    if undeclared := [name for name, leaves in arrays.items() if not all(map(is_declared, leaves))]:
        raise UserError(
            f"{type(rule).__name__}.init: state {', '.join(undeclared)} is not declared; use spec.zeros(dims) or"
            " spec.state_array(value, dims)"
        )
    return state


def _by_name(state: State) -> dict[str, StateArray]:
    """The arrays of a state by name; a QTensor `m` is `m_codes` and `m_scale`.

    >>> spec = ParameterSpec((8, 4), jnp.float32, ("embed", "mlp"), (0, 1))
    >>> list(_by_name({"row": spec.zeros((0,)), "inner": {"m": spec.zeros()}}))
    ['inner_m', 'row']
    """
    named = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_declared)
    return {
        jax.tree_util.keystr((*path, *part), simple=True, separator="_"): StateArray(value, array.dims)
        for path, array in named
        for part, value in jax.tree_util.tree_leaves_with_path(array.value)
    }


def _repeated(array: StateArray, layers: tuple[int, ...]) -> StateArray:
    """The array for all layers of a stack."""
    return dataclasses.replace(array, value=jnp.broadcast_to(array.value, (*layers, *array.value.shape)))


def _with_values(declared: State, arrays: Iterator[jax.Array]) -> State:
    """The state that a rule updates, from arrays in the order of `_by_name`: QTensors are put together again."""

    def value(array: StateArray) -> Tree:
        return with_sliced_sizes(jax.tree.map(lambda _: next(arrays), array.value), array.value)

    return jax.tree.map(value, declared, is_leaf=is_declared)


def _one_layer(names: Axes, w: Any) -> tuple[ParameterSpec, tuple[int, ...]]:
    """One layer of a weight, and the number of layers (`()` if the weight is not a stack)."""
    stacked = int(is_stacked(names))
    shape = w.shape[stacked:]
    return ParameterSpec(shape, w.dtype, names[stacked:], tuple(range(len(shape)))), w.shape[:stacked]


def _rule(rule_for: Callable[[ParameterSpec], MatrixRule], spec: ParameterSpec) -> MatrixRule:
    """The rule of one layer of a weight."""
    if spec.axes[:1] != ("expert",):
        return rule_for(spec)
    expert = ParameterSpec(spec.shape[1:], spec.dtype, spec.axes[1:], spec.dims[1:], spec.shape[0])
    rule = rule_for(expert)
    return rule_for(spec) if rule.elementwise or rule.updates_stacks else PerExpertRule(rule, expert)


def _as_state(x: jax.Array, spec: ParameterSpec) -> jax.Array:
    """An array with the sharding of its optimizer state, so that an update needs no all-gather."""
    return constrain(x, *spec.axes, role="optimizer") if any(spec.axes) else x
