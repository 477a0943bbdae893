"""Where in the source a buffer of a compiled step comes from, for people."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jaxmem.planning.breakdown import Item, maker_of, tells
from jaxmem.planning.hlo import Frame, Instruction

_STEPS = 64  # back from a buffer to what filled it
# What hands a value on as it is, or in another order or dtype.
_HANDS_ON = {"bitcast", "convert", "copy", "optimization-barrier", "reshape", "transpose"}


@dataclass(frozen=True)
class Source:
    where: str  # a source line, or the path of an argument
    inside: str  # the parts of the model that it belongs to: Decoder > Block > GatedMlp > Linear
    layers: str  # of how many layers it is


def source_of(item: Item, layers: int | None) -> Source:
    """`layers`: how many a device holds of a stack."""
    stacked = bool(layers and layers > 1 and layers in item.shape.dims)
    if item.held is None:
        return Source(path(item.what) if item.kind == "argument" else item.made_by, "", _of(layers, stacked))
    names = [(one, index) for buffer in item.held.buffers for one, index in buffer.names]
    filled = [_filled_by(one, index) for one, index in names]
    made = max((maker_of(one, ()) for one in filled), key=lambda one: (_is_in_model(one.frames), tells(one)))
    if not made.frames:
        return Source(path(made.op_name), "", _of(layers, stacked))
    classes = (frame.function.partition(".")[0] for frame in reversed(made.frames) if _in_models(frame))
    inside = list(dict.fromkeys(name for name in classes if name[:1].isupper()))
    one_layer = any("jaxmem/stack/" in frame.file for frame in made.frames)
    return Source(line(_place(made.frames)), " > ".join(inside), _of(layers, stacked, one=one_layer))


def line(frame: Frame) -> str:
    """
    >>> line(Frame("/somewhere/site-packages/jaxmem/models/parts.py", "Linear.__call__", 87))
    'jaxmem/models/parts.py:87'
    """
    known = re.search(r"(?:.*/)?((?:jaxmem|kernels)/.*)", frame.file)
    return f"{known[1] if known else '/'.join(frame.file.rsplit('/', 2)[-2:])}:{frame.line}"


def path(name: str) -> str:
    """
    >>> path("state.opt_state[0].mu['blocks']['mlp']['up']['weight']")
    'opt_state.0.mu.blocks.mlp.up.weight'
    """
    return re.sub(r"\[(?:'([^']*)'|(\d+))\]", r".\1\2", name).removeprefix("state.")


def _of(layers: int | None, stacked: bool, *, one: bool = False) -> str:
    if stacked:
        return f"all {layers} layers"
    return "one layer" if one and layers and layers > 1 else ""


def _filled_by(one: Instruction, index: tuple[int, ...]) -> Instruction:
    """What computed a value that others store, cast or turn round: of a stack that a loop fills, what its body puts
    there."""
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
        elif one.opcode in _HANDS_ON or one.opcode.endswith("-done"):
            one = one.operands[0]
        elif one.opcode == "parameter" and fusions:
            one = fusions.pop().operands[one.number]
        else:
            break
    return one


def _place(frames: Sequence[Frame]) -> Frame:
    """The innermost place in a model; else the innermost that is no machinery of the stack."""
    own = [frame for frame in frames if "jaxmem/stack/" not in frame.file]
    return next((frame for frame in own if _in_models(frame)), (own or list(frames))[0])


def _is_in_model(frames: Sequence[Frame]) -> bool:
    return any(_in_models(frame) for frame in frames)


def _in_models(frame: Frame) -> bool:
    return "jaxmem/models/" in frame.file
