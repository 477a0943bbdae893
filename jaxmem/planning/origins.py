"""The inputs of a program that each value was computed from: weights alone, the batch, the optimizer state.

A cast, gathered, sliced or dequantized weight comes from weights alone, whatever operations XLA made in between. A
gradient comes from weights and batch. Every operation is followed from the inputs onwards, loops until nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxmem.planning.hlo import Computation, HloShape, Instruction, Module

Origins = int  # bits
WEIGHTS, OPTIMIZER, BATCH, OTHER = 1, 2, 4, 8
NOWHERE = 0  # literals and what is computed from them
Tree = Any  # Origins; of a tuple, a tuple of its elements' trees


def trace_origins(module: Module, of_input: Callable[[Instruction], Origins]) -> dict[Instruction, Tree]:
    """The origins of every instruction's result; `of_input` gives those of an entry parameter."""
    found: dict[Instruction, Tree] = {}
    inputs = [one for one in module.entry.instructions if one.opcode == "parameter"]
    given = {one.number: _spread(one.shape, of_input(one)) for one in inputs}
    _run(module.entry, [given.get(n, NOWHERE) for n in range(max(given, default=-1) + 1)], found)
    return found


def origins_at(tree: Tree, index: tuple[int, ...]) -> Origins:
    """The origins of one element, or of a whole tuple."""
    for place in index:
        if not isinstance(tree, tuple):
            break
        tree = tree[place]
    return _union(tree)


def _run(computation: Computation, arguments: Sequence[Tree], found: dict[Instruction, Tree]) -> Tree:
    for one in computation.instructions:
        found[one] = arguments[one.number] if one.opcode == "parameter" else _result(one, found)
    return found[computation.root]


def _result(one: Instruction, found: dict[Instruction, Tree]) -> Tree:
    given = [found[operand] for operand in one.operands]
    if one.opcode == "get-tuple-element":
        return given[0][one.number] if isinstance(given[0], tuple) else given[0]
    if one.opcode == "tuple":
        return tuple(given)
    if one.opcode in ("bitcast", "copy", "optimization-barrier", "all-reduce-done"):
        return given[0]
    if one.opcode.endswith("-done"):
        return given[0][1] if isinstance(given[0], tuple) else given[0]
    if one.opcode == "while":
        return _loop(one, given[0], found)
    if one.opcode == "conditional":
        results = [_run(branch, [argument], found) for branch, argument in zip(one.called, given[1:], strict=True)]
        return _join(one.shape, results)
    if one.opcode in ("fusion", "call"):
        return _run(one.called[0], given, found)
    if one.opcode == "async-start":
        return (tuple(given), _run(one.called[0], given, found), NOWHERE)
    return _spread(one.shape, _union(tuple(given)))


def _loop(one: Instruction, state: Tree, found: dict[Instruction, Tree]) -> Tree:
    condition, body = sorted(one.called, key=lambda called: called.root.shape.dtype != "bool")
    while True:
        after = _join(one.shape, [state, _run(body, [state], found)])
        if after == state:
            _run(condition, [state], found)
            return state
        state = after


def _union(tree: Tree) -> Origins:
    if not isinstance(tree, tuple):
        return tree
    origins = NOWHERE
    for part in tree:
        origins |= _union(part)
    return origins


def _spread(shape: HloShape, origins: Origins) -> Tree:
    """The same origins for every element of a result."""
    return tuple(_spread(part, origins) for part in shape.parts) if shape.parts else origins


def _join(shape: HloShape, trees: Sequence[Tree]) -> Tree:
    """The origins of a result that is one of several."""
    if not shape.parts:
        return _union(tuple(trees))
    parts = [tree if isinstance(tree, tuple) else _spread(shape, tree) for tree in trees]
    return tuple(_join(part, [tree[place] for tree in parts]) for place, part in enumerate(shape.parts))
