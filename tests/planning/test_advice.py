"""What a plan warns of: each warning where its cause is, with what would cure it, and not where it is not."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxmem
from jaxmem.config import load_config
from jaxmem.config.methods import config_with
from jaxmem.errors import UserError
from jaxmem.pipeline.stages import Pipeline
from jaxmem.planning import advice
from jaxmem.planning.advice import PlanWarning, warnings_of
from jaxmem.planning.breakdown import Breakdown, KnownShapes, NamedBuffer, known_shapes
from jaxmem.planning.budget import estimated
from jaxmem.planning.buffers import Allocation, Buffer
from jaxmem.planning.compile import CompiledProgram, compile_program, replicated_arrays, without_cache
from jaxmem.planning.hlo import Computation, HloShape, Instruction, Module, total_flops
from jaxmem.planning.result import Plan
from jaxmem.planning.targets import parse_target, target_devices
from jaxmem.stack import remat
from jaxmem.step.programs import program
from tests.planning.conftest import SMALL, config, plan_here

MIB = 2**20


def found(check: Any, **plan: Any) -> list[PlanWarning]:
    """One check of a plan of which only this is known."""
    return list(check(SimpleNamespace(**plan)))


def kinds(plan: Plan) -> set[str]:
    return {warned.kind for warned in plan.warnings}


@pytest.mark.exhaustive
def test_float32_adapters_and_the_setting_that_halves_them() -> None:
    def warned(parameters: str, total: int) -> list[PlanWarning]:
        cfg = config(adapter={"kind": "qlora"}, precision={"parameters": parameters})
        return found(
            advice._float32_adapters, program=program(cfg, jax.devices()[:1]), bytes_per_device={"total": total}
        )

    [warning] = warned("float32", MIB)
    assert warning.cure.split()[0] == "precision.parameters=bfloat16"
    assert warned("bfloat16", MIB) == warned("float32", 1000 * MIB) == []


def test_a_float32_base_and_the_setting_that_halves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def warned(**adapter: str) -> list[PlanWarning]:
        return found(advice._float32_base, program=program(config(adapter=adapter), jax.devices()[:1]))

    assert not warned(kind="lora"), "a small base"
    monkeypatch.setattr(advice, "MIN_FLOAT32_BASE", 100_000)
    [warning] = warned(kind="lora")
    frozen = 4 * program(config(), jax.devices()[:1]).model.parameter_count
    assert f"{frozen / 2**10:.1f} KiB per device" in warning.text
    assert warning.cure.split(",")[0] == "adapter.base=bfloat16"
    assert len(warned(kind="dora")) == 1
    assert not warned(kind="lora", base="bfloat16")
    assert not warned(kind="qlora")
    assert not warned(kind="none")


@pytest.mark.exhaustive
def test_a_setting_that_makes_a_step_much_longer_and_its_neighbour() -> None:
    def warned(*overrides: str) -> list[PlanWarning]:
        cfg = load_config({"name": "x", "model": {"preset": "llama3.2-1b"}, "train": {"steps": 10}}, overrides)
        target = parse_target(f"a100-80gb:{cfg.mesh.stage}")
        return found(advice._slow_settings, program=SimpleNamespace(cfg=cfg), target=target, limit=target.memory)

    assert not warned("memory.update=during", "memory.remat=full", "optimizer.clip_by=previous")
    assert not warned("memory.update=after", "memory.remat=full")
    [accumulated] = warned("batch.global_size=64", "batch.accumulate=64", "data.sequence_length=256")
    assert accumulated.text.startswith("batch.accumulate=64 makes a step")
    assert not warned("batch.global_size=4096", "batch.accumulate=4096", "data.sequence_length=256"), "1 does not fit"
    stages = ("mesh.stage=4", "pipeline.rounds=2", "batch.global_size=64", "batch.accumulate=64")
    assert not warned(*stages, "data.sequence_length=256"), "one micro-batch does not fill the stages"
    [warning] = warned("memory.update=during", "memory.remat=full")
    assert re.search(r"optimizer.clip_by=global makes a step 1\.\d times as long", warning.text)
    assert warning.cure == "optimizer.clip_by=previous"


def test_rows_longer_than_the_model_was_trained_on(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')

    def cures(length: int, hf: str | None) -> list[str]:
        cfg = config(data={"sequence_length": length})
        cfg = cfg.replace(model=cfg.model.model_copy(update={"hf": hf}))
        return [one.cure for one in found(advice._sequence_length, program=SimpleNamespace(cfg=cfg))]

    assert cures(64, str(tmp_path)) == cures(128, None) == []
    assert "data.sequence_length=64" in cures(128, str(tmp_path))[0]


# ------------------------------------------------------------------ recomputation that nobody asked for


def short_of(usable: int) -> CompiledProgram:
    """A chain of layers whose activations XLA can compute again, for a GPU with so much memory."""
    place = jax.sharding.SingleDeviceSharding(target_devices(parse_target("h100-80gb"), usable)[0])

    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        def loss(weights: jax.Array) -> jax.Array:
            h = x
            for layer in range(6):
                h = jax.nn.gelu(h @ weights[layer])
            return jnp.sum(h * h)

        return weights - jax.grad(loss)(weights)

    weights = jax.ShapeDtypeStruct((6, 512, 512), jnp.float32, sharding=place)
    x = jax.ShapeDtypeStruct((16384, 512), jnp.float32, sharding=place)
    return compile_program(jax.jit(step, donate_argnums=0).lower(weights, x), here=False)


def test_recomputation_by_xla_and_what_it_costs() -> None:
    short, enough = short_of(400 * MIB), short_of(8192 * MIB)
    built = program(config(memory={"remat": "dots"}), jax.devices()[:1])
    assert found(advice._recomputed_by_xla, program=built, compiled_step=enough, limit=400 * MIB) == []
    assert found(advice._recomputed_by_xla, program=built, compiled_step=short, limit=1000) == [], "nothing would fit"
    (warned,) = found(advice._recomputed_by_xla, program=built, compiled_step=short, limit=400 * MIB)
    assert warned.kind == "recomputed by XLA"
    extra = total_flops(short.module) - total_flops(enough.module)
    assert f"{extra:.3g} more FLOPs per step" in warned.text
    assert "memory.remat=full" in warned.cure
    for instruction in enough.module.walk():
        instruction.name += ".remat"
    moved = found(advice._recomputed_by_xla, program=built, compiled_step=enough, limit=400 * MIB)
    assert moved == [], "an instruction without its original is moved, and computed once"


# ------------------------------------------------------------------ host memory


NOTHING_THERE = SimpleNamespace(on_host=lambda *_: 0, of_kind=lambda _: 0)


def test_an_offload_that_moves_nothing() -> None:
    """A CPU's compiler takes the order and leaves everything where it is."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="device")

    host = place.with_memory_kind("pinned_host")

    def step(x: jax.Array) -> jax.Array:
        return jax.device_put(jnp.sin(jax.device_put(x, place)), host)

    x = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=host)
    lowered = jax.jit(step, out_shardings=host).lower(x)
    compiled = compile_program(lowered, here=True)
    (warned,) = found(advice._offload, compiled_step=compiled, breakdown=NOTHING_THERE)
    assert warned.kind == "nothing offloaded"
    assert "--target with a GPU" in warned.cure


def test_an_offload_that_moves() -> None:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["x"], offload_src="device", offload_dst="pinned_host"
    )

    def step(weights: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(checkpoint_name(x, "x") @ w), None

        def loss(weights: jax.Array) -> jax.Array:
            return jnp.sum(jax.lax.scan(jax.checkpoint(layer, policy=policy), x, weights)[0])

        return weights - jax.grad(loss)(weights)

    place = jax.sharding.SingleDeviceSharding(target_devices(parse_target("h100-80gb"), 8192 * MIB)[0])
    weights = jax.ShapeDtypeStruct((4, 256, 256), jnp.float32, sharding=place)
    lowered = jax.jit(step).lower(weights, jax.ShapeDtypeStruct((1024, 256), jnp.float32, sharding=place))
    compiled = compile_program(lowered, here=False)
    assert compiled.wants_host
    assert found(advice._offload, compiled_step=compiled, breakdown=NOTHING_THERE) == []


def state_on_host(copied: int) -> Breakdown:
    """Of a step whose optimizer's state rests on the host and comes to the device in pieces of `copied` bytes."""
    state, piece = HloShape("float32", 32, (64 * MIB,)), HloShape("float32", 32, (copied // 4,))
    argument = Instruction(0, "state", "parameter", state, 0, "state.opt_state[0].mu['w']")
    copy = Instruction(1, "copy", "slice", piece, 0, "", operands=[argument])
    result = Instruction(2, "result", "negate", piece, 0, "", operands=[copy])
    argument.users, copy.users = [copy], [result]
    main = Computation(1, "main", [argument, copy, result], result)
    for one in main.instructions:
        one.computation = main
    module = Module([main], main, {one.id: one for one in main.instructions})
    buffer = Buffer(0, piece.bytes, ((copy, ()),))
    allocations = [
        Allocation("argument", state.bytes, 0, True, ()), Allocation("temporary", piece.bytes, None, False, (buffer,))
    ]  # fmt: skip
    return Breakdown(module, allocations)


@pytest.mark.parametrize(("copied", "warns"), [(256 * MIB, True), (16 * MIB, False)])
def test_state_on_the_host_that_comes_back_whole(copied: int, warns: bool) -> None:
    step = SimpleNamespace(wants_host=False)
    warned = found(advice._offload, compiled_step=step, breakdown=state_on_host(copied))
    assert [one.kind for one in warned] == ["offloaded without gain"] * warns
    assert all("256.0 MiB of optimizer state is in host memory" in one.text for one in warned)


# ------------------------------------------------------------------ whole arrays


@pytest.mark.exhaustive
def test_a_gathered_weight_that_outlives_its_layer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    model = {**SMALL, "embed": 64, "mlp": 256, "layers": 4}
    split = {"model": model, "mesh": {"fsdp": 8}, "data": {"sequence_length": 8}}
    assert warnings_of(plan_here(**split)) == []
    keep = lambda _: jax.checkpoint_policies.everything_saveable  # noqa: E731
    monkeypatch.setattr(advice, "MIN_UNSHARDED", 0)
    monkeypatch.setattr(remat, "_save_all_but_weights", keep)
    (warned, *_) = [one for one in plan_here(**split).warnings if one.kind == "unsharded array"]
    assert "are on each device at once: float32[4,64,256]" in warned.text
    assert "memory.remat=full" in warned.cure


@pytest.mark.exhaustive
def test_replicated_gradients_of_sharded_weights_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a step that has them whole, as it should: to a plan of one that splits them it is a fault."""
    monkeypatch.setattr(advice, "MIN_UNSHARDED", 0)
    plan = plan_here(4, mesh={"fsdp": 4}, zero=1, batch={"global_size": 16, "accumulate": 2})
    assert (
        found(advice._unsharded, breakdown=plan.breakdown, bytes_per_device=plan.bytes_per_device, program=plan.program)
        == []
    )
    split = known_shapes(program(config(mesh={"fsdp": 4}, zero=2), jax.devices()[:4]))
    faulty = dataclasses.replace(plan.breakdown, known=split)
    warned = found(advice._unsharded, breakdown=faulty, bytes_per_device=plan.bytes_per_device, program=plan.program)
    assert {one.kind for one in warned} == {"unsharded array"}
    assert any("of a sharded gradient" in one.text for one in warned)


LINEAR = {
    "model": lambda rngs: nnx.Sequential(*(nnx.Linear(256, 256, use_bias=False, rngs=rngs) for _ in range(8))),
    "loss": lambda model, batch: jnp.mean((model(batch["x"]) - 1) ** 2),
    "data": [{"x": np.ones((8, 256), np.float32)}],
}
SHARDED = {"name": "linear", "batch": {"global_size": 8}, "mesh": {"fsdp": 8}, "zero": 3, "train": {"steps": 2}}


def test_a_model_of_a_script_that_is_gathered_at_once() -> None:
    def warned(size: int, devices: int = 8, **parts: Any) -> list[PlanWarning]:
        cfg = config_with({**SHARDED, "mesh": {"fsdp": devices}}, **LINEAR, **parts)
        built = program(cfg, jax.devices()[:devices])
        breakdown = SimpleNamespace(of_kind=lambda _: size)
        target = SimpleNamespace(platform="gpu")
        return found(advice._gathered_model, program=built, breakdown=breakdown, target=target)

    (warning,) = warned(64 * MIB)
    assert "gathers all weights at once: 64.0 MiB" in warning.text
    assert warning.cure.startswith("layers=")
    assert warned(64 * MIB, layers="layers") == warned(64 * MIB, devices=1) == warned(4 * MIB) == []


@pytest.mark.exhaustive
def test_the_memory_of_a_model_of_a_script_with_and_without_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "MIN_UNSHARDED", 0)
    plans = [jaxmem.plan(SHARDED, "h100-80gb:8", **LINEAR, **parts) for parts in ({}, {"layers": "layers"})]
    assert ["gathered model" in kinds(plan) for plan in plans] == [True, False]


def test_a_part_that_has_the_form_of_something_whole_is_no_sign_of_it() -> None:
    """Half of all queries' weights is as large as all keys' weights; a quarter is not. The MLP's are like no other."""
    keys, mlp = (2, 16, 32), (2, 32, 64)
    halves = known_shapes(program(config(mesh={"replica": 2, "fsdp": 2}), jax.devices()[:4]))
    quarters = known_shapes(program(config(mesh={"fsdp": 4}), jax.devices()[:4]))
    for whole in (halves.full_weights, halves.full_gradients):
        assert keys not in whole
        assert mlp in whole
    for whole in (quarters.full_weights, quarters.full_gradients):
        assert {keys, mlp} <= whole


def test_an_array_that_only_has_as_many_elements_as_a_whole_one_is_no_sign_of_it() -> None:
    """Layers are the first dimension; activations are [rows, time, ...]; small arrays are not worth a line."""
    built = program(config(mesh={"fsdp": 4}), jax.devices()[:4])
    known = KnownShapes(full_gradients={(2, 2048, 4096)})

    def warned(*dims: int, by_shape: bool = False, length: int = 64, **sections: Any) -> list[PlanWarning]:
        shape = HloShape("float32", 32, dims)
        buffer = NamedBuffer("gradients", "of one backward pass", shape.bytes, str(shape), "", shape, None, by_shape)
        cfg = built.cfg.replace(**sections)
        share = dataclasses.replace(built.share, sequences=8 / cfg.batch.accumulate, length=length)
        plan = SimpleNamespace(cfg=cfg, share=share)
        breakdown = SimpleNamespace(known=known, buffers=[buffer])
        return found(advice._unsharded, breakdown=breakdown, bytes_per_device={"total": MIB}, program=plan)

    assert len(warned(2, 2048, 4096)) == len(warned(2, 4096, 2048, by_shape=True)) == 1
    assert warned(2048, 2, 4096) == []
    assert warned(2, 2048, 4096, by_shape=True, length=2048) == []
    assert warned(2, 2048, 4096, by_shape=True, length=4 * 2048, mesh={"context": 4}) == []
    accumulated = {"by_shape": True, "length": 2048, "batch": {"accumulate": 2}}
    assert warned(2, 2048, 4096, **accumulated, memory={"update": "during"}) == []
    assert len(warned(2, 2048, 4096, **accumulated)) == 1
    known = KnownShapes(full_gradients={(2, 64, 128)})
    assert warned(2, 64, 128) == []


# ------------------------------------------------------------------ logits, scores


LOGITS = {"model": {**SMALL, "vocab": 4096}, "data": {"sequence_length": 512}}


@pytest.mark.exhaustive
def test_large_logits_and_their_cure() -> None:
    plan = plan_here(1, **LOGITS)
    (warned,) = [one for one in plan.warnings if one.kind == "logits"]
    assert f"{plan.breakdown.of_kind('logits') / plan.bytes_per_device['total']:.0%} of the total" in warned.text
    chunk = re.fullmatch(r"memory.loss_chunk=(\d+), batch.accumulate=2 or a larger mesh.tensor", warned.cure)
    assert chunk is not None
    assert "logits" not in kinds(plan_here(1, **LOGITS, memory={"loss_chunk": int(chunk[1])}))
    device = jax.devices()[:1]
    rows = program(config(batch={"global_size": 6, "accumulate": 2}), device)
    assert advice._smaller_micro_batch(rows) == "batch.accumulate=6"
    assert advice._smaller_micro_batch(program(config(batch={"global_size": 1}), device)).startswith("a shorter data.")


@pytest.mark.parametrize("remat", ["full", "sqrt", "slots_1"])
def test_remedies_are_what_the_config_does_not_have(remat: str) -> None:
    cfg = config(memory={"remat": remat, "offload": "activations"})
    options = ("memory.remat=full", "memory.offload=activations", "memory.attention=blockwise", None, "more devices")
    assert advice._remedies(SimpleNamespace(cfg=cfg), *options) == "memory.attention=blockwise or more devices"
    dots = SimpleNamespace(cfg=config(memory={"remat": "dots"}))
    assert advice._remedies(dots, *options[:2]).startswith("memory.remat=full or")


@pytest.mark.exhaustive
def test_a_plan_without_a_fault_warns_of_nothing(cpu_plan: Plan) -> None:
    """On fsdp and tensor, which divides everything; and with attention in blocks."""
    assert cpu_plan.program.model.execution.kernels.attention.implementation == "blockwise"
    assert kinds(cpu_plan) == set()


@pytest.mark.exhaustive
def test_attention_that_writes_out_all_scores() -> None:
    reference = plan_here(1, data={"sequence_length": 128}, memory={"attention": "reference"})
    (warned,) = [one for one in reference.warnings if one.kind == "attention scores"]
    assert "of 128 positions" in warned.text
    assert "memory.attention=auto" in warned.cure


def test_attention_scores_have_a_remedy_if_no_setting_computes_fewer() -> None:
    cfg = config(memory={"attention": "blockwise"}, batch={"global_size": 1})
    built = SimpleNamespace(cfg=cfg, share=SimpleNamespace(complete_rows=1))
    breakdown = SimpleNamespace(of_kind=lambda _: MIB)
    (warned,) = found(advice._all_scores, program=built, breakdown=breakdown)
    assert warned.cure == "memory.attention=auto or a shorter data.sequence_length"


# ------------------------------------------------------------------ the partitioner


@dataclass(frozen=True)
class Moved:
    """An array that lies along one pair of mesh axes and is wanted along another."""

    before: PartitionSpec
    after: PartitionSpec

    def replicated(self) -> list[str]:
        mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))

        def move(x: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, self.after)) * 2

        x = jax.ShapeDtypeStruct((16, 8, 64), jnp.float32, sharding=NamedSharding(mesh, self.before))
        with without_cache(), replicated_arrays() as arrays:  # a cached program logs nothing
            jax.jit(move).lower(x).compile()
        return arrays


def test_an_array_that_the_partitioner_replicates() -> None:
    arrays = Moved(PartitionSpec(("a", "b")), PartitionSpec(None, "a", "b")).replicated()
    meshes = ({"tensor": 4}, {"context": 2, "tensor": 8})  # 8 does not divide the vocabulary
    plans = [SimpleNamespace(cfg=config(mesh=mesh, model={**SMALL, "vocab": 260, "heads": 8})) for mesh in meshes]
    even, uneven = (found(advice._replicated, replicated=arrays, program=plan)[0] for plan in plans)
    assert "the shard of a device was f32[2,8,64]" in even.text
    assert even.cure == "another mesh, with only fsdp or only tensor"
    assert uneven.cure == f"a vocabulary divisible by mesh.tensor, or {even.cure}"


def test_an_array_that_it_moves_in_parts() -> None:
    arrays = Moved(PartitionSpec("a", "b"), PartitionSpec("b", "a")).replicated()
    assert found(advice._replicated, replicated=arrays, program=SimpleNamespace(cfg=config())) == []


# ------------------------------------------------------------------ stages


def with_stages(global_size: int = 16, **sizes: int) -> SimpleNamespace:
    pipeline = Pipeline(**sizes)
    cfg = config(
        model={**SMALL, "layers": pipeline.layers},
        mesh={"stage": pipeline.stages},
        batch={"global_size": global_size, "accumulate": pipeline.micro_batches},
    )
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    blocks = jax.ShapeDtypeStruct((pipeline.stored, 64), jnp.float32, sharding=place)
    state = {"blocks": blocks, "head": blocks}
    model = SimpleNamespace(execution=SimpleNamespace(pipeline=pipeline))
    return SimpleNamespace(cfg=cfg, model=model, spec=SimpleNamespace(state=state))


def test_padding_layers() -> None:
    (warned,) = found(advice._padding_layers, program=with_stages(layers=6, stages=4, micro_batches=4))
    assert warned.text == (
        "2 identity layers pad model.layers=6 to 8, a multiple of the pipeline stages: 512 B of weights and optimizer"
        " state per device"
    )
    assert warned.cure == "mesh.stage x pipeline.rounds = 3"
    assert found(advice._padding_layers, program=with_stages(layers=8, stages=4, micro_batches=4)) == []
    without_stages = SimpleNamespace(model=SimpleNamespace(execution=SimpleNamespace(pipeline=None)))
    assert found(advice._padding_layers, program=without_stages) == []


def test_first_layers_of_another_kind_are_on_every_stage() -> None:
    experts = {"count": 4, "top_k": 2, "dense_layers": [0], "dense_mlp": 48}
    model = {**SMALL, "layers": 3, "experts": experts, "qk_norm": True}
    batch = {"global_size": 8, "accumulate": 2}

    def warned(stage: int, *totals: int) -> list[list[PlanWarning]]:
        built = program(config(model=model, mesh={"stage": stage}, batch=batch), jax.devices()[:stage])
        return [found(advice._first_layers, program=built, bytes_per_device={"total": total}) for total in totals]

    (warning,), of_large_plan = warned(2, MIB, 1000 * MIB)
    # Three float32 arrays (AdamW) of the weights of attention, the MLP and norms.
    size = 3 * 4 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 2 * 32 + 2 * 8)
    assert warning.text.startswith("blocks[0:1], layers without experts before the others")
    assert f": {size / 1024:.1f} KiB of weights and optimizer state" in warning.text
    assert [of_large_plan] == warned(1, MIB) == [[]]


def test_pipeline_bubble() -> None:
    (warned,) = found(advice._pipeline_bubble, program=with_stages(layers=8, stages=4, micro_batches=4))
    assert warned.text == "each pipeline stage is idle for 43% of the time of a step"
    assert warned.cure == "batch.accumulate=16, pipeline.rounds=2 or a smaller mesh.stage"
    assert found(advice._pipeline_bubble, program=with_stages(layers=8, stages=4, micro_batches=16)) == []
    few = with_stages(global_size=12, layers=8, stages=4, micro_batches=4)  # 16 does not divide 12 sequences
    assert found(advice._pipeline_bubble, program=few)[0].cure.startswith("batch.accumulate=12, pipeline.rounds=2")


# ------------------------------------------------------------------ tensor parallel


@pytest.fixture(scope="module")
def uneven() -> Plan:
    """2 key heads and 263 tokens over 4 devices of `tensor`."""
    return plan_here(mesh={"fsdp": 2, "tensor": 4}, model={**SMALL, "layers": 1, "vocab": 263})


@pytest.mark.exhaustive
def test_what_tensor_does_not_divide_is_replicated(uneven: Plan) -> None:
    # A device of 2 along fsdp holds half of the float32 weights: two of 32 x 16, and two of 32 x 263.
    heads, vocab = (one for one in warnings_of(uneven) if one.kind == "not sharded")
    assert heads.text.startswith(
        "model.kv_heads=2 is not divisible by mesh.tensor=4: its weights, 2.0 KiB, are replicated;"
    )
    assert heads.cure == "mesh.tensor=2"
    assert vocab.text.startswith(
        "model.vocab=263 is not divisible by mesh.tensor=4: its weights, 32.9 KiB, are replicated;"
    )


@pytest.mark.exhaustive
def test_tensor_across_hosts_costs_seconds(uneven: Plan) -> None:
    def on(target: str) -> list[PlanWarning]:
        return list(advice._tensor_across_hosts(dataclasses.replace(uneven, target=parse_target(target))))

    assert on("h100-80gb:2x4") == on("cpu:8") == []
    (warned,) = on("h100-80gb:4x2")
    assert warned.text.startswith("mesh.tensor=4 spans hosts of 2 GPUs: its communication takes ")
    assert float(warned.text.split("takes ")[1].split(" s")[0]) > 0
    assert warned.cure == "mesh.tensor=2 mesh.fsdp=-1"


# ------------------------------------------------------------------ remedies that are valid


def test_a_micro_batch_of_preferences_has_pairs() -> None:
    cfg = config(
        objective={"name": "dpo"},
        data={"source": "preference", "path": "pairs.jsonl", "sequence_length": 24, "packing": False},
        batch={"global_size": 6},
    )
    built = program(cfg, jax.devices()[:1])
    assert advice._smaller_micro_batch(built) == "batch.accumulate=3", "with 2, a micro-batch has 3 rows"


def test_a_neighbour_that_a_named_kernel_does_not_support_is_no_advice() -> None:
    """Without micro-batches a sequence has too many elements for cuDNN's offsets of segments."""
    cfg = config(
        model={**SMALL, "heads": 8, "head_dim": 128},
        data={"sequence_length": 32768, "packing": True},
        batch={"global_size": 128, "accumulate": 128},
        memory={"attention": "cudnn"},
    )
    target = parse_target("h100-80gb")
    with pytest.raises(UserError, match="cudnn"):
        estimated(cfg.replace(batch={"accumulate": 1}), target)
    assert all("batch.accumulate" not in warned.text for warned in advice.slow_settings(cfg, target, target.memory))


def test_a_faster_setting_that_the_reserve_leaves_no_memory_for_is_no_advice() -> None:
    cfg = load_config({"name": "x", "model": {"preset": "130m"}, "batch": {"global_size": 1}, "train": {"steps": 10}})
    target = parse_target("h100-80gb")
    slow = cfg.replace(memory={"offload": "optimizer", "remat": "full"})
    total = estimated(cfg.replace(memory={"remat": "full"}), target).total
    limits = (total, total - 1)
    assert [[warned.cure for warned in advice.slow_settings(slow, target, limit)] for limit in limits] == [
        ["memory.offload=none"],
        [],
    ]


def test_a_config_json_of_the_current_directory_is_of_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 8}')
    monkeypatch.chdir(tmp_path)
    assert found(advice._sequence_length, program=SimpleNamespace(cfg=config())) == []
