"""Attention by cuDNN, which is part of every installation of jax for NVIDIA GPUs.

XLA has two custom calls for cuDNN's attention, which this module emits itself.
`jax.nn.dot_product_attention(implementation="cudnn")` cannot be compiled for other GPUs, since it queries the devices
of this machine, and it does not support documents. The internal function of jax that supports documents reads grouped
heads at wrong offsets before jax 0.12.1 (github.com/jax-ml/jax/pull/39521).

Documents (segments) are passed in cuDNN's packed layout, "THD": consecutive runs of positions, each with an offset and
a length. XLA allocates memory for `max_segments` documents per sequence, each as long as the sequence. The workspace of
the backward pass grows in the same way (`workspace`), so that pass computes only as many heads at once as WORKSPACE
allows. If a batch has more than batch x `max_segments` documents, the output is NaN.

A plan for GPUs that are not installed compiles without cuDNN, so each call states its workspace by a formula; on a GPU
XLA replaces it by the workspace that cuDNN requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Float, Int32

from jaxmem.kernels.typing import Tree

from .arguments import Extras, KeyHeads, LogSumExp, Options, QueryHeads, Residuals, pairs

WORKSPACE = 2**30  # target for the largest workspace in bytes of the backward pass of packed sequences
_FORWARD, _BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
_STATUS_RETURNING = 2  # the version of XLA's custom-call interface that these targets have


@dataclass(frozen=True)
class CudnnCall:
    """Properties of a call that XLA needs."""

    batch: int
    length: int
    keys: int
    heads: int
    kv_heads: int
    dim: int
    scale: float
    masked: bool
    window: int | None
    max_segments: int  # segments per sequence; 1: there are no segments

    @property
    def slots(self) -> int:
        """The number of documents that memory is allocated for."""
        return self.batch * self.max_segments

    @property
    def pairs(self) -> int:
        return pairs(self.length, self.keys, causal=self.masked, window=self.window)


# (target, call, arrays) -> outputs. CPUs have no cuDNN; tests set an emulation.
ON_CPU: Callable[[str, CudnnCall, Sequence[jax.Array]], Any] | None = None


def attend(q: QueryHeads, k: KeyHeads, v: KeyHeads, options: Options, extras: Extras) -> tuple[QueryHeads, LogSumExp]:
    """Output and log-sum-exp."""
    call, packed = _call(q, k, options, extras)
    if packed is not None:  # with too many documents the loss is NaN instead of a wrong result
        q = jnp.where(packed.count <= call.slots, q, jnp.nan)
    out, stats = _run(_FORWARD, call, (q, k, v), packed)
    return out, stats if packed is None else packed.per_position(call, stats)


def gradients(saved: Residuals, d_out: jax.Array, options: Options, extras: Extras) -> tuple[jax.Array, ...]:
    q, k, v, out, lse = saved
    call, packed = _call(q, k, options, extras)
    if packed is None:
        return _run(_BACKWARD, call, (q, k, v, lse, d_out, out), None)
    return _gradients_by_heads(call, packed, (q, out, d_out), (k, v), lse)


def _call(q: jax.Array, k: jax.Array, options: Options, extras: Extras) -> tuple[CudnnCall, PackedDocuments | None]:
    """The properties of a call, and its documents if it has several in a sequence."""
    batch, length, heads, dim = q.shape
    segments = (options.max_segments if extras.segment_ids is not None else 1) or 1
    masked = options.causal or options.window is not None
    window = options.window
    call = CudnnCall(batch, length, k.shape[1], heads, k.shape[2], dim, options.scale, masked, window, segments)
    return call, None if extras.segment_ids is None else PackedDocuments.of(call, extras.segment_ids)


def _gradients_by_heads(
    call: CudnnCall,
    packed: PackedDocuments,
    by_query: tuple[jax.Array, ...],
    by_key: tuple[jax.Array, ...],
    lse: jax.Array,
) -> tuple[jax.Array, ...]:
    """dq, dk and dv of packed sequences, for one part of the query heads after the other."""
    part = backward_part(call)
    group = call.heads // call.kv_heads
    size = part.heads
    keys = max(1, size // group)  # key heads of a part, repeated for its query heads
    summed = jnp.float32 if size < group else by_key[0].dtype  # several parts add to the gradients of a key head

    def step(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        first = i * size // group
        q, out, d_out = (jax.lax.dynamic_slice_in_dim(x, i * size, size, 2) for x in by_query)
        k, v = (jnp.repeat(jax.lax.dynamic_slice_in_dim(x, first, keys, 2), size // keys, 2) for x in by_key)
        stats = packed.per_document(part, jax.lax.dynamic_slice_in_dim(lse, i * size, size, 1))
        dq, *others = _run(_BACKWARD, part, (q, k, v, stats, d_out, out), packed)
        dq = jax.lax.dynamic_update_slice_in_dim(sums[0], dq, i * size, 2)
        return dq, *(add(x, y, first) for x, y in zip(sums[1:], others, strict=True))

    def add(x: jax.Array, y: jax.Array, first: jax.Array) -> jax.Array:
        y = y.reshape(*y.shape[:2], keys, -1, call.dim).astype(jnp.float32).sum(3).astype(summed)
        return jax.lax.dynamic_update_slice_in_dim(x, jax.lax.dynamic_slice_in_dim(x, first, keys, 2) + y, first, 2)

    start = jnp.zeros_like(by_query[0]), *(jnp.zeros(x.shape, summed) for x in by_key)
    sums = jax.lax.fori_loop(0, call.heads // size, step, start)
    return tuple(x.astype(by_query[0].dtype) for x in sums)


# ---------------------------------------------------------------- documents


@dataclass(frozen=True)
class PackedDocuments:
    """The documents of all sequences in cuDNN's format: one after the other, with empty documents at the end."""

    number: Int32[Array, "batch sequence"]  # the number of the document at each position
    starts: Int32[Array, " ends"]  # the first position of each document, over all sequences; then the end of the last
    count: Int32[Array, ""]

    @classmethod
    def of(cls, call: CudnnCall, ids: Int32[Array, "batch sequence"]) -> PackedDocuments:
        """The documents of segment ids: runs of equal ids within a sequence."""
        first = jnp.concatenate([jnp.ones_like(ids[:, :1], bool), ids[:, 1:] != ids[:, :-1]], axis=1).reshape(-1)
        number = jnp.cumsum(first, dtype=jnp.int32) - 1
        (starts,) = jnp.nonzero(first, size=call.slots, fill_value=first.size)
        starts = jnp.append(starts.astype(jnp.int32), jnp.int32(first.size))
        return cls(number.reshape(ids.shape), starts, number[-1] + 1)

    def per_position(
        self, call: CudnnCall, stats: Float[Array, "slots heads sequence"]
    ) -> Float[Array, "batch heads sequence"]:
        """Values per position of a sequence, from values per position of a document."""
        start = self.starts[jnp.minimum(self.number, self.starts.size - 1)]
        place = jnp.arange(self.number.size, dtype=jnp.int32).reshape(self.number.shape) - start
        values = stats[jnp.minimum(self.number, call.slots - 1)[:, :, None], jnp.arange(call.heads), place[:, :, None]]
        return values.swapaxes(1, 2)

    def per_document(
        self, call: CudnnCall, rows: Float[Array, "batch heads sequence"]
    ) -> Float[Array, "slots heads sequence"]:
        """The inverse of `per_position`. Values beyond the end of a document are not read."""
        flat = rows.swapaxes(1, 2).reshape(-1, call.heads)
        place = self.starts[:-1, None] + jnp.arange(call.length, dtype=jnp.int32)
        return flat[jnp.minimum(place, flat.shape[0] - 1)].swapaxes(1, 2)


def workspace(call: CudnnCall, itemsize: int) -> int:
    """Bytes that the backward pass allocates: dq in float32, a value per row of scores, and with grouped heads dk and
    dv of every head (cudnn-frontend, `scaled_dot_product_flash_attention.h`). XLA does not tell cuDNN that packed
    documents share a sequence, so each document needs as many bytes as a complete sequence."""
    rows = call.slots * call.heads * call.length
    every_head = 2 * call.slots * call.heads * call.keys * call.dim * itemsize
    return rows * 4 * (call.dim + 1) + (every_head if call.heads > call.kv_heads else 0)


def backward_part(call: CudnnCall) -> CudnnCall:
    """The call of the backward pass. For packed sequences it has as many query heads as WORKSPACE allows, each with a
    copy of its keys and values, since grouped heads would allocate their gradients for each document.

    >>> call = CudnnCall(1, 4096, 4096, 32, 8, 128, 1.0, True, None, 32)
    >>> backward_part(call).heads, backward_part(replace(call, length=32768)).heads
    (8, 1)
    """
    if call.max_segments == 1:
        return call
    group = call.heads // call.kv_heads
    sizes = [n for n in range(call.heads, 0, -1) if call.heads % n == 0 and (n % group == 0 or group % n == 0)]
    parts = [replace(call, heads=n, kv_heads=n) for n in sizes]
    return next((part for part in parts if workspace(part, 0) <= WORKSPACE), parts[-1])


# ---------------------------------------------------------------- the custom calls


def _run(target: str, call: CudnnCall, arrays: tuple[jax.Array, ...], packed: PackedDocuments | None) -> Tree:
    """The outputs of a call. Forward: the output and the log-sum-exp, [documents, heads, sequence]; backward: dq, dk
    and dv."""
    q, k, v = arrays[:3]
    forward = target == _FORWARD
    sizes: tuple[jax.Array, ...] = ()
    if packed is not None:
        # The shapes are those of jax's own call.
        lengths = jnp.diff(packed.starts).reshape(call.batch, call.max_segments)
        starts = jnp.pad(packed.starts, (0, call.batch - 1), mode="edge").reshape(call.batch, -1)
        strides = (call.heads * call.dim, call.kv_heads * call.dim)
        sizes = (lengths, lengths, *(starts * stride for stride in strides))
    heads_first = [jax.ShapeDtypeStruct((x.shape[0], *(x.shape[d] for d in (2, 1, 3))), x.dtype) for x in (q, k, v)]
    if forward:
        stats = jax.ShapeDtypeStruct((call.slots, call.heads, call.length), jnp.float32)
        shapes = [heads_first[0], stats]
        transposed = 1
    else:
        shapes = heads_first
        transposed = 3
    size = 0 if forward else workspace(call, q.dtype.itemsize)
    flops = (4 if forward else 10) * call.pairs / call.length  # per element of the first output

    def on_gpu(*arrays: jax.Array) -> list[jax.Array]:
        with set_xla_metadata(flops_per_output=str(flops)):
            results = jax.ffi.ffi_call(
                target,
                [*shapes, jax.ShapeDtypeStruct((size,), jnp.uint8)],
                # In memory they are [batch, sequence, heads, dim].
                output_layouts=[(3, 1, 2, 0) if i < transposed else None for i in range(len(shapes) + 1)],
                vmap_method="sequential",
                custom_call_api_version=_STATUS_RETURNING,
                legacy_backend_config=json.dumps(_backend_config(target, call, q.dtype)),
            )(*arrays)
        return [x.swapaxes(1, 2) if i < transposed else x for i, x in enumerate(results[:-1])]

    def refuse(*_: Any) -> Any:
        raise ValueError("attention: the cudnn implementation needs an NVIDIA GPU; use another implementation on a CPU")

    def on_cpu(*arrays: jax.Array) -> list[jax.Array]:
        if ON_CPU is not None:
            return ON_CPU(target, call, arrays)
        return list(jax.pure_callback(refuse, jax.eval_shape(on_gpu, *arrays), *arrays, vmap_method="sequential"))

    return tuple(jax.lax.platform_dependent(*arrays, *sizes, cpu=on_cpu, default=on_gpu))


def _backend_config(target: str, call: CudnnCall, dtype: Any) -> dict[str, Any]:
    """`CudnnfMHABackendConfig` of XLA's `backend_configs.proto`."""
    packed = call.max_segments > 1
    mask = "CAUSAL" if call.masked else "NO_MASK"
    if packed:
        mask = "PADDING_CAUSAL" if call.masked else "PADDING"
    scores = [call.batch, call.heads, call.length, call.keys]
    config = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": call.scale,
        "intermediate_tensor_shape": {
            "element_type": {"bfloat16": "BF16", "float16": "F16"}[np.dtype(dtype).name],
            "dimensions": list(map(str, scores)),
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": mask,
        "dropout_rate": 0.0,
        "seed": "42",
        "sliding_window_length": call.window or 0,
        "max_seg_per_batch": call.max_segments,
        "is_paged_attention": False,
    }
    for name, (left, right), (left_batch, right_batch) in _MATMULS[target]:
        config[f"{name}_dot_dimension_numbers"] = {
            "lhs_contracting_dimensions": [str(left)],
            "rhs_contracting_dimensions": [str(right)],
            "lhs_batch_dimensions": ["0", str(left_batch)],
            "rhs_batch_dimensions": ["0", str(right_batch)],
        }
    return {"operation_queue_id": "0", "cudnn_fmha_backend_config": config}


# The matmuls of each call: contracted dimensions, and dimensions of batch and heads. Arrays are [batch, sequence,
# heads, dim], scores [batch, heads, queries, keys].
_MATMULS = {
    _FORWARD: (("bmm1", (3, 3), (2, 2)), ("bmm2", (3, 1), (1, 2))),
    _BACKWARD: (
        ("bmm1_grad_gemm1", (2, 1), (1, 2)),
        ("bmm1_grad_gemm2", (3, 1), (1, 2)),
        ("bmm2_grad_gemm1", (2, 1), (1, 2)),
        ("bmm2_grad_gemm2", (3, 3), (2, 2)),
    ),
}
