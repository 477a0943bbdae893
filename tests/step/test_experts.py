"""Mixtures of experts under every mesh, recompute policy and kind of weights: what one device computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxmem import optim
from jaxmem.checkpoint.saved_state import SavedState
from jaxmem.config.devices import for_devices
from jaxmem.config.optimizers import ApolloSettings, GaLoreSettings, QGaLoreSettings
from jaxmem.errors import UserError
from jaxmem.sharding.weights import is_encoded
from jaxmem.step.programs import program
from tests.step.conftest import SMALL, Trained, batch_for, config
from tests.support.tiers import cases

MODEL = {"preset": "tiny", **SMALL, "vocab": 264, "mlp": 32}
EXPERTS = {"count": 4, "top_k": 2, "balance_loss": 0.1, "z_loss": 0.01}
LAYOUTS = {
    "expert x fsdp x tensor": ({"expert": 2, "fsdp": 2, "tensor": 2}, 3, {}),
    "replica x expert x context": ({"replica": 2, "expert": 2, "context": 2}, 2, {"remat": "sqrt", "mlp_chunk": 8}),
    "stage x expert": ({"stage": 2, "expert": 2}, 3, {"remat": "dots"}),
}
ADAPTER = {
    "kind": "qlora", "rank": 2, "double_quant": True, "targets": {"blocks.attention.*": 4, "blocks.mlp.*": 2}
}  # fmt: skip


def mixture(experts=EXPERTS, **sections):
    batch = {"global_size": 16, "accumulate": 2}
    return config(model={**MODEL, "experts": experts}, **{"batch": batch, **sections})


@pytest.fixture(scope="module")
def alone():
    return Trained(mixture(), updates=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_one_device(name, alone):
    mesh, zero, memory = LAYOUTS[name]
    cfg = mixture(mesh=mesh, zero=zero, memory=memory)
    trained = Trained(cfg, int(np.prod(list(mesh.values()))), updates=2, begin=alone)
    trained.agrees_with(alone)
    weight = trained.state.params["blocks"]["mlp"]["up"]["weight"]
    assert weight.addressable_shards[0].data.shape[1] == EXPERTS["count"] // mesh["expert"]


@pytest.mark.exhaustive
def test_a_kernel_of_sharded_experts_has_the_same_losses(alone):
    cfg = mixture(memory={"remat": "dots", "experts": "triton"}, mesh={"expert": 2})
    trained = Trained(cfg, 2, updates=1, begin=alone)
    assert trained.metrics[0] == pytest.approx(alone.metrics[0], rel=2e-5, abs=1e-6)


@pytest.mark.exhaustive
def test_recomputed_routers_count_the_tokens_of_all_devices():
    """In enough layers that the backward pass runs some of them again."""
    sections = {"model": {**MODEL, "layers": 4, "experts": EXPERTS}, "batch": {"global_size": 8, "accumulate": 2}}
    alone = Trained(config(**sections), updates=1)
    apart = config(**sections, mesh={"replica": 2}, memory={"remat": "constant"})
    Trained(apart, 2, updates=1, begin=alone).agrees_with(alone)


@pytest.mark.exhaustive
def test_losses_of_routers_weigh_tokens_alike_on_all_devices():
    """Pairs of answers of unequal lengths, whose losses are means per pair."""
    dpo = {
        "objective": {"name": "dpo"},
        "data": {"source": "preference", "path": "x.jsonl", "sequence_length": 24, "packing": False},
    }
    sections = {**dpo, "adapter": {"kind": "lora", "rank": 2}, "optimizer": {"epsilon": 1e-3}}
    alone = Trained(mixture(**sections), updates=1)
    apart = Trained(mixture(**sections, mesh={"replica": 2}, zero=0), 2, updates=1, begin=alone)
    assert apart.metrics[0] == pytest.approx(alone.metrics[0], rel=2e-5, abs=1e-6)


def only_adapters_change(trained):
    before, after = (flatten_dict(jax.tree.map(np.array, tree), sep=".") for tree in (trained.first, trained.params))
    for name, value in before.items():
        changed = not all(map(np.array_equal, jax.tree.leaves(value), jax.tree.leaves(after[name])))
        assert changed == ("lora" in name), name


GPT_OSS = {
    "activation": "swiglu_clamped", "attention_sinks": True, "attention_bias": True, "output_bias": True,
    "mlp_bias": True, "window": 6, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
DEEPSEEK = {
    "kv_heads": 8, "latent": {"kv_rank": 32, "rope_dim": 4, "value_dim": 6},
    "experts": {
        **EXPERTS, "renormalize": False, "shared": 64, "shared_gate": False, "dense_layers": [0], "dense_mlp": 64,
        "groups": 2, "top_groups": 1, "scale": 2.0,
    },
}  # fmt: skip


def adapters_of(model, mesh=None, memory=None, begin=None, **adapter):
    sections = {"adapter": {**ADAPTER, **adapter}, "mesh": mesh or {}, "memory": memory or {}}
    sections["optimizer"] = {"learning_rate": 1e-2, "clip_by": "previous"}
    cfg = config(model={**MODEL, "experts": EXPERTS, **model}, batch={"global_size": 8}, **sections)
    return Trained(cfg, int(np.prod(list((mesh or {}).values()))), updates=2, begin=begin)


@pytest.mark.exhaustive
def test_sinks_and_biases_train_as_on_one_device():
    """With frozen experts in another format, from the host, in groups of heads."""
    alone = adapters_of(GPT_OSS, experts="mxfp4")
    memory = {"offload": "frozen", "head_groups": 2, "remat": "sqrt", "update": "during"}
    many = adapters_of(GPT_OSS, {"expert": 2, "context": 2, "tensor": 2}, memory, begin=alone, experts="mxfp4")
    many.agrees_with(alone)
    attention, experts = (many.params["blocks"][name] for name in ("attention", "mlp"))
    assert (attention["q"]["weight"].format, experts["up"]["weight"].format) == ("nf4", "mxfp4")
    assert not is_encoded(experts["up"]["bias"])


@pytest.mark.exhaustive
def test_latent_attention_and_shared_experts_train_as_on_one_device():
    """With adapters that share a matrix between experts."""
    alone = adapters_of(DEEPSEEK, shared_a=True)
    many = adapters_of(DEEPSEEK, {"expert": 2, "fsdp": 2, "tensor": 2}, begin=alone, shared_a=True)
    many.agrees_with(alone)
    only_adapters_change(many)


@pytest.mark.exhaustive
def test_an_evaluation_copies_experts_from_the_host():
    sections = {"adapter": {"kind": "qlora"}, "batch": {"global_size": 8}}
    memory = {"offload": "frozen", "remat": "full"}
    built = [program(mixture(memory=m, **sections), jax.devices()[:1]) for m in ({}, memory)]
    batch = batch_for(built[0])
    on_device, on_host = (float(b.compiled_evaluate(b.initialise().params, b.place(batch))["loss"]) for b in built)
    assert on_host == pytest.approx(on_device, rel=1e-5)


GALORE = {"name": "galore_adamw8bit", "rank": 2, "trainable": ["blocks.mlp.up.*"]}


@pytest.mark.exhaustive
def test_a_low_rank_optimizer_of_sharded_experts_in_a_pipeline():
    """A `shard_map` over `expert` inside of the one over `stage`."""
    trained = Trained(mixture(optimizer=GALORE, mesh={"expert": 2, "stage": 2}, zero=1), 4, updates=2)
    assert trained.metrics[1]["loss"] < trained.metrics[0]["loss"] + 0.1


@pytest.mark.exhaustive
def test_a_low_rank_optimizer_of_sharded_experts_on_the_host_in_a_pipeline():
    """Another `shard_map` over `stage` is around the loop over layers, and `tensor` shards what the rule constrains."""
    apollo = {"optimizer": {"name": "apollo", "rank": 2, "learning_rate": 1e-2}, "batch": {"global_size": 16}}
    alone = Trained(mixture(**apollo), updates=2)
    mesh = {"expert": 2, "stage": 2, "tensor": 2}
    on_host = Trained(mixture(**apollo, mesh=mesh, memory={"offload": "optimizer"}), 8, updates=2, begin=alone)
    on_host.agrees_with(alone)


LOW_RANK = {
    "galore": GaLoreSettings,
    "galore8bit": GaLoreSettings,
    "qgalore": QGaLoreSettings,
    "apollo": ApolloSettings,
}


@pytest.mark.parametrize("name", cases([*LOW_RANK, "apollo_mini", "muon"], "galore", "muon"))
def test_the_update_of_an_expert_depends_on_its_gradient_alone(name):
    scale, g = getattr(optim, f"scale_by_{name}"), jax.random.normal(jax.random.key(0), (2, 3, 64, 48))
    settings = [LOW_RANK[name](rank=4)] if name in LOW_RANK else []
    tx = scale(*settings, axes={"w": ("layer", "expert", None, None)})

    @jax.jit
    def update(g):
        return tx.update({"w": g}, tx.init({"w": g}), {"w": g})[0]["w"]

    first, second = update(g), update(g.at[1, 2].multiply(-3.0))
    np.testing.assert_array_equal(np.delete(first.reshape(6, -1), 5, 0), np.delete(second.reshape(6, -1), 5, 0))
    assert not np.array_equal(first[1, 2], second[1, 2])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["muon", "adafactor", "adam_mini"])
def test_optimizers_treat_each_expert_as_a_matrix(name):
    """As a stack of layers with the same matrices."""
    scale, g = getattr(optim, f"scale_by_{name}"), jax.random.normal(jax.random.key(0), (2, 3, 64, 48))

    def update(g, axes):
        tx = scale(axes={"w": axes})
        return tx.update({"w": g}, tx.init({"w": g}), {"w": g})[0]["w"]

    wanted = update(g.reshape(6, 64, 48), ("layer", None, None)).reshape(g.shape)
    np.testing.assert_allclose(update(g, ("layer", "expert", None, None)), wanted, rtol=1e-5, atol=1e-5)


def test_small_experts_have_quantized_states_together():
    state = optim.scale_by_adam8bit(axes={"w": ("layer", "expert", None, None)}).init({"w": jnp.zeros((2, 64, 32, 4))})
    assert sorted(state.arrays) == ["m_codes", "m_scale", "v_codes", "v_scale"]


@pytest.mark.parametrize(
    ("experts", "sections", "named"),
    [
        ({"count": 2, "top_k": 3}, {}, "top_k=3 exceeds model.experts.count=2"),
        ({"count": 8, "top_k": 2}, {"mesh": {"expert": 3}}, "use mesh.expert=2 or 4"),
        (None, {"mesh": {"expert": 2}}, "use mesh.expert=1"),
        (EXPERTS, {"adapter": {"kind": "dora"}}, "adapter.kind=dora does not support model.experts"),
        (EXPERTS, {"adapter": {"kind": "lora", "dropout": 0.1}}, "use adapter.dropout=0"),
        (None, {"adapter": {"kind": "lora", "shared_a": True}}, "adapter.shared_a=true requires"),
        (None, {"adapter": {"kind": "qlora", "experts": "mxfp4"}}, "adapter.experts=mxfp4 requires model.experts"),
    ],
)
def test_what_is_not_possible_is_named(experts, sections, named):
    def resolve():
        cfg = mixture(experts, batch={"global_size": 24}, **sections)
        for_devices(cfg, cfg.mesh.expert)

    with pytest.raises(UserError, match=named):
        resolve()


# Layers 0, 2 and 4 have a dense MLP: a stack of layer 0, and a group of the stacks of layers 1 and 3, and 2 and 4.
MIXED = {"layers": 5, "qk_norm": True, "experts": {**EXPERTS, "every": 2, "dense_mlp": 48}}


def mixed(**sections):
    batch = {"global_size": 16, "accumulate": 2}
    optimizer = {"name": "sgd", "learning_rate": 0.5, "clip_by": "previous"}
    return config(**{"model": {**MODEL, **MIXED}, "batch": batch, "optimizer": optimizer, **sections})


@pytest.mark.exhaustive
def test_layers_of_two_kinds_train_as_on_one_device():
    alone = Trained(mixed(), updates=2)
    mesh, memory = {"stage": 2, "fsdp": 2}, {"remat": "full", "update": "during"}
    Trained(mixed(mesh=mesh, zero=2, memory=memory), 4, updates=2, begin=alone).agrees_with(alone)


def test_other_pipeline_stages_read_layers_of_two_kinds():
    """Layer 0 is not in the stack that the stages share; three periods of two layers are padded to four."""
    cfg = mixed(model={**MODEL, **MIXED, "layers": 7}, mesh={"stage": 2})
    staged, alone = program(cfg, jax.devices()[:2]), program(cfg.replace(mesh={"stage": 1}), jax.devices()[:1])

    def number(x):
        """Each layer, or each row of other arrays, is filled with its number."""
        rows = np.arange(1, 1 + len(x), dtype=x.dtype).reshape(-1, *[1] * (x.ndim - 1))
        return np.broadcast_to(rows, x.shape)

    params = jax.tree.map(number, alone.spec.state.params)
    found = flatten_dict(SavedState(staged).complete_params(params, alone.cfg.model_dump(mode="json")), sep=".")
    up = {name: np.asarray(x).reshape(len(x), -1)[:, 0].tolist() for name, x in found.items() if "mlp.up" in name}
    assert up == {
        "blocks[0:1].mlp.up.weight": [1],
        "blocks[1:7].[1:7:2].mlp.up.weight": [1, 2, 3, 0],
        "blocks[1:7].[2:7:2].mlp.up.weight": [1, 2, 3, 0],
    }
    names = staged.spec.gradient_names
    order = [name for name in names if name.startswith("blocks.mlp.down.weight")]
    assert order == [f"blocks.mlp.down.weight of layer {layer}" for layer in (8, 7, 6, 5, 4, 3, 2, 1, 0)]
