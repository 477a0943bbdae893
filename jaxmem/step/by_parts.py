"""The forward and backward pass of a network, part by part.

A network is a sequence of parts (`models.network`): stacks of layers, operations with an embedding or output matrix,
and functions in between. `ForwardByParts` computes them one after the other. Its backward pass goes through them in
reverse order. A stack passes the gradient of each layer to a visitor. The gradient of an embedding or output matrix
that no other part uses never exists completely: slices of it are computed on request. Frozen parameters have no
gradient, but gradients are propagated through them.
"""

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.extend.core import Var

from jaxmem.models.network import Flow, Layers, MatrixPart, NetworkPart, Path, run_parts
from jaxmem.models.vocab_slices import VocabOpResult
from jaxmem.optim.groups import merge, select
from jaxmem.quant.precision import Params
from jaxmem.sharding.weights import differentiable, is_quantized, with_gradients
from jaxmem.stack import ForwardPass, forward
from jaxmem.step.objective import Batch, Objective, Sums, objective, trained_sum
from jaxmem.step.state import StateSpec
from jaxmem.typing import Tree

# (matrix, slices, index of a slice) -> the gradient of that slice; without slices, of the complete matrix
SliceGradient = Callable[..., jax.Array]


@dataclass(frozen=True)
class PassedStack:
    """A stack of layers after its forward pass."""

    path: Path
    result: ForwardPass
    trainable: Tree  # its trainable weights, at `path`

    def nest(self, tree: Tree) -> Tree:
        """`tree`, which has the structure of the weights, at the path of the stack."""
        return unflatten_dict({self.path: tree})

    def weights(self, trainable: Tree) -> Tree:
        """All weights, with the trainable weights replaced by `trainable`, which is at the path of the stack."""
        return merge(self.result.call.weights, _at(trainable, self.path))


@dataclass(frozen=True)
class PassedMatrix:
    """An operation with an embedding or output matrix after its forward pass."""

    path: Path
    result: VocabOpResult


@dataclass(frozen=True)
class PassedFunctions:
    """Functions of the weights outside of stacks, one after the other, and the input of the first one."""

    parts: Sequence[NetworkPart]
    flow: Flow


class ForwardByParts:
    """One forward pass over a batch, followed by any number of backward passes."""

    sums: Sums

    def __init__(self, spec: StateSpec, params: Params, batch: Batch, keys: jax.Array, micro_batches: int) -> None:
        self._model, self._params = spec.model, params
        trainable = spec.model.select(params)
        # A new network for each part: a pass may change the random number generators of a script's model.
        network = partial(spec.model.network, params)
        parts = parts_of(objective(spec.cfg), network(), params, batch, keys)
        stack_paths = [part.path for part in parts if isinstance(part, Layers)]
        self._outside = _without(params, stack_paths)  # parameters outside of stacks
        self._at = differentiable(_without(trainable, stack_paths), spec.gradient_dtype)
        self._frozen = {path for path, w in flatten_dict(trainable).items() if w is None}

        self._passed: list[PassedStack | PassedMatrix | PassedFunctions] = []
        flow = Flow(None)
        functions = PassedFunctions((), flow)
        for part in parts:
            passed: PassedStack | PassedMatrix | None = None
            if isinstance(part, Layers):
                weights = _at(trainable, part.path)
                learns = jax.tree.map(lambda w: w is not None, weights, is_leaf=lambda w: w is None or is_quantized(w))
                stack = forward(part.call(network(), flow), learns, spec.gradient_dtype, micro_batches)
                passed = PassedStack(part.path, stack, unflatten_dict({part.path: weights}))
            elif isinstance(part, MatrixPart) and (result := part.separate(network(), flow)) is not None:
                passed = PassedMatrix(part.path, result)
            if passed is None:
                flow = part.run(network(), flow)
                functions = PassedFunctions((*functions.parts, part), functions.flow)
            else:
                flow = flow._replace(x=passed.result.y)
                self._passed += [functions, passed] if functions.parts else [passed]
                functions = PassedFunctions((), flow)

        self.stacks = [passed for passed in self._passed if isinstance(passed, PassedStack)]
        matrices = dict.fromkeys(passed.path for passed in self._passed if isinstance(passed, PassedMatrix))
        read_before = {
            path for passed in self._passed if isinstance(passed, PassedFunctions) for path in self._reads(passed)
        }
        # These matrices are used in no function, so their gradients are computed in slices, by request.
        read = read_before | self._reads(functions)
        self._sliced = [path for path in matrices if path not in read]
        self._at = _replaced(self._at, dict.fromkeys(self._sliced))
        # The parameters that only the functions after the last stack or matrix use: usually the final norm. A matrix
        # that a lookup uses too (tied embeddings) is not one of them: only the lookup completes its gradient.
        self.last_parameters = _without(self._at, [*read_before, *matrices])

        def loss(at: Params, flow: Flow) -> tuple[jax.Array, Sums]:
            sums = self._run(functions.parts, at, flow)
            return trained_sum(sums), sums

        _, self._loss_derivative, self.sums = jax.vjp(loss, self._at, functions.flow, has_aux=True)

    def backward(
        self,
        stack_backward: Callable[[PassedStack, Tree], Tree],
        on_last_gradients: Callable[[Params], object] = lambda _: None,
    ) -> tuple[Params, dict[Path, SliceGradient]]:
        """Gradients of the mean loss.

        Args:
            stack_backward: differentiates a stack: it maps the gradient of the output to the gradient of the input.
            on_last_gradients: is called first, with the gradients of `last_parameters`; the stacks are differentiated
                after it returns.

        Returns:
            The gradients of the parameters outside of stacks, without the matrices whose gradients are computed in
            slices; and for each of these, by its path, a function that computes slices of the gradient.
        """
        grads, g = self._loss_derivative(1.0 / jnp.maximum(self.sums["count"], 1.0))
        _, g = jax.lax.optimization_barrier((on_last_gradients(select(grads, self.last_parameters)), g))
        uses: dict[Path, list[tuple[VocabOpResult, jax.Array]]] = {}  # of the matrices, with the gradients of results
        for passed in reversed(self._passed):
            if isinstance(passed, PassedStack):
                g = g._replace(x=stack_backward(passed, g.x))
            elif isinstance(passed, PassedMatrix):
                uses.setdefault(passed.path, []).append((passed.result, g.x))
                grads = self._with_complete_gradient(grads, passed, g.x)
                g = g._replace(x=passed.result.input_gradient(g.x))
            else:
                _, derivative = jax.vjp(partial(self._run, passed.parts), self._at, passed.flow)
                of_functions, g = derivative(g)
                grads = jax.tree.map(jnp.add, grads, of_functions)
        in_slices: dict[Path, SliceGradient] = {
            path: partial(_slice_gradient, uses[path]) for path in self._sliced if path not in self._frozen
        }
        return _without(grads, self._sliced), in_slices

    def _with_complete_gradient(self, grads: Params, passed: PassedMatrix, g: jax.Array) -> Params:
        """`grads` plus the gradient of a matrix that functions use too."""
        path = passed.path
        if path in self._sliced or path in self._frozen:
            return grads
        total = _at(grads, path)
        gradient = passed.result.weight_gradient(g, _at(self._params, path))
        return _replaced(grads, {path: total + gradient.astype(total.dtype)})

    def _run(self, parts: Sequence[NetworkPart], at: Params, flow: Flow) -> Any:
        """The result of functions, differentiable with respect to the parameters `at`."""
        outside = flatten_dict(with_gradients(self._outside, at))
        network = self._model.network(unflatten_dict(flatten_dict(self._params) | outside))
        return run_parts(network, parts, flow)

    def _reads(self, functions: PassedFunctions) -> set[Path]:
        """The parameters outside of stacks that functions use."""
        traced = jax.make_jaxpr(partial(self._run, functions.parts))(self._at, functions.flow).jaxpr
        inputs = {x for equation in traced.eqns for x in equation.invars if isinstance(x, Var)}
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(self._at)]
        return {tuple(key.key for key in path) for path, x in zip(paths, traced.invars, strict=False) if x in inputs}


def parts_of(
    terms: Objective, network: Any, params: Params, batch: Batch, keys: jax.Array | None, *, matrices: bool = True
) -> Sequence[NetworkPart]:
    """The parts of a network and of its loss. `matrices`: whether operations with an embedding or output matrix of a
    network that cannot name its parts are parts."""
    if (parts := terms.named_parts(network, batch, keys)) is not None:
        return parts
    from jaxmem.step.intercepted_parts import intercepted_parts

    return intercepted_parts(terms, network, params, batch, keys, matrices=matrices)


def _slice_gradient(uses: list[tuple[VocabOpResult, jax.Array]], weight: Any, *which: Any) -> jax.Array:
    """The gradient of a matrix or of a slice of it: the sum over its uses."""
    return reduce(jnp.add, (result.weight_gradient(g, weight, *which) for result, g in uses))


def _at(tree: Tree, path: Path) -> Tree:
    return reduce(operator.getitem, path, tree)


def _replaced(params: Params, new: Mapping[Path, Any]) -> Params:
    return unflatten_dict(flatten_dict(params) | new)


def _without(params: Params, paths: Collection[Path]) -> Params:
    """The parameters that are not at or below these paths."""
    return unflatten_dict(
        {path: x for path, x in flatten_dict(params).items() if not any(path[: len(p)] == p for p in paths)}
    )
