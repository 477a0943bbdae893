"""The parts of a network and of its loss, in the order of the forward pass.

A network of the config names them (`models.network`). The model or the loss of a script cannot: it is run under
`call.intercept_with`. Its stacks of layers, and its operations with an embedding or output matrix, are cut out where
they are computed, and each function between two of these cuts is the complete network with the known results of the
earlier cuts; XLA removes the operations that do not contribute. The path of the weights of a cut is found by the
identity of its arrays.

With `memory.update: during`, the gradient of a stack is that of its result with respect to its weights and `x`. A model
or loss in which something else has a gradient is refused (`_refuse_lost_gradients`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Var, get_opaque_trace_state

from jaxmem.errors import UserError
from jaxmem.models.network import Flow, Layers, MatrixPart, NetworkPart, Part
from jaxmem.models.vocab_slices import VocabOp, VocabOpResult
from jaxmem.quant.precision import Params
from jaxmem.sharding.table import is_axes, is_stacked
from jaxmem.sharding.trees import Path, subtree, without
from jaxmem.sharding.weights import with_gradients
from jaxmem.stack.apply import result_shapes
from jaxmem.stack.call import StackCall, intercept_with
from jaxmem.stack.scheduled import inexact_leaves
from jaxmem.step.objective import Batch, Objective, Sums
from jaxmem.typing import AxesTree, Tree

Cut: TypeAlias = StackCall | VocabOp


def parts_of(
    objective: Objective,
    network: Callable[[Params], Any],
    params: Params,
    batch: Batch,
    keys: jax.Array | None,
    proxies: Params | None = None,
) -> Sequence[NetworkPart]:
    """The parts of a network and of its loss; the last one returns the sums.

    Args:
        objective: the loss, whose operations are the last parts.
        network: returns the network with the given weights.
        params: the weights.
        batch: arrays [rows, ...].
        keys: the random key of each row; None: without dropout.
        proxies: the arrays to differentiate with respect to, for `memory.update: during`. Then operations with an
            embedding or output matrix of a network that cannot name its parts are parts, too.
    """
    if (named := objective.named_parts(network(params), batch, keys)) is not None:
        return named
    is_during = proxies is not None
    script = _Script(objective, batch, keys, is_during)
    cuts, _ = script.run(network(params))
    parts: list[NetworkPart] = []
    stacks: list[Path] = []
    for number, cut in enumerate(cuts):
        path = _path_of(params, cut.weights if isinstance(cut, StackCall) else cut.weight)
        if is_during and path in stacks:
            raise _unsupported(f"a model or loss that applies {'.'.join(path)} more than once")
        # A lookup is the first part: it has no input that a part before it would compute.
        parts += [Part(partial(script.input_of, number))] if cut.x is not None else []
        if isinstance(cut, StackCall):
            parts.append(Layers(path, partial(script.stack, number)))
            stacks.append(path)
        else:
            parts.append(MatrixPart(_refuse, path, partial(script.matrix, number)))
    if proxies is not None:
        _refuse_lost_gradients(script, lambda proxies: network(with_gradients(params, proxies)), proxies, stacks)
    return [*parts, Part(script.sums)]


class _Marks(NamedTuple):
    """Zeros that are added to the results of stacks, so that a jaxpr shows what depends on them."""

    x: jax.Array
    outputs: jax.Array


@dataclass(frozen=True)
class _Script:
    """A script's model and loss on a batch."""

    objective: Objective
    batch: Batch
    keys: jax.Array | None
    is_during: bool

    def run(self, network: Any, known: Sequence[Any] = (), marks: _Marks | None = None) -> tuple[list[Cut], Sums]:
        """The cuts of the network in the order of the computation, and the sums of the objective. `known` are the
        results of the first cuts. `marks` are added to the results of stacks."""
        cuts: list[Cut] = []
        trace = _trace_state()

        def handle(cut: Cut) -> Any:
            is_inside = _trace_state() != trace
            if isinstance(cut, VocabOp):
                is_first_lookup = cut.x is None and not cuts
                if not self.is_during or is_inside or not (is_first_lookup or cut.x is not None):
                    return None
            elif self.is_during and is_inside:
                raise _unsupported("layers within a loop or another transformation of jax in the model or loss")
            cuts.append(cut)
            is_known = len(cuts) <= len(known)
            if isinstance(cut, VocabOp):
                return known[len(cuts) - 1] if is_known else None
            x = known[len(cuts) - 1] if is_known else cut.x  # beyond the known results, the input of the stack
            if not self.is_during:
                return x, None
            outputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result_shapes(cut)[1])
            return (x, outputs) if marks is None else (_marked(x, marks.x), _marked(outputs, marks.outputs))

        with intercept_with(handle):
            sums = self.objective(network, self.batch, self.keys)
        return cuts, sums

    def input_of(self, number: int, network: Any, flow: Flow) -> Flow:
        """From the result of the cut before to the input of a cut."""
        known = _known(flow) if number else ()
        cuts, _ = self.run(network, known)
        return Flow(cuts[number].x, known)

    def stack(self, number: int, network: Any, flow: Flow) -> StackCall:
        cut = self.run(network, flow.kept)[0][number]
        assert isinstance(cut, StackCall)
        return replace(cut, x=flow.x)

    def matrix(self, number: int, network: Any, flow: Flow) -> VocabOpResult:
        cut = self.run(network, flow.kept or ())[0][number]
        assert isinstance(cut, VocabOp)
        return cut.forward()

    def sums(self, network: Any, flow: Flow) -> Sums:
        return self.run(network, _known(flow))[1]


def _trace_state() -> Any:
    """Differs inside of a loop or another transformation of jax."""
    return get_opaque_trace_state(convention="jaxmem")


def applies_hooks_by_layer(
    loss: Callable[..., Any], params: Params, batch: Batch, keys: jax.Array, axes: AxesTree
) -> bool:
    """Whether the hooks of stacked weights can be applied layer by layer: a script's loss applies each stack of layers
    at most once, not within a loop of its own, and uses the weights of stacks nowhere else."""
    stacks: list[Tree] = []
    traces: list[Any] = []

    def replace_stack(cut: Cut) -> Any:
        if not isinstance(cut, StackCall):
            return None
        stacks.append(jax.tree.leaves(cut.weights)[0])
        traces.append(_trace_state())
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result_shapes(cut))

    def traced(*arguments: Any) -> Any:
        traces.append(_trace_state())
        with intercept_with(replace_stack):
            return loss(*arguments)

    jaxpr = jax.make_jaxpr(traced)(params, batch, keys).jaxpr
    is_once = len(set(map(id, stacks))) == len(stacks)
    used = {x for equation in jaxpr.eqns for x in equation.invars if isinstance(x, Var)}
    used |= {x for x in jaxpr.outvars if isinstance(x, Var)}
    in_stack = jax.tree.leaves(jax.tree.map(lambda names, _: is_stacked(names), axes, params, is_leaf=is_axes))
    is_used = any(is_of_layers and x in used for x, is_of_layers in zip(jaxpr.invars, in_stack, strict=False))
    return is_once and not is_used and all(trace == traces[0] for trace in traces)


def _marked(tree: Tree, mark: jax.Array) -> Tree:
    return jax.tree.map(lambda x: x + mark.astype(x.dtype), tree)


def _refuse_lost_gradients(
    script: _Script, network: Callable[[Params], Any], proxies: Params, stacks: Sequence[Path]
) -> None:
    """Refuses a model or loss with a gradient that a backward pass by parts would drop. `proxies`: the trainable
    weights, of which those below `stacks` are weights of layers."""

    def results(proxies: Params, marks: _Marks) -> tuple[Tree, Tree]:
        cuts, sums = script.run(network(proxies), marks=marks)
        # What stacks read besides x.
        arguments = [(cut.inputs, cut.shared) for cut in cuts if isinstance(cut, StackCall)]
        return (inexact_leaves(arguments), script.objective.trained_sum(sums)), (arguments, sums)

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
