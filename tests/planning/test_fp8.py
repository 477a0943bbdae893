"""Matmuls in FP8 in the modules that XLA compiles for GPUs."""

import re
from collections import Counter
from types import SimpleNamespace

import pytest

from jaxmem.planning import advice, parse_target, targets
from tests.planning.conftest import SMALL, compiled_for, config
from tests.support.tiers import exhaustive

SECTIONS = {
    "model": {**SMALL, "embed": 128, "mlp": 256, "head_dim": 32},
    "data": {"sequence_length": 128},
    "batch": {"global_size": 4},
    "memory": {"remat": "full"},
}
FP8 = {"precision": {"compute": "fp8"}}
BY_ROW = {"precision": {"compute": "fp8", "fp8_scaling": "row"}}


def not_in_fp8(target, step):
    plan = SimpleNamespace(target=parse_target(target), compiled_step=step)
    return list(advice._not_in_fp8(plan))


@pytest.mark.parametrize(
    ("target", "sections"),
    [
        ("h100-80gb", FP8),
        exhaustive("rtx4090-24gb:2", {**BY_ROW, "mesh": {"stage": 2}, "batch": {"global_size": 4, "accumulate": 2}}),
        exhaustive("b200-180gb:4", {**FP8, "mesh": {"fsdp": 2, "tensor": 2}}),
        exhaustive("rtx5090-32gb", BY_ROW),
    ],
)
def test_matmuls_are_compiled_to_fp8(target, sections):
    _, step = compiled_for(config(**{**SECTIONS, **sections}), target)
    matmuls = [part for part in step.module.walk() if part.proto.custom_call_target.endswith("$f8")]
    formats = Counter(operand.shape.dtype for part in matmuls for operand in part.operands)
    assert formats["float8_e5m2"] >= 8  # XLA joins the matmuls of q, k and v, and those of gate and up
    assert formats["float8_e4m3fn"] >= 14
    assert not not_in_fp8(target, step)


def test_a_matmul_that_is_not_in_fp8_is_named(monkeypatch):
    """XLA is not told the version of CUDA, without which it uses no FP8."""
    complete = targets.target_config
    monkeypatch.setattr(targets, "target_config", lambda *gpu: re.sub("runtime_version.*", "", complete(*gpu)))
    _, step = compiled_for(config(**SECTIONS, **FP8), "h100-80gb")
    (warning,) = not_in_fp8("h100-80gb", step)
    assert warning.kind == "not in FP8"
    assert re.match(r"XLA compiles (\d+) of \1 matmuls of precision.fp8_layers without FP8: bfloat16", warning.text)
