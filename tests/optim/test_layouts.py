"""Every optimizer updates on every mesh as on one device, and its state lies as the tables say."""

import functools

import jax
import numpy as np
import pytest

from jaxmem import optim
from jaxmem.sharding.layout import layout_for
from jaxmem.sharding.table import is_axes
from tests.optim.conftest import gradients, normal
from tests.step.conftest import config
from tests.support.tiers import cases

AXES = {
    "up": ("layer", "embed", "mlp"),
    "down": ("layer", "mlp", "embed"),
    "table": ("vocab", "embed"),
    "norm": ("layer", "norm"),
}
MESHES = {
    "fsdp": ({"fsdp": 8}, 3),
    "tensor": ({"tensor": 4}, 3),
    "all": ({"stage": 2, "fsdp": 2, "tensor": 2}, 3),
    "zero-1": ({"fsdp": 8}, 1),
}


def weights():
    return {
        "up": normal(2, 64, 96), "down": normal(2, 64, 64, seed=1), "table": normal(72, 64, seed=2),
        "norm": normal(2, 64, seed=3),
    }  # fmt: skip


def layout_on(mesh, zero=3):
    return layout_for(config(mesh=mesh, zero=zero), jax.devices()[: int(np.prod(list(mesh.values())))])


def run(name, mesh, zero=3, updates=2, **own):
    """The updates that an optimizer makes on a mesh, and its state."""
    layout = layout_on(mesh, zero)
    params = weights()
    tx = optim.optimizer(name)(1e-2, axes=AXES, **own)

    def placed(role, axes, tree):
        return jax.tree.map(lambda a, x: layout.sharding(role, a, x.shape), axes, tree, is_leaf=is_axes)

    shapes = jax.eval_shape(tx.init, params)
    state_places = placed("optimizer", optim.state_axes(tx, params, AXES), shapes)
    grad_places, weight_places = placed("gradients", AXES, params), placed("weights", AXES, params)
    with layout:
        state = jax.jit(tx.init, out_shardings=state_places)(params)
        step = jax.jit(tx.update, out_shardings=(weight_places, state_places), donate_argnums=1)
        params = jax.device_put(params, weight_places)
        said = []
        for g in gradients(weights(), updates):
            one, state = step(jax.device_put(g, grad_places), state, params)
            said.append(jax.tree.map(np.asarray, one))
    return said, state


@functools.cache
def alone(name):
    return run(name, {})[0]


# tests/step/test_update_during.py trains with every optimizer on a mesh. These: each kind of state.
CASES = [
    ("galore_adamw", "tensor"), ("adamw8bit", "fsdp"), ("adafactor", "all"), ("muon", "all"), ("adamw4bit", "all"),
    ("qgalore", "all"), ("apollo", "all"), ("adam_mini", "all"), ("adamw8bit", "zero-1"), ("galore_adamw8bit", "fsdp"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "mesh"), cases(CASES, *CASES[1:4]))
def test_every_mesh_updates_as_one_device(name, mesh):
    said, _ = run(name, *MESHES[mesh])
    for one, expected in zip(said, alone(name), strict=True):
        for leaf in one:
            difference = np.abs(one[leaf] - expected[leaf])
            # A value between two codes may fall to either side: a few such are not seen in the mean.
            assert difference.mean() < 2e-4 * np.abs(expected[leaf]).mean(), leaf


def test_a_stage_computes_a_projection_only_when_one_of_its_layers_is_due():
    """A decision by layer, not all branches and then a choice between their results."""
    params = weights()
    tx = optim.optimizer("galore_adamw")(1e-2, axes=AXES)
    with layout_on(MESHES["all"][0]):
        lowered = jax.jit(tx.update).lower(params, jax.eval_shape(tx.init, params), params).as_text()
    assert lowered.count("stablehlo.case") == 2  # `up` and `down`


def held(state):
    """Bytes on one device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state))


@pytest.mark.exhaustive
def test_a_kernel_updates_as_its_optimizer_does():
    """Stacks as one array, each device its own part; the second update comes from the codes of the first."""
    said, _ = run("adamw8bit", {"fsdp": 2, "tensor": 2}, kernel="triton")
    for one, expected in zip(said, alone("adamw8bit"), strict=True):
        for leaf in one:
            difference = np.abs(one[leaf] - expected[leaf])
            assert difference.mean() < 2e-4 * np.abs(expected[leaf]).mean(), leaf
