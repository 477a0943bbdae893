"""Adapters: only they learn, on any mesh, with the base in numbers or codes; nothing is spent on what stays."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxmem.errors import UserError
from jaxmem.planning.breakdown import known_shapes
from jaxmem.sharding.weights import is_encoded
from jaxmem.step.programs import program
from tests.step.conftest import Trained, config

LEARNING = {"epsilon": 1e-3, "learning_rate": 1e-2}


def adapted(kind="lora", adapter=None, **sections):
    return config(optimizer=LEARNING, adapter={"kind": kind, "rank": 4, **(adapter or {})}, **sections)


def both(**sections):
    """In layers and in the embedding, of different ranks and scales, one layer without an adapter, with dropout."""
    targets = {"*.mlp.*": 2, "blocks[:1].*.q": 1, "blocks[1:].*.k": 4, "blocks.*.[qvo]": 4, "embedding": 3}
    own = {"targets": targets, "alpha_pattern": {"blocks[-1:].*.v": 7}, "lora_plus_ratio": 4.0, "dropout": 0.2}
    return adapted(adapter=own, **sections)


class Decoded:
    """Where another run began, its weights as the float32 numbers that they stand for."""

    def __init__(self, begun):
        numbers = lambda w: np.array(w.dequantize(np.float32) if is_encoded(w) else w, np.float32)  # noqa: E731
        self.begun = replace(begun, params=jax.tree.map(numbers, begun.params, is_leaf=is_encoded))


@pytest.fixture(scope="module")
def alone():
    return Trained(both(), updates=2)


def test_only_adapters_move(alone):
    before, after = flatten_dict(alone.first), flatten_dict(alone.params)
    moved = {path for path in before if (before[path] != after[path]).any()}
    assert moved == {path for path in before if path[-1] in ("a", "b")}
    for path, rank in (("q", 1), ("k", 0)):  # of the first layer; the rest stays zero
        own = after["blocks", "attention", path, "lora", "a"][0], after["blocks", "attention", path, "lora", "b"][0]
        assert not own[0][:, rank:].any()
        assert not own[1][rank:].any()
    assert {before[path].shape[-1] for path in before if path[-1] == "a"} == {2, 3, 4}
    held = sum(x.size for x in jax.tree.leaves(alone.state.opt_state))
    assert alone.built.model.trainable_count < held <= 2 * alone.built.model.trainable_count + 8


@pytest.mark.exhaustive
def test_a_mesh_in_chunks_does_the_same_and_holds_no_adapter_whole(alone):
    memory = {"remat": "full", "mlp_chunk": 5, "head_groups": 2}
    mesh = Trained(both(mesh={"fsdp": 4, "tensor": 2}, memory=memory), devices=8, updates=2, begin=alone)
    mesh.agrees_with(alone)
    for path, placed in flatten_dict(mesh.built.spec.state.params).items():
        parts = placed.size // np.prod(placed.sharding.shard_shape(placed.shape))
        assert path[-1] not in ("a", "b") or parts >= 4, path


@pytest.mark.exhaustive
def test_a_quantized_base_does_not_change():
    """nf4, constants in codes too, head and embedding included; the loss in slices, boundaries by a schedule."""
    sections = {"memory": {"remat": "sqrt", "loss_chunk": 100}, "mesh": {"fsdp": 2}}
    trained = Trained(adapted("qlora", **sections), devices=2, updates=2)
    before, after = (flatten_dict(params) for params in (trained.first, trained.params))
    for path, leaf in before.items():
        same = all(jax.tree.leaves(jax.tree.map(np.array_equal, leaf, after[path])))
        assert same != ("lora" in path), path
    q = before["head", "weight"]
    assert (q.format, q.scale.format) == ("nf4", "dynamic8")
    # The same step from the same values in float32: they are computed with as they are.
    plain = Trained(adapted(), updates=2, begin=Decoded(trained.begun))
    for mine, other in zip(trained.metrics, plain.metrics, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert mine["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("tied", [False, True])
def test_embeddings_are_stored_in_a_format_of_their_own(tied):
    adapter = {"embeddings": "bfloat16"}
    model = {"preset": "tiny", "tie_embeddings": tied}
    trained = Trained(adapted("qlora", adapter, model=model, mesh={"fsdp": 2}), devices=2, updates=2)
    weights = flatten_dict(trained.first)
    vocabulary = {path for path in weights if path[0] in ("embedding", "head")}
    assert len(vocabulary) == 2 - tied
    for path in vocabulary:
        assert weights[path].dtype == "bfloat16"
    assert weights["blocks", "mlp", "up", "weight"].format == "nf4"
    plain = Trained(adapted(model=model), updates=2, begin=Decoded(trained.begun))
    for step, expected in zip(trained.metrics, plain.metrics, strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.exhaustive
def test_the_compiled_step_spends_nothing_on_what_stays():
    """No gradient of the base, no state of it, no second copy of it: in bytes, and in the shapes of products."""
    wide = {"vocab": 264, "embed": 64, "mlp": 512, "heads": 4, "kv_heads": 4, "head_dim": 16, "layers": 2}
    sections = {"model": {"preset": "tiny", **wide}, "batch": {"global_size": 1}, "data": {"sequence_length": 16}}
    sections["memory"] = {"mlp_chunk": 4}  # gradients of the base would be added up over chunks
    lora, full = (program(cfg, jax.devices()[:1]) for cfg in (adapted(**sections), config(**sections)))
    steps = [built.lower_step().compile() for built in (lora, full)]
    memory = [step.memory_analysis() for step in steps]
    base = 4 * full.model.parameter_count
    # Arguments: the base, adapters with two moments each, the batch.
    assert memory[0].argument_size_in_bytes < base + 12 * lora.model.trainable_count + 2000
    assert memory[0].alias_size_in_bytes > base  # passed through where it lies
    assert memory[0].temp_size_in_bytes < memory[1].temp_size_in_bytes - 0.8 * base
    made = [set(re.findall(r"= f32\[([0-9,]*)\]\S* dot\(", step.as_text())) for step in steps]
    gradients = {"64,512", "512,64", "264,64", "64,264", "64,64"}
    assert made[1] & gradients
    assert not made[0] & gradients


def test_the_planner_counts_no_gradient_of_what_stays():
    """A layer's adapters have the forms of A and B, of which the base has none."""
    every = known_shapes(program(config(), jax.devices()[:1])).gradients
    own = known_shapes(program(adapted(), jax.devices()[:1])).gradients
    assert own
    assert not own & every


@pytest.mark.exhaustive
def test_dora_begins_with_the_lengths_that_the_base_has():
    first = program(adapted("dora"), jax.devices()[:1]).initialise().params["blocks"]["mlp"]["up"]
    weight = np.float64(first["weight"])
    np.testing.assert_allclose(first["lora"]["magnitude"], np.linalg.norm(weight, axis=1), rtol=1e-5)


@pytest.mark.exhaustive
def test_the_state_of_an_adapted_embedding_and_head_is_on_the_host():
    adapter = {"targets": ["blocks.*", "embedding", "head"]}
    alone = Trained(adapted(adapter=adapter), updates=2)
    away = Trained(adapted(adapter=adapter, memory={"offload": "optimizer"}), updates=2, begin=alone)
    away.agrees_with(alone)
    assert len(jax.tree.leaves(away.built.spec.host_state)) >= 4  # both moments of both matrices


def test_unknown_targets():
    """Among them names of PEFT, all of which are answered."""
    targets = ["blocks.atention.q", "q_proj", "mlp.down_proj", "lm_head", "all-linear"]
    with pytest.raises(UserError) as error:
        _ = program(adapted(adapter={"targets": targets}), jax.devices()[:1]).spec.state
    assert str(error.value).split("\n") == [
        "adapter.targets: blocks.atention.q matches no layer; did you mean blocks.attention.q?",
        "adapter.targets: q_proj matches no layer; did you mean blocks.attention.q?",
        "adapter.targets: mlp.down_proj matches no layer; did you mean blocks.mlp.down?",
        "adapter.targets: lm_head matches no layer; did you mean head?",
        "adapter.targets: all-linear matches no layer; use blocks.*, all linear layers of the blocks",
    ]


@pytest.mark.exhaustive
def test_preferences_are_learnt_on_any_mesh():
    """DPO of adapters, pairs in micro-batches."""
    sections = {
        "objective": {"name": "dpo"},
        "data": {"source": "preference", "path": "none", "packing": False, "sequence_length": 16},
        "batch": {"global_size": 8, "accumulate": 2},
    }
    alone = Trained(adapted(**sections), updates=1)
    mesh = adapted(**sections, mesh={"fsdp": 2, "tensor": 2})
    Trained(mesh, devices=4, updates=1, begin=alone).agrees_with(alone)
    assert alone.metrics[0]["margin"] != 0
