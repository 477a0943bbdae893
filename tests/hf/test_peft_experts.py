"""Adapters of experts in PEFT's format: a tensor for each expert, read back equal."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file

from jaxmem import adapters, hf, models
from jaxmem.config import Decoder, load_config
from jaxmem.errors import UserError
from jaxmem.inference.load import open_model
from jaxmem.step.programs import program

SMALL = {"vocab": 257, "layers": 2, "embed": 32, "mlp": 16, "heads": 2, "kv_heads": 1, "head_dim": 16}
ROWS = np.arange(24).reshape(2, 12)


FIRST_DENSE = {"dense_layers": [0], "dense_mlp": 24}


MODELS = {
    "mixtral": {"experts": {"count": 3, "top_k": 2}},
    "qwen3_moe, first dense": {"qk_norm": True, "experts": {"count": 3, "top_k": 2, **FIRST_DENSE}},
}


@pytest.fixture
def base(request, tmp_path):
    cfg = Decoder(**SMALL, **MODELS[request.param])
    hf.save(models.build(cfg, nnx.Rngs(0)), tmp_path / "base", tokenizer="bytes")
    return tmp_path / "base"


def opened(base, tmp_path, *overrides):
    """A program with random adapters, its parameters, and the directory to which they were saved."""
    common = ["adapter.kind=lora", "adapter.rank=2", "adapter.targets=['blocks.*']"]
    built, params = open_model(base, [*common, *overrides])
    keys = iter(jax.random.split(jax.random.key(1), 100))
    flat = {
        path: jax.random.normal(next(keys), x.shape, x.dtype) / 4 if path[-2] == "lora" else x
        for path, x in flatten_dict(params).items()
    }
    params = unflatten_dict(flat)
    hf.save_adapter(params, built.cfg.adapter, tmp_path / "out", base=str(base))
    return built, params


def logits_of(built, params):
    return jax.jit(lambda params, rows: nnx.merge(built.model.graphdef, params)(rows))(
        params, jnp.asarray(ROWS, jnp.int32)
    )


def test_trained_experts_of_some_layers_are_refused_in_an_adapter(tmp_path):
    """A layer has a tensor for each expert."""
    raw = {"name": "x", "model": {**SMALL, **MODELS["mixtral"], "layers": 4}, "train": {"steps": 1}}
    trainable = "optimizer.trainable=['blocks[-1:].mlp.gate.weight', 'blocks[1:2].attention.q.weight']"
    overrides = ["adapter.kind=lora", "adapter.targets=[blocks.attention.k]", trainable]
    experts = {f"model.layers.3.block_sparse_moe.experts.{n}.w1.weight" for n in range(3)}
    built = program(load_config(raw, overrides), jax.devices()[:1])
    saved = hf.saved_names(built)
    assert saved == {*experts, "model.layers.1.self_attn.q_proj.weight"}
    with pytest.raises(UserError, match="PEFT cannot load trained weights of experts; use --merge"):
        hf.save_adapter(built.spec.state.params, built.cfg.adapter, tmp_path / "out", saved=saved)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("base", "shared"), [("mixtral", True), ("qwen3_moe, first dense", False)], indirect=["base"])
def test_adapters_of_experts_are_read_back(base, shared, tmp_path):
    built, params = opened(base, tmp_path, f"adapter.shared_a={str(shared).lower()}")
    again, found = open_model(tmp_path / "out")
    np.testing.assert_allclose(logits_of(again, found), logits_of(built, params), atol=1e-5)
    if not shared:
        jax.tree.map(np.testing.assert_array_equal, found, params)
    tensors = load_file(tmp_path / "out/adapter_model.safetensors")
    experts = [name for name in tensors if ".experts." in name]
    assert len(experts) == sum(built.cfg.model.has_experts) * 3 * 3 * 2  # layers, experts, matrices, A and B
    gates = [name for name in experts if name.endswith(("gate_proj.lora_A.weight", "w1.lora_A.weight"))]
    assert {tensors[name].shape for name in gates} == {(2, 32)}
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["r"] == 2


GPT_OSS = {
    "activation": "swiglu_clamped", "mlp_bias": True, "attention_sinks": True, "attention_bias": True,
    "output_bias": True, "window": 8, "layer_types": ["sliding_attention", "full_attention"],
    "experts": {"count": 3, "top_k": 2},
}  # fmt: skip


def test_adapters_of_experts_in_one_tensor_are_merged(tmp_path):
    """A tensor has the matrices of all experts of a layer (gpt-oss)."""
    network = models.build(Decoder(**SMALL, **GPT_OSS), nnx.Rngs(0))
    adapters.lora(network, rank=2, targets=["blocks.mlp.*"], lora_bias=True)
    for name in ("gate", "up", "down"):
        lora = getattr(network.blocks.mlp, name).lora
        for variable in (lora.b, lora.bias):
            variable.set_value(jax.random.normal(jax.random.key(1), variable.get_value().shape) / 4)
    hf.save(network, tmp_path / "out")
    adapters.merge(network)
    expected = nnx.to_pure_dict(nnx.state(network))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6),
        nnx.to_pure_dict(nnx.state(hf.load(tmp_path / "out"))),
        expected,
    )


@pytest.mark.parametrize(
    ("targets", "others"),
    [
        ({"blocks.mlp.gate": 2, "blocks.mlp.up": 4}, {}),
        (["blocks.mlp.gate"], {}),
        (["blocks[1:].mlp.*"], {}),
        (["blocks[1:].mlp.*"], FIRST_DENSE),
    ],
)
def test_adapters_of_experts_that_peft_cannot_load(targets, others, tmp_path):
    model = {**SMALL, "qk_norm": True, "experts": {"count": 3, "top_k": 2, **others}}
    adapter = {"kind": "lora", "rank": 2, "targets": targets}
    cfg = load_config({"name": "x", "model": model, "adapter": adapter, "train": {"steps": 1}})
    built = program(cfg, jax.devices()[:1])
    with pytest.raises(UserError, match="gate and up have adapters and all layers have the same rank"):
        hf.save_adapter(built.spec.state.params, built.cfg.adapter, tmp_path / "out")
