"""The implementations of attention, experts and updates that `auto` chooses."""

import itertools

import pytest

from jaxmem.config.devices import for_devices
from jaxmem.config.methods import run_config
from jaxmem.errors import UserError
from jaxmem.planning.compile import CompiledProgram
from jaxmem.planning.result import Plan
from jaxmem.planning.targets import parse_target, target_devices
from jaxmem.sharding.share import share_of
from jaxmem.step.kernel_choice import attention_choice, kernel_choices, resolve_kernels
from jaxmem.step.programs import program
from tests.planning.conftest import SMALL, config


@pytest.mark.parametrize(
    ("capability", "overrides", "chosen"),
    [
        (90, [], "triton"),
        (80, [], "triton"),
        (75, [], "none"),
        (None, [], "none"),
        (90, ["optimizer.kernel=none"], "none"),
    ],
)
def test_the_choice_and_its_reason(capability, overrides, chosen):
    cfg = run_config("llama3-8b", ["optimizer.name=adamw8bit", *overrides], method="qlora")
    platform = "cpu" if capability is None else "gpu"
    choices = kernel_choices(cfg, platform, capability).by_setting
    assert choices["optimizer.kernel"].implementation == chosen
    assert all(choice.why for choice in choices.values())
    run = resolve_kernels(cfg, platform, capability)
    assert run.optimizer.kernel == chosen
    assert resolve_kernels(run, platform, capability) == run


@pytest.mark.parametrize(
    ("sections", "chosen"),
    [
        ({}, None),  # nothing is in 8 bits
        ({"precision": {"parameters": "int8"}}, "triton"),
        ({"precision": {"parameters": "int8", "rounding": "nearest"}}, "none"),
        ({"precision": {"parameters": "bfloat16"}, "optimizer": {"name": "galore_adamw8bit"}}, None),
    ],
)
def test_updates_that_have_a_fused_form(sections, chosen):
    found = kernel_choices(config(**sections), "gpu", 90).update
    assert (found and found.implementation) == chosen


@pytest.mark.parametrize(
    ("capability", "overrides", "chosen", "why"),
    [
        (90, [], "triton", "all experts at once"),
        (90, ["adapter.base=int8"], "triton", "all experts at once"),
        (90, ["adapter.base=int3"], "blockwise", "does not dequantize int3"),
        (90, ["adapter.base=nf4", "precision.block_size=null", "mesh.tensor=256"], "blockwise", "blocks of a multiple"),
        (90, ["adapter.base=mxfp4", "model.mlp=864"], "triton", "all experts at once"),  # 32 values, not 864 / 32 = 27
        (90, ["memory.experts=blockwise"], "blockwise", "memory.experts"),
        (75, [], "blockwise", "7.5"),
        (None, [], "blockwise", "no NVIDIA GPU"),
    ],
)
def test_experts(capability, overrides, chosen, why):
    cfg = run_config("qwen3-30b-a3b", overrides, method="qlora")
    platform = "cpu" if capability is None else "gpu"
    found = kernel_choices(cfg, platform, capability).experts
    assert found.implementation == chosen
    assert why in found.why
    assert resolve_kernels(cfg, platform, capability).memory.experts == chosen
    assert kernel_choices(run_config("llama3-8b", method="qlora"), platform, capability).experts is None


def test_experts_in_a_format_that_the_named_kernel_does_not_dequantize():
    cfg = run_config("qwen3-30b-a3b", ["adapter.base=uint8", "memory.experts=triton"], method="qlora")
    refusal = "memory.experts=triton: triton does not dequantize uint8; .*; use memory.experts=auto"
    with pytest.raises(UserError, match=refusal):
        kernel_choices(cfg, "gpu", 90)


@pytest.mark.exhaustive
def test_the_kernels_of_an_update():
    """8-bit Adam's moments and int8 weights, on two GPUs; tests/kernels/test_targets.py compiles both."""
    cfg = config(
        model={**SMALL, "embed": 256},
        optimizer={"name": "adamw8bit", "trainable": ["blocks.mlp.up.*"]},
        precision={"parameters": "int8"},
        batch={"global_size": 4},
        mesh={"fsdp": 2},
        memory={"attention": "blockwise"},
    )
    aim = parse_target("h100-80gb:2")
    built = program(cfg, target_devices(aim, aim.memory))
    assert "@triton_kernel_call" in built.lower_step().as_text()
    plan = Plan(built, aim, CompiledProgram(b"", b""), seconds=0.0)
    assert any(line.startswith("optimizer.kernel: triton (") for line in plan.choices)


def with_heads(preset, heads, kv_heads, **mesh):
    stage = mesh.get("stage", 1)
    model = {"preset": preset, "heads": heads, "kv_heads": kv_heads}
    batch = {"global_size": stage, "accumulate": stage}
    return config(model=model, mesh=mesh, batch=batch, data={"sequence_length": 64})


def test_a_device_repeats_kv_heads_that_tensor_does_not_divide():
    cfg = with_heads("gpt-oss-20b", 16, 4, tensor=8, context=2)  # ring does not support its sinks
    assert attention_choice(cfg, "cpu", None).context_method == "ulysses"
    shares = [share_of(with_heads("llama3-8b", *heads, tensor=4)) for heads in ((64, 8), (16, 1), (12, 6))]
    assert [(share.part_of_model.heads, share.part_of_model.kv_heads) for share in shares] == [(16, 2), (4, 1), (3, 3)]


def test_each_mesh_that_is_accepted_has_a_method_of_context():
    accepted = 0
    presets = ("llama3-8b", "gpt-oss-20b")
    for preset, heads, kv_heads, stage in itertools.product(presets, (4, 12, 16), (1, 2, 4, 6), (1, 2)):
        for tensor, context in itertools.product((1, 2, 4, 8), (2, 4)) if heads % kv_heads == 0 else ():
            cfg = with_heads(preset, heads, kv_heads, tensor=tensor, context=context, stage=stage)
            try:
                cfg = for_devices(cfg, tensor * context * stage)
            except UserError:
                continue
            accepted += 1
            assert attention_choice(cfg, "cpu", None).context_method in ("ring", "ulysses")
    assert accepted > 50
