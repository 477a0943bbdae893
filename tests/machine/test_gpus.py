"""Rates that kernels attain, against measurements."""

import pytest

from jaxmem.machine.gpus import ATTENTION_IN_STEP, GPUS, LAUNCH_SECONDS, MATMUL_SECONDS, keys_per_query

H100 = GPUS["h100-80gb"]


@pytest.mark.parametrize(
    ("length", "forward", "backward"),
    [(2048, 484, 370), (4096, 591, 474), (8192, 644, 541), (16_384, 673, 579), (32_768, 688, 581)],
)
def test_causal_attention_attains_what_cudnn_does(length: int, forward: float, backward: float) -> None:
    """cuDNN 9.19 on an H200 (NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training/results), less in a step."""
    rates = [H100.attention_rate("bfloat16", length / 2, 128, backward=backward) / 1e12 for backward in (False, True)]
    expected = [ATTENTION_IN_STEP * measured for measured in (forward, backward)]
    assert rates == pytest.approx(expected, rel=0.05)


def test_windows_and_narrow_heads_attain_less() -> None:
    """A window of 1,024 and heads of 64 (the same source): 358 and 299 TFLOP/s."""
    assert H100.attention_rate("bfloat16", 1024, 64, backward=False) == pytest.approx(358e12, rel=0.15)
    assert H100.attention_rate("bfloat16", 1024, 64, backward=True) == pytest.approx(299e12, rel=0.15)


def test_keys_per_query_are_half_the_length_with_a_causal_mask() -> None:
    pairs_per_query = 4097 / 2  # of 4,096 positions
    assert keys_per_query(4 * pairs_per_query, backward=False) == pairs_per_query
    assert keys_per_query(10 * pairs_per_query, backward=True) == pairs_per_query


@pytest.mark.parametrize(("size", "tflops"), [(1024, 253), (2048, 641), (4096, 780)])
def test_small_matmuls_attain_less(size: int, tflops: float) -> None:
    """Cubes on an H100 (openxla/xla, default_matmul_perf_table.txtpb), in tests too short for the power limit."""
    flops = 2 * size**3
    seconds = LAUNCH_SECONDS + MATMUL_SECONDS + flops / H100.matmul_rate("bfloat16")
    assert flops / seconds / 1e12 == pytest.approx(tflops, rel=0.2)
