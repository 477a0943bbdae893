"""The attention that a run gets by default, in its programs for each kind of GPU."""

import re

import pytest

import jaxmem
from jaxmem.config import load_config
from jaxmem.config.devices import for_devices
from jaxmem.errors import UserError
from jaxmem.planning.result import Plan
from jaxmem.planning.targets import parse_target, target_devices
from jaxmem.step.kernel_choice import attention_choice, resolve_kernels
from jaxmem.step.programs import program
from tests.planning.conftest import SMALL, compiled_for, config

CUDNN, TRITON = "__cudnn$fmha", "triton_kernel_call"
PACKED = {
    "a100-40gb": TRITON,
    "a6000-48gb": TRITON,
    "rtx4090-24gb": TRITON,
    "h100-80gb": CUDNN,
    "b200-180gb": CUDNN,
    "rtx5090-32gb": TRITON,
}


UNPACKED = {"sequence_length": 128, "packing": False}
SECTIONS = {
    "model": {**SMALL, "embed": 128, "head_dim": 64},
    "data": {"sequence_length": 128},
    "batch": {"global_size": 4},
    "mesh": {"fsdp": -1},
    "memory": {"remat": "full"},
}


def calls(targets):
    """The kernels of attention among the targets of custom calls."""
    return {kernel for kernel in (CUDNN, TRITON) if any(target.startswith(kernel) for target in targets)}


def test_packed_rows_on_each_gpu():
    """What is chosen; the next test looks into the modules."""
    targets = {name: parse_target(f"{name}:2").gpu for name in PACKED}
    cfg = for_devices(config(**SECTIONS), 2)
    chosen = {
        name: attention_choice(cfg, "gpu", round(10 * float(gpu.compute_capability))).implementation
        for name, gpu in targets.items()
    }
    assert chosen == {name: "cudnn" if kernel == CUDNN else "triton" for name, kernel in PACKED.items()}


@pytest.mark.exhaustive
def test_the_kernels_of_packed_rows():
    """Of cuDNN: test_gpu."""
    target = parse_target("rtx4090-24gb:2")
    built, step = compiled_for(config(**SECTIONS), target.name)
    plan = Plan(built, target, step, 0.0)
    assert calls({one.proto.custom_call_target for one in step.module.walk()}) == {TRITON}
    assert plan.step_as_json()["kernels"]["memory.attention"]["implementation"] == "triton"
    assert plan.estimated_step_seconds


@pytest.mark.parametrize(
    ("gpu", "change", "kernels", "implementation"),
    [
        # One document, then padding, which a causal mask is enough for.
        ("a100-40gb", {"data": UNPACKED}, {CUDNN}, "cudnn"),
        ("h100-80gb", {"precision": {"compute": "float32"}}, {TRITON}, "triton"),
        # Each device attends to the complete sequence, with some of the heads.
        ("h100-80gb", {"mesh": {"context": 2}}, {CUDNN}, "cudnn"),
        ("h100-80gb", {"mesh": {"context": 2, "context_method": "ring"}, "data": UNPACKED}, {CUDNN}, "cudnn"),
        ("a100-40gb", {"mesh": {"context": 2, "context_method": "ring"}}, {TRITON}, "triton"),
        ("h100-80gb", {"memory": {"attention": "blockwise"}}, set(), "blockwise"),
    ],
)
def test_settings_change_the_choice(gpu, change, kernels, implementation):
    """In the lowered forward pass, which has the calls of the step in a third of its time."""
    target = parse_target(f"{gpu}:2")
    built = program(config(**{**SECTIONS, **change}), target_devices(target, target.memory))
    lowered = built.lower_evaluate().as_text()
    assert calls(re.findall(r'custom_call @"?([\w$.]+)', lowered)) == kernels
    assert built.model.execution.kernels.attention.implementation == implementation


def test_a_kernel_that_is_named_is_refused_before_compiling():
    with pytest.raises(UserError, match=r"memory.attention=cudnn: compute capability is 8.9; .* use memory.attention"):
        jaxmem.plan(config(**{**SECTIONS, "memory": {"attention": "cudnn"}}), "rtx4090-24gb")


H100 = 90


@pytest.mark.parametrize(
    ("gpu", "mesh", "sections", "method", "implementation"),
    [
        (H100, {"context": 8}, {}, "ulysses", "cudnn"),
        (H100, {"context": 8, "context_method": "ring"}, {}, "ring", "triton"),  # documents of other devices
        (80, {"context": 8}, {}, "ulysses", "triton"),
        (None, {"context": 8}, {}, "ulysses", "blockwise"),
        # Heads that are not divisible by 16; all-to-all between hosts, which takes longer than an overlapped ring.
        (H100, {"context": 16}, {"model": {"preset": "llama3-8b", "heads": 24}}, "ring", "triton"),
        (H100, {"context": 16}, {"data": {"sequence_length": 2**17, "packing": False}}, "ring", "cudnn"),
        (H100, {"context": 8}, {"model": {"preset": "llama3-8b", "window": 512}}, "ring", "triton"),
        (H100, {"context": 8, "context_method": "ulysses"}, {"memory": {"attention": "triton"}}, "ulysses", "triton"),
    ],
)
def test_the_method_of_context_and_its_kernel(gpu, mesh, sections, method, implementation):
    base = {
        "train": {"steps": 1},
        "model": {"preset": "llama3-8b"},
        "data": {"sequence_length": 2**17},
        "batch": {"global_size": 1},
    }
    cfg = load_config({"name": "x", **base, "mesh": mesh, **sections})
    chosen = attention_choice(cfg, "cpu" if gpu is None else "gpu", gpu)
    assert (chosen.context_method, chosen.implementation) == (method, implementation)
    assert chosen.why.startswith(f"{method} over context")
    after = resolve_kernels(cfg, "gpu", gpu)
    assert (after.mesh.context_method, after.memory.attention) == (method, implementation)
