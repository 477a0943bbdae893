"""An update during the backward pass is the update after it: every weight, on any mesh, with any recomputation."""

import jax
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from jaxmem import optim
from jaxmem.config.optimizers import OPTIMIZERS
from jaxmem.errors import UserError
from jaxmem.optim.rules import quantized
from jaxmem.planning.compile import compile_program
from jaxmem.planning.targets import parse_target, target_devices
from jaxmem.sharding.trees import merge
from jaxmem.step import nonfinite
from jaxmem.step.programs import program
from tests.step.conftest import SMALL, Trained, batch_for, config

MODEL = {"preset": "tiny", **SMALL, "layers": 3, "vocab": 264}


def during(cfg, remat="none", offload="none", **sections):
    """A decoder's tables in slices of 66."""
    sections = {**cfg, **sections}
    slices = {} if "family" in sections.get("model", {}) else {"loss_chunk": 64}
    return config(**{**sections, "memory": {"update": "during", "remat": remat, "offload": offload, **slices}})


def agree(cfg, *variants):
    """The losses, lengths of gradients and weights of an update after the pass. All weights have moved."""
    after = Trained(config(**cfg), updates=2)
    for devices, other in variants:
        one = Trained(other, devices, updates=2, begin=after)
        one.agrees_with(after)
        moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), one.first, one.params)
        assert all(jax.tree.leaves(moved)), moved
        assert jax.tree.structure(one.state) == jax.tree.structure(after.state)


def test_a_decoder():
    """Clipped by the length of all gradients, which a pass before measures."""
    cfg = {"model": MODEL}
    agree(cfg, (4, during(cfg, "full", "activations", mesh={"fsdp": 2, "tensor": 2})))


@pytest.mark.exhaustive
def test_adapters_and_frozen_weights_in_micro_batches():
    """What is frozen lets gradients through and keeps its bits; who was no number is known by name."""
    cfg = {
        "model": MODEL,
        "adapter": {"kind": "lora", "rank": 4, "targets": ["blocks[-1:].attention.*", "embedding"], "dropout": 0.1},
        "optimizer": {"epsilon": 1e-3, "trainable": ["*norm.scale", "head.*"]},
        "batch": {"global_size": 8, "accumulate": 2},
    }
    after = Trained(config(**cfg), updates=2)
    one = Trained(during(cfg, "full", mesh={"fsdp": 2, "tensor": 2}), 4, updates=2, begin=after)
    one.agrees_with(after)
    before, now = flatten_dict(one.first), flatten_dict(one.params)
    for path, weight in before.items():
        learns = ("lora" in path and path[-1] != "layer_scale") or path[-1] == "scale" or path[0] == "head"
        stayed = jax.tree.map(np.array_equal, weight, now[path])
        assert all(jax.tree.leaves(stayed)) != learns, path
    places = []
    for trained in (after, one):
        adapter = trained.state.params["blocks"]["attention"]["q"]["lora"]
        adapter["b"] = adapter["b"].at[1].set(np.nan)
        _, metrics = trained.compiled(trained.state, trained.built.place(batch_for(trained.built)))
        places.append(trained.built.spec.gradient_names[int(metrics[nonfinite.METRIC])])
    assert places[0] == places[1]


# Of a decoder's matrices each has an optimizer of its own, and so have those of a vision transformer.
IN_A_DECODER = {
    "*.q.weight": "galore_adamw", "*.k.weight": "qgalore", "*.v.weight": "apollo", "*.o.weight": "apollo_mini",
    "*.gate.weight": "muon", "*.up.weight": "adamw8bit", "*.down.weight": "adafactor", "embedding.*": "lion",
    "head.*": "adam_mini", "*norm.scale": "sgd",
}  # fmt: skip
IN_A_TRANSFORMER = {
    "*.q.*": "galore_adamw8bit", "*.k.weight": "lion8bit", "*.k.bias": "sgd", "*.v.*": "momentum8bit",
    "*.o.*": "adamw4bit", "*.up.*": "adam", "*.down.*": "sgd", "*norm.*": "adamw", "head.*": "adamw",
    "patches.*": "adamw", "position": "adamw",
}  # fmt: skip


@pytest.mark.exhaustive
def test_every_optimizer_is_in_one_of_them():
    assert {*IN_A_DECODER.values(), *IN_A_TRANSFORMER.values()} == set(OPTIMIZERS)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("names", "sections", "mesh"),
    [
        (IN_A_DECODER, {"model": MODEL}, {"mesh": {"fsdp": 2, "tensor": 2}}),
        (
            IN_A_TRANSFORMER,
            {
                "model": {"family": "vit", "layers": 2, "embed": 16, "mlp": 32, "heads": 2},
                "objective": "classify",
                "data": {"source": "digits"},
            },
            {"mesh": {"fsdp": 4}, "zero": 0},
        ),
    ],
)
def test_every_optimizer(names, sections, mesh, monkeypatch):
    """But for codes and projections, which make more of a last bit, the same weights."""
    monkeypatch.setattr(quantized, "MIN_SIZE", 0)
    monkeypatch.setattr(optim, "build", lambda _cfg, _rate, axes: mixed(names, axes))
    cfg = {**sections, "optimizer": {"clip": None}}
    after = Trained(config(**cfg), updates=2)
    one = Trained(during(cfg, "full", **mesh), 4, updates=2, begin=after)
    for begun, mine, theirs in zip(*map(jax.tree.leaves, (one.first, one.params, after.params)), strict=True):
        assert np.abs(mine - theirs).mean() < 2e-3 * np.abs(theirs - begun).mean() + 1e-7


def mixed(names, axes):
    """An optimizer for each pattern that any of these weights has the name of."""
    found = {}
    for pattern, name in names.items():
        own = {"epsilon": 1e-3} if "epsilon" in OPTIMIZERS[name].fields else {}
        try:
            found[pattern] = optim.optimizer(name)(1e-2, axes=optim.select_trainable(axes, [pattern]), **own)
        except UserError:
            continue

    def init(params):
        return {pattern: tx.init(optim.select_trainable(params, [pattern])) for pattern, tx in found.items()}

    def update(grads, state, params, **extra):
        said, new = grads, {}
        for pattern, tx in found.items():
            own = optim.select_trainable(grads, [pattern]), state[pattern], optim.select_trainable(params, [pattern])
            updates, new[pattern] = tx.update(*own, **extra)
            said = merge(said, updates)
        return said, new

    return optax.GradientTransformationExtraArgs(init, update)


@pytest.mark.exhaustive
def test_tied_embeddings_clipped_by_the_last_length():
    optimizer = {"name": "adamw", "epsilon": 1e-3, "clip": 5.0, "clip_by": "previous"}
    cfg = {"model": {**MODEL, "tie_embeddings": True}, "optimizer": optimizer}
    agree(cfg, (8, during(cfg, "dots", mesh={"replica": 2, "fsdp": 2, "context": 2}, zero=2)))


@pytest.mark.exhaustive
def test_quantized_weights():
    """int8 under APOLLO-Mini, by a kernel, of two micro-batches: the same codes, but where rounding by chance met
    another last bit."""
    cfg = {
        "model": MODEL,
        "precision": {"parameters": "int8"},
        "optimizer": {
            "name": "apollo_mini", "learning_rate": 1e-2, "epsilon": 1e-3, "clip_by": "weight",
            "trainable": ["embedding.*", "*.down.*", "*norm.scale"],
        },
    }  # fmt: skip
    after = Trained(config(**cfg), updates=2)
    kernel = {"optimizer": {**cfg["optimizer"], "kernel": "triton"}, "batch": {"global_size": 8, "accumulate": 2}}
    whole = [batch_for(after.built, update) for update in (0, 1)]
    halves = [{name: x.reshape(2, -1, *x.shape[2:]) for name, x in batch.items()} for batch in whole]
    one = Trained(during(cfg, "full", mesh={"fsdp": 2, "tensor": 2}, **kernel), 4, 2, halves, begin=after)
    for mine, theirs in zip(one.metrics, after.metrics, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    trained = map(one.built.model.select, (one.first, one.params, after.params))
    for begun, mine, theirs in zip(*map(jax.tree.leaves, trained), strict=True):
        if mine.dtype == np.int8:
            assert np.mean(mine != begun) > 0.01
            assert np.mean(mine != theirs) < 0.01
        else:
            np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.exhaustive
def test_several_stacks_with_dropout():
    """In recomputation the same is dropped again; what lies between the stacks is trained too."""
    cfg = {
        "model": {"family": "convnet", "stages": [8, 16], "blocks": 2, "dropout": 0.2},
        "objective": "classify",
        "data": {"source": "digits"},
        "optimizer": {"epsilon": 1e-3, "clip_by": "weight"},
    }
    agree(cfg, (1, during(cfg, "full")))


@pytest.mark.exhaustive
def test_no_gradient_outlives_its_layer_and_no_update_copies_the_stack():
    """Compiled bytes, for a GPU: of twelve layers not four gradients are there at once, beside all else, of four
    micro-batches too. The gradient of one table would be more."""
    cfg = during(
        {},
        "full",
        model={**MODEL, "layers": 12, "mlp": 1024, "vocab": 16384},
        data={"sequence_length": 8},
        batch={"global_size": 8, "accumulate": 4},
        precision={"compute": "bfloat16"},
    )
    aim = parse_target("h100-80gb")
    step = compile_program(program(cfg, target_devices(aim, aim.memory)).lower_step(), here=False)
    assert step.sizes["temporaries"] < 4 * (3 * 32 * 1024 * 4)


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        (
            {
                "batch": {"global_size": 8, "accumulate": 2},
                "objective": "dpo",
                "data": {"source": "preference", "path": "x", "packing": False},
            },
            "batch.accumulate",
        ),
        (
            {"batch": {"global_size": 8, "accumulate": 2}, "remat": "full", "offload": "activations"},
            "batch.accumulate",
        ),
        ({"precision": {"compute": "float16", "loss_scale": "dynamic"}}, "precision.loss_scale"),
    ],
)
def test_incompatible_settings(sections, key):
    with pytest.raises(UserError, match=rf"^memory.update=during(?=.*{key}=).* does not support "):
        during({}, **sections)
