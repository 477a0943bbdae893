"""Presets have the published shapes: their parameter counts are the published ones, to the last weight."""

import pytest

from jaxmem.config import Config, Decoder, Train, load_config
from jaxmem.config.devices import for_devices
from jaxmem.config.presets import PRESETS
from jaxmem.step.execution import ExecutionSpec
from jaxmem.step.model import ModelSpec

PUBLISHED = {
    "60m": 58_073_600,
    "130m": 134_105_856,
    "350m": 367_969_280,
    "1b": 1_339_082_752,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama3-8b": 8_030_261_248,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    # The text models of 4b to 27b: without the image encoder and its projection.
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 4_300_079_472 - 416_866_032 - 1152 * 2561,
    "gemma3-12b": 12_187_325_040 - 416_866_032 - 1152 * 3841,
    "gemma3-27b": 27_432_406_640 - 416_866_032 - 1152 * 5377,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "qwen1.5-moe": 14_315_784_192,
    "deepseek-v2-lite": 15_706_484_224,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-14b": 14_768_307_200,
    "phi4-mini": 3_836_021_760,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "phi3-mini": 3_821_079_552,
    "phi4": 14_659_507_200,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
}


def preset(name: str) -> Decoder:
    model = load_config({"name": "x", "model": {"preset": name}, "train": {"steps": 1}}).model
    assert isinstance(model, Decoder)
    return model


def spec(model: Decoder) -> ModelSpec:
    cfg = Config(name="x", model=model, train=Train(steps=1))
    return ModelSpec(cfg, ExecutionSpec(cfg, "cpu"))


def test_every_preset_but_tiny_has_a_published_count():
    assert PUBLISHED.keys() == PRESETS.keys() - {"tiny"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_count(name):
    assert spec(preset(name)).parameter_count == PUBLISHED[name]


@pytest.mark.exhaustive
def test_active_parameters():
    """Mixtral has 12.9 B and 39 B, Qwen3 3.3 B and 22 B, Qwen1.5 2.7 B, gpt-oss 3.6 B and 5.1 B, as their publishers
    round them. The counts of gpt-oss (3.61 and 5.13 B) and DeepSeek-V2-Lite (2.4 B) do not include the embedding."""
    names = ("mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b", "qwen3-235b-a22b", "qwen1.5-moe")
    found = [spec(preset(name)).active_count for name in names]
    assert found == [12_879_925_248, 39_161_468_928, 3_353_032_704, 22_190_763_520, 2_689_173_504]
    for name, published in (("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13), ("deepseek-v2-lite", 2.45)):
        model = preset(name)
        active = spec(model).active_count - model.vocab * model.embed
        assert round(active / 1e9, 2) == published


def test_count_by_hand():
    shape = {"vocab": 11, "layers": 2, "embed": 6, "mlp": 5, "heads": 2, "kv_heads": 1, "head_dim": 4}
    # q 6x8, k and v 6x4, o 8x6, three of 6x5, two norms of 6; a final norm of 6; two tables of 11x6
    plain = 2 * (48 + 24 + 24 + 48 + 90 + 12) + 6 + 132
    assert spec(Decoder(**shape)).parameter_count == plain
    assert spec(Decoder(**shape, tie_embeddings=True)).parameter_count == plain - 66
    assert spec(Decoder(**shape, attention_bias=True)).parameter_count == plain + 2 * (8 + 4 + 4)
    assert spec(Decoder(**shape, qk_norm=True)).parameter_count == plain + 2 * (4 + 4)
    assert spec(Decoder(**shape, qk_norm="all_heads", norms="both")).parameter_count == plain + 2 * (8 + 4 + 2 * 6)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("llama2-7b", "rope.theta", 10_000.0),
        ("llama3-8b", "rope.theta", 500_000.0),
        ("llama3-8b", "rope.scaling", "none"),
        ("llama3.2-1b", "rope.scaling", "llama3"),
        ("llama3.2-1b", "rope.factor", 32.0),
        ("llama3.2-1b", "rope.original_length", 8192),
        ("llama3-405b", "rope.factor", 8.0),
        ("mistral-7b", "window", 4096),
        ("mistral-7b", "norm_epsilon", 1e-5),
        ("qwen2.5-7b", "rope.theta", 1_000_000.0),
        ("qwen2.5-7b", "norm_epsilon", 1e-6),
        ("qwen3-8b", "qk_norm", True),
        ("qwen3-8b", "attention_bias", False),
        ("1b", "norm_epsilon", 1e-6),
    ],
)
def test_what_the_count_does_not_show(name, field, value):
    found = preset(name)
    for part in field.split("."):
        found = getattr(found, part)
    assert found == value


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("fsdp", [1, 2, 4, 8])
def test_tiny_divides(fsdp, tensor):
    cfg = load_config({"name": "x", "model": {"preset": "tiny"}, "train": {"steps": 1}, "mesh": {"fsdp": fsdp}})
    mesh = for_devices(
        cfg.model_copy(update={"mesh": cfg.mesh.model_copy(update={"tensor": tensor})}), fsdp * tensor
    ).mesh
    assert (mesh.fsdp, mesh.tensor) == (fsdp, tensor)
