"""The schema that editors complete from describes what `load_config` accepts, short forms included."""

import json

import pytest

from jaxmem.config import Decoder
from jaxmem.config.networks import FAMILIES
from jaxmem.config.presets import PRESETS
from jaxmem.config.schema import json_schema
from jaxmem.config.sections import Config, Objective


@pytest.fixture(scope="module")
def schema():
    return json.loads(json.dumps(json_schema()))


def test_every_key_is_described_and_no_other_allowed(schema):
    assert schema["properties"].keys() == Config.model_fields.keys()
    assert all(section["additionalProperties"] is False for section in [schema, *schema["$defs"].values()])


def test_objective_may_be_a_name(schema):
    section, name = schema["properties"]["objective"]["anyOf"]
    assert section == {"$ref": "#/$defs/Objective"}
    assert name["enum"] == schema["$defs"]["Objective"]["properties"]["name"]["enum"]
    assert Objective().name in name["enum"]


def test_a_preset_stands_for_the_decoders_fields(schema):
    decoder = schema["$defs"]["Decoder"]
    assert decoder["properties"]["preset"]["enum"] == [*PRESETS, None]
    assert "required" not in decoder
    with_directory, with_preset, without = decoder["anyOf"]
    assert with_directory["required"] == ["hf"]
    assert with_preset == {"required": ["preset"], "properties": {"preset": {"enum": list(PRESETS)}}}
    assert without["required"] == [name for name, field in Decoder.model_fields.items() if field.is_required()]


def test_only_a_decoder_need_not_name_its_family(schema):
    assert [
        name for name in FAMILIES if "family" not in schema["$defs"][FAMILIES[name].__name__].get("required", [])
    ] == ["decoder"]


def test_every_key_has_a_description_and_the_values_that_it_requires(schema):
    sections = {"Config": schema, **schema["$defs"]}
    keys = {
        f"{name}.{key}": value for name, section in sections.items() for key, value in section["properties"].items()
    }
    is_section = {key for key, value in keys.items() if "$ref" in str(value) and "description" not in value}
    assert all(len(value["description"]) > 8 for key, value in keys.items() if key not in is_section)
    assert is_section <= {*(f"Config.{name}" for name in Config.model_fields), "Decoder.rope"}
    assert keys["Objective.beta"]["description"].endswith("only with objective.name: dpo")
    assert keys["Adapter.virtual_tokens"]["description"].endswith("only with adapter.kind: prompt")
    assert keys["Optimizer.similarity"]["description"].endswith("only with optimizer.name: qgalore")
