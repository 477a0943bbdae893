"""Which implementations support a call of attention, and which one is chosen, before anything is compiled.

The first of these that supports the call is chosen: cuDNN; `triton` on NVIDIA GPUs from Ampere on; plain JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxmem.kernels import choice
from jaxmem.kernels.choice import NONE_FAILED, Choice, triton_refusal
from jaxmem.kernels.validation import FLOATS

from .arguments import Extras, Options

OPERATION = "attention"
ORDER = {  # the reason to choose each implementation
    "cudnn": "cuDNN supports this attention",
    "triton": "the kernel for compute capability 8.0 and newer",
}
PORTABLE = "blockwise"  # runs wherever XLA does
SIXTEEN_BIT = ("bfloat16", "float16")
MAX_WORKSPACE = 4 * 2**30  # bytes that cuDNN may allocate for packed sequences; kernels without workspace are as fast


@dataclass(frozen=True)
class Request:
    """The properties of a call that an implementation may not support."""

    dtype: str
    queries: int
    keys: int
    heads: int
    dim: int
    batch: int = 1
    masked: bool = True  # causal, or with a window
    window: bool = False
    soft_cap: bool = False
    deterministic: bool = False  # whether equal inputs need bitwise equal gradients
    has_segments: bool = False
    keys_have_own: bool = False  # whether the keys have other segment ids than the queries
    max_segments: int | None = None  # segments per sequence; None: unknown

    @classmethod
    def of(cls, q: Any, k: Any, options: Options, extras: Extras, *, keys_have_own: bool = False) -> Request:
        batch, queries, heads, dim = q.shape
        return cls(
            *(q.dtype.name, queries, k.shape[1], heads, dim, batch),
            masked=options.causal or options.window is not None,
            window=options.window is not None,
            soft_cap=options.soft_cap is not None,
            has_segments=extras.segment_ids is not None,
            keys_have_own=keys_have_own,
            max_segments=options.max_segments,
        )

    def over_context(self, method: str, devices: int) -> Request:
        """The call of each device if `devices` share the sequence of this call by a method of `context.py`."""
        if method == "ulysses":
            return replace(self, heads=self.heads // devices)
        part = replace(
            self, queries=self.queries // devices, keys=self.keys // devices, keys_have_own=self.has_segments
        )
        return replace(part, has_segments=True, keys_have_own=True) if self.window else part

    @property
    def kind(self) -> str:
        """The dtype and the kind of mask."""
        return f"{self.dtype} {'causal' if self.masked else 'full'}"


Limits = Iterator[tuple[bool, str, str]]  # (whether a rule is broken, the value, the values that are supported)


def refusal(name: str, call: Request, capability: int | None) -> str | None:
    """The reason why an implementation does not support a call on GPUs of compute capability `capability` (90 for 9.0;
    None: unknown, not checked); None: it supports the call.

    >>> refusal("cudnn", Request("float32", 4096, 4096, 32, 128), 90)
    'q is float32; the cudnn implementation supports bfloat16 and float16'
    >>> refusal("cudnn", Request("bfloat16", 4096, 4096, 32, 128), 90)
    """
    for broken, value, allowed in _RULES[name](call, capability) if name in _RULES else ():
        if broken:
            return f"{value}; the {name} implementation {allowed}"
    return None


def _common(call: Request, capability: int | None, max_dim: int, dtypes: tuple[str, ...]) -> Limits:
    older = capability is not None and capability < 80
    yield older, _has(capability), "needs 8.0 or newer"
    yield call.dim > max_dim, f"q has dim {call.dim}", f"supports at most {max_dim}"
    yield call.dtype not in dtypes, f"q is {call.dtype}", f"supports {' and '.join(dtypes)}"


def _triton(call: Request, capability: int | None) -> Limits:
    yield from _common(call, capability, 256, FLOATS)


def _cudnn(call: Request, capability: int | None) -> Limits:
    """cuDNN 9 as XLA calls it (docs.nvidia.com/deeplearning/cudnn, "Scaled Dot Product Attention")."""
    yield from _common(call, capability, 256 if capability in (None, 90) else 128, SIXTEEN_BIT)
    yield call.dim % 8 > 0, f"q has dim {call.dim}", "supports multiples of 8"
    yield call.soft_cap, "soft_cap is set", "does not support it"
    # cuDNN's deterministic backward pass stores the gradients of all scores.
    yield call.deterministic, "deterministic is set", "does not support it"
    lengths = f"q has {call.queries} positions and k {call.keys}"
    yield call.masked and call.queries != call.keys, lengths, "needs as many queries as keys for a causal mask"
    # cuDNN counts the offsets of segments in elements, with 32 bits.
    numbers = call.batch * call.queries * call.heads * call.dim
    yield (
        call.has_segments and numbers >= 2**31,
        f"q has {numbers:,} elements",
        "supports fewer than 2^31 with segments",
    )
    packs = capability is None or capability == 90 or 100 <= capability < 120
    yield call.has_segments and not packs, _has(capability), "needs 9.0 or 10.0 for segments"
    unknown = call.has_segments and call.max_segments is None
    yield unknown, "segment_ids are set without max_segments", "needs both"
    yield call.has_segments and call.max_segments == 1, "max_segments is 1", "needs at least 2 with segment_ids"
    size = 0 if unknown or not call.has_segments else _packed_workspace(call)
    yield (
        size > MAX_WORKSPACE,
        f"q has {call.queries} positions",
        (f"needs {size / 2**30:.1f} GiB for {call.max_segments} segments of that length"),
    )
    yield call.keys_have_own, "kv_segment_ids is set", "supports the ids of the queries only"


def _packed_workspace(call: Request) -> int:
    """Bytes that the backward pass of one head of packed sequences allocates."""
    from .cudnn import CudnnCall, workspace

    segments = call.max_segments or 1
    return workspace(CudnnCall(call.batch, call.queries, call.keys, 1, 1, call.dim, 1.0, True, None, segments), 2)


def _has(capability: int | None) -> str:
    return f"compute capability is {(capability or 0) / 10}"


_RULES: dict[str, Callable[[Request, int | None], Limits]] = {"cudnn": _cudnn, "triton": _triton}


def choose(call: Request, capability: int | None, failed: Mapping[str, str] = NONE_FAILED) -> Choice:
    """The implementation of a call that names no implementation, and why. `failed`: implementations that failed their
    check on this device, and the reasons.

    >>> choose(Request("bfloat16", 4096, 4096, 32, 128), 90).implementation
    'cudnn'
    >>> documents = Request("bfloat16", 4096, 4096, 32, 128, has_segments=True, max_segments=32)
    >>> choose(documents, None).why
    'no NVIDIA GPU'
    """

    def reason(name: str) -> str | None:
        missing = triton_refusal(capability) if name == "triton" else None
        return failed.get(name) or missing or refusal(name, call, capability)

    return choice.choose(ORDER, PORTABLE, capability, reason, call.kind)
