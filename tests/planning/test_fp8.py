"""Matmuls in FP8 in the modules that XLA compiles for GPUs."""

import re
from collections import Counter
from types import SimpleNamespace

import pytest

from jaxmem.models.fp8 import SCOPE
from jaxmem.planning import advice, targets
from jaxmem.planning.hlo import BLOCK_SCALED_DOT, dot_flops
from jaxmem.planning.targets import parse_target
from tests.planning.conftest import SMALL, compiled_for, config
from tests.support.tiers import exhaustive

SECTIONS = {
    "model": {**SMALL, "embed": 128, "mlp": 256, "head_dim": 32},
    "data": {"sequence_length": 128},
    "batch": {"global_size": 4},
    "memory": {"remat": "full"},
}
EXPERTS = {**SECTIONS["model"], "experts": {"count": 4, "top_k": 2}}
FP8 = {"precision": {"compute": "fp8"}}
BY_ROW = {"precision": {"compute": "fp8", "fp8_scaling": "row"}}
IN_BLOCKS = {"precision": {"compute": "fp8", "fp8_scaling": "mxfp8"}}


def not_in_fp8(target, built, step):
    plan = SimpleNamespace(target=parse_target(target), program=built, compiled_step=step)
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
    built, step = compiled_for(config(**{**SECTIONS, **sections}), target)
    matmuls = [part for part in step.module.walk() if part.proto.custom_call_target.endswith("$f8")]
    formats = Counter(operand.shape.dtype for part in matmuls for operand in part.operands)
    assert formats["float8_e5m2"] >= 8  # XLA joins the matmuls of q, k and v, and those of gate and up
    assert formats["float8_e4m3fn"] >= 14
    assert not not_in_fp8(target, built, step)


@pytest.mark.parametrize(
    ("target", "sections"),
    [
        exhaustive("b200-180gb:8", {"mesh": {"fsdp": 2, "tensor": 2, "context": 2}}),
        exhaustive("b200-180gb:4", {"mesh": {"stage": 2, "replica": 2}, "batch": {"global_size": 8, "accumulate": 2}}),
        # A frozen weight is not mapped over the groups of rows that sum their gradients.
        exhaustive(
            "b200-180gb:4",
            {
                "mesh": {"fsdp": 4},
                "zero": 1,
                "batch": {"global_size": 8, "accumulate": 2},
                "adapter": {"kind": "lora"},
            },
        ),
        exhaustive("b200-180gb:2", {"mesh": {"expert": 2}, "model": EXPERTS}),
    ],
)
def test_matmuls_with_block_scales_are_compiled_to_fp8_in_every_layout(target, sections):
    check_block_scaled(target, *compiled_for(config(**{**SECTIONS, **IN_BLOCKS, **sections}), target))


def check_block_scaled(target, built, step):
    """Returns the matmuls."""
    matmuls = [part for part in step.module.walk() if part.proto.custom_call_target == BLOCK_SCALED_DOT]
    assert len(matmuls) >= 7
    assert {operand.shape.dtype for part in matmuls for operand in part.operands} == {"float8_e4m3fn", "float8_e8m0fnu"}
    assert all(SCOPE in part.op_name for part in matmuls)
    assert not not_in_fp8(target, built, step)
    return matmuls


@pytest.mark.exhaustive
@pytest.mark.parametrize("scaling", ["tensor", "row", "mxfp8"])
def test_weight_gradients_are_reduce_scattered(scaling):
    precision = {"compute": "fp8", "fp8_scaling": scaling}
    _, step = compiled_for(config(**SECTIONS, precision=precision, mesh={"fsdp": 4}), "b200-180gb:4")
    reduced = [part.shape for part in step.module.walk() if part.opcode in ("all-reduce", "all-reduce-start")]
    model = SECTIONS["model"]
    smallest = model["embed"] * model["kv_heads"] * model["head_dim"]
    assert all(shape.bytes < smallest for shape in reduced)


def test_matmuls_with_block_scales_are_compiled_to_fp8_and_have_the_flops_of_others():
    model = {**SECTIONS["model"], "kv_heads": 4}  # cuDNN pads fewer than 128 columns
    cfg = config(**{**SECTIONS, **IN_BLOCKS, "model": model, "memory": {"remat": "none"}})
    built, step = compiled_for(cfg, "b200-180gb")
    matmuls = check_block_scaled("b200-180gb", built, step)
    flops = sum(dot_flops(part) * step.module.executions[part.computation] for part in matmuls)
    width = model["embed"] * (2 * model["heads"] + 2 * model["kv_heads"]) * model["head_dim"]
    width += 3 * model["embed"] * model["mlp"]
    assert flops == 3 * 2 * width * model["layers"] * 4 * 128  # tokens


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("target", "sections", "missing"),
    [("h100-80gb", FP8, "runtime_version.*"), ("b200-180gb", IN_BLOCKS, "dnn_version.*")],
)
def test_a_matmul_that_is_not_in_fp8_is_named(target, sections, missing, monkeypatch):
    """XLA is not told the version of CUDA or cuDNN, without which it uses no FP8."""
    complete = targets.target_config
    monkeypatch.setattr(targets, "target_config", lambda *gpu: re.sub(missing, "", complete(*gpu)))
    built, step = compiled_for(config(**SECTIONS, **sections), target)
    (warning,) = not_in_fp8(target, built, step)
    assert warning.kind == "not in FP8"
    assert re.match(r"XLA compiles (\d+) of \1 matmuls of precision.fp8_layers without FP8: bfloat16", warning.text)
