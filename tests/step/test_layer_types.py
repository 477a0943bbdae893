"""Layers with and without a window in one stack: all ways to train it learn what one device learns."""

import functools

import pytest

from tests.step.conftest import SMALL, Trained, config
from tests.support.tiers import cases

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
BATCH = {"batch": {"global_size": 8, "accumulate": 2}}
LORA = {"adapter": {"kind": "lora", "rank": 4, "targets": ["blocks.*"]}}
WAYS = {
    "fsdp": ({}, {"mesh": {"fsdp": 4, "tensor": 2}, "memory": {"loss_chunk": 40}}, 8),
    "context": ({}, {"mesh": {"context": 2}, "memory": {"remat": "full", "mlp_chunk": 5, "head_groups": 2}}, 2),
    "schedule": ({}, {"memory": {"remat": "sqrt", "loss_chunk": 50}}, 1),
    "during": ({}, {"memory": {"update": "during"}, "mesh": {"fsdp": 2}}, 2),
    "stages": ({}, {"mesh": {"stage": 2}, "memory": {"remat": "full"}}, 2),
    "lora": (LORA, {"memory": {"remat": "full", "offload": "activations"}, "mesh": {"fsdp": 2}}, 2),
}


@functools.cache
def alone(name):
    return Trained(config(model=MODEL, **BATCH, **(LORA if name == "lora" else {})), updates=2)


@pytest.mark.parametrize("way", cases(WAYS, "fsdp"))
def test_every_way_to_train_equals_one_device(way):
    base, sections, devices = WAYS[way]
    reference = alone(way if base else "")
    begin = None if "stage" in sections.get("mesh", {}) else reference  # stages have identity layers
    found = Trained(config(model=MODEL, **BATCH, **base, **sections), devices, updates=2, begin=begin)
    for mine, theirs in zip(found.metrics, reference.metrics, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5, abs=1e-6)
