"""Into a run and out again: the same tensors, bit for bit, on any mesh; one tensor at a time on the host."""

import json
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxmem import hf, models
from jaxmem.config import Adapter, Decoder, load_config
from jaxmem.config.hf_rope import ORIGINAL_LENGTH
from jaxmem.config.hf_values import UnsupportedError
from jaxmem.config.hugging_face import config_json, decoder_fields, fields_of
from jaxmem.errors import UserError
from jaxmem.hf import writer
from jaxmem.hf.peft import read_base
from jaxmem.inference.export import export_model
from jaxmem.inference.load import open_model
from jaxmem.quant import quantize
from jaxmem.step.programs import program
from jaxmem.training.run import run
from tests.support.tiers import cases

SMALL = {"vocab": 257, "layers": 2, "embed": 16, "mlp": 24, "heads": 4, "kv_heads": 2, "head_dim": 8, "qk_norm": True}
STORED = {
    "llama3.1": np.float16,
    "gemma2": ml_dtypes.bfloat16,
    "phi3": np.float32,
    "gpt-oss": ml_dtypes.bfloat16,
    "qwen2-moe": np.float32,
    "deepseek-v2": np.float32,
    "qwen3-moe-every": ml_dtypes.bfloat16,
}


@pytest.mark.parametrize("name", cases(STORED, "gpt-oss"))
def test_an_export_has_the_tensors_of_the_directory(name: str, tmp_path: Path, compare) -> None:
    compare.write_directory(name, tmp_path / "given", STORED[name])
    export_model(tmp_path / "given", tmp_path / "out")
    given, found = (load_file(tmp_path / place / "model.safetensors") for place in ("given", "out"))
    assert found.keys() == given.keys()
    for tensor, x in given.items():
        assert found[tensor].dtype == x.dtype
        np.testing.assert_array_equal(found[tensor].view(np.uint8), x.view(np.uint8))
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads(
        (tmp_path / "given/config.json").read_text()
    )
    with pytest.raises(UserError, match="out exists already"):
        export_model(tmp_path / "given", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["given", "out"]


@pytest.mark.exhaustive
def test_a_model_of_its_own_is_written_with_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_FILE_BYTES", 20_000)  # several files
    network = models.build(Decoder(**SMALL), nnx.Rngs(0))
    hf.save(network, tmp_path / "out", tokenizer="bytes", dtype="bfloat16")
    assert decoder_fields(str(tmp_path / "out")).items() >= SMALL.items()
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == 256
    found = hf.load(tmp_path / "out")
    again = network.blocks.mlp.down.weight.get_value().astype(jnp.bfloat16)
    np.testing.assert_array_equal(found.blocks.mlp.down.weight.get_value(), again)
    assert len(list((tmp_path / "out").glob("model-0000*"))) > 1


@pytest.mark.exhaustive
def test_unknown_special_tokens_are_null(tmp_path: Path, directories: Path) -> None:
    """Without these keys, transformers has the defaults of the class: in Phi-3 a padding token of 32000."""
    hf.save(hf.load(directories / "phi3"), tmp_path / "out")
    found = json.loads((tmp_path / "out/config.json").read_text())
    assert [found[f"{kind}_token_id"] for kind in ("bos", "eos", "pad")] == [None, None, None]


@pytest.mark.exhaustive
def test_a_soft_prompt_is_not_dropped(tmp_path: Path, directories: Path) -> None:
    overrides = ["adapter.kind=prompt", "adapter.virtual_tokens=2", "data.packing=false"]
    built, params = open_model(directories / "llama3", overrides)
    with pytest.raises(UserError, match=r"soft prompt.* use hf\.save_adapter"):
        hf.save(nnx.merge(built.model.graphdef, params), tmp_path / "out", base=directories / "llama3")


def test_values_wider_than_keys_are_refused(tmp_path: Path, compare) -> None:
    compare.write_directory("deepseek-v2", tmp_path / "wide", v_head_dim=20)
    with pytest.raises(UserError, match=r"wide: model\.latent\.value_dim=20 exceeds model\.head_dim=16"):
        hf.load(tmp_path / "wide")


def test_every_family_s_settings_are_written_as_they_are_read(compare) -> None:
    for name in compare.CASES:
        fields = fields_of({**compare.config(name), "quantization_config": None})
        made = config_json(Decoder(**fields))
        assert fields_of(made) == fields, name
    with pytest.raises(UserError, match=r"model.qk_norm, model.mlp_bias: no Hugging Face architecture"):
        load_config(
            {"name": "x", "model": fields_of(compare.config("qwen3")) | {"mlp_bias": True}, "train": {"steps": 1}}
        )
    # A field that has no effect is no difference.
    odd = {"theta": 10.0, "scaling": "linear", "factor": 2.0, "original_length": 64}
    assert (
        "LlamaForCausalLM"
        in config_json(Decoder(**fields_of(compare.config("llama2")) | {"rope": odd}))["architectures"]
    )


def test_a_longer_context_than_that_of_the_base_is_written(compare) -> None:
    """vLLM and llama.cpp read the longest sequence from this key."""
    base = compare.config("qwen2") | {"max_position_embeddings": 64}
    model = Decoder(**fields_of(base))
    yarn = model.replace(rope={"scaling": "yarn", "factor": 4.0, "original_length": 64})
    llama3 = model.replace(rope={"scaling": "llama3", "factor": 2.0, "original_length": 16})
    cases = [
        (model, base, None, 64),
        (model, base, 32, 64),
        (model, base, 96, 96),  # trained on longer sequences
        (yarn, base, 32, 256),
        (yarn, base, 300, 300),
        (yarn, {**base, "max_position_embeddings": 512}, None, 256),
        (yarn, None, 32, 256),
        (llama3, base, None, 64),
        (model, None, None, 2048),
    ]
    for decoder, settings, length, expected in cases:
        written = config_json(decoder, settings, length)
        assert written["max_position_embeddings"] == expected
        assert fields_of(written) == fields_of(config_json(decoder))
    # The original length is that of the base, if its scaling has none.
    scaled = base | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    longer = config_json(Decoder(**fields_of(scaled)), scaled, 300)
    assert (longer["max_position_embeddings"], longer["rope_scaling"][ORIGINAL_LENGTH]) == (300, 64)


def test_the_original_length_of_phi3_is_outside_of_its_scaling(compare) -> None:
    """transformers ignores the one in `rope_scaling`, and has a default of 4096."""
    settings = compare.config("phi4-mini")
    for original in (6, 4096):
        rope = {**fields_of(settings)["rope"], "original_length": original, "factor": 8.0}
        written = config_json(Decoder(**{**fields_of(settings), "rope": rope}))
        lengths = written[ORIGINAL_LENGTH], written["rope_scaling"][ORIGINAL_LENGTH]
        assert (written["architectures"], lengths) == (["Phi3ForCausalLM"], (original, original))
    del settings[ORIGINAL_LENGTH]
    assert fields_of(settings)["rope"]["original_length"] == 4096
    settings["rope_scaling"] = {**settings["rope_scaling"], ORIGINAL_LENGTH: 6}
    with pytest.raises(UnsupportedError, match=r"is 4096, but in rope_scaling 6; set both"):
        fields_of(settings)


@pytest.mark.exhaustive
def test_the_text_model_of_a_model_with_images(tmp_path: Path, directories: Path, compare) -> None:
    """Under both names that transformers has given its weights; it is written as a model of text alone."""
    text = compare.config("gemma3")
    del text["architectures"]
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    tensors = load_file(directories / "gemma3" / "model.safetensors")
    wanted = hf.load(directories / "gemma3")
    for prefix in ("language_model.model.", "model.language_model."):
        place = tmp_path / prefix
        place.mkdir()
        (place / "config.json").write_text(json.dumps(outer | {"vision_config": {"hidden_size": 8}}))
        named = {prefix + name.removeprefix("model."): x for name, x in tensors.items()}
        save_file(named | {"vision_tower.x.weight": np.ones((2, 2), np.float32)}, place / "model.safetensors")
        found = hf.load(place)
        assert found.cfg == wanted.cfg
        jax.tree.map(np.testing.assert_array_equal, *(nnx.to_pure_dict(nnx.state(one)) for one in (found, wanted)))
    hf.save(found, tmp_path / "out", base=place)
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == ["Gemma3ForCausalLM"]
    assert load_file(tmp_path / "out/model.safetensors").keys() == tensors.keys()


def test_adapters_of_a_model_with_images_are_refused(tmp_path: Path, compare) -> None:
    text = compare.config("gemma3")
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    with pytest.raises(UserError, match=r"also reads images: its layers have other names in PEFT; use --merge"):
        hf.save_adapter({}, Adapter(kind="lora"), tmp_path / "out", base=str(tmp_path))


def test_an_adapter_with_a_trained_tied_embedding_is_refused(tmp_path: Path) -> None:
    raw = {"name": "x", "model": {**SMALL, "tie_embeddings": True}, "train": {"steps": 1}}
    built = program(load_config(raw, ["adapter.kind=lora", "optimizer.trainable=[embedding.*]"]), jax.devices()[:1])
    with pytest.raises(UserError, match="PEFT does not tie a trained embedding to the output projection; use --merge"):
        hf.save_adapter(built.spec.state.params, built.cfg.adapter, tmp_path / "out", saved=hf.saved_names(built))


def test_adapters_of_fused_matrices_are_refused(tmp_path: Path, directories: Path) -> None:
    with pytest.raises(UserError, match=r"phi3.*qkv_proj.*use --merge"):
        hf.save_adapter({}, Adapter(kind="lora"), tmp_path / "out", base=str(directories / "phi3"))


def test_of_two_scalings_the_one_of_transformers_counts(compare) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    given = {"rope_scaling": yarn, "rope_parameters": {"rope_type": "default"}, "original_max_position_embeddings": 32}
    rope = fields_of(compare.config("llama3") | given)["rope"]
    assert (rope["scaling"], rope["factor"], rope["original_length"]) == ("yarn", 4.0, 32)
    given["rope_scaling"] = {**yarn, "original_max_position_embeddings": 16}
    with pytest.raises(Exception, match=r"original_max_position_embeddings is 32, but in rope_scaling 16"):
        fields_of(compare.config("llama3") | given)


@pytest.mark.parametrize(
    ("name", "key", "value"), [("deepseek-v2", "mlp_bias", True), ("gemma3", "attn_logit_softcapping", 30.0)]
)
def test_settings_without_support_are_refused(name, key, value, compare) -> None:
    """In transformers the first adds weights, and the second has no effect, unlike in the other Gemma."""
    with pytest.raises(UnsupportedError, match=f"{key}={json.dumps(value)} is not supported"):
        fields_of(compare.config(name) | {key: value})


MESHES = {
    "sharded": {"fsdp": 4, "tensor": 2},
    "stages": {"stage": 2, "fsdp": 2, "tensor": 2},
}


def config(place: Path, mesh: dict[str, int], **sections):
    base = {
        "model": {"hf": str(place)},
        "data": {"sequence_length": 16},
        "mesh": mesh,
        "train": {"steps": 2},
        "name": "x",
    }
    return load_config({**base, **sections})


@pytest.mark.parametrize("mesh", MESHES)
def test_each_device_reads_its_own_part(mesh: str, directories: Path) -> None:
    place = directories / "llama3"
    built = program(config(place, MESHES[mesh]))
    params = read_base(built)
    for x, spec in zip(*map(jax.tree.leaves, (params, built.spec.state.params)), strict=True):
        assert x.sharding.is_equivalent_to(spec.sharding, x.ndim)
    there = load_file(place / "model.safetensors")
    np.testing.assert_array_equal(params["embedding"]["weight"], there["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["head"]["weight"], there["lm_head.weight"].T)
    for layer in range(2):
        found = params["blocks"]["mlp"]["down"]["weight"][layer]
        np.testing.assert_array_equal(found, there[f"model.layers.{layer}.mlp.down_proj.weight"].T)


@pytest.mark.exhaustive
def test_the_host_holds_less_than_two_tensors(tmp_path: Path, compare) -> None:
    """numpy's memory is counted, jax's is not: what lies on devices is theirs."""
    given = compare.config("llama3") | {"vocab_size": 2048, "hidden_size": 512, "num_hidden_layers": 12}
    shapes = compare.shapes(given)
    (tmp_path / "config.json").write_text(json.dumps(given))
    save_file({name: np.ones(shape, np.float32) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    largest = max(4 * int(np.prod(shape)) for shape in shapes.values())
    assert (tmp_path / "model.safetensors").stat().st_size > 5 * largest
    hf.load(tmp_path, dtype=jnp.bfloat16)  # compiles, which takes Python's memory too
    tracemalloc.start()
    hf.load(tmp_path, dtype=jnp.bfloat16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert largest <= peak < 2 * largest


@pytest.mark.exhaustive
def test_a_run_begins_from_the_weights(tmp_path: Path, directories: Path, compare) -> None:
    """And what it leaves is a directory again, with the shape that it came with."""
    (tmp_path / "texts").mkdir()
    for number in range(20):
        (tmp_path / "texts" / f"{number}.txt").write_text(chr(number) * 40)
    place = tmp_path / "model"
    compare.write_directory("llama3.2", place)
    given = json.loads((place / "config.json").read_text()) | {"vocab_size": 257}
    (place / "config.json").write_text(json.dumps(given))
    save_file(
        {name: compare.values(name, shape) for name, shape in compare.shapes(given).items()},
        place / "model.safetensors",
    )
    data = {"source": "text", "path": str(tmp_path / "texts"), "tokenizer": "bytes", "sequence_length": 16}
    cfg = config(place, {}, data=data, output=str(tmp_path), optimizer={"learning_rate": 1e-30, "weight_decay": 0.0})
    assert cfg.model.rope.scaling == "llama3"
    result = run(cfg, jax.devices()[:1])
    np.testing.assert_allclose(
        result.state.params["embedding"]["weight"], compare.values("model.embed_tokens.weight", (257, 32)), rtol=1e-6
    )
    place.rename(tmp_path / "gone")
    export_model(tmp_path / "x", tmp_path / "out")
    assert decoder_fields(str(tmp_path / "out")) == fields_of(given)


@pytest.mark.exhaustive
def test_weights_are_encoded_on_the_way(directories: Path) -> None:
    """Each layer as it would be among all, and the vectors as they are."""
    place = directories / "llama3"
    built = program(config(place, {"fsdp": 2, "tensor": 2}, precision={"parameters": "int8"}), jax.devices()[:4])
    params = read_base(built)
    there = load_file(place / "model.safetensors")
    q = params["blocks"]["mlp"]["up"]["weight"]
    whole = np.stack([there[f"model.layers.{layer}.mlp.up_proj.weight"].T for layer in range(2)])
    assert q.codes.dtype == np.int8
    np.testing.assert_array_equal(q.codes, quantize(jnp.asarray(whole), "int8", q.block_size, q.axis).codes)
    np.testing.assert_array_equal(params["norm"]["scale"], there["model.norm.weight"])
