"""What is written is what vLLM's loaders ask for: data/vllm.json says how that was found. It was read, not run."""

import json
from pathlib import Path
from typing import Any

import pytest
from flax import nnx
from safetensors import safe_open

from jaxmem import adapters, hf, models
from jaxmem.config import Adapter, Decoder
from jaxmem.config.hugging_face import config_json, fields_of
from jaxmem.hf.names import decoder_weights, tensor_shapes

ASKED = json.loads((Path(__file__).parent / "data" / "vllm.json").read_text())
OTHERWISE = {  # what transformers has and vLLM has not
    "qwen3-biases": {"self_attn.o_proj.bias"},  # left out without a word
    "qwen2-window": "refuses a window",
}
SMALL = {"vocab": 264, "layers": 2, "embed": 16, "mlp": 24, "heads": 4, "kv_heads": 2, "head_dim": 8}


def asked(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensors and their shapes, of a config.json."""
    kind = config["architectures"][0]
    own = config["hidden_size"] // config["num_attention_heads"]
    own = own if kind in ASKED["head_dim of hidden_size alone"] else config.get("head_dim") or own
    sizes = {
        **config,
        "head_dim": own,
        "queries": own * config["num_attention_heads"],
        "keys": own * config["num_key_value_heads"],
    }
    layer = {**ASKED["of a layer"], **ASKED["norms of heads"].get(kind, {})}
    for key, modules in ASKED["biases"][kind].items():
        if key == "always" or config.get(key):
            named = {name: dims for name, dims in layer.items() if name.split(".")[-2] in modules}
            layer |= {name.replace(".weight", ".bias"): dims[:1] for name, dims in named.items()}
    names = {
        f"model.layers.{n}.{name}": dims for n in range(config["num_hidden_layers"]) for name, dims in layer.items()
    }
    tensors = dict(ASKED["tensors"])
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    return {name: tuple(sizes[dim] for dim in dims) for name, dims in {**tensors, **names}.items()}


@pytest.mark.exhaustive
def test_models(compare):
    for name in compare.CASES:
        if compare.config(name)["architectures"][0] not in ASKED["biases"]:
            continue  # not recorded
        model = Decoder(**fields_of(compare.config(name)))
        network = nnx.eval_shape(lambda model=model: models.build(model, nnx.Rngs(0)))
        written = config_json(model)
        assert not set(ASKED["config"]) - written.keys()
        there = tensor_shapes(decoder_weights(nnx.to_pure_dict(nnx.state(network))))
        only = OTHERWISE.get(name, set())
        if only == "refuses a window":
            assert written["architectures"][0] in ASKED[only]
            assert written["use_sliding_window"]
            continue
        found = asked(written)
        assert {tensor.split(".", 3)[-1] for tensor in there.keys() - found.keys()} == only, name
        assert found == {tensor: shape for tensor, shape in there.items() if tensor in found}, name


@pytest.fixture(scope="module")
def new():
    return nnx.split(models.build(Decoder(**SMALL), nnx.Rngs(0)))


@pytest.mark.exhaustive
def test_files(new, tmp_path):
    network = nnx.merge(*new)
    hf.save(network, tmp_path / "out", tokenizer="bytes", dtype="bfloat16")
    config = json.loads((tmp_path / "out/config.json").read_text())
    with safe_open(tmp_path / "out/model.safetensors", "numpy") as file:
        assert {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} == asked(config)  # noqa: SIM118
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118
    assert config["torch_dtype"] == "bfloat16"
    assert {"tokenizer.json", "tokenizer_config.json"} < {file.name for file in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize(
    ("targets", "one_rank"),
    [(["blocks.*", "embedding", "head"], True), ({"blocks.*": 2}, True), ({"*.mlp.*": 2, "blocks.*": 4}, False)],
)
def test_adapters(new, targets, one_rank, tmp_path):
    cfg, network = Adapter(kind="lora", rank=4, alpha=8, targets=targets), nnx.merge(*new)
    adapters.lora(network, rank=4, alpha=8, targets=targets)
    ranks = hf.save_adapter(nnx.to_pure_dict(nnx.state(network)), cfg, tmp_path / "out")
    assert (len(ranks) == 1) == one_rank
    wanted, config = ASKED["adapter"], json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == wanted["files"]
    assert not set(wanted["required"]) - config.keys()
    assert all(config.get(key, values[0]) in values for key, values in wanted["only"].items())
    assert set(config["target_modules"]) <= set(wanted["modules"])
    shapes = asked(config_json(Decoder(**SMALL)))
    with safe_open(tmp_path / "out/adapter_model.safetensors", "numpy") as file:
        for name in file.keys():  # noqa: SIM118
            ending = next(one for one in wanted["endings"] if name.endswith(one))
            module = name.removeprefix(wanted["prefix"]).removesuffix(ending)
            assert module.split(".")[-1] in config["target_modules"]
            out, into = shapes[f"{module}.weight"]
            if "embedding" in ending:
                out, into = into, out
            sizes = {"in": into, "out": out, "r": config["r"]}
            shape = tuple(sizes[dim] for dim in wanted["endings"][ending])
            assert tuple(file.get_slice(name).get_shape()) == shape or not one_rank
    if one_rank:  # and so one scale, which is the one that was trained
        used = network.blocks.attention.q.lora
        assert used.scale == config["lora_alpha"] / config["r"]
