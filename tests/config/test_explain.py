"""Each mistake is one line: the full key, what was given, what is allowed, the nearest valid name."""

from __future__ import annotations

import pytest

from jaxmem.config import load_config
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
        ("optimizer.name=adamww", "optimizer.name: 'adamww' is not one of adamw, adam, ..."),
        ("objective=clasify", "objective.name: 'clasify' is not one of ..."),
        ("memory.update=3", "memory.update: 3 is not one of after, during"),
        ("memory.loss_chunk=x", "memory.loss_chunk: 'x' is not one of auto, or a whole number"),
        ("memory.loss_chunk=0", "memory.loss_chunk: 0 is not one of auto, or at least 1"),
        (
            "memory.remat=sqr",
            "memory.remat: 'sqr' is not one of none, full, dots, sqrt, recursive, constant, budget, or ...",
        ),
        ("memory.remat={sav: [q]}", "memory.remat.save: missing"),
        ("memory.remat={save: 3}", "memory.remat.save: must be a list, not 3"),
        (
            "train.trackers=[tensorbord]",
            "train.trackers[0]: 'tensorbord' is not one of tensorboard, wandb; did you mean tensorboard?",
        ),
        (
            "objective={name: contrastve}",
            "objective.name: 'contrastve' is not one of next_token, dpo, classify, binary, regress_l1, regress_l2, ...",
        ),
        (
            "model={family: decodr}",
            "model.family: 'decodr' is not one of decoder, vit, convnet, mlp; did you mean decoder?",
        ),
        ("model={family: [1]}", "model.family: [1] is not one of decoder, vit, convnet, mlp"),
        ("model.preset=tny", "model.preset: 'tny' is not a preset; did you mean tiny?"),
        ("model.preset=[1]", "model.preset: [1] is not a preset; known: ..."),
        ("model={family: vit, preset: tiny}", "model.preset: only family decoder has presets, vit has none"),
        ("model={family: vit, layers: 0}", "model.layers: must be at least 1, not 0"),
        ("model.layers=1.5", "model.layers: must be a whole number, not 1.5"),
        ("model=tiny", "model: must be a section, with keys of its own, not 'tiny'"),
        ("mesh=8", "mesh: must be a section, with keys of its own, not 8"),
        ("mesh.fsdp=true", "mesh.fsdp: must be a whole number, not True"),
        ("zero=4", "zero: must be at most 3, not 4"),
        ("zero=true", "zero: must be a whole number, not True"),
        ("name=3", "name: must be text, in quotes where it looks like something else, not 3"),
        ("data.packing=no", "data.packing: must be true or false, not 'no'"),
        ("data.held_out=1", "data.held_out: must be less than 1, not 1"),
        ("optimizer.learning_rate=0", "optimizer.learning_rate: must be more than 0, not 0"),
        ("optimizer.learning_rate=fast", "optimizer.learning_rate: must be a number, not 'fast'"),
        ("optimizer.clip=.inf", "optimizer.clip: must be a finite number, not inf"),
        ("train.profile=3", "train.profile: must be a list, not 3"),
        ("train.profile=[1, 2, 3]", "train.profile: must be of at most 2 values, not [1, 2, 3]"),
        ("train.profile=[1]", "train.profile[1]: missing"),
        ("model={family: convnet, stages: []}", "model.stages: must be of at least 1 values, not []"),
        ("name=null", "name: must be text, in quotes where it looks like something else, not None"),
        ("train.steps=" + "1" * 90 + ".5", "train.steps: must be a whole number, not 1.11111..."),
    ],
)
def test_one_mistake_is_one_line(override, line):
    [found] = lines(override)
    assert found == line or (line.endswith("...") and found.startswith(line.removesuffix("...")))


def test_what_is_missing():
    with pytest.raises(UserError) as error:
        load_config({"model": {"layers": 2, "embed": 8}})
    assert str(error.value).split("\n") == [
        "name: missing",
        "train: missing",
        "model.preset: missing; give one, or model.hf, or " + LACKING,
    ]


def test_a_key_of_two_lines_is_one_line():
    with pytest.raises(UserError, match=r"^seed 2: unknown key; did you mean seed\?$"):
        load_config({**TINY, "seed\n2": 1})


def test_several_mistakes_are_as_many_lines():
    found = lines("mesh.fdsp=8", "optimizer.name=adamww", "model.layers=-1")
    assert {line.partition(":")[0] for line in found} == {"mesh.fdsp", "optimizer.name", "model.layers"}
    assert len(found) == 3
