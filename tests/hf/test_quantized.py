"""Weights that other tools quantized: the values and the logits of those tools; read without decoding for QLoRA."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from jaxmem import hf
from jaxmem.config import Decoder, load_config
from jaxmem.config.hf_modules import MODULES
from jaxmem.config.hf_quantized import HfScheme, scheme_of
from jaxmem.config.hf_values import UnsupportedError
from jaxmem.config.hugging_face import config_json, decoder_fields, fields_of
from jaxmem.errors import UserError
from jaxmem.hf.peft import read_base
from jaxmem.hf.quantized import Bitsandbytes4, EvenlySpaced
from jaxmem.inference.load import initial_state
from jaxmem.kernels.codes import NF4, dynamic_code
from jaxmem.quant import QTensor
from jaxmem.step.programs import program
from tests.hf import quantized_reference as reference
from tests.support.tiers import cases

RECORDED = dict(np.load(Path(__file__).parent / "data" / "quantized.npz"))
# Format, block size, and the bits of a weight of q (64 inputs, 32 outputs); None: decoded when it is read.
STORED = {
    "nf4 double": ("nf4", 64, 4 + 8 / 64 + 32 / 64 + 32 / 2048),
    "llm.int8": ("int8", 64, 8.5),
    "gptq": ("int4", 32, 5),
    "gptq act-order": None,
    "packed": ("uint4", 32, 6),
}


def written(place: Path, name: str, tensors: dict | None = None, config: dict | None = None) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    found = reference.tensors(name, RECORDED) if tensors is None else tensors
    save_file({key: np.ascontiguousarray(x) for key, x in found.items()}, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps(config or reference.config(name)))
    return place


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("quantized")
    return {name: written(root / name.replace(" ", "-"), name) for name in reference.CASES}


def built(place: Path, devices: int = 1, **sections):
    raw = {"name": "x", "model": {"hf": str(place)}, "adapter": {"kind": "qlora"}, "train": {"steps": 2}}
    raw |= {"data": {"sequence_length": 8}, "batch": {"global_size": 2}, **sections}
    return program(load_config(raw), jax.devices()[:devices])


def recorded(name: str, path: tuple[str, ...], layer: int) -> np.ndarray:
    return RECORDED[f"{name}/values/{MODULES['.'.join(path[:-1])].format(layer)}.weight"]


@pytest.mark.parametrize("name", cases(reference.CASES, "nf4 double", "gptq asymmetric", "llm.int8", "packed"))
def test_values_and_logits_are_those_of_the_tool(name, places):
    model = hf.load(places[name])
    for path, x in flatten_dict(nnx.to_pure_dict(nnx.state(model))).items():
        if reference.is_quantized(MODULES[".".join(path[:-1])]):
            for layer, w in enumerate(np.asarray(x)):
                atol = 0 if name in ("nf4 double", "fp4") else 2e-7
                np.testing.assert_allclose(reference.sample(w.T), recorded(name, path, layer), rtol=0, atol=atol)
    logits = jax.jit(model)(jnp.asarray(reference.IDS, jnp.int32))
    np.testing.assert_allclose(logits, RECORDED[f"{name}/logits"], atol=2e-5)


@pytest.mark.parametrize("name", cases(STORED, "nf4 double", "gptq act-order"))
def test_qlora_stores_the_codes_of_the_file(name, places):
    params = flatten_dict(read_base(built(places[name])))
    embedding, q = params["embedding", "weight"], params["blocks", "attention", "q", "weight"]
    if STORED[name] is None:
        assert q.format == "nf4"
        return
    assert embedding.dtype == np.float32, "others are stored as in the file"
    assert (q.format, q.block_size, q.nbytes * 8 / np.prod(q.shape)) == STORED[name]
    for path, x in params.items():
        # Rows of 96 and 32 are not multiples of blocks of 64 of bitsandbytes; such a matrix is quantized again.
        if isinstance(x, QTensor) and (q.format not in ("nf4", "fp4") or x.size == 64):
            for layer, w in enumerate(np.asarray(x.dequantize(jnp.float32))):
                np.testing.assert_allclose(reference.sample(w.T), recorded(name, path, layer), rtol=0, atol=2e-7)


@pytest.mark.exhaustive
def test_qlora_trains_from_the_logits_of_the_decoded_weights(places):
    adapter, data = {"kind": "qlora", "rank": 2}, {"sequence_length": 7}
    trained = built(places["packed"], 2, adapter=adapter, data=data, mesh={"fsdp": 2})
    ids = np.int32(reference.IDS)[None]  # [micro-batches, batch, time]
    ones = np.ones(ids[..., 1:].shape, np.int32)
    positions = ones * np.arange(7, dtype=np.int32)
    batch = {"inputs": ids[..., :-1], "targets": ids[..., 1:], "segment_ids": ones, "positions": positions}
    batch = trained.place({**batch, "mask": np.float32(ones)})
    state, metrics = trained.lower_step().compile()(initial_state(trained), batch)
    logits = RECORDED["packed/logits"][:, :-1]
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, reference.IDS[:, 1:, None], -1)[..., 0]
    assert metrics["loss"] == pytest.approx(losses.mean(), abs=1e-5)
    assert np.any(np.asarray(state.params["blocks"]["attention"]["q"]["lora"]["b"]))


# ------------------------------------------------------------------ settings


def test_modules_of_a_file_that_are_not_quantized_are_stored_as_they_are():
    config = reference.config("nf4 double")
    quantization = {**config["quantization_config"], "llm_int8_skip_modules": ["lm_head", "mlp.down_proj", "layers.0"]}
    found = fields_of({**config, "quantization_config": quantization})["quantization"]
    assert set(found["layers"]) == {
        f"blocks.{one}" for one in ("attention.q", "attention.k", "attention.v", "attention.o", "mlp.gate", "mlp.up")
    }
    config = reference.config("packed")
    quantization = {**config["quantization_config"], "ignore": ["lm_head", "re:.*self_attn.*"]}
    found = fields_of({**config, "quantization_config": quantization})["quantization"]
    assert set(found["layers"]) == {"blocks.mlp.gate", "blocks.mlp.up", "blocks.mlp.down"}


def test_a_damaged_config_of_a_quantized_model_is_refused_in_one_line(compare):
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    damaged = {**compare.config("deepseek-v2"), "n_shared_experts": 10**9, "quantization_config": quantization}
    with pytest.raises(UnsupportedError, match=r"^experts\.shared=\d+ must be at most 2147483647$"):
        fields_of(damaged)


def test_a_model_with_images_has_the_dtype_of_its_complete_settings(compare):
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    text = {key: value for key, value in compare.config("gemma3").items() if key not in ("dtype", "torch_dtype")}
    settings = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "dtype": "bfloat16"}
    assert fields_of({**settings, "quantization_config": quantization})["quantization"]["others"] == "bfloat16"


def test_full_fine_tuning_and_another_format_decode(places):
    assert built(places["fp4"], adapter={"kind": "none"}).cfg.base_quantization is None
    assert built(places["fp4"], adapter={"kind": "qlora", "base": "int8"}).cfg.base_quantization is None
    one = built(places["fp4"], adapter={"kind": "qlora", "base": "fp4"})
    params = flatten_dict(one.spec.state.params)
    assert params["embedding", "weight"].format == params["blocks", "attention", "q", "weight"].format == "fp4"


def test_an_exported_model_is_not_quantized(places):
    config = reference.config("gptq")
    model = Decoder(**decoder_fields(str(places["gptq"])))
    assert "quantization_config" not in config_json(model, config)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gptq", {"quant_method": "hqq"}, "quant_method hqq .*bitsandbytes, gptq, awq"),
        ("gptq", {"bits": 3}, "quantization_config: bits"),
        ("gptq", {"group_size": 0}, "group_size"),
        ("gptq", {"dynamic": {"-:.*": {}}}, "dynamic is not supported"),
        ("awq", {"version": "gemv"}, "version"),
        ("nf4 double", {"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type"),
        ("packed", {"format": "nvfp4-pack-quantized"}, "format"),
        ("packed", {"config_groups": {}}, "config_groups"),
        ("packed", {"ignore": ["re:("]}, "quantization_config.ignore: invalid regex"),
    ],
)
def test_unknown_settings_are_refused(name, changes, message, tmp_path):
    config = reference.config(name)
    config["quantization_config"] = {**config["quantization_config"], **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        decoder_fields(str(tmp_path))


Q = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("name", "tensor", "change", "message"),
    [
        ("gptq", "scales", None, "q_proj.scales is missing"),
        ("gptq", "qweight", None, "missing tensors: .*q_proj.weight"),
        ("gptq", "scales", lambda x: x[:1], r"q_proj.scales is F16 \[1, 32\], but config.json requires .*\[2, 32\]"),
        ("gptq", "qzeros", lambda x: x + 1, "zero points are not symmetric"),
        ("gptq", "g_idx", lambda x: x + 5, "g_idx contains a group that does not exist"),
        ("gptq", "g_idx", lambda x: x[::-1], "g_idx is not in order"),
        ("gptq", "scales", lambda x: x * np.float16(np.nan), "q_proj.weight contains NaN"),
        ("gptq act-order", "g_idx", None, "g_idx is missing"),
        ("gptq act-order", "g_idx", lambda x: x - 1, "a group that does not exist"),
        ("awq", "qweight", lambda x: x.astype(np.int64), "qweight is I64"),
        ("nf4 double", "weight", lambda x: x[:-1], "q_proj.weight is U8"),
        ("nf4 double", "weight.quant_map", lambda x: x * 2, "quant_map has other values"),
        ("nf4 double", "weight.quant_state.bitsandbytes__nf4", lambda x: x[:-1], "is missing or damaged"),
        ("nf4 double", "weight.quant_state.bitsandbytes__nf4", None, "is missing or damaged"),
        ("llm.int8", "SCB", lambda x: x.astype(np.float64), "SCB is F64"),
        ("llm.int8", "weight_format", lambda x: x + np.uint8(1), "weight_format"),
        ("packed", "weight_zero_point", lambda x: x[:, :1], "weight_zero_point is I32"),
    ],
)
def test_tensors_that_do_not_match_the_config_are_refused(name, tensor, change, message, tmp_path):
    tensors = reference.tensors(name, RECORDED)
    found = tensors.pop(Q + tensor)
    if change is not None:
        tensors[Q + tensor] = change(found)
    with pytest.raises(UserError, match=message) as refused:
        hf.load(written(tmp_path, name, tensors))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
def test_zero_points_of_0_borrow_from_the_next_of_their_word(form: str, bits: int) -> None:
    """GPTQModel subtracts 1 at each code of a word of 32 bits, and adds it again when it reads the file."""
    words = 32 // bits
    draw = np.random.default_rng(0)
    codes = draw.integers(0, 2**bits, (32, 2 * words)).astype(np.uint32)  # [in, out]
    zeros = np.array([0, 5, 7, 0, 0, 2**bits - 1, 8, 0] * 2, np.uint32)[: 2 * words]
    shifts = bits * np.arange(words, dtype=np.uint32)
    packed_zeros = (zeros.reshape(1, 2, words) << shifts).sum(-1, dtype=np.uint32)
    if form == "gptq":
        packed_zeros -= np.uint32({4: 0x11111111, 8: 0x01010101}[bits])
    quantization = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": False, "checkpoint_format": form}
    scheme = scheme_of({"quantization_config": quantization})
    assert scheme is not None
    parts = {
        "qweight": (codes.reshape(-1, words, 2 * words) << shifts[:, None]).sum(1, dtype=np.uint32).view(np.int32),
        "scales": np.full((1, 2 * words), 0.5, np.float32),
        "qzeros": packed_zeros.view(np.int32),
    }
    weight = EvenlySpaced(scheme, 2 * words, 32, 32).weight(parts).dequantize(jnp.float32)
    np.testing.assert_allclose(weight, (codes.astype(np.float32) - zeros) / 2, atol=1e-4)


def test_groups_of_scales_continue_in_the_next_row():
    """Several groups of a bitsandbytes file, by the definition: scale = dynamic code * scale of its group + mean."""
    rows, columns, block, group = 6, 640, 64, 8  # 60 blocks
    draw = np.random.default_rng(0)
    codes = draw.integers(0, 16, (rows, columns))
    scales, nested = draw.integers(0, 256, 60), draw.uniform(0.5, 1.0, 8).astype(np.float32)
    parts = {
        "weight": (codes.reshape(-1, 2) @ [16, 1]).astype(np.uint8)[:, None],
        "weight.absmax": scales.astype(np.uint8),
        "weight.nested_absmax": nested,
        "mean": np.full((1, 1), 0.25, np.float32),
    }
    scheme = HfScheme("bitsandbytes", 4, listed="nf4", scale_group=group)
    found = Bitsandbytes4(scheme, rows, columns, block).weight(parts).dequantize(jnp.float32)
    absmax = np.asarray(dynamic_code(8, signed=True), np.float32)[scales] * nested[np.arange(60) // group] + 0.25
    expected = np.asarray(NF4, np.float32)[codes] * absmax.repeat(block).reshape(rows, columns)
    np.testing.assert_allclose(found, expected.T, rtol=1e-6, atol=1e-6)
