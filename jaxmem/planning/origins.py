"""The inputs of a program from which each value was computed: weights, the batch, the optimizer state.

A cast, gathered, sliced or dequantized weight is computed from weights alone, whichever operations XLA inserted. A
gradient is computed from weights and batch. Origins are propagated from the inputs through every operation, in loops
until they do not change.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence

from jaxmem.planning.hlo import Computation, Instruction, Module

Origins = int  # one bit per input
WEIGHTS, OPTIMIZER, BATCH, OTHER = 1, 2, 4, 8
NOWHERE = 0  # literals, and values that are computed from literals only
Result = tuple[Origins, ...]  # one for each array of an instruction's result


def trace_origins(module: Module, of_input: Callable[[Instruction], Origins]) -> dict[Instruction, Result]:
    """The origins of the result of every instruction. `of_input` returns the origin of an argument of the program."""
    found: dict[Instruction, Result] = {}
    inputs = [one for one in module.entry.instructions if one.opcode == "parameter"]
    inputs.sort(key=lambda one: one.number)
    _run(module.entry, [_uniform(one, of_input(one)) for one in inputs], found)
    return found


def union(results: Iterable[Origins]) -> Origins:
    return functools.reduce(operator.or_, results, NOWHERE)


def _run(computation: Computation, arguments: Sequence[Result], found: dict[Instruction, Result]) -> Result:
    for one in computation.instructions:
        found[one] = arguments[one.number] if one.opcode == "parameter" else _result(one, found)
    return found[computation.root]


def _result(one: Instruction, found: dict[Instruction, Result]) -> Result:
    operands = [found[operand] for operand in one.operands]
    match one.opcode:
        case "get-tuple-element":
            return operands[0][one.operands[0].shape.arrays_at((one.number,))]
        case "async-done":
            return operands[0][one.operands[0].shape.arrays_at((1,))]  # the operand is (operands, results, ...)
        case "tuple":
            return sum(operands, ())
        case "copy" | "optimization-barrier":
            return operands[0]
        case "while":
            condition, body = sorted(one.called, key=lambda called: called.root.shape.dtype != "bool")
            state = operands[0]
            while (after := _either(state, _run(body, [state], found))) != state:
                state = after
            _run(condition, [state], found)
            return state
        case "conditional":
            branches = zip(one.called, operands[1:], strict=True)
            return _either(*(_run(branch, [argument], found) for branch, argument in branches))
        case "fusion" | "call":
            return _run(one.called[0], operands, found)
        case "async-start":
            started = sum(operands, ()) + _run(one.called[0], operands, found)
            return started + (NOWHERE,) * (one.shape.arrays - len(started))
        case _:
            return _uniform(one, union(map(union, operands)))


def _uniform(one: Instruction, origins: Origins) -> Result:
    return (origins,) * one.shape.arrays


def _either(*results: Result) -> Result:
    """The origins of a result that equals one of several results."""
    return tuple(map(union, zip(*results, strict=True)))
