"""`memory.update: during`: each layer is updated in the backward pass, as soon as its gradient is computed.

The backward pass goes through the layers from the last to the first. A layer's gradient is computed, its weights and
its part of the optimizer state are read, updated and written in place, and the gradient is freed. With P parameters in
N layers, gradients take P / N values instead of P, for any optimizer (Lv et al., arXiv:2306.09782). The results equal
those of updating after the backward pass up to rounding: here the loss is divided by its count before the backward
pass, there the gradients after it. With micro-batches, a layer is backpropagated through all of them before it is
updated.

The parts of a decoder (`Decoder.parts`, then `Objective.loss_parts`), what `_run_parts` makes of them in the forward
pass, and what updates their parameters:

    part                       becomes           updated by
    lookup                     PassedMatrix      `_Updates.matrix`, slice by slice
    begin                      PassedFunctions   `_Updates.unstacked` (a soft prompt), after the backward pass
    layers, a part per stack   PassedStack       `_Updates.stack`, layer by layer
    finish (final norm)        PassedFunctions   `_Updates.unstacked`
    projection and its loss    PassedMatrix      `_Updates.matrix`, slice by slice
    sums                       PassedFunctions   nothing: it has no parameters

The projection is a matrix if its logits are computed in slices (`memory.loss_chunk`); otherwise finish, projection and
sums are the functions after the last stack, and their parameters are updated before the layers (`last_parameters`).
An embedding matrix that functions use too (tied, without slices; with an adapter) is updated with the others, because
its gradient is complete only at the end.

An update (`update_during_backward`), in the order in which it is computed:

1. `_forward`: the forward pass, part by part (`parts.parts_of`).
2. `_Updates.gradient_norm`, only for an optimizer that needs the norm of all gradients before the first update
   (clipping by the global norm): a backward pass that discards the gradients.
3. `ForwardByParts.loss_gradients`, and the update of `last_parameters`.
4. `ForwardByParts.backward`: back through the parts. `stack.reverse.ForwardPass.backward` loops over the layers of a
   stack from the last one: it computes the gradient of a layer and passes it to `LayerUpdate.visitor`, which updates
   the layer.
5. Other parameters outside of layers, then embedding and output matrices, slice by slice (`VocabUpdate`): the gradient
   of a matrix that no function uses never exists completely.

Frozen parameters have no gradient, but gradients are propagated through them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.extend.core import Var

from jaxmem import optim
from jaxmem.models.network import Flow, Layers, MatrixPart, NetworkPart, run_parts
from jaxmem.models.vocab_slices import VocabOpResult, VocabSlices
from jaxmem.optim.apply import Writer, sum_of_squares
from jaxmem.optim.groups import ParameterGroup, constrain_tree
from jaxmem.quant.precision import Params
from jaxmem.sharding.table import is_axes
from jaxmem.sharding.trees import Path, merge, nest, replace_at, select, single_weights, subtree, without
from jaxmem.sharding.weights import differentiable, is_encoded, with_gradients
from jaxmem.stack.reverse import ForwardPass, Visitor, forward, merge_micro_batches
from jaxmem.step.model import ModelSpec
from jaxmem.step.objective import Batch, Sums, objective_of
from jaxmem.step.parts import parts_of
from jaxmem.step.state import StepSpec, TrainState
from jaxmem.step.update_piecewise import LayerUpdate, StackUpdate, Updated, VocabUpdate, add_squares
from jaxmem.typing import Tree


def update_during_backward(
    spec: StepSpec, state: TrainState, batch: Batch, keys: jax.Array, write: Writer
) -> tuple[Params, Tree, Sums, jax.Array]:
    """One update.

    Args:
        spec: the specification of the step.
        state: the state before the update.
        batch: arrays [micro-batches, rows, ...].
        keys: the random key of each row, [micro-batches, rows].
        write: adds updates to weights.

    Returns:
        New parameters, new optimizer state, the sums of the objective, and the squared norms of the gradients in the
        order of `StepSpec.gradient_names`.
    """
    network = _forward(spec, state.params, batch, keys)
    groups = {stack.path: [spec.group(w) for w in single_weights(stack.trainable)] for stack in network.stacks}
    update = _Updates(spec, state, write, groups)
    if spec.cfg.needs_global_norm_first:
        update = replace(update, norm=update.gradient_norm(network))

    grads, g = network.loss_gradients()
    last = update.unstacked(select(grads, network.last_parameters))
    _, g = jax.lax.optimization_barrier((last.weights, g))
    gradients = network.backward(grads, g, update.stack)
    others = update.unstacked(without(gradients.of_others, flatten_dict(network.last_parameters)))
    matrices = [update.matrix(path, gradient) for path, gradient in gradients.of_matrices.items()]
    updated = [last, *gradients.of_stacks, others, *matrices]

    axes = spec.model.select(spec.model.axes)
    zeros = jax.tree.map(lambda _: 0, axes, is_leaf=is_axes)
    squares = spec.backward_order.sort(merge(zeros, *(part.squares for part in updated)))
    new_states = merge(state.opt_state, *(group_state for part in updated for group_state in part.states))
    new_params = merge(state.params, *(part.weights for part in updated))
    return new_params, optim.record_norm(new_states, jnp.sqrt(jnp.sum(squares))), network.sums, squares


@dataclass(frozen=True)
class _Updates:
    """Updates of the parts of a network, from their gradients and the state before the step."""

    spec: StepSpec
    before: TrainState
    write: Writer
    groups: Mapping[Path, Sequence[ParameterGroup]]  # of each stack, one per weight
    norm: jax.Array | None = None  # of all gradients, if the optimizer needs it

    def stack(self, stack: PassedStack, g: Tree) -> tuple[Updated, Tree]:
        """Backward through a stack, updating its layers. Maps the output gradient to the input gradient."""
        layers = stack.result.call.layers
        opt_state = self.before.opt_state
        stacks = [
            StackUpdate(group, group.state(opt_state), self.write, self.norm, layers)
            for group in self.groups[stack.path]
        ]
        update = LayerUpdate(stacks)
        visitor = update.visitor(stack.path, stack.result.call.weights, stack.trainable, layers)
        if self.spec.offloads("optimizer"):  # the state of a layer is copied while its gradient is computed
            visitor = replace(visitor, fetch=update.fetch)
        return stack.result.backward(g, visitor)

    def unstacked(self, grads: Tree) -> Updated:
        """Updates parameters outside of stacks together."""
        if not jax.tree.leaves(grads):
            return Updated({}, [], {})
        weights = select(self.before.params, grads)
        group = self.spec.group(weights)
        grads = constrain_tree(grads, group.axes, "gradients")
        group_state = group.state(self.before.opt_state)
        new, new_state = group.update_weights(grads, group_state, weights, self.write, norm=self.norm)
        return Updated(new, [new_state], jax.tree.map(sum_of_squares, grads))

    def matrix(self, path: Path, gradient: MatrixGradient) -> Updated:
        """Updates an embedding or output matrix, slice by slice."""
        new, new_state, square = self._vocab_update(path).update(gradient, self.write, self.norm)
        return Updated(new, [new_state], nest(path, square))

    def gradient_norm(self, network: ForwardByParts) -> jax.Array:
        """The norm of all gradients, computed in a backward pass that discards them."""

        def stack_backward(stack: PassedStack, g: Tree) -> tuple[jax.Array, Tree]:
            def visit(squares: jax.Array, _: jax.Array, dw: Tree, __: None) -> jax.Array:
                return add_squares(squares, self.groups[stack.path], nest(stack.path, dw))

            zero = jnp.zeros((), jnp.float32)
            return stack.result.backward(g, Visitor(zero, lambda _: stack.result.call.weights, visit))

        gradients = network.backward(*network.loss_gradients(), stack_backward)
        of_matrices = [self._vocab_update(path).squares(gradient) for path, gradient in gradients.of_matrices.items()]
        return jnp.sqrt(sum_of_squares(gradients.of_others) + sum(gradients.of_stacks) + sum(of_matrices))

    def _vocab_update(self, path: Path) -> VocabUpdate:
        weight = select(self.before.params, nest(path, 0))
        group = self.spec.group(weight)
        chunk = self.spec.cfg.memory.loss_chunk
        entries = None if chunk == "auto" else chunk
        return VocabUpdate(group, weight, group.state(self.before.opt_state), self.spec.gradient_dtype, entries)


@dataclass(frozen=True)
class PassedStack:
    """A stack of layers after its forward pass."""

    path: Path
    result: ForwardPass
    trainable: Tree  # its trainable weights, at `path`


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


@dataclass(frozen=True)
class MatrixGradient:
    """The gradient of a matrix, or of a slice of it: the sum over its uses, each with the gradient of its result."""

    uses: Sequence[tuple[VocabOpResult, jax.Array]]

    def __call__(self, weight: Any, slices: VocabSlices | None = None, j: jax.Array | None = None) -> jax.Array:
        return reduce(jnp.add, (result.weight_gradient(g, weight, slices, j) for result, g in self.uses))


Passed = PassedStack | PassedMatrix | PassedFunctions
OfStack = TypeVar("OfStack")


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
    # Those that only functions after the last stack or matrix use: of a decoder the final norm and an untied output
    # matrix, or none if the logits are computed in slices.
    last_parameters: Params
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


def _forward(spec: StepSpec, params: Params, batch: Batch, keys: jax.Array) -> ForwardByParts:
    """The forward pass of the network and of its loss. `batch` and `keys`: as in `update_during_backward`."""
    micro_batches = len(keys)
    if micro_batches == 1:
        batch, keys = jax.tree.map(lambda x: x[0], (batch, keys))
    else:
        batch, keys = merge_micro_batches((batch, keys), micro_batches)
    model = spec.model
    trainable = model.select(params)
    objective = objective_of(spec.cfg)
    parts = parts_of(objective, model.bind, params, batch, keys, differentiable(trainable, spec.gradient_dtype))
    stacks = [part.path for part in parts if isinstance(part, Layers)]
    proxies = differentiable(without(trainable, stacks), spec.gradient_dtype)
    outside = Outside(model, params, without(params, stacks), proxies)

    def run_stack(part: Layers, flow: Flow) -> PassedStack:
        weights = subtree(trainable, part.path)
        learns = jax.tree.map(lambda w: w is not None, weights, is_leaf=lambda w: w is None or is_encoded(w))
        result = forward(part.call(model.bind(params), flow), learns, spec.gradient_dtype, micro_batches)
        return PassedStack(part.path, result, nest(part.path, weights))

    passed, last = _run_parts(parts, partial(model.bind, params), run_stack)
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


def _run_parts(
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
