"""The section `memory`, and the policies of `memory.remat`: which activations are saved for the backward pass. A
new policy is a line of `POLICIES`.

A policy saves all activations of a layer, or its input and the activations with some names. Policies with a `split`
save the inputs of some layers only (boundaries), and recompute the others. For N layers:

    policy     boundaries in memory     layers run again  method
    every_K    N / K + K                below N           input of every K-th layer; all inputs of one segment
    sqrt       2 sqrt N                 below N           the same with K = sqrt N (Chen et al., arXiv:1604.06174)
    recursive  1 + log2 N               N / 2 log2 N      halves of halves (the same paper, section 4.3)
    slots_K    K + 1                    the fewest        Griewank and Walther, ACM TOMS 26(1), 2000: revolve
    constant   2                        N (N - 1) / 2     every boundary is recomputed from the input of the stack

With slots_K and constant, one of the boundaries is the input of the running layer.

`jaxmem.stack.recompute_plan` derives from a split (see `Split`) the order in which layers run. Imports no jax.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from jaxmem.config.base import Count, Positive, Section, Texts, setting

MATMUL = "product"  # the checkpoint name of every matrix multiplication with a weight
# (number n of layers of a segment, slot of the segment's input) -> number of layers that run before the next boundary
# is saved, from 1 to n - 1
Split = Callable[[int, int], int]


@dataclass(frozen=True)
class Policy:
    """What is saved. `splits` returns the split for the number of layers of a stack, or for the K in the name."""

    saved: tuple[str, ...] | None = ()  # activations that each layer saves besides its input; None: all
    splits: Callable[[int], Split] | None = None
    has_number: bool = False  # its name contains a K: every_4


def _segments(size: int) -> Split:
    return lambda n, _: size if n > size else 1


def _revolve(slots: int) -> Split:
    def split(n: int, slot: int) -> int:
        free = slots - slot
        if free <= 1:
            return n - 1
        return min(range(1, n), key=lambda far: far + fewest(n - far, free - 1) + fewest(far, free))

    return split


POLICIES = {
    "none": Policy(saved=None),
    "full": Policy(),
    "dots": Policy(saved=(MATMUL,)),
    "sqrt": Policy(splits=lambda layers: _segments(math.isqrt(layers - 1) + 1)),
    "recursive": Policy(splits=lambda _: lambda n, _: -(-n // 2)),
    "constant": Policy(splits=lambda _: lambda n, _: n - 1),
    "every": Policy(splits=_segments, has_number=True),
    "slots": Policy(splits=_revolve, has_number=True),
}
NUMBERED = rf"^({'|'.join(name for name, policy in POLICIES.items() if policy.has_number)})_([1-9][0-9]*)$"


class Save(Section):
    """Names of the activations that layers save for the backward pass; the others are recomputed."""

    save: Texts = setting(..., "names of activations, see docs/activations.md")


# `auto`: planning chooses the fastest policy that fits.
_PLAIN = [name for name, policy in POLICIES.items() if not policy.has_number]
_Policy = Literal[*_PLAIN, "auto"]  # type: ignore[valid-type]


def _check_number(policy: str) -> str:
    if re.match(NUMBERED, policy) is None:
        raise PydanticCustomError("policy", "Input should be every_K, slots_K (K: a number)")
    return policy


_Numbered = Annotated[str, AfterValidator(_check_number), WithJsonSchema({"type": "string", "pattern": NUMBERED})]
Offloaded = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


class Memory(Section):
    """Activation checkpointing, offloading, and computation in chunks."""

    remat: _Policy | _Numbered | Save = setting(
        "none", "activation checkpointing: which activations are recomputed; auto: the fastest policy that fits"
    )
    offload: Literal["none", "activations", "optimizer", "frozen"] | Offloaded = setting(
        "none",
        "stored in host memory: saved activations (all, or a list of names), optimizer state, frozen parameters",
    )
    save_dtype: Literal["compute", "fp8"] = setting(
        "compute",
        "what saved activations are stored in: the compute dtype, or FP8 (e4m3) with a scale per block of 128",
    )
    update: Literal["after", "during"] = setting(
        "after", "when weights are updated: after the backward pass, or layer by layer during it"
    )
    attention: Literal["auto", "blockwise", "cudnn", "triton", "reference"] = setting(
        "auto", "attention kernel; auto: cuDNN where it supports the run, else a kernel of jaxmem, else plain JAX"
    )
    experts: Literal["auto", "blockwise", "triton"] = setting(
        "auto", "matmuls of experts: all at once (triton), or one block of tokens after the other, in less memory"
    )
    budget: Positive | None = setting(None, "memory limit in GiB per device; null: the device's memory minus reserve")
    loss_chunk: Literal["auto"] | Count = setting("auto", "vocabulary entries per slice of the logits")
    mlp_chunk: Literal["auto"] | Count = setting("auto", "tokens of a sequence per chunk of norms, projections and MLP")
    head_groups: Literal["auto"] | Count = setting("auto", "groups of heads; attention is computed for one at a time")


def policy_of(remat: object) -> Policy | None:
    """The policy that `memory.remat` names ("every_4": "every"); None for names of activations, or unknown names."""
    if not isinstance(remat, str):
        return None
    numbered = re.match(NUMBERED, remat)
    policy = POLICIES.get(numbered[1] if numbered else remat)
    return policy if policy is not None and policy.has_number == bool(numbered) else None


def is_scheduled(remat: object) -> bool:
    """Whether the policy saves the boundaries of some layers only.

    >>> [is_scheduled(remat) for remat in ("full", "sqrt", "slots_4", ("attention",))]
    [False, True, True, False]
    """
    policy = policy_of(remat)
    return policy is not None and policy.splits is not None


def split_of(remat: object, layers: int) -> Split | None:
    """The split of a scheduled policy for this number of layers; None: the policy saves every boundary."""
    policy = policy_of(remat)
    if policy is None or policy.splits is None:
        return None
    return policy.splits(int(str(remat).rpartition("_")[2]) if policy.has_number else layers)


def fewest(layers: int, slots: int) -> int:
    """The least number of layers that run again with `slots` saved boundaries: r N - C(slots + r, r - 1), where r is
    the largest number of times that any layer runs again.

    >>> fewest(16, 16), fewest(16, 4), fewest(16, 1)
    (15, 27, 120)
    """
    r = 0
    while math.comb(slots + r, r) < layers:
        r += 1
    return r * layers - math.comb(slots + r, r - 1) if r else 0
