"""Layers with and without a window in one stack: all ways to train it learn what one device learns."""

import math

import pytest

from tests.step.conftest import SMALL, Trained, config

MODEL = {
    "preset": "gemma3-1b",
    **SMALL,
    "vocab": 264,
    "layers": 5,
    "window": 5,
    "query_pre_attn_scalar": 12,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "logit_soft_cap": 3.0,
}
# Adapters learn beside all weights of layers but the norms' and the embedding.
LEARNING = {
    "batch": {"global_size": 8, "accumulate": 2},
    "adapter": {"kind": "lora", "rank": 4, "targets": ["blocks.attention.*"]},
    "optimizer": {"epsilon": 1e-3, "trainable": ["blocks.*.weight"]},
}
CHUNKS = {"mlp_chunk": 5, "head_groups": 2}
WAYS = {
    "schedule": ({"fsdp": 4, "tensor": 2}, {"loss_chunk": 40, "remat": "sqrt"}),
    "during": ({"context": 2, "fsdp": 2}, {"remat": "full", "update": "during", **CHUNKS}),
    "offload": ({"fsdp": 2}, {"remat": "full", "offload": "activations"}),
    "stages": ({"stage": 2}, {"remat": "full"}),
}


@pytest.fixture(scope="module")
def alone():
    return Trained(config(model=MODEL, **LEARNING), updates=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_train_equals_one_device(way, alone):
    mesh, memory = WAYS[way]
    begin = None if "stage" in mesh else alone  # stages have identity layers
    cfg = config(model=MODEL, **LEARNING, mesh=mesh, memory=memory)
    found = Trained(cfg, math.prod(mesh.values()), updates=2, begin=begin)
    for mine, theirs in zip(found.metrics, alone.metrics, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5, abs=1e-6)
