"""The backward pass of a layer in two parts: the gradient of its input, and later the gradients of its weights (B and W
of Qi et al., arXiv:2401.10241).

The derivative is traced into a list of operations. B executes those that the gradient of the input depends on; W
executes the others. Between them, the values that B computes and W reads are saved: for a matmul, its input and the
gradient of its output.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core

Tree = Any
# Operations that only contain others, which are executed one by one.
_CONTAINERS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "checkpoint": "jaxpr", "remat2": "jaxpr"}
# W repeats these instead of keeping their results, which are not smaller than their operands: a wider dtype, another
# shape.
_REPEATED = ("convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "name")
_BARRIER = "optimization_barrier"  # has one result for each operand, which depends on this operand only


@dataclass
class SplitBackward:
    """A backward pass in two parts, `begin` and `finish`. `begin` is traced first."""

    _equations: Sequence[Any] = ()
    _outputs: Sequence[Any] = ()
    _tree: Any = None
    _saved: Sequence[Any] = ()  # variables
    _known: Sequence[tuple[Any, int]] = ()  # variables, and their indices among the known leaves

    def begin(self, derivative: Callable[[Tree], tuple[Tree, Tree]], g: Tree, known: Tree) -> tuple[Tree, list[Any]]:
        """Returns the gradient of the input and the values to keep. `derivative` returns the gradients of weights and
        of the input; `known` are arrays that `finish` receives too."""
        leaves, tree = jax.tree.flatten((derivative, g))

        def both(*leaves: Any) -> tuple[Tree, Tree]:
            derivative, g = jax.tree.unflatten(tree, leaves)
            return derivative(g)

        traced, (dw, dx) = jax.make_jaxpr(both, return_shape=True)(*leaves)
        flat = jax.make_jaxpr(lambda *leaves: _inlined(traced.jaxpr, traced.consts, leaves))(*leaves)
        jaxpr, count = flat.jaxpr, len(jax.tree.leaves(dw))
        of_weights, of_input = jaxpr.outvars[:count], jaxpr.outvars[count:]
        values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*flat.consts, *leaves), strict=True))
        places = {id(leaf): place for place, leaf in enumerate(jax.tree.leaves(known))}
        given = {var: places[id(x)] for var, x in values.items() if id(x) in places}

        _execute(_needed(jaxpr.eqns, of_input, set(values)), values)
        repeated = {y for one in jaxpr.eqns if _is_repeated(one) for y in one.outvars}
        self._equations = _needed(jaxpr.eqns, of_weights, set(values) - repeated)
        read = {x for one in self._equations for x in one.inputs} | {*of_weights}
        computed = {y for one in self._equations for y in one.outputs}
        inputs = [x for x in values if x in read - computed]
        self._known = [(x, given[x]) for x in inputs if x in given]
        self._saved = [x for x in inputs if x not in given]
        self._outputs, self._tree = of_weights, jax.tree.structure(dw)
        return jax.tree.unflatten(jax.tree.structure(dx), _read(of_input, values)), _read(self._saved, values)

    def finish(self, saved: Sequence[Any], known: Tree) -> Tree:
        """The gradients of the weights."""
        leaves = jax.tree.leaves(known)
        values = dict(zip(self._saved, saved, strict=True)) | {x: leaves[place] for x, place in self._known}
        _execute(self._equations, values)
        return jax.tree.unflatten(self._tree, _read(self._outputs, values))


@dataclass(frozen=True)
class _Equation:
    """An operation; of a barrier, only some operands."""

    eqn: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


def _needed(eqns: Sequence[Any], outputs: Sequence[Any], known: set[Any]) -> list[_Equation]:
    """The operations on which the outputs depend, without those whose results are known."""
    wanted, found = {x for x in outputs if not isinstance(x, core.Literal)} - known, list[_Equation]()
    for eqn in reversed(eqns):
        pairs = [(x, y) for x, y in zip(eqn.invars, eqn.outvars, strict=False) if y in wanted]
        if not any(y in wanted for y in eqn.outvars):
            continue
        is_barrier = eqn.primitive.name == _BARRIER
        inputs = tuple(x for x, _ in pairs) if is_barrier else tuple(eqn.invars)
        found.append(_Equation(eqn, inputs, tuple(y for _, y in pairs) if is_barrier else tuple(eqn.outvars)))
        wanted |= {x for x in inputs if not isinstance(x, core.Literal)} - known
    return found[::-1]


def _is_repeated(eqn: Any) -> bool:
    sizes = [x.aval.size * x.aval.dtype.itemsize for x in (*eqn.invars, *eqn.outvars) if hasattr(x.aval, "size")]
    return eqn.primitive.name in _REPEATED and len(sizes) == 2 and sizes[0] <= sizes[1]


def _execute(equations: Sequence[_Equation], values: dict[Any, Any]) -> None:
    for one in equations:
        results = _bind(one.eqn, _read(one.inputs, values))
        values.update(zip(one.outputs, results, strict=True))


def _bind(eqn: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    if eqn.primitive.name == _BARRIER:
        return jax.lax.optimization_barrier(tuple(inputs))
    params = eqn.primitive.get_bind_params(eqn.params)
    functions, params = params if isinstance(params, tuple) else ((), params)  # a pair before jax 0.10.2
    results = eqn.primitive.bind(*functions, *inputs, **params)
    return list(results) if eqn.primitive.multiple_results else [results]


def _read(variables: Sequence[Any], values: dict[Any, Any]) -> list[Any]:
    return [x.val if isinstance(x, core.Literal) else values[x] for x in variables]


def _inlined(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """The results of a trace, in which operations within `_CONTAINERS` are traced one by one."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True))
    for eqn in jaxpr.eqns:
        inputs, name = _read(eqn.invars, values), _CONTAINERS.get(eqn.primitive.name)
        if name is None:
            results = _bind(eqn, inputs)
        else:
            inner = eqn.params[name]
            results = _inlined(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), inputs)
        values.update(zip(eqn.outvars, results, strict=True))
    return _read(jaxpr.outvars, values)
