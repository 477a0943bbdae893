"""XLA's options for a step, in plans and in runs, each with its reason and its planned cost.

Several GPUs: two of XLA's defaults leave communication exposed. It combines all gradients of a layer into one
reduce-scatter, which has to wait for the last of them; and it runs one collective at a time, so that a layer's last
reduction delays the next layer's all-gather. Llama 3 8B on 8 H100s, sequence length 4096, a ring over `context: 8`: 6 %
of the communication time is exposed with the defaults, 0.02 % with these options, in the same memory. Not used:
pipelined collectives (5 GiB more, no gain) and double-buffered loops (0.6 GiB more, no gain).
"""

import jax

Options = dict[str, bool | int | str]

# Overlaps communication and host transfers with kernels. XLA's default is on from Hopper on, and off for older GPUs.
# Llama 3 8B on 8 RTX 4090s: 75.6 -> 66.0 s per step, 0.45 GiB more memory; 70 B frozen in host memory on one A100: 10.3
# -> 7.6 s, 0.67 GiB more.
LATENCY_HIDING: Options = {"xla_gpu_enable_latency_hiding_scheduler": True}
OVERLAP: Options = {
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 1,  # each gradient is reduced as soon as it exists
    "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
}
# All transfers from host memory may run at once. By default only two may, and XLA runs the others before the first
# kernel: kernels then wait for five of the seven weights of a layer.
FETCH: Options = {"xla_gpu_experimental_parallel_async_compute_limit": 64}
# Without this option some of XLA's kernels, e.g. the scatter-add of an embedding's gradient, add in varying order.
DETERMINISTIC: Options = {"xla_gpu_deterministic_ops": True}
# jax 0.10 computes batched matmuls on CPUs with a library that takes twice as long as Eigen.
EIGEN: Options = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}


def compiler_options(platform: str, devices: int, *, fetches: bool, deterministic: bool) -> Options:
    """The options. `fetches`: whether the step has state in host memory; `deterministic`: whether equal inputs must
    give bitwise equal outputs."""
    if platform == "cpu":
        return EIGEN if jax.__version_info__ < (0, 11) else {}
    hiding = LATENCY_HIDING if devices > 1 or fetches else {}
    return (
        hiding
        | (OVERLAP if devices > 1 else {})
        | (FETCH if fetches else {})
        | (DETERMINISTIC if deterministic else {})
    )
