"""The parts of a network that cannot name them: the model of a script, with the loss of the script.

The network is run under `call.intercept_with`. Its stacks of layers, and its operations with an embedding or output
matrix, are cut out where they are computed, and each function between two of these cuts is the complete network with
the known results of the earlier cuts; XLA removes the operations that do not contribute. The path of the weights of a
cut is found by the identity of its arrays.

With `memory.update: during`, the gradient of a stack is that of its result with respect to its weights and `x`. A model
or loss in which something else has a gradient is refused (`_refuse_lost_gradients`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Var, get_opaque_trace_state

from jaxmem.errors import UserError
from jaxmem.models.network import Flow, Layers, MatrixPart, NetworkPart, Part
from jaxmem.models.vocab_slices import VocabOp, VocabOpResult
from jaxmem.quant.precision import Params
from jaxmem.sharding.trees import Path, subtree, without
from jaxmem.sharding.weights import with_gradients
from jaxmem.stack.apply import result_shapes
from jaxmem.stack.call import StackCall, intercept_with
from jaxmem.stack.scheduled import inexact_leaves
from jaxmem.step.objective import Batch, Objective, Sums
from jaxmem.typing import Tree

Cut: TypeAlias = StackCall | VocabOp


def intercepted_parts(
    objective: Objective,
    network: Callable[[Params], Any],
    params: Params,
    batch: Batch,
    keys: jax.Array | None,
    proxies: Params | None = None,
) -> list[NetworkPart]:
    """The parts of the network with the weights `params`, and of the loss; the last one returns the sums. The arguments
    are those of `by_parts.parts_of`."""
    is_during = proxies is not None
    run = _Interception(objective, batch, keys, is_during)
    cuts = run.cuts(network(params))
    parts: list[NetworkPart] = []
    stacks: list[Path] = []
    for number, cut in enumerate(cuts):
        path = _path_of(params, cut.weights if isinstance(cut, StackCall) else cut.weight)
        if is_during and path in stacks:
            raise _unsupported(f"a model or loss that applies {'.'.join(path)} more than once")
        # A lookup is the first part: it has no input that a part before it would compute.
        parts += [Part(run.input_of(number))] if cut.x is not None else []
        if isinstance(cut, StackCall):
            parts.append(Layers(path, run.stack(number)))
            stacks.append(path)
        else:
            parts.append(MatrixPart(_refuse, path, run.matrix(number)))
    if proxies is not None:
        _refuse_lost_gradients(run, lambda proxies: network(with_gradients(params, proxies)), proxies, stacks)
    return [*parts, Part(lambda network, flow: run.sums(network, _known(flow)))]


class _Marks(NamedTuple):
    """Zeros that are added to the results of stacks, so that a jaxpr shows what depends on them."""

    x: jax.Array
    outputs: jax.Array


class _Interception:
    def __init__(self, objective: Objective, batch: Batch, keys: jax.Array | None, is_during: bool) -> None:
        self.objective = objective
        self._batch = batch
        self._keys = keys
        self._is_during = is_during

    def cuts(self, network: Any, known: tuple[Any, ...] = ()) -> list[Cut]:
        """The cuts of the network, in the order of the computation. `known` are the results of the first ones."""
        return self._run(network, known)[0]

    def sums(self, network: Any, known: tuple[Any, ...]) -> Sums:
        return self._run(network, known)[1]

    def input_of(self, number: int) -> Callable[[Any, Flow], Flow]:
        """The function from the cut before to the input of this cut."""

        def run(network: Any, flow: Flow) -> Flow:
            known = _known(flow) if number else ()
            return Flow(self.cuts(network, known)[number].x, known)

        return run

    def stack(self, number: int) -> Callable[[Any, Flow], StackCall]:
        def call(network: Any, flow: Flow) -> StackCall:
            cut = self.cuts(network, flow.kept)[number]
            assert isinstance(cut, StackCall)
            return replace(cut, x=flow.x)

        return call

    def matrix(self, number: int) -> Callable[[Any, Flow], VocabOpResult]:
        def separate(network: Any, flow: Flow) -> VocabOpResult:
            cut = self.cuts(network, flow.kept or ())[number]
            assert isinstance(cut, VocabOp)
            return cut.forward()

        return separate

    def arguments_and_sums(self, network: Any, marks: _Marks) -> tuple[Tree, Sums]:
        """What stacks read besides x, and the sums, with marked results of stacks."""
        cuts, sums = self._run(network, (), marks)
        return [(cut.inputs, cut.shared) for cut in cuts if isinstance(cut, StackCall)], sums

    def _run(self, network: Any, known: tuple[Any, ...], marks: _Marks | None = None) -> tuple[list[Cut], Sums]:
        """The cuts, and the sums of the objective."""
        cuts: list[Cut] = []
        trace = get_opaque_trace_state(convention="jaxmem")

        def handle(part: Cut) -> Any:
            is_inside = get_opaque_trace_state(convention="jaxmem") != trace
            if isinstance(part, VocabOp):
                is_first_lookup = part.x is None and not cuts
                if not self._is_during or is_inside or not (is_first_lookup or part.x is not None):
                    return None
            elif self._is_during and is_inside:
                raise _unsupported("layers within a loop or another transformation of jax in the model or loss")
            cuts.append(part)
            number = len(cuts) - 1
            if isinstance(part, VocabOp):
                return known[number] if number < len(known) else None
            x = known[number] if number < len(known) else part.x  # beyond the known results, the input of the stack
            if not self._is_during:
                return x, None
            outputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result_shapes(part)[1])
            return (x, outputs) if marks is None else (_marked(x, marks.x), _marked(outputs, marks.outputs))

        with intercept_with(handle):
            sums = self.objective(network, self._batch, self._keys)
        return cuts, sums


def _marked(tree: Tree, mark: jax.Array) -> Tree:
    return jax.tree.map(lambda x: x + mark.astype(x.dtype), tree)


def _refuse_lost_gradients(
    run: _Interception, network: Callable[[Params], Any], proxies: Params, stacks: Sequence[Path]
) -> None:
    """Refuses a model or loss with a gradient that a backward pass by parts would drop. `proxies`: the trainable
    weights, of which those below `stacks` are weights of layers."""

    def results(proxies: Params, marks: _Marks) -> tuple[Tree, Tree]:
        arguments, sums = run.arguments_and_sums(network(proxies), marks)
        return (inexact_leaves(arguments), run.objective.trained_sum(sums)), (arguments, sums)

    def derivatives(tangents: Tree, marks: _Marks) -> tuple[Tree, Tree]:
        return jax.jvp(results, (proxies, marks), tangents, has_aux=True)[1:]

    zero = jnp.zeros((), jnp.float32)
    marks = _Marks(zero, zero)
    inputs = (proxies, marks), marks
    closed, outputs = jax.make_jaxpr(derivatives, return_shape=True)(*inputs)
    jaxpr = closed.jaxpr
    (of_weights, of_marks), marked = jax.tree.unflatten(jax.tree.structure(inputs), jaxpr.invars)
    (arguments, loss), values = jax.tree.unflatten(jax.tree.structure(outputs), jaxpr.outvars)
    of_layers = [subtree(of_weights, path) for path in stacks]
    others = without(of_weights, stacks)
    if _depend(jaxpr, values, marked.outputs):
        raise _unsupported("a model or loss that uses the outputs of layers, the second result of apply_call")
    if _depend(jaxpr, (arguments, loss), of_layers):
        names = ", ".join(map(".".join, stacks))
        raise _unsupported(f"a model or loss that uses the weights of {names} outside of these layers (an L2 penalty)")
    for path, arguments_of_stack in zip(stacks, arguments, strict=True):
        if _depend(jaxpr, arguments_of_stack, (others, of_marks.x)):
            name = ".".join(path)
            raise _unsupported(
                f"{name}, whose layers read trainable values besides their input (the result of an encoder, learned "
                "positions)"
            )


def _depend(jaxpr: Jaxpr, outputs: Tree, inputs: Tree) -> bool:
    """Whether some of these outputs depend on some of these inputs."""
    dependent = set(jax.tree.leaves(inputs))
    for equation in jaxpr.eqns:
        if any(isinstance(x, Var) and x in dependent for x in equation.invars):
            dependent.update(equation.outvars)
    return any(isinstance(x, Var) and x in dependent for x in jax.tree.leaves(outputs))


def _unsupported(what: str) -> UserError:
    return UserError(f"memory.update=during does not support {what}; use memory.update=after")


def _known(flow: Flow) -> tuple[Any, ...]:
    """The results of all cuts so far."""
    return (*(flow.kept or ()), flow.x)


def _refuse(_network: Any, _flow: Flow) -> Flow:
    raise AssertionError("an intercepted operation with a matrix is always separate")


def _path_of(params: Params, weights: Tree) -> Path:
    """The path of a matrix or of the weights of a stack in the parameter tree."""
    path, leaf = jax.tree_util.tree_leaves_with_path(weights)[0]
    complete = next(path_of_leaf for path_of_leaf, x in jax.tree_util.tree_leaves_with_path(params) if x is leaf)
    return tuple(step.key for step in complete[: len(complete) - len(path)])
