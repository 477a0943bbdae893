"""Some weights learn: the others keep their bits, and have neither gradient nor state, on any mesh and in codes."""

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxmem.errors import UserError
from jaxmem.step.programs import program
from tests.step.conftest import SMALL, Trained, config

NORMS = ["*norm.scale", "head.*"]


def frozen(**sections):
    own = {"epsilon": 1e-3, "learning_rate": 1e-2, "trainable": NORMS}
    return config(optimizer=own, batch={"global_size": 8, "accumulate": 2}, **sections)


@pytest.fixture(scope="module")
def alone():
    return Trained(frozen(), updates=2)


def test_only_what_is_chosen_moves(alone):
    before, after = flatten_dict(alone.first), flatten_dict(alone.params)
    moved = {".".join(path) for path in before if (before[path] != after[path]).any()}
    assert moved == {"blocks.attention_norm.scale", "blocks.mlp_norm.scale", "norm.scale", "head.weight"}
    held = sum(x.size for x in jax.tree.leaves(alone.state.opt_state))
    assert alone.built.model.trainable_count < held <= 2 * alone.built.model.trainable_count + 8


@pytest.mark.exhaustive
def test_frozen_quantized_weights_do_not_change():
    """Frozen weights in codes are neither decoded nor encoded again."""
    cfg = config(
        optimizer={"learning_rate": 1e-2, "trainable": ["*norm.scale"]},
        precision={"parameters": "int8"},
        mesh={"fsdp": 2},
    )
    trained = Trained(cfg, devices=2, updates=2)
    before, after = (flatten_dict(params) for params in (trained.first, trained.params))
    for path in before:
        same = jax.tree.map(np.array_equal, before[path], after[path])
        assert all(jax.tree.leaves(same)) != (path[-1] == "scale"), path


@pytest.mark.exhaustive
def test_the_compiled_step_has_no_gradient_of_what_is_frozen(alone):
    every = program(config(batch={"global_size": 8, "accumulate": 2}), jax.devices()[:1])
    full, less = (built.lower_step().compile() for built in (every, alone.built))
    gone = alone.built.model.parameter_count - alone.built.model.trainable_count
    sizes = [one.memory_analysis() for one in (full, less)]
    assert sizes[0].argument_size_in_bytes - sizes[1].argument_size_in_bytes == 8 * gone  # Adam's moments
    assert sizes[0].temp_size_in_bytes - sizes[1].temp_size_in_bytes > 4 * gone  # the sum of gradients
    assert less.cost_analysis()["flops"] < 0.85 * full.cost_analysis()["flops"]


def test_what_cannot_be_chosen():
    with pytest.raises(UserError, match="norms matches no parameter"):
        _ = program(config(optimizer={"trainable": ["norms"]}), jax.devices()[:1]).spec.state


SOME = ["blocks[:1].attention.*", "blocks[-1:].mlp.*", "blocks[1:].mlp.up.*", "*norm.scale"]


@pytest.mark.exhaustive
def test_some_layers_learn_on_any_mesh():
    """Of stacks with three layers, each weight in other ones, beside adapters; in micro-batches, whose gradients are
    added in place, also where boundaries are on the host and where groups of rows keep their sums apart."""
    sections = {
        "model": {"preset": "tiny", **SMALL, "vocab": 264, "layers": 3},
        "adapter": {"kind": "lora", "rank": 2, "targets": ["blocks.attention.q"]},
        "optimizer": {"epsilon": 1e-3, "learning_rate": 1e-2, "trainable": SOME},
    }
    whole = {"global_size": 8}
    alone = Trained(config(**sections, batch=whole, memory={"remat": "sqrt"}), updates=2)
    before, after = (flatten_dict(params)["blocks", "mlp", "up", "weight"] for params in (alone.first, alone.params))
    assert [bool((before[n] != after[n]).any()) for n in range(3)] == [False, True, True]
    assert "blocks.mlp.down.weight of layer 2" in alone.built.spec.gradient_names
    assert "blocks.mlp.down.weight of layer 1" not in alone.built.spec.gradient_names
    memory = {"remat": "full", "offload": ["activations"]}
    split = config(**sections, batch={**whole, "accumulate": 2}, mesh={"replica": 2, "fsdp": 2}, memory=memory)
    Trained(split, devices=4, updates=2, begin=alone).agrees_with(alone)


@pytest.mark.exhaustive
def test_the_backward_pass_stops_where_nothing_learns():
    """Of six layers the last one, in compiled bytes: no state, no gradient and no boundary of the others."""
    wide = {"vocab": 264, "embed": 64, "mlp": 256, "heads": 4, "kv_heads": 4, "head_dim": 16, "layers": 6}
    sections = {"model": {"preset": "tiny", **wide}, "batch": {"global_size": 2}, "memory": {"remat": "full"}}
    last = program(config(adapter={"kind": "last_layers"}, **sections), jax.devices()[:1])
    full, less = (one.lower_step().compile() for one in (program(config(**sections), jax.devices()[:1]), last))
    gone = last.model.parameter_count - last.model.trainable_count
    assert gone == 5 * (4 * 64 * 64 + 3 * 64 * 256 + 2 * 64) + 264 * 64
    sizes = [one.memory_analysis() for one in (full, less)]
    assert sizes[0].argument_size_in_bytes - sizes[1].argument_size_in_bytes == 8 * gone  # Adam's moments
    assert sizes[0].temp_size_in_bytes - sizes[1].temp_size_in_bytes > 4 * gone
    boundaries = "f32[6,2,24,64]"
    assert boundaries in full.as_text()
    assert boundaries not in less.as_text()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"mesh": {"stage": 2}}, r"mesh.stage=2 does not support training only some layers \(blocks\[-1:\].\*\)"),
        (
            {"memory": {"update": "during"}},
            r"memory.update=during does not support training only some layers",
        ),
        ({"adapter": {"base": "nf4"}}, r"adapter.base=nf4 does not support training only some layers \(blocks\[-1:\]"),
        ({"adapter": {"layers": 3}}, "adapter.layers=3 exceeds model.layers=2; use adapter.layers=2"),
        (
            {"adapter": {"rank": 4}},
            "adapter.rank=4 requires adapter.kind=lora, dora or qlora, not last_layers",
        ),
        ({"adapter": {"kind": "prompt"}}, "adapter.kind=prompt does not support data.packing=true"),
        (
            {"adapter": {"kind": "prompt"}, "mesh": {"context": 2}},
            "kind=prompt does not support mesh.context=2",
        ),
        (
            {"adapter": {"kind": "patterns", "targets": {"*.bias": 2}}},
            "ranks in adapter.targets; use a list",
        ),
    ],
)
def test_incompatible_settings(sections, message):
    adapter = {"kind": "last_layers", **sections.get("adapter", {})}
    with pytest.raises(UserError, match=message):
        config(**{**sections, "adapter": adapter})
