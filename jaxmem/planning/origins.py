"""What each value of a compiled program is computed from: weights, optimizer state, the batch; and in which pass.

Origins are propagated through every operation, in loops until they do not change. So a cast, gathered or dequantized
weight is computed from weights alone, whichever operations XLA inserted, and a gradient from weights and batch.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence

from jaxmem.kernels.scopes import purpose_of
from jaxmem.planning.hlo import Computation, Instruction, Module, dot_flops
from jaxmem.step.categories import ROLE_OF_CATEGORY, category_of

Origins = int  # the inputs of the program from which a value was computed, one bit per input
WEIGHTS, OPTIMIZER, BATCH, OTHER = 1, 2, 4, 8
GRADIENT = 16  # the value is the gradient of a weight, or computed from such gradients
NOWHERE = 0  # literals, and values that are computed from literals only
Result = tuple[Origins, ...]  # one for each array of an instruction's result


def input_origin(path: str) -> Origins:
    """The origin of an argument of a program, from its path in jax."""
    category = category_of(path)
    if category in ROLE_OF_CATEGORY:
        return WEIGHTS if ROLE_OF_CATEGORY[category] == "weights" else OPTIMIZER
    return BATCH if category == "batch" else OTHER


def pass_of(op_name: str) -> str:
    """The pass of a training step that an operation belongs to.

    >>> [pass_of(f"jit(step)/{name}") for name in ("jvp()/add", "transpose(jvp())/while/body/dot_general", "mul")]
    ['forward', 'backward', 'update']
    """
    if "transpose(" in op_name or is_recomputed(op_name):
        return "backward"
    return "forward" if "jvp(" in op_name else "update"


def is_repeated(op_name: str) -> bool:
    """Whether an operation copies, reads or recomputes a value instead of computing a new one."""
    return not op_name or op_name.endswith("dynamic_slice") or is_recomputed(op_name)


def is_recomputed(op_name: str) -> bool:
    """Whether an operation of the backward pass repeats one of the forward pass."""
    return "rematted_computation" in op_name


def trace_origins(module: Module, of_input: Callable[[Instruction], Origins]) -> dict[Instruction, Result]:
    """The origins of the result of every instruction. `of_input` returns the origin of an argument of the program."""
    origins: dict[Instruction, Result] = {}
    inputs = [instruction for instruction in module.entry.instructions if instruction.opcode == "parameter"]
    inputs.sort(key=lambda instruction: instruction.number)
    _run(module.entry, [_uniform(instruction, of_input(instruction)) for instruction in inputs], origins)
    return origins


def union(results: Iterable[Origins]) -> Origins:
    return functools.reduce(operator.or_, results, NOWHERE)


def _run(computation: Computation, arguments: Sequence[Result], origins: dict[Instruction, Result]) -> Result:
    for instruction in computation.instructions:
        origins[instruction] = (
            arguments[instruction.number] if instruction.opcode == "parameter" else _result(instruction, origins)
        )
    return origins[computation.root]


def _result(instruction: Instruction, origins: dict[Instruction, Result]) -> Result:
    operands = [origins[operand] for operand in instruction.operands]
    match instruction.opcode:
        case "get-tuple-element":
            return operands[0][instruction.operands[0].shape.arrays_at((instruction.number,))]
        case "async-done":
            return operands[0][instruction.operands[0].shape.arrays_at((1,))]  # the operand is (operands, results, ...)
        case "tuple":
            return sum(operands, ())
        case "copy" | "optimization-barrier":
            return operands[0]
        case "while":
            condition, body = sorted(instruction.called, key=lambda called: called.root.shape.dtype != "bool")
            state = operands[0]
            while (after := _either(state, _run(body, [state], origins))) != state:
                state = after
            _run(condition, [state], origins)
            return state
        case "conditional":
            branches = zip(instruction.called, operands[1:], strict=True)
            return _either(*(_run(branch, [argument], origins) for branch, argument in branches))
        case "fusion" | "call":
            return _run(instruction.called[0], operands, origins)
        case "async-start":
            started = sum(operands, ()) + _run(instruction.called[0], operands, origins)
            return started + (NOWHERE,) * (instruction.shape.arrays - len(started))
        case _:
            return _uniform(instruction, _computed(instruction, [union(operand) for operand in operands]))


def _computed(instruction: Instruction, operands: Sequence[Origins]) -> Origins:
    """The origins of a result, from those of the operands. The gradient of a weight is a matmul, in the backward pass,
    of two values that depend on the batch; the gradient of an activation is a matmul with a weight. The gradient of an
    embedding is what its lookup computes in the backward pass. New weights and optimizer state do not count as
    gradients, although they are computed from them."""
    result = union(operands)
    purpose = purpose_of(instruction.op_name)
    if purpose == "update" and result & GRADIENT:
        return result & ~(GRADIENT | BATCH) | OPTIMIZER
    is_transposed = pass_of(instruction.op_name) == "backward" and not is_recomputed(instruction.op_name)
    if purpose == "embedding" and is_transposed and result & BATCH:
        return result | GRADIENT
    if not dot_flops(instruction):
        return result
    is_of_weight = is_transposed and purpose not in ("attention", "all_scores")
    if is_of_weight and all(origins & BATCH or not origins for origins in operands):
        return result | GRADIENT
    return result & ~GRADIENT


def _uniform(instruction: Instruction, origins: Origins) -> Result:
    return (origins,) * instruction.shape.arrays


def _either(*results: Result) -> Result:
    """The origins of a result that equals one of several results."""
    return tuple(map(union, zip(*results, strict=True)))
