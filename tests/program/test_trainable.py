"""Some weights learn: the others keep their bits, and have neither gradient nor state, on any mesh and in codes."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxmem.config import load_config
from jaxmem.errors import UserError
from jaxmem.program import program
from tests.program.conftest import Trained, config

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
    assert alone.built.trainable < held <= 2 * alone.built.trainable + 8


def test_a_mesh_does_the_same(alone):
    Trained(frozen(mesh={"fsdp": 4, "tensor": 2}), devices=8, updates=2).agrees_with(alone)


def test_codes_stay_as_they_are():
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


def test_the_compiled_step_has_no_gradient_of_what_is_frozen(alone):
    every = program(config(batch={"global_size": 8, "accumulate": 2}), jax.devices()[:1])
    full, less = (built.lower_step().compile() for built in (every, alone.built))
    gone = alone.built.parameters - alone.built.trainable
    sizes = [one.memory_analysis() for one in (full, less)]
    assert sizes[0].argument_size_in_bytes - sizes[1].argument_size_in_bytes == 8 * gone  # Adam's moments
    assert sizes[0].temp_size_in_bytes - sizes[1].temp_size_in_bytes > 4 * gone  # the sum of gradients
    assert less.cost_analysis()["flops"] < 0.85 * full.cost_analysis()["flops"]


def test_what_cannot_be_chosen():
    with pytest.raises(UserError, match="no weight is called 'norms'"):
        _ = program(config(optimizer={"trainable": ["norms"]}), jax.devices()[:1]).state
    with pytest.raises(UserError, match=r"memory\.update=after, where what is frozen has no gradient"):
        load_config(frozen().model_dump(mode="json"), ["memory.update=during", "optimizer.clip=null"])
