"""What may change between a checkpoint and the run that goes on from it."""

import json
from typing import Any

import pytest

from jaxmem.checkpoint.same_run import CHANGEABLE_KEYS, FIXED_KEYS, changed, refuse_changes
from jaxmem.config import Config
from jaxmem.errors import UserError, as_yaml

BASE: dict[str, Any] = {
    "name": "x",
    "model": {"family": "convnet"},
    "data": {"mixture": [{"source": "text", "path": "a"}, {"source": "jsonl", "path": "b"}]},
    "train": {"steps": 9},
}


def config(**changes: Any) -> dict[str, Any]:
    """The base with `section.field` replaced, resolved."""
    raw = json.loads(json.dumps(BASE))
    for field, value in changes.items():
        *sections, name = field.split("__")
        place = raw
        for section in sections:
            place = place[int(section)] if isinstance(place, list) else place.setdefault(section, {})
        place[name] = value
    return Config.model_validate(raw).model_dump(mode="python")


OLD = json.loads(json.dumps(config()))  # as it comes from a checkpoint

BINDING = {
    "seed": 1,
    "objective__name": "classify",
    "model__stages": [8, 16],
    "model__blocks": 3,
    "data__sequence_length": 8,
    "data__shuffle": False,
    "data__held_out": 0.1,
    "data__mixture__1__weight": 2.0,
    "batch__global_size": 16,
    "precision__parameters": "bfloat16",
    "precision__master": "float32",
    "optimizer__name": "adam",
}
HARMLESS = {
    "name": "y",
    "output": "elsewhere",
    "objective__label_smoothing": 0.1,
    "model__dropout": 0.1,
    "data__mixture__0__path": "moved/a",
    "data__tokenizer": "moved/t.json",
    "data__epochs": 3,
    "batch__accumulate": 2,
    "mesh__fsdp": 4,
    "mesh__stage": 2,
    "pipeline__rounds": 2,
    "zero": 1,
    "precision__compute": "bfloat16",
    "memory__remat": "full",
    "memory__attention": "reference",
    "optimizer__learning_rate": 1.0,
    "optimizer__warmup": 5,
    "train__steps": 100,
    "train__log_every": 1,
    "train__trackers": ["wandb"],
    "checkpoint__keep": 1,
}


@pytest.mark.parametrize("field", BINDING)
def test_binding(field: str) -> None:
    [line] = changed(OLD, config(**{field: BINDING[field]}))
    assert line.startswith(f"{field.replace('__', '.')} was ")
    assert line.endswith(f", is {as_yaml(BINDING[field])}")


@pytest.mark.parametrize("field", HARMLESS)
def test_harmless(field: str) -> None:
    new = config(**{field: HARMLESS[field]})
    assert new != config()
    assert changed(OLD, new) == []


def test_a_source_more_and_another_family() -> None:
    assert "data.mixture.2.source was null, is digits" in changed(
        OLD, config(data__mixture=[*BASE["data"]["mixture"], {"source": "digits"}])
    )
    assert "model.family was convnet, is mlp" in changed(OLD, config(model={"family": "mlp"}))


def test_the_list_of_quantized_layers_may_change_but_not_their_format() -> None:
    """Another version may list the modules of the same config.json in another order."""
    sizes = {"vocab": 8, "layers": 1, "embed": 8, "mlp": 8, "heads": 1, "kv_heads": 1, "head_dim": 8}
    layers = ["blocks.attention.q", "blocks.mlp.gate", "blocks.mlp.shared_gate"]

    def decoder(**quantization: Any) -> dict[str, Any]:
        return config(model={**sizes, "quantization": {"format": "nf4", "layers": layers, **quantization}})

    assert changed(decoder(), decoder(layers=layers[1::-1])) == []
    assert changed(decoder(), decoder(format="fp4")) == ["model.quantization.format was nf4, is fp4"]


def test_the_order_of_patterns_is_fixed() -> None:
    """The first pattern that matches applies."""
    alphas = {"*.q": 8.0, "blocks.*": 4.0}
    before = config(adapter__alpha_pattern=alphas)
    assert changed(json.loads(json.dumps(before)), config(adapter__alpha_pattern={**alphas})) == []
    [line] = changed(before, config(adapter__alpha_pattern={"blocks.*": 4.0, "*.q": 8.0}))
    assert line == "adapter.alpha_pattern was {*.q: 8, blocks.*: 4}, is {blocks.*: 4, *.q: 8}"


def test_fields_of_the_table_exist() -> None:
    fields = set()

    def walk(value: Any, prefix: str) -> None:
        fields.add(prefix)
        if isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{prefix}.{key}" if prefix else key)

    walk(OLD, "")
    assert set(FIXED_KEYS) <= fields
    of_decoders = {"model.hf", "model.quantization.layers"}
    assert set(CHANGEABLE_KEYS) - {"data.mixture.*.path"} - of_decoders <= fields


def test_refusal_says_what_to_do() -> None:
    refuse_changes(OLD, config(mesh__fsdp=2), "runs/x", ("a", "a"))
    with pytest.raises(UserError) as caught:
        refuse_changes(OLD, config(seed=3, batch__global_size=32), "runs/x")
    text = str(caught.value)
    assert text.startswith("cannot resume from runs/x: seed was 0, is 3, batch.global_size was 8, is 32; ")
    assert "checkpoint.resume=never" in text
    with pytest.raises(UserError, match="the data files or the tokenizer have changed"):
        refuse_changes(OLD, config(), "runs/x", ("a", "b"))


@pytest.mark.parametrize(
    ("field", "other", "refused"),
    [
        ("optimizer.clip", 0.5, None),
        ("optimizer.clip_by", "weight", "previous"),
        ("optimizer.weight_decay", 0.2, 0.0),
        ("optimizer.momentum", 0.0, 0.9),
        ("optimizer.project_embeddings", False, True),
        ("precision.loss_scale", "none", "dynamic"),
    ],
)
def test_settings_with_which_the_optimizer_state_has_other_arrays(field: str, other: object, refused: object) -> None:
    key = field.replace(".", "__")
    refuse_changes(OLD, config(**{key: other}), "runs/x")
    with pytest.raises(UserError, match=rf"{field} was .*, is {as_yaml(refused)}; undo"):
        refuse_changes(OLD, config(**{key: refused}), "runs/x")
