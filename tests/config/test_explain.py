"""Each mistake is one line: the full key, what was given, what is allowed, the nearest valid name."""

import re
from pathlib import Path

import pytest

from jaxmem.config import Config, Decoder, load_config
from jaxmem.config.explain import ELSEWHERE, UNNEEDED
from jaxmem.errors import UserError

TINY = {"name": "x", "model": {"preset": "tiny"}, "train": {"steps": 10}}

LACKING = "model.vocab, model.mlp, model.heads, model.kv_heads, model.head_dim"


def lines(*overrides: str) -> list[str]:
    with pytest.raises(UserError) as error:
        load_config(TINY, overrides)
    return str(error.value).split("\n")


@pytest.mark.parametrize(
    ("override", "given", "words"),
    [
        ("mesh.fdsp=8", "mesh.fdsp", "unknown mesh.fsdp"),
        ("fsdp=8", "fsdp", "unknown mesh.fsdp"),
        ("layers=8", "layers", "unknown model.layers"),
        ("model.layer=8", "model.layer", "unknown model.layers"),
        ("model.rope.teta=8", "model.rope.teta", "unknown model.rope.theta"),
        ("optimiser.name=adam", "optimiser", "unknown optimizer"),
        ("batch.qqq=1", "batch.qqq", "unknown batch.accumulate batch.global_size"),
        ("data={mixture: [{pth: a}]}", "data.mixture[0].pth", "unknown data.mixture[0].path"),
        ("optimizer.name=adamww", "optimizer.name=adamww", "adamw qgalore did"),
        ("optimizer.name=3", "optimizer.name=3", "adamw qgalore"),
        ("objective=clasify", "objective.name=clasify", "next_token classify did"),
        ("memory.update=3", "memory.update=3", "after during"),
        ("memory.loss_chunk=x", "memory.loss_chunk=x", "auto whole number"),
        ("memory.loss_chunk=0", "memory.loss_chunk=0", "auto least 1"),
        ("memory.remat=sqr", "memory.remat=sqr", "none auto every_K slots_K mapping did sqrt"),
        ("memory.remat=every_0", "memory.remat=every_0", "none auto every_K slots_K mapping"),
        ("memory.remat={save: [q], sav: 1}", "memory.remat.sav", "unknown memory.remat.save"),
        ("memory.remat={save: 3}", "memory.remat.save=3", "list"),
        ("train.trackers=[tensorbord]", "train.trackers[0]=tensorbord", "tensorboard wandb did"),
        ("train.trackers=wandb", "train.trackers=wandb", "list"),
        ("model={family: decodr}", "model.family=decodr", "decoder vit convnet mlp did"),
        ("model={family: [1]}", "model.family=[1]", "decoder vit convnet mlp"),
        ("model.preset=tny", "model.preset=tny", "did tiny"),
        ("model.preset=[1]", "model.preset=[1]", "130m 1b llama3-8b"),
        ("model={family: vit, preset: tiny}", "model.preset=tiny", "null"),
        ("model={family: vit, layers: 0}", "model.layers=0", "least 1"),
        ("model.layers=1.5", "model.layers=1.5", "whole number"),
        ("model=tiny", "model=tiny", "mapping"),
        ("mesh=8", "mesh=8", "mapping"),
        ("mesh.fsdp=true", "mesh.fsdp=true", "whole number"),
        ("zero=4", "zero=4", "most 3"),
        ("zero='3'", 'zero="3"', "whole number"),
        ("name=3", "name=3", "text"),
        ("name=null", "name=null", "text"),
        ("data.packing=no", "data.packing=no", "true false"),
        ("data.held_out=1", "data.held_out=1", "below 1"),
        ("optimizer.learning_rate=0", "optimizer.learning_rate=0", "above 0"),
        ("optimizer.clip=.inf", "optimizer.clip=inf", "finite number"),
        ("train.evaluate_every=0", "train.evaluate_every=0", "least 1"),
        ("train.profile=3", "train.profile=3", "list"),
        ("train.profile=[1, 2, 3]", "train.profile=[1, 2, 3]", "2 items"),
        ("train.profile=[1]", "train.profile[1]", "missing"),
        ("train.profile=[0, 1]", "train.profile[0]=0", "least 1"),
        ("model={family: convnet, stages: []}", "model.stages=[]", "at least 1 item"),
        ("adapter.targets={a: 0}", "adapter.targets.a=0", "least 1"),
        ("adapter.alpha_pattern={a: 0}", "adapter.alpha_pattern.a=0", "above 0"),
        ("train.steps=1e9", "train.steps=1e+09", "whole number"),
        ("memory.budget=80GB", "memory.budget=80GB", "number"),
        ("generate.tokens=1", "generate.tokens", "generate.kv_cache generate.prefill_chunk"),
        ("train.steps=" + "1" * 90 + ".5", "train.steps=1.111111111111111e+89", "whole number"),
    ],
)
def test_one_mistake_is_one_line(override, given, words):
    [found] = lines(override)
    assert re.match(re.escape(given) + r"(:| )", found)
    assert [word for word in words.split() if word not in found.removeprefix(given)] == []
    assert not re.search(r"\bNone|True|False|\(\?|\^", found), "Python values and regular expressions"


def test_what_is_missing():
    with pytest.raises(UserError) as error:
        load_config({"model": {"layers": 2, "embed": 8}})
    name, train, model = str(error.value).split("\n")
    assert name.startswith("name is missing")
    assert train.startswith("train is missing")
    assert "train.steps" in train
    assert model.startswith("model.preset is missing")
    assert model.endswith(LACKING)


def test_a_key_of_two_lines_is_one_line():
    with pytest.raises(UserError, match=r"^seed 2: unknown key; did you mean seed\?$"):
        load_config({**TINY, "seed\n2": 1})


def test_several_mistakes_are_as_many_lines():
    found = lines("mesh.fdsp=8", "optimizer.name=adamww", "model.layers=-1")
    assert {re.match(r"[\w.]+", line)[0] for line in found} == {"mesh.fdsp", "optimizer.name", "model.layers"}
    assert len(found) == 3


def test_names_of_other_tools_are_answered_with_the_key():
    for name, answer in ELSEWHERE.items():
        key = re.match(r"[\w.]+", answer)[0]
        section, _, field = key.partition(".")
        kind = Decoder if section == "model" else Config.model_fields[section].annotation
        assert not field or field in kind.model_fields
        assert lines(f"{name}=1") == [f"{name}: unknown key; use {answer}"]
        assert "." in name or any(key in line for line in lines(f"batch.{name}=1"))


def test_settings_of_other_tools_that_need_no_key():
    assert lines("compile=true") == ["compile: unknown key; remove it: every step is compiled"]
    for name, reason in UNNEEDED.items():
        assert lines(f"{name}=1") == [f"{name}: unknown key; remove it: {reason}"]


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("optimizer.name=paged_adamw_8bit", "did you mean adamw8bit?"),
        ("precision.compute=float8", "did you mean fp8?"),
        ("precision.parameters=float8", "did you mean fp8_e4m3?"),
        ("memory.remat=true", "did you mean full?"),
        ("memory.remat=false", "did you mean none?"),
        ("memory.remat=selective", "did you mean dots?"),
        ("optimizer=lion", "use optimizer.name=lion"),
        ("optimizer=adamw_8bit", "use optimizer.name=adamw8bit"),
        (
            "adapter.targets=all-linear",
            "use a list such as [blocks.attention.q], or [blocks.*] for all linear layers of the blocks",
        ),
        ("adapter=qlora", "use adapter.kind=qlora"),
    ],
)
def test_values_of_other_tools_and_of_sections(override, hint):
    assert lines(override)[0].endswith(f"; {hint}")


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("load_in_8bit=false", "remove it, since it is false"),
        ("load_in_4bit=false", "remove it, since it is false"),
        ("load_in_4bit=true", "use adapter.kind=qlora"),
        ("wandb_project=null", "remove it, since it is null"),
        ("early_stopping_patience=null", "remove it, since it is null"),
        ("adapter.use_rslora=false", "remove it, since it is false"),  # the default
        ("sample_packing=false", "use data.packing"),
        ("max_grad_norm=null", "use optimizer.clip"),
        ("data.pakcing=false", "did you mean data.packing?"),
    ],
)
def test_a_setting_that_is_switched_off_is_removed_unless_it_changes_the_default(override, hint):
    assert lines(override) == [f"{override.partition('=')[0]}: unknown key; {hint}"]


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("saves_per_epoch", "checkpoint.every, a number of updates"),
        ("save_strategy", "checkpoint.every, a number of updates"),
        ("evals_per_epoch", "train.evaluate_every, a number of updates"),
        ("eval_strategy", "train.evaluate_every, a number of updates"),
        ("datasets", "data.path, and data.source=chat for conversations"),
    ],
)
def test_settings_of_other_tools_in_other_units(name, unit):
    assert lines(f"{name}=1") == [f"{name}: unknown key; use {unit}"]


def test_the_keys_of_a_toml_file_are_explained(tmp_path):
    file = tmp_path / "titan.toml"
    file.write_text('[model]\nflavor = "8B"\n[optimizer]\nlr = 3e-4\n[parallelism]\ntensor_parallel_degree = 2\n')
    with pytest.raises(UserError) as error:
        load_config(file)
    text = str(error.value)
    assert "model.flavor: unknown key; use model.preset\n" in text
    assert "optimizer.lr: unknown key; use optimizer.learning_rate\n" in text
    assert "parallelism: unknown key; use mesh, such as" in text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name = \n", r"a\.toml: Invalid value \(at line 1"),
        ("x = " + "[" * 5000, r"a\.toml: nested deeper than 16"),
        ("name" + ".a" * 5000 + " = 1", r"a\.toml: nested deeper than 16"),
        (f"seed = {'1' * 5000}", r"a\.toml: Exceeds the limit"),
        ("# " + "x" * 300_000, r"a\.toml: larger than 256 KiB"),
    ],
)
def test_a_toml_file_that_cannot_be_read_is_one_line(tmp_path, text, problem):
    file = tmp_path / "a.toml"
    file.write_text(text)
    with pytest.raises(UserError, match=problem) as error:
        load_config(file)
    assert "\n" not in str(error.value)


def test_an_unknown_key_of_an_optional_section():
    with pytest.raises(UserError, match=r"model\.experts\.cuont: unknown key; did you mean model\.experts\.count\?"):
        load_config(Path(__file__).parents[2] / "configs/demo.yaml", ["model.experts={cuont: 2, top_k: 1}"])
