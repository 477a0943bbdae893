"""Each mistake is one line: the full key, what was given, what is allowed, the nearest valid name."""

import re

import pytest

from jaxmem.config import Config, Decoder, load_config
from jaxmem.config.explain import ELSEWHERE
from jaxmem.errors import UserError

TINY = {"name": "x", "model": {"preset": "tiny"}, "train": {"steps": 10}}

LACKING = "model.vocab, model.mlp, model.heads, model.kv_heads, model.head_dim"


def lines(*overrides: str) -> list[str]:
    with pytest.raises(UserError) as error:
        load_config(TINY, overrides)
    return str(error.value).split("\n")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("mesh.fdsp=8", "mesh.fdsp: unknown key; did you mean mesh.fsdp?"),
        ("fsdp=8", "fsdp: unknown key; did you mean mesh.fsdp?"),
        ("model.layer=8", "model.layer: unknown key; did you mean model.layers?"),
        ("model.rope.teta=8", "model.rope.teta: unknown key; did you mean model.rope.theta?"),
        ("optimiser.name=adam", "optimiser: unknown key; did you mean optimizer?"),
        ("batch.qqq=1", "batch.qqq: unknown key; known: batch.accumulate, batch.global_size"),
        ("data={mixture: [{pth: a}]}", "data.mixture[0].pth: unknown key; did you mean data.mixture[0].path?"),
        (
            "optimizer.name=adamww",
            "optimizer.name='adamww' is unknown; expected one of adamw, adam, sgd, lion, adafactor, adam_mini, mu...",
        ),
        (
            "objective=clasify",
            "objective.name='clasify' is unknown; expected one of next_token, dpo, classify, binary, regress_l1, ...",
        ),
        ("memory.update=3", "memory.update=3 is unknown; expected one of after, during"),
        ("memory.loss_chunk=x", "memory.loss_chunk='x' must be auto, or a whole number"),
        ("memory.loss_chunk=0", "memory.loss_chunk=0 must be auto, or at least 1"),
        (
            "memory.remat=sqr",
            "memory.remat='sqr' must be none, full, dots, sqrt, recursive, constant, auto, or text of the form ...",
        ),
        ("memory.remat={sav: [q]}", "memory.remat.save is missing"),
        ("memory.remat={save: 3}", "memory.remat.save=3 must be a list"),
        (
            "train.trackers=[tensorbord]",
            "train.trackers[0]='tensorbord' is unknown; expected one of tensorboard, wandb; did you mean tensorboard?",
        ),
        (
            "objective={name: contrastve}",
            "objective.name='contrastve' is unknown; expected one of next_token, dpo, classify, binary, regress_l...",
        ),
        (
            "model={family: decodr}",
            "model.family='decodr' is unknown; expected one of decoder, vit, convnet, mlp; did you mean decoder?",
        ),
        ("model={family: [1]}", "model.family=[1] is unknown; expected one of decoder, vit, convnet, mlp"),
        ("model.preset=tny", "model.preset='tny' is unknown; did you mean tiny?"),
        (
            "model.preset=[1]",
            "model.preset=[1] is unknown; known: 130m, 1b, 350m, 60m, llama2-13b, llama2-7b, llama3-405b, llama3-...",
        ),
        ("model={family: vit, preset: tiny}", "model.preset=tiny requires model.family=decoder, not vit"),
        ("model={family: vit, layers: 0}", "model.layers=0 must be at least 1"),
        ("model.layers=1.5", "model.layers=1.5 must be a whole number"),
        ("model=tiny", "model='tiny' must be a mapping of keys to values"),
        ("mesh=8", "mesh=8 must be a mapping of keys to values"),
        ("mesh.fsdp=true", "mesh.fsdp=True must be a whole number"),
        ("zero=4", "zero=4 must be at most 3"),
        ("zero=true", "zero=True must be a whole number"),
        ("name=3", "name=3 must be text, in quotes if it looks like a number"),
        ("data.packing=no", "data.packing='no' must be true or false"),
        ("data.held_out=1", "data.held_out=1 must be less than 1"),
        ("optimizer.learning_rate=0", "optimizer.learning_rate=0 must be more than 0"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate='fast' must be a number"),
        ("optimizer.clip=.inf", "optimizer.clip=inf must be a finite number"),
        ("train.profile=3", "train.profile=3 must be a list"),
        ("train.profile=[1, 2, 3]", "train.profile=[1, 2, 3] must be a list of at most 2 values"),
        ("train.profile=[1]", "train.profile[1] is missing"),
        ("model={family: convnet, stages: []}", "model.stages=[] must be a list of at least 1 values"),
        ("name=null", "name=None must be text, in quotes if it looks like a number"),
        ("train.steps=" + "1" * 90 + ".5", "train.steps=1.111111111111111e+89 must be a whole number"),
    ],
)
def test_one_mistake_is_one_line(override, line):
    [found] = lines(override)
    assert found == line or (line.endswith("...") and found.startswith(line.removesuffix("...")))


def test_what_is_missing():
    with pytest.raises(UserError) as error:
        load_config({"model": {"layers": 2, "embed": 8}})
    assert str(error.value).split("\n") == [
        "name is missing",
        "train is missing; set train.steps or train.tokens",
        "model.preset is missing; set it, or model.hf, or " + LACKING,
    ]


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
        assert any(key in line for line in lines(f"batch.{name}=1"))
