"""Layers on stages: what one device learns, messages between neighbours only, and the schedule's memory and bubble."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.checkpoint.manager import Checkpoints
from jaxmem.checkpoint.saved_state import SavedState
from jaxmem.planning.hlo import read_module, trip_count
from jaxmem.step.programs import program
from jaxmem.step.state import TrainState
from tests.step.conftest import SMALL, Trained, batch_for, config
from tests.support.generation import generate
from tests.support.stages import arranged
from tests.support.tiers import cases

MODEL = {"preset": "tiny", **SMALL, "vocab": 264}


def staged(mesh, micro=4, layers=6, rounds=1, rows=4, dropout=0.0, schedule="auto", **sections):
    return config(
        model={**MODEL, "layers": layers, "dropout": dropout},
        batch={"global_size": rows * micro, "accumulate": micro},
        mesh=mesh,
        pipeline={"rounds": rounds, "schedule": schedule},
        **sections,
    )


def devices_of(cfg):
    mesh = cfg.mesh
    return mesh.stage * mesh.replica * mesh.fsdp * mesh.tensor * mesh.context


# Every schedule and update; layers and micro-batches that are not divisible by stages. The norm that clips is
# known before an update during the backward pass, which tests/step/test_experts.py combines with 1F1B. All combinations
# with the recompute policies: python -m tests.support.pipelines
RUNS = {
    "layers filled up": staged({"stage": 4}, dropout=0.2, memory={"remat": "sqrt"}),
    "gpipe": staged({"stage": 3}, dropout=0.2, schedule="gpipe", memory={"remat": "dots", "offload": "optimizer"}),
    "activations on the host": staged(
        {"stage": 2}, dropout=0.2, memory={"remat": {"save": ["attention_out"]}, "offload": ["attention_out"]}
    ),
    "circular x fsdp x tensor": staged(
        {"stage": 2, "fsdp": 2, "tensor": 2}, rounds=2, dropout=0.2, schedule="circular", zero=1
    ),
    "interleaved x fsdp": staged(
        {"stage": 2, "fsdp": 2},
        rounds=2,
        dropout=0.2,
        zero=2,
        memory={"remat": "constant", "update": "during", "offload": "optimizer"},
    ),
}


@pytest.fixture(scope="module")
def alone():
    return Trained(staged({}, dropout=0.2), updates=2)


@functools.cache
def trained(name):
    return Trained(RUNS[name], devices_of(RUNS[name]), updates=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", RUNS)
def test_pipeline_stages_train_as_one_device(name, alone):
    on_stages = trained(name)
    for mine, theirs in zip(on_stages.metrics, alone.metrics, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5, abs=1e-6)
    built = on_stages.built
    expected = SavedState(built).complete_params(alone.params, alone.built.cfg.model_dump())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), on_stages.params, expected)
    assert built.model.parameter_count == alone.built.model.parameter_count


@pytest.mark.exhaustive
def test_chunks_in_stages_in_16_bits():
    """XLA's compiler for CPUs ends the process where it sums 16-bit floats over devices of a stage."""
    shared = {"precision": {"compute": "bfloat16"}, "memory": {"mlp_chunk": 5}}
    alone = Trained(staged({}, 2, 2, **shared))
    on_stages = Trained(staged({"stage": 2, "fsdp": 2}, 2, 2, schedule="gpipe", **shared), 4)
    assert on_stages.metrics[0]["loss"] == pytest.approx(alone.metrics[0]["loss"], rel=1e-3)
    assert on_stages.metrics[0]["gradient_norm"] == pytest.approx(alone.metrics[0]["gradient_norm"], rel=2e-2)


@pytest.mark.exhaustive
def test_frozen_weights_come_from_the_host():
    """Of quantized layers with adapters, on stages with an identity layer."""
    adapter = {"kind": "qlora", "base": "nf4", "rank": 4, "targets": ["*.q", "*.down"]}
    alone = Trained(staged({}, 2, 5, adapter=adapter), updates=2)
    memory = {"remat": "full", "offload": ["frozen", "optimizer"], "update": "during"}
    away = Trained(staged({"stage": 2}, 2, 5, rounds=2, adapter=adapter, memory=memory), 2, updates=2)
    for mine, theirs in zip(away.metrics, alone.metrics, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5, abs=1e-6)
    waiting = jax.tree.leaves(away.built.spec.host_state.params["blocks"])
    there = jax.tree.leaves(away.state.params["blocks"])
    assert len([x for x in there if x.sharding.memory_kind == "pinned_host"]) == len(waiting) > 0


@pytest.mark.exhaustive
def test_evaluation_and_generation_use_the_pipeline(alone):
    """Evaluated, and asked for a text."""
    built = trained("circular x fsdp x tensor").built
    params = jax.device_put(
        SavedState(built).complete_params(alone.params, alone.built.cfg.model_dump()),
        jax.tree.map(lambda x: x.sharding, built.spec.state.params),
    )
    batch = batch_for(built)
    pairs = (alone.built, alone.state.params), (built, params)
    sums = [one.compiled_evaluate(weights, one.place(batch)) for one, weights in pairs]
    assert jax.tree.map(float, sums[1]) == pytest.approx(jax.tree.map(float, sums[0]), rel=2e-5)
    texts = [list(generate(one, weights, np.arange(5), 6)) for one, weights in pairs]
    assert texts[0] == texts[1]


def test_padding_layers_stay_zero():
    """Also in a network whose blocks have biases, which a gradient would reach."""
    cfg = config(
        model={"family": "mlp", "layers": 3, "embed": 16, "mlp": 32},
        objective="classify",
        data={"source": "digits"},
        batch={"global_size": 8, "accumulate": 2},
        mesh={"stage": 2},
    )
    on_stages = Trained(cfg, 2, updates=2)
    for path, leaf in jax.tree_util.tree_leaves_with_path(on_stages.state):
        if "blocks" in str(path):
            assert leaf.shape[0] == 4
            assert not np.asarray(leaf[3]).any()
            assert np.asarray(leaf[2]).any()


@pytest.mark.parametrize("zero", cases([0, 3], 0))
def test_a_loss_of_pairs_of_rows_sees_the_rows_of_all_devices(zero):
    """The negatives of a row are on all devices, also where each stage has rows of its own."""
    sections = {
        "model": {"family": "vit", "layers": 2, "embed": 16, "mlp": 32, "heads": 2, "outputs": 8},
        "objective": "contrastive",
        "data": {"source": "digits"},
    }
    alone = Trained(config(**sections), updates=1)
    spread = config(**sections, mesh={"stage": 2, "replica": 2}, zero=zero)
    Trained(spread, 4, updates=1, begin=alone).agrees_with(alone, atol=1e-4)


@pytest.mark.exhaustive
def test_a_checkpoint_moves_over_stages(tmp_path):
    """Saved on one device, read on 4 stages, saved there, read on 3, then on 2 that go round twice, and back on one."""
    meshes = [({}, 1), ({"stage": 4, "fsdp": 2}, 1), ({"stage": 3}, 1), ({"stage": 2, "fsdp": 2}, 2)]
    programs = [staged(mesh, rounds=rounds) for mesh, rounds in meshes]
    programs = [program(cfg, jax.devices()[: devices_of(cfg)]) for cfg in programs]
    state = programs[0].initialise()
    # The weights in place of the moments: every number another, and zeros where layers fill up.
    state = TrainState(state.step, state.params, moments(state.opt_state, state.params))
    first = jax.tree.map(np.asarray, state)
    with Checkpoints(tmp_path) as checkpoints:
        for step, (before, after) in enumerate(itertools.pairwise([*programs, programs[0]])):
            saved = before.cfg.model_dump(mode="json")
            checkpoints.save(step, state, {}, saved, force=True)
            read, _, found = checkpoints.restore(step, SavedState(after).shapes_to_restore)
            state = SavedState(after).complete(read, found)
            for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(after.spec.state), strict=True):
                assert (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype)
                assert leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim)
            jax.tree.map(np.testing.assert_array_equal, state, stored(after.model.execution.pipeline, first))


def test_one_device_reads_the_layers_that_a_circular_pipeline_saved():
    staged_program = program(staged({"stage": 3}, micro=3, rounds=2), jax.devices()[:3])
    alone = program(staged({}), jax.devices()[:1])

    def numbered(x):
        """Each position of a stack is filled with its number."""
        return np.broadcast_to(np.arange(len(x), dtype=x.dtype).reshape(-1, *[1] * (x.ndim - 1)), x.shape)

    saved = jax.tree.map(numbered, staged_program.spec.state.params)
    found = SavedState(alone).complete_params(saved, staged_program.cfg.model_dump(mode="json"))
    up = np.asarray(found["blocks"]["mlp"]["up"]["weight"])
    assert up[:, 0, 0].tolist() == [0, 2, 4, 1, 3, 5]


def stored(pipeline, state):
    """One device's state as stages have it."""
    if pipeline is None:
        return state
    in_blocks = lambda path: "blocks" in jax.tree_util.keystr(path)  # noqa: E731
    one = lambda path, x: arranged(pipeline, jnp.asarray(x)) if in_blocks(path) else x  # noqa: E731
    return jax.jit(lambda state: jax.tree_util.tree_map_with_path(one, state))(state)


def moments(opt_state, params):
    """An optimizer's state with the weights in place of what has their form."""
    form = jax.tree.structure(params)
    alike = lambda x: jax.tree.structure(x) == form  # noqa: E731
    return jax.tree.map(lambda x: params if alike(x) else x, opt_state, is_leaf=alike)


@pytest.mark.exhaustive
def test_the_same_stages_on_other_devices():
    """In one process, as a search makes them: nothing is kept of the devices before."""
    cfg = staged({"stage": 2, "fsdp": 2}, zero=1)
    for first in (0, 4):
        program(cfg, jax.devices()[first : first + 4]).lower_step()


# ------------------------------------------------------------------ the compiled step


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["layers filled up", "circular x fsdp x tensor"])
def test_the_loop_runs_the_schedule(name):
    run = trained(name)
    module = read_module(run.compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto())
    loops = [trip_count(one) for one in module.walk() if one.opcode == "while"]
    assert loops.count(run.built.model.execution.pipeline.timetable.ticks) == 1


@pytest.mark.exhaustive
def test_stages_send_activations_to_their_neighbours_and_no_weights():
    text = trained("layers filled up").compiled.as_text()
    messages = re.findall(r"collective-permute(?:-start)?\(.*source_target_pairs=\{(.*?)\}\}", text)
    directions = {int(b) - int(a) for pairs in messages for a, b in re.findall(r"(\d),(\d)", pairs)}
    assert directions == {1, -1}
    weights = {tuple(sorted(shape)) for shape in ((32, 64), (32, 32), (4 * 8, 32))}
    for kind in ("all-gather", "all-to-all"):
        for shape in re.findall(rf"= \(?\w+\[([\d,]*)\]\S* {kind}(?:-start)?\(", text):
            dims = [int(n) for n in shape.split(",") if int(n) > 1]
            assert tuple(sorted(dims[-2:])) not in weights


@pytest.mark.exhaustive
def test_stages_compute_embedding_and_loss_together():
    """They store parts of both matrices, and sum activations and statistics of the logits, no weights or gradients of
    weights."""
    run = trained("layers filled up")
    rows, length, embed = 4, run.built.cfg.data.sequence_length, MODEL["embed"]
    params = run.state.params
    for matrix, dim in ((params["embedding"]["weight"], 0), (params["head"]["weight"], 1)):
        assert matrix.sharding.shard_shape(matrix.shape)[dim] == MODEL["vocab"] // 4
    reduced = set()
    for shapes in re.findall(r"= (.*?) all-reduce(?:-start)?\(", run.compiled.as_text()):
        reduced |= {tuple(map(int, filter(None, dims.split(",")))) for dims in re.findall(r"\w\[([\d,]*)\]", shapes)}
    assert (rows, length, embed) in reduced
    assert {dims for dims in reduced if len(dims) > 1} <= {(rows, length, embed), (rows, length)}


@pytest.mark.exhaustive
def test_memory_follows_the_stages():
    """With 1F1B more micro-batches take no more memory; with GPipe each one its boundaries."""
    stages, layers, rows, length, embed = 2, 4, 2, 128, 32

    def temporaries(micro, schedule):
        memory, data = {"remat": "full"}, {"sequence_length": length}
        sections = {"memory": memory, "data": data, "optimizer": {"name": "sgd"}}
        cfg = staged({"stage": stages}, micro, layers, rows=rows, schedule=schedule, **sections)
        built = program(cfg, jax.devices()[:stages])
        return built.lower_step().compile().memory_analysis().temp_size_in_bytes

    assert temporaries(32, "1f1b") <= 1.01 * temporaries(8, "1f1b")
    boundary = rows * length * embed * 4
    grown = (temporaries(32, "gpipe") - temporaries(8, "gpipe")) / 24
    assert layers / stages * boundary <= grown <= (layers / stages + 2) * boundary
