"""What the layers of each family call their values, for `memory.remat: {save: [names]}` and `memory.offload`."""

from __future__ import annotations

import re

_ATTENTION = (
    "attention_norm", "attention_q", "attention_k", "attention_v", "attention", "attention_out", "mlp_norm",
)  # fmt: skip
NAMES: dict[str, tuple[str, ...]] = {
    "decoder": (*_ATTENTION, "mlp_gate", "mlp_up", "mlp_hidden", "mlp_out"),
    "vit": (*_ATTENTION, "mlp_up", "mlp_hidden", "mlp_out"),
    "mlp": ("mlp_up", "mlp_hidden"),
    "convnet": (),
}

BOUNDARY = "boundary"  # a layer's input, for `memory.offload: activations`

RESTING = ("optimizer", "frozen")  # what waits in host memory between updates, for `memory.offload`


def rests_on_host(offload: str | tuple[str, ...], what: str) -> bool:
    """
    >>> rests_on_host("optimizer", "optimizer"), rests_on_host(("activations",), "optimizer")
    (True, False)
    """
    return what in ((offload,) if isinstance(offload, str) else offload)


def on_host(offload: str | tuple[str, ...]) -> tuple[str, ...]:
    """What layers keep in host memory, by name, as `memory.offload` says it.

    >>> on_host("none"), on_host("activations"), on_host(("attention",))
    ((), ('boundary',), ('attention',))
    """
    given = (offload,) if isinstance(offload, str) else offload
    return tuple(BOUNDARY if name == "activations" else name for name in given if name not in ("none", *RESTING))


# Of these, what is there for some tokens or some heads at a time only, where layers go through a sequence in pieces.
_INPUTS = ("attention_norm", "attention_q", "attention_k", "attention_v")
IN_CHUNKS = (*_INPUTS, "mlp_norm", "mlp_gate", "mlp_up", "mlp_hidden")
IN_GROUPS = (*_INPUTS, "attention")

# In a pattern of weights' names, which layers of a stack, as Python counts them: `blocks[-2:].*`.
LAYERS = re.compile(r"\[(-?\d*):(-?\d*)\]")
