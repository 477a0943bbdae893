"""Random settings of every family's config.json: the logits of transformers, or refused."""

import json
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxmem import hf
from jaxmem.config import Decoder
from jaxmem.config.check import decoder_errors
from jaxmem.config.hf_values import UnsupportedError
from jaxmem.config.hugging_face import family_of, fields_of
from tests.hf.logits_fuzz import BASES, SHOWN
from tests.hf.test_config_fuzz import shapes_of
from tests.hf.transformers_reference import ROWS, config, values

CASES = json.loads((Path(__file__).parent / "data" / "logits_fuzz.json").read_text())


@pytest.mark.exhaustive
@pytest.mark.parametrize("base", BASES)
def test_a_random_config_is_refused_or_has_the_logits_of_transformers(base, tmp_path):
    outcomes = Counter()
    for number, case in enumerate(case for case in CASES if case["base"] == base and case["logits"] is not None):
        settings = {**config(base), **case["changed"]}
        try:
            model = Decoder.model_validate(fields_of(settings))
        except UnsupportedError:
            outcomes["refused"] += 1
            continue
        if [*decoder_errors(model)]:
            outcomes["refused"] += 1
            continue
        (place := tmp_path / str(number)).mkdir()
        (place / "config.json").write_text(json.dumps(settings))
        shapes = shapes_of(model, family_of(settings).fused)
        save_file({name: values(name, shape) for name, shape in shapes.items()}, place / "model.safetensors")
        found = jax.jit(hf.load(place))(jnp.asarray(ROWS[:1], jnp.int32))[0, -1, :SHOWN]
        np.testing.assert_allclose(found, case["logits"], atol=2e-4, err_msg=str(case["changed"]))
        outcomes["equal"] += 1
    assert min(outcomes["equal"], outcomes["refused"]) > 0
