"""Optimizers are written for one matrix (`MatrixRule`); `by_layer` applies them to each layer of a stack.

A weight [layer, m, n] is a stack of matrices; a rule sees one layer, with the rank, rows and norms of one matrix.
`by_layer` turns a rule into an optax transformation. It loops over the layers and overwrites the old state and the
gradient of each layer with its new state and update, so that at most one additional layer exists in float32, for any
format of the state.

In your own loop, name the dimensions of stacked weights: `axes` is a tree with the structure of the parameters and a
tuple of names for each, e.g. `("layer", None, None)` for a stack of matrices. Without `axes` no weight is a stack. Two
names have a meaning: `layer`, and `vocab` for embedding and output matrices.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from jaxmem.optim.apply import NotSeparableError, VocabSlice, axes_or_unnamed, leaf_key
from jaxmem.optim.in_place import update_layers, update_rows
from jaxmem.sharding import Axes, constrain, current, is_axes
from jaxmem.sharding.leaves import Derived


@dataclass(frozen=True)
class ParameterSpec:
    """Shape, dtype and axes of a weight, or of one layer of a stacked weight."""

    shape: tuple[int, ...]
    dtype: Any
    axes: Axes  # logical names, or None
    dims: tuple[int | str | None, ...]  # per axis: a dimension of the parameter without `layer`, or a logical name
    experts: int = 1  # matrices of this shape in a layer

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether this is a matrix other than an embedding or output matrix."""
        return len(self.shape) == 2 and "vocab" not in self.axes

    def state_array(self, value: Any, dims: tuple[int, ...] | None = None) -> Derived:
        """Declares a state array along these dimensions of the weight, by default all."""
        own = self.dims if dims is None else tuple(self.dims[d] for d in dims)
        return Derived(value, own)

    def zeros(self, dims: tuple[int, ...] | None = None, dtype: DTypeLike = jnp.float32) -> Derived:
        over = range(len(self.shape)) if dims is None else dims
        return self.state_array(jnp.zeros([self.shape[d] for d in over], dtype), dims)


@dataclass(frozen=True)
class UpdateContext:
    """Inputs of an update besides the gradient and the state."""

    weight: Any  # an array, or a QTensor
    spec: ParameterSpec
    count: jax.Array  # the number of updates including this one, so 1 at the first update
    layer: jax.Array  # the index of the layer in the stack
    layers: int  # the number of layers of the stack
    key: jax.Array  # a random key: different for each layer, the same at every update
    vocab_slice: VocabSlice | None = None  # if the weight is a part of a vocabulary matrix: the rows of this part

    def sums(self, *terms: tuple[jax.Array, int | None]) -> tuple[jax.Array, ...]:
        """For each (array, dim), the sum over dimension `dim` of the complete matrix; if `dim` is None, over all
        dimensions. With a vocabulary slice, each call is one more pass over all slices."""
        own = [jnp.sum(x, axis=dim) for x, dim in terms]
        if self.vocab_slice is None:
            return tuple(own)
        over = [i for i, (_, dim) in enumerate(terms) if dim in (None, self.vocab_slice.dim)]
        total = dict(zip(over, self.vocab_slice.total([own[i] for i in over]), strict=True))
        return tuple(total.get(i, x) for i, x in enumerate(own))


State = dict[str, Any]  # the state arrays of a rule, by name


class MatrixRule:
    """An optimizer of one matrix (or vector, or scalar)."""

    elementwise: ClassVar[bool] = False  # whether rows can be updated separately, and the weight is not read
    updates_stacks: ClassVar[bool] = False  # whether the rule updates a stack of layers as one array

    def init(self, spec: ParameterSpec) -> State:
        """The initial state: trees of `Derived`, by name."""
        raise NotImplementedError

    def is_separable(self, dim: int, /) -> bool:
        """Whether slices along a dimension can be updated separately. Sums over all slices come from
        `UpdateContext.sums`."""
        del dim
        return True

    def update(self, g: jax.Array, state: State, context: UpdateContext, /) -> tuple[jax.Array, State]:
        """Returns the update before weight decay and learning rate, in any dtype, and the new state. `state` has the
        values inside `Derived`."""
        raise NotImplementedError


@dataclass(frozen=True)
class PerExpertRule(MatrixRule):
    """A rule applied to the matrix of each expert of a layer."""

    rule: MatrixRule
    expert: ParameterSpec

    def init(self, spec: ParameterSpec) -> State:
        def repeat(one: Derived) -> Derived:
            values = jax.tree.map(lambda x: jnp.broadcast_to(x, (spec.shape[0], *x.shape)), one.value)
            return Derived(values, (0, *one.dims))

        return jax.tree.map(repeat, self.rule.init(self.expert), is_leaf=_is_derived)

    def update(self, g: jax.Array, state: State, context: UpdateContext, /) -> tuple[jax.Array, State]:
        def one(own: tuple[jax.Array, State], read_only: Any, i: jax.Array) -> tuple[jax.Array, State]:
            (g, state), (weight, count, layer, key) = own, read_only
            inputs = {"weight": weight, "count": count, "layer": layer, "key": jax.random.fold_in(key, i)}
            expert_context = dataclasses.replace(context, spec=self.expert, **inputs)
            layout = current()
            with nullcontext() if layout is None else layout.without("expert"):
                u, new = self.rule.update(g, state, expert_context)
            return u.astype(g.dtype), new

        # Passed as arguments, since a nested `shard_map` (pipeline stages) cannot read scalars of the outer one.
        scalars = (jnp.broadcast_to(x, g.shape[:1]) for x in (context.count, context.layer, context.key))
        return update_layers(one, (g, state), (context.weight, *scalars), "expert")


class ByLayerState(NamedTuple):
    step: jax.Array  # updates so far
    leaves: Any  # the state of the rule of each parameter


def by_layer(
    rule_for: Callable[[ParameterSpec], MatrixRule], axes: Any = None, *, seed: int = 0
) -> optax.GradientTransformationExtraArgs:
    """An optax transformation that applies a rule to each leaf. Besides the state of the rules, it needs memory for at
    most one layer in float32.

    With `update(..., layer=i, layers=n)`, gradients, state and parameters are those of layer i of n. With `update(...,
    vocab_slice=s)`, they are some rows of the only parameter, a vocabulary matrix.
    """

    def init(params: Any) -> ByLayerState:
        def make(names: Axes, w: Any) -> dict[str, Any]:
            spec, layers = _one_layer(names, w)
            if spec.size == 0:
                return {}
            state = _rule(rule_for, spec).init(spec)
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (*layers, *x.shape)), state)

        leaves = jax.tree.map(make, axes_or_unnamed(axes, params), params, is_leaf=is_axes)
        return ByLayerState(jnp.zeros((), jnp.int32), leaves)

    def update(
        grads: Any,
        state: ByLayerState,
        params: Any = None,
        *,
        layer: jax.Array | None = None,
        layers: int = 1,
        vocab_slice: VocabSlice | None = None,
        **_: Any,
    ) -> tuple[Any, ByLayerState]:
        weights, count = grads if params is None else params, optax.safe_increment(state.step)

        def of_leaf(path: Any, names: Axes, g: jax.Array, state: Any, w: Any) -> tuple[jax.Array, Any]:
            """The update and the new state of one parameter."""
            names = names[1:] if layer is not None and names[:1] == ("layer",) else names
            spec, stack = _one_layer(names, w)
            if spec.size == 0:
                return g, state
            if vocab_slice is not None:
                spec = dataclasses.replace(spec, shape=vocab_slice.shape)
            rule = _rule(rule_for, spec)
            if vocab_slice is not None and not rule.is_separable(vocab_slice.dim):
                raise NotSeparableError
            # The key of a leaf depends only on its name, so that it is the same on every mesh and in every order.
            key, total = leaf_key(jax.random.key(seed), path), stack[0] if stack else layers

            def update_layer(pair: tuple[jax.Array, Any], w: Any, i: jax.Array, _: Any = None) -> tuple[jax.Array, Any]:
                g, state = pair
                context = UpdateContext(w, spec, count, i, total, jax.random.fold_in(key, i), vocab_slice)
                values = jax.tree.map(lambda x: x.value, state, is_leaf=_is_derived)
                u, new = rule.update(_as_state(g, spec), values, context)
                put = lambda x, value: dataclasses.replace(x, value=value)  # noqa: E731
                return _as_state(u.astype(g.dtype), spec), jax.tree.map(put, state, new, is_leaf=_is_derived)

            first = jnp.zeros((), jnp.int32) if layer is None else layer
            if stack and rule.updates_stacks:
                spec = dataclasses.replace(spec, shape=w.shape, axes=names)
                return update_layer((g, state), w, first)
            if rule.elementwise:
                return update_rows(update_layer, (g, state), None, names)
            return update_layers(update_layer, (g, state), w) if stack else update_layer((g, state), w, first)

        treedef: Any
        names, treedef = jax.tree.flatten(axes_or_unnamed(axes, weights), is_leaf=is_axes)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(grads)]
        trees = (treedef.flatten_up_to(tree) for tree in (grads, state.leaves, weights))
        new = [of_leaf(*leaf) for leaf in zip(paths, names, *trees, strict=True)]
        updates, leaves = (jax.tree.unflatten(treedef, part) for part in zip(*new, strict=True))
        return updates, ByLayerState(count, leaves)

    return optax.GradientTransformationExtraArgs(init, update)


def transformation(settings: type) -> Callable[..., Callable[..., optax.GradientTransformationExtraArgs]]:
    """Decorator: turns a function `(settings, spec) -> rule` into a function `(settings, *, axes)` that returns the
    optax transformation of the rule (`by_layer`). `settings`: the class of the hyperparameters. If the new function is
    called without settings, it uses an instance of this class with default values."""
    default = settings()

    def decorate(choose: Callable[..., MatrixRule]) -> Callable[..., optax.GradientTransformationExtraArgs]:
        @functools.wraps(choose, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
        def scale(settings: Any = default, *, axes: Any = None) -> optax.GradientTransformationExtraArgs:
            return by_layer(functools.partial(choose, settings), axes)

        del scale.__wrapped__  # the signature of `choose` differs
        return scale

    return decorate


def _one_layer(names: Axes, w: Any) -> tuple[ParameterSpec, tuple[int, ...]]:
    """One layer of a weight, and the number of layers (`()` if the weight is not a stack)."""
    stacked = int(names[:1] == ("layer",))
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


def _is_derived(x: Any) -> bool:
    return isinstance(x, Derived)
