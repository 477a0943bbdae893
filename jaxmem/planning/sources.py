"""The source line, the modules and the layers of each buffer of a compiled step."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxmem.planning.breakdown import NamedBuffer, information, maker_of
from jaxmem.planning.hlo import Frame, Instruction

MODELS, STACK = "jaxmem/models/", "jaxmem/stack/"
_STEPS = 64  # at most this many operations back from a buffer to the one that filled it
# Operations that return their operand, perhaps in another order or dtype.
_FORWARDING = {"bitcast", "convert", "copy", "optimization-barrier", "reshape", "transpose"}


@dataclass(frozen=True)
class SourceLine:
    where: str  # a source line, or the path of an argument
    inside: str  # the modules around it: Decoder > Block > GatedMlp > Linear
    layers: str  # "all 32 layers", "one layer" or ""


def source_of(buffer: NamedBuffer, layers: int | None) -> SourceLine:
    """`layers`: the number of layers of a stack on one device."""
    every = f"all {layers} layers" if layers and layers > 1 and layers in buffer.shape.dims else ""
    if buffer.region is None:
        return SourceLine(path(buffer.what) if buffer.kind == "argument" else buffer.made_by, "", every)
    filled = [_filled_by(one, index) for alias in buffer.region.buffers for one, index in alias.aliases]
    made = max(
        (maker_of(one, ()) for one in filled),
        key=lambda one: (any(MODELS in frame.file for frame in one.frames), information(one)),
    )
    if not made.frames:
        return SourceLine(path(made.op_name), "", every)
    classes = (frame.function.partition(".")[0] for frame in reversed(made.frames) if MODELS in frame.file)
    inside = list(dict.fromkeys(name for name in classes if name[:1].isupper()))
    one_layer = bool(layers and layers > 1) and any(STACK in frame.file for frame in made.frames)
    return SourceLine(line(_place(made.frames)), " > ".join(inside), every or ("one layer" if one_layer else ""))


def line(frame: Frame) -> str:
    """
    >>> line(Frame("/somewhere/site-packages/jaxmem/models/linear.py", "Linear.__call__", 87))
    'jaxmem/models/linear.py:87'
    """
    known = re.search(r"(?:.*/)?((?:jaxmem|kernels)/.*)", frame.file)
    return f"{known[1] if known else '/'.join(frame.file.rsplit('/', 2)[-2:])}:{frame.line}"


def path(name: str) -> str:
    """
    >>> path("state.opt_state[0].mu['blocks']['mlp']['up']['weight']")
    'opt_state.0.mu.blocks.mlp.up.weight'
    """
    return re.sub(r"\[(?:'([^']*)'|(\d+))\]", r".\1\2", name).removeprefix("state.")


def _filled_by(one: Instruction, index: tuple[int, ...]) -> Instruction:
    """The operation that computed a value, before operations that only store, cast or transpose it. For a stack that a
    loop fills, it is an operation in the body of the loop."""
    fusions: list[Instruction] = []
    for _ in range(_STEPS):
        if one.is_fusion:
            fusions.append(one)
            one = one.called[0].root
        elif one.opcode == "tuple" and index:
            one, index = one.operands[index[0]], index[1:]
        elif one.opcode == "get-tuple-element":
            one, index = one.operands[0], (one.number, *index)
        elif one.opcode == "dynamic-update-slice":
            one = one.operands[1]
        elif one.opcode in _FORWARDING or one.opcode.endswith("-done"):
            one = one.operands[0]
        elif one.opcode == "parameter" and fusions:
            one = fusions.pop().operands[one.number]
        else:
            break
    return one


def _place(frames: Sequence[Frame]) -> Frame:
    """The innermost line in a model, otherwise the innermost line that does not apply the stack of layers."""
    own = [frame for frame in frames if STACK not in frame.file]
    return next((frame for frame in own if MODELS in frame.file), (own or list(frames))[0])
