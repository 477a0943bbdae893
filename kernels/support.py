"""What the implementations of each operation support and refuse, before anything is compiled.

Plain JAX (`blockwise`, `reference`) supports every call on every device. `jaxmem.step.kernel_choice` chooses among the
implementations that support the calls of a run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax

from .codes import KERNEL_FORMATS
from .validation import FLOATS

if TYPE_CHECKING:
    from .fused_attention.arguments import Extras, Options

MISSING_TRITON = "the triton implementation requires jax-triton; run pip install 'jaxmem[cuda13]'"
SIXTEEN_BIT = ("bfloat16", "float16")
MAX_WORKSPACE = 4 * 2**30  # bytes that cuDNN may allocate for packed sequences; kernels without workspace are as fast
# Parts of the names of devices that are not installed (`jaxmem.planning.targets`); "A10" is a part of "A100".
CAPABILITIES = {"A100": 80, "A10": 86, "L4": 89, "H100": 90, "B200": 100, "RTX PRO 6000": 120}


def capability(device: Any = None) -> int | None:
    """The compute capability of a device, by default the device to compile for: 90 for 9.0; None for a CPU."""
    if device is None:
        device = jax.devices()[0]
        mesh_device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
        if mesh_device is not None and mesh_device.device_kind != device.device_kind:  # it is not installed
            name = max(CAPABILITIES, key=mesh_device.device_kind.rfind)
            return CAPABILITIES[name] if name in mesh_device.device_kind else None
    return round(10 * float(device.compute_capability)) if device.platform == "gpu" else None


def triton_refusal(capability: int | None) -> str | None:
    """The reason why Triton kernels cannot run on GPUs of compute capability `capability` (90 for 9.0; None: not a
    GPU); None: they can run."""
    if capability is None:
        return "no NVIDIA GPU"
    if capability < 80:
        return f"compute capability is {capability / 10}; the triton implementation needs 8.0 or newer"
    if importlib.util.find_spec("jax_triton") is None:
        return MISSING_TRITON
    return None


@dataclass(frozen=True)
class Request:
    """The properties of a call of attention that an implementation may not support."""

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


def attention_refusal(name: str, call: Request, capability: int | None) -> str | None:
    """The reason why an implementation does not support a call of attention on GPUs of compute capability `capability`
    (90 for 9.0; None: unknown, not checked); None: it supports the call.

    >>> attention_refusal("cudnn", Request("float32", 4096, 4096, 32, 128), 90)
    'q is float32; the cudnn implementation supports bfloat16 and float16'
    >>> attention_refusal("cudnn", Request("bfloat16", 4096, 4096, 32, 128), 90)
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
        f"needs {size / 2**30:.1f} GiB for {call.max_segments} segments of that length",
    )
    yield call.keys_have_own, "kv_segment_ids is set", "supports the ids of the queries only"


def _packed_workspace(call: Request) -> int:
    """Bytes that the backward pass of one head of packed sequences allocates."""
    from .fused_attention.cudnn import CudnnCall, workspace

    segments = call.max_segments or 1
    return workspace(CudnnCall(call.batch, call.queries, call.keys, 1, 1, call.dim, 1.0, True, None, segments), 2)


def _has(capability: int | None) -> str:
    return f"compute capability is {(capability or 0) / 10}"


_RULES: dict[str, Callable[[Request, int | None], Limits]] = {"cudnn": _cudnn, "triton": _triton}


def experts_refusal(form: str, blocks: Iterable[tuple[int, int]]) -> str | None:
    """The reason why `grouped_matmul.triton` cannot dequantize the matrices of experts, or None if it can.

    Args:
        form: the format of their codes.
        blocks: the inputs of each matrix, and the number of values that share a scale.
    """
    if form not in KERNEL_FORMATS:
        return f"triton does not dequantize {form}; blockwise dequantizes one expert at a time"
    together = KERNEL_FORMATS[form].together
    for inputs, block in blocks:
        if block % together:
            return f"triton needs blocks of a multiple of {together} values; {inputs} inputs have {block}"
    return None
