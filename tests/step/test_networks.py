"""The networks on pictures under the same tables as the decoder: each with an objective of its own."""

import re

import jax
import numpy as np
import optax
import pytest

from tests.step.conftest import Trained, batch_for, config
from tests.support.tiers import cases

EVERYWHERE = {"fsdp": 4, "tensor": 2}
RUNS = {
    "vit": ({"layers": 2, "embed": 16, "mlp": 32, "heads": 2}, {"name": "classify", "z_loss": 1e-3}),
    "convnet": ({"stages": [8, 16], "blocks": 1, "outputs": 6}, {"name": "contrastive"}),
    "mlp": (
        {"layers": 2, "embed": 16, "mlp": 32, "inputs": "embedding", "outputs": 1},
        {"name": "regress_l2"},
    ),
}


def pictures(family, **sections):
    model, objective = RUNS[family]
    return config(model={"family": family, **model}, objective=objective, data={"source": "digits"}, **sections)


@pytest.fixture(scope="module")
def family(request):
    return request.param


@pytest.fixture(scope="module")
def alone(family):
    return Trained(pictures(family), updates=2)


@pytest.fixture(scope="module")
def split(family, alone):
    return Trained(pictures(family, mesh=EVERYWHERE, zero=1 if family == "mlp" else 3), 8, updates=2, begin=alone)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", RUNS, indirect=True)
def test_every_family_trains_as_one_device(alone, split):
    zero = split.built.cfg.zero
    split.agrees_with(alone)
    share = held(inner(split.state.params)) / held(inner(alone.state.params))
    assert share == pytest.approx(1 / 8 if zero == 3 else 1 / 2)
    share = held(inner(optax.tree_utils.tree_get(split.state.opt_state, "mu"))) / held(inner(alone.state.params))
    assert share == pytest.approx(1 / 8 if zero >= 1 else 1 / 2)


def held(leaves):
    """Bytes on one device."""
    return sum(x.addressable_shards[0].data.nbytes for x in leaves)


def inner(params):
    """The weights that grow with the model: those of layers, but for norms and biases."""
    return [x for path, x in paths(params) if "blocks" in str(path) and str(path[-1]) == "['weight']"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", RUNS, indirect=True)
def test_every_weight_learns(family, alone):
    for path, before in jax.tree_util.tree_leaves_with_path(alone.first):
        after = alone.params
        for key in path:
            after = after[key.key]
        assert not np.array_equal(before, after), path


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["vit", "convnet"], indirect=True)
def test_gathered_weights_are_not_the_whole_model(split):
    """Weights are gathered a layer at a time, activations over time and batches never: more layers do not make the
    largest gather larger."""
    built, sizes = split.built, gathers(split.compiled.as_text())
    weights = max(x.size // (x.shape[0] if "blocks" in str(path) else 1) for path, x in paths(built.spec.state.params))
    model = built.cfg.model
    rows = built.cfg.batch.global_size // EVERYWHERE["fsdp"]
    stream = rows * (model.image_size // model.patch) ** 2 * model.embed if model.family == "vit" else 0
    assert sizes
    assert max(sizes) <= max(weights, stream)


@pytest.mark.parametrize("family", cases(RUNS, "convnet"), indirect=True)
def test_rows_that_do_not_count_do_not_matter(family, alone):
    batch = batch_for(alone.built)
    mask = np.array([[1, 0, 1, 1, 1, 0, 1, 1]], np.float32)
    changed = {name: np.where(expand(mask, x) > 0, x, x[:, ::-1]) for name, x in batch.items()} | {"mask": mask}
    compiled = alone.built.lower_evaluate().compile()
    one, two = (
        {name: float(x) for name, x in compiled(alone.state.params, alone.built.place(rows)).items()}
        for rows in ({**batch, "mask": mask}, changed)
    )
    assert not np.array_equal(batch["inputs"], changed["inputs"])
    assert one == pytest.approx(two, rel=1e-6)
    assert one["count"] == 6


def expand(mask, x):
    return mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim))


def paths(tree):
    return jax.tree_util.tree_leaves_with_path(tree)


def gathers(text):
    shapes = re.findall(r"= \(?\w+\[([\d,]*)\]\S* all-gather(?:-start)?\(", text)
    return [int(np.prod([int(n) for n in shape.split(",") if n])) for shape in shapes]
