"""Attention with the options that transformers use. `reference.py` defines the results.

A new implementation is a module with `attend` and `gradients` (see `derivative.py`), a line in IMPLEMENTATIONS, and its
limits in `kernels/support.py`. `tests/kernels/test_attention.py` tests all of them. For runs of jaxmem also:

- its name in the setting `memory.attention` (`jaxmem/config/recompute.py`)
- `_FUSED_ATTENTION` in `jaxmem/step/kernel_choice.py`: if `auto` may choose it, its place in the order, and the reason
- `_FLOPS` in `jaxmem/step/context_methods.py`: if its rate differs from that of plain JAX
- `PER_DEVICE` in `jaxmem/models/attention.py`: if XLA's partitioner cannot shard it
- `refuse_gpu_kernels` in `jaxmem/step/kernel_check.py`: if it needs a GPU
"""

from typing import Any, Unpack

from jax.typing import ArrayLike

from jaxmem.kernels.support import Request, attention_refusal, capability

from .arguments import CHECKS, AttentionOptions, QueryHeads, check_arguments
from .derivative import Implementation

IMPLEMENTATIONS: dict[str, Any] = {name: f"{__name__}.{name}" for name in ("blockwise", "cudnn", "reference", "triton")}


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    implementation: str | None = None,
    **options: Unpack[AttentionOptions],
) -> QueryHeads:
    """softmax(scale q k^T) v for each head, its softmax in float32.

    Args:
        q: [batch, queries, heads, dim].
        k: [batch, keys, kv_heads, dim]. `heads` may be a multiple of `kv_heads`: consecutive groups of query heads
            share a key head.
        v: Like `k`.
        implementation: A name in IMPLEMENTATIONS; None: `blockwise`.
        **options:
            `causal`: a query attends to the keys up to its own position; with more keys than queries, the last query is
            at the position of the last key.
            `window`: a query attends to this number of keys, of which the key at its own position is the last.
            `has_window`: a boolean on the device; false: the window does not apply. The call then compiles both cases
            and runs one of them, so layers of one scan may differ in it.
            `window_share`, for the planner: (number of calls to which the window applies, number of all calls).
            `segment_ids`: a query attends to keys of its own id. `kv_segment_ids`: the ids of keys; by default
            `segment_ids`.
            `max_segments`: the largest number of runs of equal ids in a sequence, where each id is in one run. `cudnn`
            needs this number; its output is NaN for sequences with more runs.
            `scale`: by default 1/sqrt(dim). `soft_cap` bounds the scores, cap tanh(score / cap).
            `sinks`: a logit for each head, [heads], that is part of each softmax without a value; differentiable.

    Returns:
        An array of the shape of q, zero for a query that attends to no key.
    """
    arrays, checked, extras = check_arguments(q, k, v, **options)
    kv_segment_ids = options.get("kv_segment_ids")
    keys_have_own = kv_segment_ids is not None and kv_segment_ids is not options.get("segment_ids")
    request = Request.of(*arrays[:2], checked, extras, keys_have_own=keys_have_own)
    name = "blockwise" if implementation is None else implementation
    refusal = lambda chosen: attention_refusal(chosen, request, capability())  # noqa: E731
    module = CHECKS.implementation(name, IMPLEMENTATIONS, (arrays, extras), refusal)
    return Implementation(module).attend(*arrays, checked, extras)
