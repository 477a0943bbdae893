"""Which implementation supports a call of attention, known before anything is compiled, and which one is chosen.

The order: the fastest that was measured on this kind of device; cuDNN, which its vendor tunes; `mosaic` on Hopper;
`triton` on NVIDIA GPUs from Ampere on; plain JAX.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from jaxmem.kernels import choice
from jaxmem.kernels.choice import Choice
from jaxmem.kernels.validation import FLOATS

from .arguments import Extras, Options

OPERATION = "attention"
ORDER = ("cudnn", "mosaic", "triton")
PLAIN = "blockwise"  # runs wherever XLA does
SIXTEEN = ("bfloat16", "float16")
MAX_WORKSPACE = 4 * 2**30  # bytes of cuDNN for packed rows; a kernel without a workspace is as fast


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
    dropout: bool = False
    deterministic: bool = False
    has_segments: bool = False
    keys_have_own: bool = False  # segment ids, which may differ from those of the queries
    max_segments: int | None = None  # per row; None: unknown

    @classmethod
    def of(cls, q: Any, k: Any, options: Options, extras: Extras, *, keys_have_own: bool = False) -> Request:
        batch, queries, heads, dim = q.shape
        return cls(
            dtype=q.dtype.name,
            queries=queries,
            keys=k.shape[1],
            heads=heads,
            dim=dim,
            batch=batch,
            masked=options.causal or options.window is not None,
            window=options.window is not None,
            soft_cap=options.soft_cap is not None,
            dropout=options.dropout > 0,
            deterministic=options.deterministic,
            has_segments=extras.segment_ids is not None,
            keys_have_own=keys_have_own,
            max_segments=options.max_segments,
        )

    @classmethod
    def of_documents(cls, length: int, dim: int) -> Request:
        """Packed rows of a language model in bfloat16."""
        return cls("bfloat16", length, length, 32, dim, has_segments=True, max_segments=32)

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
        """The part of a call that an entry of `tuned.json` must share."""
        return f"{self.dtype} {'causal' if self.masked else 'full'}"

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.queries, self.keys, self.heads, self.dim


Failures = Iterator[tuple[bool, str, str]]  # whether a rule is broken, what was given, what is supported


def refusal(name: str, call: Request, capability: int | None) -> str | None:
    """Why an implementation does not support a call on GPUs of compute capability `capability` (90 for 9.0; None:
    unknown, not checked); None: it supports the call.

    >>> refusal("cudnn", Request("float32", 4096, 4096, 32, 128), 90)
    'q is float32; the cudnn implementation supports bfloat16 and float16'
    >>> refusal("cudnn", Request("bfloat16", 4096, 4096, 32, 128), 90)
    """
    for broken, given, allowed in _RULES[name](call, capability) if name in _RULES else ():
        if broken:
            return f"{given}; the {name} implementation {allowed}"
    return None


def _flash(call: Request, max_dim: int, dtypes: tuple[str, ...]) -> Failures:
    yield call.dim > max_dim, f"q has dim {call.dim}", f"supports at most {max_dim}"
    yield call.dtype not in dtypes, f"q is {call.dtype}", f"supports {' and '.join(dtypes)}"


def _triton(call: Request, capability: int | None) -> Failures:
    yield from _flash(call, 256, FLOATS)
    yield _is_older(capability), _has(capability), "needs 8.0 or newer"


def _mosaic(call: Request, capability: int | None) -> Failures:
    yield from _flash(call, 256, SIXTEEN)
    yield capability not in (None, 90), _has(capability), "needs 9.0"


def _cudnn(call: Request, capability: int | None) -> Failures:
    """cuDNN 9 as XLA calls it (docs.nvidia.com/deeplearning/cudnn, "Scaled Dot Product Attention")."""
    yield from _flash(call, 256 if capability == 90 else 128, SIXTEEN)
    yield _is_older(capability), _has(capability), "needs 8.0 or newer"
    yield call.dim % 8 > 0, f"q has dim {call.dim}", "supports multiples of 8"
    yield call.soft_cap, "soft_cap is set", "does not support it"
    yield call.dropout, "dropout is set", "does not support a mask that depends on positions alone"
    # Its deterministic backward pass stores the gradients of all scores.
    yield call.deterministic, "deterministic is True", "does not support it"
    lengths = f"q has {call.queries} positions and k {call.keys}"
    yield call.masked and call.queries != call.keys, lengths, "needs as many queries as keys for a causal mask"
    # Offsets count numbers from the first one, in 32 bits.
    numbers = call.batch * call.queries * call.heads * call.dim
    yield call.has_segments and numbers >= 2**31, f"q has {numbers:,} numbers", "supports fewer than 2^31 with segments"
    packed = capability is None or capability == 90 or 100 <= capability < 120
    yield call.has_segments and not packed, f"{_has(capability)}", "needs 9.0 or 10.0 for segments"
    unknown = call.has_segments and call.max_segments is None
    yield unknown, "segment_ids are set without max_segments", "needs both"
    size = 0 if unknown or not call.has_segments else _packed_workspace(call)
    yield (
        size > MAX_WORKSPACE,
        f"q has {call.queries} positions",
        (f"needs {size / 2**30:.1f} GiB for {call.max_segments} segments of that length"),
    )
    yield call.keys_have_own, "kv_segment_ids is set", "supports the ids of the queries only"


def _packed_workspace(call: Request) -> int:
    """Bytes that the backward pass of one head of packed rows allocates."""
    from .cudnn import Call, workspace

    segments = call.max_segments or 1
    return workspace(Call(call.batch, call.queries, call.keys, 1, 1, call.dim, 1.0, True, None, segments), 2)


def _is_older(capability: int | None) -> bool:
    return capability is not None and capability < 80


def _has(capability: int | None) -> str:
    return f"compute capability is {(capability or 0) / 10}"


_RULES: dict[str, Callable[[Request, int | None], Failures]] = {"cudnn": _cudnn, "mosaic": _mosaic, "triton": _triton}


def choose(call: Request, capability: int | None, device: str) -> Choice:
    """The implementation for a call where none is named, and why. `device`: its name, as `tuned.json` has it.

    >>> choose(Request("bfloat16", 4096, 4096, 32, 128), 90, "NVIDIA H100").implementation
    'cudnn'
    >>> documents = Request("bfloat16", 4096, 4096, 32, 128, has_segments=True, max_segments=32)
    >>> choose(documents, None, "cpu").why
    'no NVIDIA GPU'
    """

    def chosen(name: str, why: str) -> Choice:
        return Choice(name, why, call.kind, call.sizes)

    if capability is None:
        return chosen(PLAIN, "no NVIDIA GPU")
    measured = choice.nearest_entry(choice.tuned(), OPERATION, device, call.kind, call.sizes, (*ORDER, PLAIN))
    fastest = () if measured is None else (measured["implementation"],)
    refused: list[str] = []
    for name in (*fastest, *ORDER):
        why = choice.failure(OPERATION, name) or _missing(name) or refusal(name, call, capability)
        if why is None:
            reason = "the fastest that was measured" if name in fastest else _REASONS[name]
            return chosen(name, "; ".join([reason, *refused]))
        refused.append(why if name in why else f"{name}: {why}")
    return chosen(PLAIN, "; ".join(refused))


_REASONS = {
    "cudnn": "cuDNN supports it",
    "mosaic": "the kernel for compute capability 9.0",
    "triton": "the kernel for compute capability 8.0 and newer",
}


def _missing(name: str) -> str | None:
    if name == "triton" and importlib.util.find_spec("jax_triton") is None:
        return "the triton implementation needs jax-triton: pip install 'jaxmem[cuda13]'"
    return None
