"""The forward and backward pass of a network that is cut at its stacks of layers.

A network with n stacks is divided into n + 1 segments with the stacks between them: from the batch to the input of the
first stack, from the output of one stack to the input of the next, and from the output of the last one to the loss.
Each segment is the complete network, run under `stack.intercept_with`, which returns the known output of every stack
instead of computing it; operations that do not contribute to the segment are removed as dead code. So the network
needs no changes, and each segment is differentiated separately.

Embedding and output matrices are cut out in the same way (`models.vocab_slices.VocabOp`): the embedding lookup at the
start, and at the end an output projection whose loss is computed in slices. If no other operation uses such a matrix,
its complete gradient never exists: slices of it are computed on request. Frozen parameters have no gradient, but
gradients are propagated through them.
"""

import operator
from collections.abc import Callable, Collection
from functools import cached_property, partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxmem.models.vocab_slices import VocabOpResult
from jaxmem.optim.groups import merge, select
from jaxmem.quant.precision import Params
from jaxmem.sharding.weights import differentiable, is_quantized, with_gradients
from jaxmem.stack import ForwardPass, StackCall, forward, intercept_with
from jaxmem.step.objective import Batch, Sums, objective, trained_sum
from jaxmem.step.state import StateSpec

Tree = Any
Path = tuple[str, ...]
# (matrix, slices, index of a slice) -> the gradient of that slice; without slices, of the complete matrix
SliceGradient = Callable[..., jax.Array]


class Segments:
    """One forward pass over a batch, followed by any number of backward passes."""

    def __init__(self, spec: StateSpec, params: Params, batch: Batch, key: jax.Array, micro_batches: int) -> None:
        self._model, self._params, self._batch, self._key = spec.model, params, batch, key
        self._objective = objective(spec.cfg)
        self._trainable = trainable = spec.model.select(params)
        self._cuts: list[ForwardPass | VocabOpResult] = []  # in the order in which the network computes them
        self._cut_weights: list[Any] = []  # the weights of each cut

        def run(part: Any) -> Any:
            if isinstance(part, StackCall):
                trainable_weights = _at(trainable, _path_of(params, part.weights))
                learns = jax.tree.map(
                    lambda w: w is not None, trainable_weights, is_leaf=lambda w: w is None or is_quantized(w)
                )
                return self._add(forward(part, learns, spec.gradient_dtype, micro_batches), part.weights), None
            return None if part.x is None and self._cuts else self._add(part.forward(), part.weight)

        network = self._model.network(params)
        with intercept_with(run):
            x = self._objective.features(network, batch, key)
            # Run the loss only if it uses a matrix that can be cut out; running it records that cut.
            if self._uses_cut_matrix(partial(self._objective.sums, network), x):
                self._objective.sums(network, x, batch)
        self._paths = [_path_of(params, weights) for weights in self._cut_weights]
        self.stacks = {n: cut for n, cut in enumerate(self._cuts) if isinstance(cut, ForwardPass)}
        uses = {n: path for n, path in enumerate(self._paths) if n not in self.stacks}
        stacked = [self._paths[n] for n in self.stacks]
        self._outside = _without(params, stacked)  # parameters outside of stacks
        self._at = differentiable(_without(trainable, stacked), spec.gradient_dtype)
        self._read = [self._read_by(number) for number in range(len(self._cuts) + 1)]
        read_elsewhere = set().union(*self._read)
        # The uses of each matrix, by path, if all of them can be cut out.
        self.matrices = {
            path: [n for n, other in uses.items() if other == path]
            for path in uses.values()
            if path not in read_elsewhere
        }
        at = {path: None if path in self.matrices else x for path, x in flatten_dict(self._at).items()}
        self._at = unflatten_dict(at)
        last = partial(self._segment, len(self._cuts))
        _, self._last, self.sums = jax.vjp(last, self._at, self._cuts[-1].y, has_aux=True)

    sums: Sums

    def nest(self, number: int, tree: Tree) -> Tree:
        """`tree`, which has the structure of the weights of a stack, nested at the path of the stack."""
        return unflatten_dict({self._paths[number]: tree})

    def trainable(self, number: int) -> Tree:
        """The trainable weights of a stack, at its path."""
        return self.nest(number, _at(self._trainable, self._paths[number]))

    def weights(self, number: int, trainable: Tree) -> Any:
        """All weights of a stack, with the trainable weights replaced by `trainable`."""
        return merge(self.stacks[number].applied.weights, _at(trainable, self._paths[number]))

    @cached_property
    def last_parameters(self) -> Tree:
        """The parameters outside of stacks that only the last segment uses: usually the final norm. A matrix that a cut
        also uses (tied embeddings) is excluded: only the backward pass of the lookup completes its gradient."""
        return _without(self._at, [*set().union(*self._read[:-1]), *self._paths])

    def backward(
        self, stack_backward: Callable[[int, Any], Any], on_last_gradients: Callable[[Tree], Any] = lambda _: None
    ) -> tuple[Tree, dict[Path, SliceGradient]]:
        """Gradients of the mean loss with respect to the parameters outside of stacks. For each matrix in `matrices`,
        returns a function that computes slices of the gradient. `stack_backward(number, g)` differentiates a stack: it
        maps the gradient of the output to the gradient of the input. `on_last_gradients` is called first, with the
        gradients of `last_parameters`; the stacks are differentiated after it returns."""
        grads, g = self._last(1.0 / jnp.maximum(self.sums["count"], 1.0))
        _, g = jax.lax.optimization_barrier((on_last_gradients(select(grads, self.last_parameters)), g))
        output_gradients: dict[int, Any] = {}
        for number in reversed(range(len(self._cuts))):
            cut, output_gradients[number] = self._cuts[number], g
            g = stack_backward(number, g) if isinstance(cut, ForwardPass) else cut.input_gradient(g)
            path = self._paths[number]
            if not isinstance(cut, ForwardPass) and path not in self.matrices and _at(grads, path) is not None:
                of_segment = _at(grads, path)
                of_cut = cut.weight_gradient(output_gradients[number], _at(self._params, path)).astype(of_segment.dtype)
                grads = unflatten_dict(flatten_dict(grads) | {path: of_segment + of_cut})
            if g is None:
                break
            before = self._cuts[number - 1].y if number else None
            _, derivative = jax.vjp(partial(self._segment, number), self._at, before)
            of_segment, g = derivative(g)
            grads = jax.tree.map(jnp.add, grads, of_segment)

        def slice_gradient(numbers: list[int]) -> SliceGradient:
            uses = [(cut, output_gradients[n]) for n in numbers if not isinstance(cut := self._cuts[n], ForwardPass)]
            return lambda weight, *which: reduce(jnp.add, (cut.weight_gradient(g, weight, *which) for cut, g in uses))

        trainable = {path: uses for path, uses in self.matrices.items() if _at(self._trainable, path) is not None}
        return _without(grads, self.matrices), {path: slice_gradient(uses) for path, uses in trainable.items()}

    def _add(self, cut: ForwardPass | VocabOpResult, weights: Any) -> Any:
        self._cuts.append(cut)
        self._cut_weights.append(weights)
        return cut.y

    def _uses_cut_matrix(self, sums: Callable[[Any, Batch], Sums], x: Any) -> bool:
        """Whether the loss uses a matrix that can be cut out."""
        uses: list[bool] = []

        def note(part: Any) -> jax.Array:
            uses.append(True)
            return part.forward().y

        with intercept_with(note):
            jax.eval_shape(lambda: sums(x, self._batch))
        return bool(uses)

    def _read_by(self, number: int) -> set[Path]:
        """The parameters outside of stacks that segment `number` uses."""
        before = self._cuts[number - 1].y if number else None
        traced = jax.make_jaxpr(partial(self._segment, number))(self._at, before).jaxpr
        read = {id(x) for equation in traced.eqns for x in equation.invars}
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(self._at)]
        return {_names(path) for path, x in zip(paths, traced.invars, strict=False) if id(x) in read}

    def _segment(self, number: int, at: Tree, before: Any) -> Any:
        """The segment between two cuts. Returns the input of cut `number` from the output of the previous cut; after
        the last cut, (loss, sums)."""
        inputs: list[Any] = []

        def replay(part: Any) -> Any:
            if not isinstance(part, StackCall) and part.x is None and inputs:
                return None
            inputs.append(part.x)
            y = before if len(inputs) == number else self._cuts[len(inputs) - 1].y
            return (y, None) if isinstance(part, StackCall) else y

        outside = flatten_dict(with_gradients(self._outside, at))
        network = self._model.network(unflatten_dict(flatten_dict(self._params) | outside))
        with intercept_with(replay):
            x = self._objective.features(network, self._batch, self._key)
            if number < len(inputs):
                return inputs[number]
            sums = self._objective.sums(network, x, self._batch)
        return (trained_sum(sums), sums) if number == len(inputs) else inputs[number]


def _at(tree: Tree, path: Path) -> Tree:
    return reduce(operator.getitem, path, tree)


def _names(path: Any) -> Path:
    return tuple(step.key for step in path)


def _path_of(params: Params, weights: Tree) -> Path:
    """The path of a matrix or of the weights of a stack in the parameter tree, found by array identity."""
    path, leaf = jax.tree_util.tree_leaves_with_path(weights)[0]
    complete = next(path_of_leaf for path_of_leaf, x in jax.tree_util.tree_leaves_with_path(params) if x is leaf)
    return _names(complete[: len(complete) - len(path)])


def _without(params: Params, paths: Collection[Path]) -> Params:
    """The parameters that are not at or below these paths."""
    kept = {
        path_of_leaf: x
        for path_of_leaf, x in flatten_dict(params).items()
        if not any(path_of_leaf[: len(path)] == path for path in paths)
    }
    return unflatten_dict(kept)
