"""What XLA is told when it compiles a step, for a plan and for a run alike. Each option with its reason and cost.

Several GPUs: two of XLA's defaults leave messages exposed. It joins all gradients of a layer into one reduce-scatter,
which then has to wait for the last of them; and it lets one message run at a time, so that a layer's last reduction
holds up the next layer's gather. Llama 3 8B on 8 H100s, seq 4096, `context: 8`: 6 % of the messages' time is exposed
with the defaults, 0.02 % with these, in the same memory. Tried and not taken: pipelined collectives (5 GiB more,
nothing gained) and double-buffered loops (0.6 GiB more, nothing gained).
"""

from __future__ import annotations

import jax

Options = dict[str, bool | int | str]

# Messages, and what goes to and from host memory, move beside kernels. For GPUs from Hopper on XLA does that by itself;
# for older ones it begins each where it is needed. Llama 3 8B on 8 RTX 4090s: 75.6 -> 66.0 s a step in 0.45 GiB more;
# 70 B frozen in host memory, on one A100: 10.3 -> 7.6 s in 0.67 GiB more (planned).
BESIDE: Options = {"xla_gpu_enable_latency_hiding_scheduler": True}
OVERLAP: Options = {
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 1,  # each gradient leaves as soon as it is made
    "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
}
# What comes from host memory may all be on its way at once. By default two slices are, and XLA lines up the others
# before the first kernel: of seven weights of a layer five are waited for.
FETCH: Options = {"xla_gpu_experimental_parallel_async_compute_limit": 64}
# Without it some of XLA's kernels, as those that add rows to a table's gradient, add in an order that changes.
SAME: Options = {"xla_gpu_deterministic_ops": True}
# jax 0.10 gives batched products on CPUs to a library that takes twice as long for them as Eigen does.
EIGEN: Options = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}


def compiler_options(platform: str, devices: int, *, fetches: bool, deterministic: bool) -> Options:
    """`fetches`: whether the step brings some of its state from host memory; `deterministic`: whether equal input must
    give equal bits."""
    if platform == "cpu":
        return EIGEN if jax.__version_info__ < (0, 11) else {}
    beside = BESIDE if devices > 1 or fetches else {}
    return beside | (OVERLAP if devices > 1 else {}) | (FETCH if fetches else {}) | (SAME if deterministic else {})
