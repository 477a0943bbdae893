"""Names that `memory.remat: {save: [names]}` and `memory.offload` share with the layers; families add their own."""

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

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
    match = LAYER_RANGE.search(pattern)
    if match is None:
        return pattern, None
    start, stop = (int(part) if part not in ("", "-") else None for part in match.groups())
    return LAYER_RANGE.sub("", pattern, count=1), slice(start, stop)


def layer_stacks(kinds: Sequence[object]) -> tuple[tuple[range, ...], ...]:
    """Divides layers of several kinds into stacks of equal layers: first runs of one kind, then a repeated pattern. The
    stacks of the pattern are one group; one scan applies it, a period of the pattern at a time.

    >>> layer_stacks("DEEE"), layer_stacks("DEDE")
    (((range(0, 1),), (range(1, 4),)), ((range(0, 4, 2), range(1, 4, 2)),))
    """
    count = len(kinds)
    edges = [n for n in range(count) if n == 0 or kinds[n] != kinds[n - 1]]

    def period_from(begin: int) -> int:
        repeated = kinds[begin:]
        return next(n for n in range(1, count + 1) if len(repeated) % n == 0 and repeated[n:] == repeated[:-n])

    # Of the divisions into the fewest modules, the one with the most runs, since a group is recomputed as one layer.
    runs = min(range(len(edges)), key=lambda runs: (runs + period_from(edges[runs]), -runs))
    begin = edges[runs]
    period = period_from(edges[runs])
    pattern = tuple(range(first, count, period) for first in range(begin, begin + period))
    return *((range(*run),) for run in pairwise(edges[: runs + 1])), pattern


def stack_name(layers: range) -> str:
    """The name of a stack with these layers, as the patterns of layers are written.

    >>> stack_name(range(1, 27)), stack_name(range(1, 8, 2))
    ('[1:27]', '[1:8:2]')
    """
    return f"[{layers.start}:{layers.stop}{f':{layers.step}' * (layers.step > 1)}]"


def is_last_stack(name: str, layers: int) -> bool:
    """Whether a weight is in the last stack, or group of stacks, of a model with `layers` layers: pipeline stages share
    these layers; the layers before them are on all stages, like the embedding.

    >>> is_last_stack("blocks[0:1].mlp.up", 9), is_last_stack("blocks[1:9].[1:9:2].mlp.up", 9)
    (False, True)
    """
    stack = split_stack(name)[1]
    return stack is None or stack.stop == layers


_STACK = re.compile(r"\.?\[(\d+):(\d+)(?::(\d+))?\]")


def split_stack(name: str) -> tuple[str, range | None]:
    """The name of a weight without the name of its stack, and the layers of this stack; None: all layers, or the weight
    is not stacked.

    >>> split_stack("blocks[1:9].[2:9:2].mlp.up"), split_stack("blocks.mlp.up")
    (('blocks.mlp.up', range(2, 9, 2)), ('blocks.mlp.up', None))
    """
    ranges = _STACK.findall(name)
    layers = range(*(int(part or 1) for part in ranges[-1])) if ranges else None
    return _STACK.sub("", name), layers


def count_layers(names: Iterable[str]) -> int:
    """The number of layers of a model, from the names of its weights; 0 if no name has the layers of a stack.

    >>> count_layers(["blocks[0:1].mlp.up", "blocks[1:27].mlp.up"]), count_layers(["blocks.mlp.up"])
    (27, 0)
    """
    return max((layers.stop for name in names if (layers := split_stack(name)[1]) is not None), default=0)
