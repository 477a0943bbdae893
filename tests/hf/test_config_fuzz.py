"""Random config.json files: what transformers computes, or refused."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from jaxmem import models
from jaxmem.config import Decoder
from jaxmem.config.hf_modules import Fused
from jaxmem.config.hf_values import UnsupportedError
from jaxmem.config.hugging_face import config_json, family_of, fields_of
from jaxmem.hf.names import decoder_weights, tensor_shapes
from jaxmem.hf.tensors import OutputTensor, fuse_tensors
from jaxmem.models.rope import frequencies
from tests.hf.config_fuzz import digest

CASES = json.loads((Path(__file__).parent / "data" / "config_fuzz.json").read_text())


def shapes_of(model: Decoder, fused: Mapping[str, Fused]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a file of the model, by name."""
    network = nnx.eval_shape(lambda: models.build(model, nnx.Rngs(0)))
    shapes = tensor_shapes(decoder_weights(nnx.to_pure_dict(nnx.state(network))))
    tensors = [OutputTensor(name, np.dtype(np.float32), shape, np.array) for name, shape in shapes.items()]
    return {one.name: one.shape for one in fuse_tensors(tensors, fused)}


@pytest.mark.exhaustive
def test_a_random_config_is_refused_or_computes_what_transformers_does():
    accepted, shapes = 0, {}
    for case in CASES:
        settings, facts = case["config"], case["facts"]
        try:
            fields = fields_of(settings)
        except UnsupportedError:
            continue
        if facts is None:  # transformers cannot make it
            continue
        accepted += 1
        model = Decoder.model_validate(fields)
        usual = {name: Decoder.model_fields[name].default for name in ("rope", "norm_epsilon", "window", "layer_types")}
        fused = family_of(settings).fused
        key = model.model_copy(update=usual | {"sliding_rope": None}), bool(fused)
        if key not in shapes:
            shapes[key] = digest(shapes_of(model, fused))
        assert shapes[key] == facts["weights"], settings
        for (kind, wanted), scale in zip(facts["frequencies"].items(), facts["factor"], strict=True):
            rope = model.ropes[-1 if kind.startswith("sliding") else 0]
            radians, factor = frequencies(rope, model.head_dim)
            np.testing.assert_allclose(radians, wanted, rtol=1e-5, err_msg=str(settings))
            assert abs(factor - scale) < 1e-6, settings
        assert model.norm_epsilon == facts["epsilon"], settings
        assert facts["windows"] == list(model.windows), settings
        assert facts["activation"].startswith({"silu": "SiLU", "gelu_tanh": "GELUTanh"}[model.activation]), settings
        assert facts["soft_caps"] == [model.attention_soft_cap, model.logit_soft_cap], settings
        assert abs(facts["scale"] - (model.query_pre_attn_scalar or model.head_dim) ** -0.5) < 1e-6, settings
        assert facts["heads"] == model.heads // model.kv_heads, settings
        assert fields_of(config_json(model, length=32)) == fields, settings
    assert accepted > len(CASES) // 4
