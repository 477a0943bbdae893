"""Names that `memory.remat: {save: [names]}` and `memory.offload` share with the layers; families add their own."""

import re

BOUNDARY = "boundary"  # the input of a layer, for `memory.offload: activations`

STATE_PARTS = ("optimizer", "frozen")  # parts of the state that `memory.offload` stores in host memory between updates


def is_offloaded(offload: str | tuple[str, ...], part: str) -> bool:
    """Whether `memory.offload` includes a part of the state.

    >>> is_offloaded("optimizer", "optimizer"), is_offloaded(("activations",), "optimizer")
    (True, False)
    """
    return part in ((offload,) if isinstance(offload, str) else offload)


def offloaded_activations(offload: str | tuple[str, ...]) -> tuple[str, ...]:
    """The names of the activations that `memory.offload` stores in host memory.

    >>> offloaded_activations("none"), offloaded_activations("activations"), offloaded_activations(("attention",))
    ((), ('boundary',), ('attention',))
    """
    given = (offload,) if isinstance(offload, str) else offload
    return tuple(BOUNDARY if name == "activations" else name for name in given if name not in ("none", *STATE_PARTS))


# Activations that exist only for some tokens (`memory.mlp_chunk`) or some heads (`memory.head_groups`) at a time.
_INPUTS = ("attention_norm", "attention_q", "attention_k", "attention_v")
IN_CHUNKS = (*_INPUTS, "mlp_norm", "mlp_gate", "mlp_up", "mlp_hidden")
IN_GROUPS = (*_INPUTS, "attention")

# A pattern of names of weights can select layers of a stack by a Python slice: `blocks[-2:].*`.
LAYER_RANGE = re.compile(r"\[(-?\d*):(-?\d*)\]")


def split_layers(pattern: str) -> tuple[str, slice | None]:
    """A pattern without its slice of layers, and the slice.

    >>> split_layers("blocks[-2:].mlp.*"), split_layers("head.*")
    (('blocks.mlp.*', slice(-2, None, None)), ('head.*', None))
    """
    found = LAYER_RANGE.search(pattern)
    if found is None:
        return pattern, None
    start, stop = (int(part) if part not in ("", "-") else None for part in found.groups())
    return LAYER_RANGE.sub("", pattern, count=1), slice(start, stop)
