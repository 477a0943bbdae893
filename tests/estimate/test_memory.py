"""The estimate against real arrays, and against what XLA compiles."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from jaxmem.config.devices import for_devices
from jaxmem.config.hugging_face import config_json
from jaxmem.config.methods import config_with
from jaxmem.estimate.memory import estimate
from jaxmem.estimate.passes import passes_of
from jaxmem.estimate.state import bytes_on_device
from jaxmem.kernels.fused_attention.arguments import pairs
from jaxmem.machine.gpus import GPUS
from jaxmem.planning.compile import compile_program
from jaxmem.planning.result import Plan
from jaxmem.planning.targets import parse_target, target_devices
from jaxmem.step.programs import Program, program
from tests.planning.conftest import SMALL, config, plan_here
from tests.support.tiers import exhaustive

WIDE = {
    "family": "decoder",
    "vocab": 8192,
    "layers": 8,
    "embed": 512,
    "mlp": 1536,
    "heads": 8,
    "kv_heads": 4,
    "head_dim": 64,
}

LATENT = {
    **WIDE,
    "preset": "deepseek-v2-lite",
    "head_dim": 192,
    "layers": 4,
    "mlp": 384,
    "kv_heads": 8,
    "experts": {
        "count": 8,
        "top_k": 2,
        "shared": 768,
        "shared_gate": False,
        "dense_layers": [0, 1],
        "dense_mlp": 4096,
    },
}
ADAPTED_EXPERTS = {
    "model": {**WIDE, "layers": 4, "mlp": 768, "experts": {"count": 64, "top_k": 4}},
    "batch": {"global_size": 1},
    "memory": {"remat": "full", "offload": "frozen"},
    "precision": {"parameters": "bfloat16", "rounding": "stochastic"},
}


def on_gpus(count: int, **sections: object) -> Program:
    target = parse_target(f"h100-80gb:{count}")
    base = {"model": WIDE, "data": {"sequence_length": 1024}, "batch": {"global_size": 32}}
    return program(config(**{**base, **sections}), target_devices(target, target.memory))


@pytest.mark.parametrize(
    ("zero", "mesh", "parameters", "master"),
    [
        (0, {"fsdp": 4, "tensor": 2}, "float32", "none"),
        exhaustive(1, {"fsdp": 8}, "bfloat16", "none"),
        (1, {"replica": 2, "fsdp": 2, "tensor": 2}, "bfloat16", "float32"),
        (2, {"fsdp": 8}, "bfloat16", "float32"),
        exhaustive(2, {"replica": 2, "fsdp": 2, "tensor": 2}, "float32", "none"),
        (3, {"replica": 2, "fsdp": 2, "tensor": 2}, "bfloat16", "none"),
        exhaustive(3, {"fsdp": 4, "tensor": 2}, "bfloat16", "float32"),
    ],
)
def test_state_is_exact(zero: int, mesh: dict[str, int], parameters: str, master: str) -> None:
    built = program(config(mesh=mesh, zero=zero, precision={"parameters": parameters, "master": master}))
    parts = estimate(built.cfg, "cpu").categories
    assert parts["parameters"] == bytes_on_device(built.spec.state.params)
    assert parts["master"] + parts["optimizer"] == bytes_on_device(built.spec.state.opt_state)
    assert parts["batch"] == bytes_on_device(built.spec.batch)


@pytest.mark.parametrize(("stages", "rounds"), [(2, 1), (4, 1), (2, 2)])
def test_the_state_of_identity_layers_is_exact(stages: int, rounds: int) -> None:
    """5 layers on stages that do not divide them."""
    model = {**config().model.model_dump(exclude_none=True), "layers": 5}
    sections = {"mesh": {"stage": stages}, "batch": {"global_size": 8, "accumulate": 4}, "pipeline": {"rounds": rounds}}
    built = program(config(model=model, **sections), jax.devices()[:stages])
    guess = estimate(built.cfg, "cpu")
    assert guess.categories["parameters"] == bytes_on_device(built.spec.state.params)
    assert guess.categories["optimizer"] == bytes_on_device(built.spec.state.opt_state)
    assert guess.host == guess.categories["parameters"] + guess.categories["optimizer"]


@pytest.mark.exhaustive
def test_the_state_of_adapters_is_exact() -> None:
    built = program(config(mesh={"fsdp": 4, "tensor": 2}, adapter={"kind": "qlora", "rank": 4}))
    found = estimate(built.cfg, "cpu")
    assert found.categories["parameters"] + found.categories["quantization"] == bytes_on_device(built.spec.state.params)
    assert found.categories["optimizer"] == bytes_on_device(built.spec.state.opt_state)
    assert found.host == bytes_on_device(built.spec.state.params) + bytes_on_device(built.spec.state.opt_state)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("count", "sections"),
    [
        (4, {"memory": {"remat": "dots"}, "mesh": {"fsdp": 2, "tensor": 2}, "zero": 1}),
        (
            4,
            {
                "memory": {"remat": "sqrt"},
                "mesh": {"fsdp": 4},
                "zero": 1,
                "batch": {"global_size": 16, "accumulate": 2},
            },
        ),
        (
            4,
            {
                "memory": {"remat": "full", "offload": "activations"},
                "mesh": {"fsdp": 4},
                "zero": 2,
                "precision": {"parameters": "bfloat16"},
            },
        ),
        # Keys go round, in blocks one after the other; whole logits wait beside the layers.
        (
            4,
            {
                "memory": {"remat": "full"},
                "mesh": {"context": 2, "tensor": 2},
                "data": {"sequence_length": 8192},
                "batch": {"global_size": 8, "accumulate": 2},
            },
        ),
        (
            2,
            {
                "memory": {"remat": "full", "mlp_chunk": 128},
                "mesh": {"fsdp": 2},
                "batch": {"global_size": 32, "accumulate": 2},
            },
        ),
        (
            4,
            {
                "memory": {"remat": "sqrt"},
                "mesh": {"stage": 2, "fsdp": 2},
                "zero": 1,
                "batch": {"global_size": 64, "accumulate": 4},
            },
        ),
        # The backward pass recomputes the experts of other devices' tokens, whatever the policy saves.
        (
            2,
            {
                "model": {**WIDE, "mlp": 384, "experts": {"count": 8, "top_k": 2}},
                "memory": {"remat": "none"},
                "mesh": {"expert": 2},
                "batch": {"global_size": 8},
            },
        ),
        # `tensor` shards the hidden units of layers without experts and of shared experts.
        (4, {"model": LATENT, "memory": {"remat": "none"}, "mesh": {"tensor": 4}, "batch": {"global_size": 2}}),
        # Experts in host memory: those of a layer and of the next one are on the device.
        exhaustive(1, {**ADAPTED_EXPERTS, "adapter": {"kind": "lora", "targets": ["blocks.attention.*"]}}),
        exhaustive(1, {**ADAPTED_EXPERTS, "adapter": {"kind": "lora", "targets": ["blocks.*"], "rank": 4}}),
    ],
)
def test_totals_are_near_what_is_compiled(count: int, sections: dict) -> None:
    built = on_gpus(count, **sections)
    step = compile_program(built.lower_step(), here=False)
    expected = estimate(built.resolved, "gpu")
    assert expected.total == pytest.approx(step.total, rel=0.1)
    assert expected.host - bytes_on_device(built.spec.state) == pytest.approx(step.host_total, rel=0.01, abs=8)


@pytest.mark.exhaustive
def test_an_update_during_the_backward_pass_needs_fewer_bytes_with_pipeline_stages() -> None:
    """Float32 sums of the gradients of all layers exist also with one micro-batch; with `during`, of one layer."""
    totals = {}
    for update in ("after", "during"):
        memory = {"remat": "full", "update": update}
        data, optimizer = {"sequence_length": 256}, {"clip_by": "previous"}
        built = on_gpus(2, mesh={"stage": 2}, batch={"global_size": 1}, data=data, memory=memory, optimizer=optimizer)
        step = compile_program(built.lower_step(), here=False)
        assert estimate(built.resolved, "gpu").total == pytest.approx(step.total, rel=0.1)
        totals[update] = step.total
    layer = 4 * (built.model.parameter_count - 2 * WIDE["vocab"] * WIDE["embed"]) / WIDE["layers"]
    assert totals["after"] - totals["during"] > 0.8 * (WIDE["layers"] / 2 - 1) * layer


@pytest.mark.parametrize(
    ("pattern", "layers", "alone"),
    [
        ({"every": 2, "dense_mlp": 48}, 8, {"every": 2, "dense_mlp": 48}),
        exhaustive({"dense_layers": [0, 2, 4, 6], "dense_mlp": 48}, 8, {"dense_layers": [0, 2], "dense_mlp": 48}),
        exhaustive({"dense_layers": [0], "dense_mlp": 512}, 9, {}),
    ],
)
def test_a_group_of_a_pipeline_stage_has_whole_periods_of_layers(pattern: dict, layers: int, alone: dict) -> None:
    """Of the second model, the first layer is not in a pipeline stage."""

    def saved(layers: int, stages: int, pattern: dict) -> int:
        experts = {"count": 4, "top_k": 2, **pattern}
        model = {**SMALL, "qk_norm": True, "layers": layers, "experts": experts}
        sections = {"mesh": {"stage": stages}, "batch": {"global_size": 8, "accumulate": 8}}
        return passes_of(for_devices(config(model=model, **sections), stages), "gpu").saved

    assert saved(layers, 2, pattern) == saved(4, 1, alone)


@pytest.mark.parametrize(("zero", "split"), [(1, 1), (3, 4)])
def test_sums_of_gradients_are_sharded_like_gradients(zero: int, split: int) -> None:
    """Up to zero 1 each group of rows has its own complete sum."""
    built = program(config(mesh={"fsdp": 4}, zero=zero, batch={"global_size": 32, "accumulate": 4}), jax.devices()[:4])
    sums = 4 * built.model.parameter_count / split
    assert sums <= estimate(built.cfg, "cpu").categories["gradients"] < 1.3 * sums


@pytest.mark.exhaustive
@pytest.mark.parametrize("remat", ["none", "full"])
def test_traced_matmul_flops_equal_the_compiled_ones(remat: str) -> None:
    """A whole step's arithmetic from the trace of one row."""
    plan = plan_here(1, memory={"remat": remat})
    traced = sum(one.times * one.flops for one in passes_of(plan.program.cfg, "cpu").matmuls)
    assert 8 * traced == pytest.approx(plan.timeline.flops, rel=0.05)


@pytest.mark.exhaustive
def test_attention_flops_do_not_depend_on_the_implementation() -> None:
    def products(name: str) -> list[tuple[int, int]]:
        cfg = config(model=WIDE, memory={"attention": name}, precision={"compute": "bfloat16"})
        return [(one.times, one.flops) for one in passes_of(cfg, "gpu").matmuls]

    def total(products: list[tuple[int, int]]) -> int:
        return sum(times * flops for times, flops in products)

    two = products("triton")
    plain = sum(one.times * one.flops for one in passes_of(config(model=WIDE), "gpu").matmuls)
    assert total(two) > plain / 2
    # All gradients at once take 5 products in place of 7: two of one layer's attention less, for each.
    model = program(config(model=WIDE), jax.devices()[:1]).cfg
    seen = pairs(model.data.sequence_length, model.data.sequence_length, causal=True, window=None)
    saved = 2 * 2 * model.model.layers * model.model.heads * seen * model.model.head_dim
    assert total(two) - total(products("cudnn")) == pytest.approx(saved, rel=1e-6)


@pytest.mark.exhaustive
def test_layers_with_a_window_count_as_often_as_they_run() -> None:
    """Three of four layers have it, in one program with two branches. 512 positions are four blocks of plain JAX's
    attention; of two, a causal mask leaves as many tiles as the window."""
    pattern = ["sliding_attention"] * 3 + ["full_attention"]

    def flops(**fields: object) -> float:
        model = {"preset": "gemma3-1b", **WIDE, "layers": 4, "embed": 64, "mlp": 64, "window": 16, **fields}
        cfg = config(model=model, data={"sequence_length": 512}, memory={"remat": "full"})
        return float(sum(one.times * one.flops for one in passes_of(cfg, "cpu").matmuls))

    sliding, full, mixed = (
        flops(layer_types=[]),
        flops(layer_types=[], window=None, sliding_rope=None),
        flops(layer_types=pattern),
    )
    assert full > 1.1 * sliding
    assert mixed == pytest.approx((3 * sliding + full) / 4)


def test_checkpoints_of_adapters_need_no_host_memory_for_the_base(tmp_path: Path) -> None:
    """With `model.hf` no checkpoint contains the base; in host memory it counts once."""
    model = config().model
    (tmp_path / "config.json").write_text(json.dumps(config_json(model)))
    sections = {"adapter": {"kind": "lora", "rank": 2}, "data": {"sequence_length": 24, "tokenizer": "bytes"}}
    everything = program(config(**sections), jax.devices()[:1])
    built = program(config(**sections, model={"hf": str(tmp_path)}), jax.devices()[:1])
    state = built.spec.state
    adapters = bytes_on_device(built.model.select(state.params)) + bytes_on_device(state.opt_state)
    counters = bytes_on_device(state) - bytes_on_device(state.params) - bytes_on_device(state.opt_state)
    assert estimate(everything.cfg, "cpu").host == bytes_on_device(everything.spec.state) - counters
    assert estimate(built.cfg, "cpu").host == adapters
    plan = Plan(built, parse_target("cpu:1"), SimpleNamespace(total=0, host_total=0), 0.0)  # type: ignore[arg-type]
    assert plan.host_bytes == adapters + counters
    offloaded = estimate(built.cfg.replace(memory={"offload": ("frozen",)}), "gpu")
    assert offloaded.host - adapters < bytes_on_device(state.params)


def test_a_kernel_of_a_script_has_an_estimate() -> None:
    """Its FLOPs are unknown."""

    class Network(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.dense = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            call = jax.ffi.ffi_call("some_kernel", jax.ShapeDtypeStruct((), x.dtype))
            return call(jax.lax.stop_gradient(x)) + self.dense(x)

    cfg = config_with(
        {"name": "x", "batch": {"global_size": 4}, "train": {"steps": 2}},
        model=Network,
        loss=lambda model, batch: model(batch["x"]).mean(),
        data=[{"x": np.zeros((4, 8), np.float32)}],
    )
    seconds = estimate(for_devices(cfg, 1), "gpu", GPUS["a100-40gb"]).seconds
    assert seconds is not None
    assert seconds > 0
