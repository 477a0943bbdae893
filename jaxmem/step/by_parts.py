"""The forward and backward pass of a network, part by part.

A network is a sequence of parts (`models.network`): stacks of layers, operations with an embedding or output matrix,
and functions in between. `forward_by_parts` computes them one after the other. `ForwardByParts.backward` goes through
them in reverse order. A stack passes the gradient of each layer to a visitor. The gradient of an embedding or output
matrix that no other part uses never exists completely: slices of it are computed on request. Frozen parameters have no
gradient, but gradients are propagated through them.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.extend.core import Var

from jaxmem.models.network import Flow, Layers, MatrixPart, NetworkPart, run_parts
from jaxmem.models.vocab_slices import VocabOpResult, VocabSlices
from jaxmem.quant.precision import Params
from jaxmem.sharding.trees import Path, merge, nest, replace_at, subtree, without
from jaxmem.sharding.weights import differentiable, is_encoded, with_gradients
from jaxmem.stack.reverse import ForwardPass, forward
from jaxmem.step.model import ModelSpec
from jaxmem.step.objective import Batch, Objective, Sums, objective_of
from jaxmem.step.state import StateSpec
from jaxmem.typing import Tree


@dataclass(frozen=True)
class MatrixGradient:
    """The gradient of a matrix, or of a slice of it: the sum over its uses, each with the gradient of its result."""

    uses: Sequence[tuple[VocabOpResult, jax.Array]]

    def __call__(self, weight: Any, slices: VocabSlices | None = None, j: jax.Array | None = None) -> jax.Array:
        return reduce(jnp.add, (result.weight_gradient(g, weight, slices, j) for result, g in self.uses))


@dataclass(frozen=True)
class PassedStack:
    """A stack of layers after its forward pass."""

    path: Path
    result: ForwardPass
    trainable: Tree  # its trainable weights, at `path`

    def weights(self, trainable: Tree) -> Tree:
        """All weights, with the trainable weights replaced by `trainable`, which is at the path of the stack."""
        return merge(self.result.call.weights, subtree(trainable, self.path))


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


OfStack = TypeVar("OfStack")
Passed = PassedStack | PassedMatrix | PassedFunctions


class Gradients(NamedTuple, Generic[OfStack]):
    """What a backward pass returns."""

    of_stacks: Sequence[OfStack]  # what was made of the gradients of each stack, from the last stack to the first
    of_matrices: dict[Path, MatrixGradient]  # of the matrices whose gradients are computed in slices
    of_others: Params  # of the other parameters outside of stacks


@dataclass(frozen=True)
class Outside:
    """The parameters outside of stacks. `proxies` are the arrays to differentiate with respect to."""

    model: ModelSpec
    params: Params  # of the complete network
    outside: Params
    proxies: Params

    def run(self, parts: Sequence[NetworkPart], proxies: Params, flow: Flow) -> Any:
        """The result of functions, differentiable with respect to `proxies`."""
        outside = flatten_dict(with_gradients(self.outside, proxies))
        return run_parts(self.model.bind(replace_at(self.params, outside)), parts, flow)

    def read_by(self, functions: PassedFunctions) -> set[Path]:
        """The paths of the parameters that functions use."""
        traced = jax.make_jaxpr(partial(self.run, functions.parts))(self.proxies, functions.flow).jaxpr
        inputs = {x for equation in traced.eqns for x in equation.invars if isinstance(x, Var)}
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(self.proxies)]
        return {tuple(key.key for key in path) for path, x in zip(paths, traced.invars, strict=False) if x in inputs}


@dataclass(frozen=True)
class ForwardByParts:
    """A forward pass over a batch, which any number of backward passes may follow."""

    passed: Sequence[Passed]  # up to the last stack or matrix
    outside: Outside  # `proxies` has None for the matrices in `sliced`
    sliced: Collection[Path]  # the matrices whose gradients are computed in slices
    frozen: Collection[Path]
    last_parameters: Params  # those that only functions after the last stack or matrix use: usually the final norm
    loss_derivative: Callable[[jax.Array], tuple[Params, Flow]]  # of the functions after the last stack or matrix
    sums: Sums

    @property
    def stacks(self) -> list[PassedStack]:
        return [passed for passed in self.passed if isinstance(passed, PassedStack)]

    def loss_gradients(self) -> tuple[Params, Flow]:
        """Gradients of the mean loss: of the parameters outside of stacks, as far as the functions after the last stack
        or matrix use them, and of what they read."""
        return self.loss_derivative(1.0 / jnp.maximum(self.sums["count"], 1.0))

    def backward(
        self, grads: Params, g: Flow, stack_backward: Callable[[PassedStack, Tree], tuple[OfStack, Tree]]
    ) -> Gradients[OfStack]:
        """Back through the parts.

        Args:
            grads, g: `loss_gradients`.
            stack_backward: differentiates a stack: from the gradient of its output it returns what it makes of the
                gradients of the layers, and the gradient of the input.
        """
        of_stacks = list[OfStack]()
        uses: dict[Path, list[tuple[VocabOpResult, jax.Array]]] = {}  # of the matrices, with the gradients of results
        for passed in reversed(self.passed):
            if isinstance(passed, PassedStack):
                of_stack, input_gradient = stack_backward(passed, g.x)
                of_stacks.append(of_stack)
                g = g._replace(x=input_gradient)
            elif isinstance(passed, PassedMatrix):
                uses.setdefault(passed.path, []).append((passed.result, g.x))
                grads = self._with_complete_gradient(grads, passed, g.x)
                g = g._replace(x=passed.result.input_gradient(g.x))
            else:
                _, derivative = jax.vjp(partial(self.outside.run, passed.parts), self.outside.proxies, passed.flow)
                of_functions, g = derivative(g)
                grads = jax.tree.map(jnp.add, grads, of_functions)
        in_slices = {path: MatrixGradient(uses[path]) for path in self.sliced if path not in self.frozen}
        return Gradients(of_stacks, in_slices, without(grads, self.sliced))

    def _with_complete_gradient(self, grads: Params, passed: PassedMatrix, g: jax.Array) -> Params:
        """`grads` plus the gradient of a matrix that functions use too."""
        path = passed.path
        if path in self.sliced or path in self.frozen:
            return grads
        total = subtree(grads, path)
        gradient = passed.result.weight_gradient(g, subtree(self.outside.params, path))
        return replace_at(grads, {path: total + gradient.astype(total.dtype)})


def forward_by_parts(
    spec: StateSpec, params: Params, batch: Batch, keys: jax.Array, micro_batches: int
) -> ForwardByParts:
    """The forward pass of the network and of its loss.

    Args:
        spec: the specification of the step.
        params: all parameters.
        batch: arrays [rows, ...], in the order of `merge_micro_batches`.
        keys: the random key of each row.
        micro_batches: the number of micro-batches that the rows are from.
    """
    model = spec.model
    trainable = model.select(params)
    network = partial(model.bind, params)
    all_proxies = differentiable(trainable, spec.gradient_dtype)
    objective = objective_of(spec.cfg)
    parts = parts_of(objective, model.bind, params, batch, keys, all_proxies)
    stacks = [part.path for part in parts if isinstance(part, Layers)]
    proxies = differentiable(without(trainable, stacks), spec.gradient_dtype)
    outside = Outside(model, params, without(params, stacks), proxies)

    def run_stack(part: Layers, flow: Flow) -> PassedStack:
        weights = subtree(trainable, part.path)
        learns = jax.tree.map(lambda w: w is not None, weights, is_leaf=lambda w: w is None or is_encoded(w))
        result = forward(part.call(network(), flow), learns, spec.gradient_dtype, micro_batches)
        return PassedStack(part.path, result, nest(part.path, weights))

    passed, last = run_forward(parts, network, run_stack)
    functions = [part for part in passed if isinstance(part, PassedFunctions)]
    read_before = {path for function in functions for path in outside.read_by(function)}
    matrices = list(dict.fromkeys(matrix.path for matrix in passed if isinstance(matrix, PassedMatrix)))
    # No function uses these matrices, so their gradients are computed in slices, by request.
    read = read_before | outside.read_by(last)
    sliced = [path for path in matrices if path not in read]
    proxies = replace_at(proxies, dict.fromkeys(sliced))

    def loss(proxies: Params, flow: Flow) -> tuple[jax.Array, Sums]:
        sums = outside.run(last.parts, proxies, flow)
        return objective.trained_sum(sums), sums

    _, loss_derivative, sums = jax.vjp(loss, proxies, last.flow, has_aux=True)
    return ForwardByParts(
        passed,
        replace(outside, proxies=proxies),
        sliced,
        frozen={path for path, w in flatten_dict(trainable).items() if w is None},
        # A matrix that a lookup uses too (tied embeddings) is not one of them: only the lookup completes its gradient.
        last_parameters=without(proxies, [*read_before, *matrices]),
        loss_derivative=loss_derivative,
        sums=sums,
    )


def run_forward(
    parts: Sequence[NetworkPart], network: Callable[[], Any], run_stack: Callable[[Layers, Flow], PassedStack]
) -> tuple[list[Passed], PassedFunctions]:
    """Runs the parts. Returns those up to the last stack or matrix, and the functions after it. `network` returns a new
    network for each part: a pass may change the random number generators of a script's model."""
    passed: list[Passed] = []
    functions = PassedFunctions((), Flow(None))  # since the last stack or matrix
    flow = functions.flow
    for part in parts:
        separate: PassedStack | PassedMatrix | None = None
        if isinstance(part, Layers):
            separate = run_stack(part, flow)
        elif isinstance(part, MatrixPart) and (result := part.separate(network(), flow)) is not None:
            separate = PassedMatrix(part.path, result)
        if separate is None:
            functions = PassedFunctions((*functions.parts, part), functions.flow)
            flow = part.run(network(), flow)
        else:
            passed += [functions, separate] if functions.parts else [separate]
            flow = flow._replace(x=separate.result.y)
            functions = PassedFunctions((), flow)
    return passed, functions


def parts_of(
    objective: Objective,
    network: Callable[[Params], Any],
    params: Params,
    batch: Batch,
    keys: jax.Array | None,
    proxies: Params | None = None,
) -> Sequence[NetworkPart]:
    """The parts of a network and of its loss.

    Args:
        objective: the loss, whose operations are the last parts.
        network: returns the network with the given weights.
        params: the weights.
        batch: arrays [rows, ...].
        keys: the random key of each row; None: without dropout.
        proxies: the arrays to differentiate with respect to, for `memory.update: during`. Then operations with an
            embedding or output matrix of a network that cannot name its parts are parts, too.
    """
    if (parts := objective.named_parts(network(params), batch, keys)) is not None:
        return parts
    from jaxmem.step.intercepted_parts import intercepted_parts

    return intercepted_parts(objective, network, params, batch, keys, proxies)
