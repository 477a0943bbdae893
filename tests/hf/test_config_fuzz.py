"""Random config.json files: what transformers computes, or refused."""

import json
from pathlib import Path

import numpy as np
from flax import nnx

from jaxmem import models
from jaxmem.config import Decoder
from jaxmem.config.hf_values import UnsupportedError
from jaxmem.config.hugging_face import config_json, fields_of
from jaxmem.hf.names import decoder_weights, tensor_shapes
from jaxmem.models.rope import frequencies
from tests.hf.config_fuzz import digest

CASES = json.loads((Path(__file__).parent / "data" / "config_fuzz.json").read_text())


def shapes_of(model: Decoder) -> dict[str, tuple[int, ...]]:
    network = nnx.eval_shape(lambda: models.build(model, nnx.Rngs(0)))
    return tensor_shapes(decoder_weights(nnx.to_pure_dict(nnx.state(network))))


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
        key = model.model_copy(
            update={"rope": Decoder.model_fields["rope"].default, "norm_epsilon": 1.0, "window": None}
        )
        if key not in shapes:
            shapes[key] = digest(shapes_of(model))
        assert shapes[key] == facts["weights"], settings
        radians, factor = frequencies(model.rope, model.head_dim)
        np.testing.assert_allclose(radians, facts["frequencies"], rtol=1e-5, err_msg=str(settings))
        assert factor == np.float64(facts["factor"]).round(12) or abs(factor - facts["factor"]) < 1e-6, settings
        assert model.norm_epsilon == facts["epsilon"], settings
        assert facts["windows"] == [model.window] * model.layers, settings
        assert facts["activation"].startswith("SiLU"), settings
        assert facts["heads"] == model.heads // model.kv_heads, settings
        assert fields_of(config_json(model, length=32)) == fields, settings
    assert accepted > len(CASES) // 4
