"""Incompatible settings are errors before jax starts, with what to use; compatible ones are not."""

import os

import pytest

from jaxmem.config import Config, load_config
from jaxmem.errors import UserError

TEXT = {"name": "x", "model": {"preset": "tiny"}, "train": {"steps": 100}}
PICTURES = {
    "name": "x",
    "objective": "classify",
    "model": {"family": "vit"},
    "train": {"steps": 100},
    "data": {"source": "digits"},
}


def lines(base: dict, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as error:
        load_config(base, overrides)
    return str(error.value).split("\n")


@pytest.mark.parametrize(
    ("base", "overrides", "line"),
    [
        (
            TEXT,
            ["precision.master=float32"],
            ("precision.master=float32 requires precision.parameters=bfloat16, not float32"),
        ),
        (
            TEXT,
            ["output=gs://bucket/runs"],
            "output=gs://bucket/runs must be a local directory; use checkpoint.path for a bucket",
        ),
        (TEXT, ['output="a\\0b"'], "output='a\\x00b' contains a null byte; remove it"),
        (
            TEXT,
            ["checkpoint.path=hdfs://x"],
            "checkpoint.path=hdfs:// is unknown; use a directory, gs:// or s3://",
        ),
        (TEXT, ["adapter.rank=8"], "adapter.rank=8 requires adapter.kind=lora or dora or qlora, not none"),
        (
            TEXT,
            ["adapter={kind: lora, base: nf4}"],
            "adapter.kind=lora does not support adapter.base=nf4; use adapter.kind=qlora, or float32 or bfloat16",
        ),
        (
            TEXT,
            ["adapter.kind=qlora", "precision.parameters=int8"],
            (
                "adapter.kind=qlora does not support precision.parameters=int8; use float32 or bfloat16,"
                " and adapter.kind=qlora with adapter.base=int8"
            ),
        ),
        (
            TEXT,
            ["adapter={kind: lora, targets: ['*']}", "memory.loss_chunk=64"],
            (
                "memory.loss_chunk=64 does not support head in adapter.targets; use auto, or"
                " adapter.targets without head"
            ),
        ),
        (
            TEXT,
            ["name=a/b"],
            "name='a/b' is not the name of a directory; use letters, digits, and . _ - after the first",
        ),
        (TEXT, ["name=.."], "name='..' is not the name of a directory; use letters, digits, and . _ - after the first"),
        (TEXT, ["train.tokens=5"], "train.steps and train.tokens are both set; set one of them"),
        (TEXT, ["train.steps=null"], "train.steps and train.tokens are both null; set one of them"),
        (PICTURES, ["train={tokens: 9}"], "train.tokens=9 requires model.family=decoder, not vit"),
        (TEXT, ["optimizer.warmup=100"], "optimizer.warmup=100 must be less than the 100 steps of the run"),
        (
            TEXT,
            ["optimizer.warmup=2", "train={tokens: 16384}"],
            "optimizer.warmup=2 must be less than the 2 steps of the run",
        ),
        (
            TEXT,
            ["train.profile=[5, 4]"],
            "train.profile=[5, 4] must be [from, to], from <= to <= the 100 steps of the run",
        ),
        (
            TEXT,
            ["train.profile=[5, 101]"],
            "train.profile=[5, 101] must be [from, to], from <= to <= the 100 steps of the run",
        ),
        (
            TEXT,
            ["checkpoint.keep_best=true"],
            "checkpoint.keep_best=true requires train.evaluate_every; set a number of updates",
        ),
        (
            TEXT,
            ["train.evaluate_every=5", "data.held_out=0"],
            "train.evaluate_every=5 requires data.held_out above 0",
        ),
        (
            TEXT,
            ["memory.remat=slots_4", "mesh.stage=2"],
            (
                "mesh.stage=2 does not support memory.remat=slots_4; use none, full, every_K, sqrt, dots"
                " or {save: [names]}"
            ),
        ),
        (
            TEXT,
            ["memory.remat={save: [mlp_hiden]}"],
            "memory.remat.save=mlp_hiden is not an activation of model.family=decoder; did you mean mlp_hidden?",
        ),
        (
            PICTURES,
            ["memory.loss_chunk=64"],
            "memory.loss_chunk=64 requires objective.name=next_token or dpo, not classify",
        ),
        (
            TEXT,
            ["memory.mlp_chunk=64", "memory.remat={save: [mlp_hidden]}"],
            "memory.mlp_chunk=64 does not support memory.remat.save=mlp_hidden; use auto",
        ),
        (
            TEXT,
            ["memory.head_groups=3"],
            "memory.head_groups=3 does not divide the 4 KV heads; use one of [1, 2, 4]",
        ),
        (
            TEXT,
            ["memory.offload=[atention]", "memory.remat=full"],
            "memory.offload=atention is not an activation of model.family=decoder; did you mean attention?",
        ),
        (
            TEXT,
            ["memory.offload=activations"],
            "memory.offload=activations does not support memory.remat=none; use full, dots or {save: [names]}",
        ),
        (
            TEXT,
            ["memory.offload=[attention]", "memory.remat=sqrt"],
            "memory.offload=[attention] does not support memory.remat=sqrt; use full",
        ),
        (
            TEXT,
            ["memory.offload=activations", "memory.remat=auto"],
            "memory.offload=activations does not support memory.remat=auto; use full, dots or {save: [names]}",
        ),
        (
            TEXT,
            ["memory.offload=optimizer", "optimizer={name: sgd}"],
            (
                "memory.offload=optimizer has no effect: optimizer.name=sgd without optimizer.momentum has"
                " no state; use none"
            ),
        ),
        (
            TEXT,
            ["memory.offload=frozen"],
            "memory.offload=frozen has no effect: all parameters are trainable; use none or optimizer",
        ),
        (
            TEXT,
            ["memory.offload=[optimizer]", "mesh.stage=2"],
            "memory.offload=[optimizer] does not support mesh.stage=2; use mesh.stage=1, or memory.offload=none",
        ),
        (
            TEXT,
            ["memory.offload=[optimiser]", "memory.remat=full"],
            "memory.offload=optimiser is not an activation of model.family=decoder; did you mean optimizer?",
        ),
        (TEXT, ["model.kv_heads=3"], "model.kv_heads=3 does not divide model.heads=8"),
        (TEXT, ["model.head_dim=15"], "model.head_dim=15 must be even: rotary positions rotate pairs"),
        (
            TEXT,
            ["model.rope.factor=8"],
            "model.rope.factor=8 requires model.rope.scaling=linear or llama3 or yarn, not none",
        ),
        (TEXT, ["model.vocab=256"], "model.vocab=256 must be at least 257 for data.tokenizer=bytes"),
        (PICTURES, ["model.heads=3"], "model.heads=3 does not divide model.embed=64"),
        (PICTURES, ["model.patch=3"], "model.patch=3 does not divide model.image_size=8"),
        (
            PICTURES,
            ["model={family: mlp, categories: 18}"],
            "model.categories=18 requires model.inputs=one_hot or embedding, not numbers",
        ),
        (
            PICTURES,
            ["model={family: mlp, inputs: one_hot, categories: 16}"],
            "model.categories=16 must be at least 17, the pixel values of digits",
        ),
        (
            PICTURES,
            ["model={family: convnet, stages: [8, 8, 8, 8, 8]}"],
            "model.image_size=8 does not support 5 model.stages; use 4 or fewer",
        ),
        (
            PICTURES,
            ["model.image_size=16"],
            "model.image_size=16 and model.channels=1 must be 8 and 1 for digits",
        ),
        (
            TEXT,
            ["objective=binary"],
            "objective.name=binary does not support model.family=decoder; use next_token or dpo",
        ),
        (PICTURES, ["objective=binary"], "model.outputs=10 must be 1 for objective.name=binary on digits"),
        (PICTURES, ["model.outputs=5"], "model.outputs=5 must be 10 for objective.name=classify on digits"),
        (
            PICTURES,
            ["objective={name: regress_l2, label_smoothing: 0.1}", "model.outputs=1"],
            "objective.label_smoothing=0.1 requires objective.name=next_token or classify or dpo, not regress_l2",
        ),
        (
            PICTURES,
            ["objective={name: binary, z_loss: 0.1}", "model.outputs=1"],
            "objective.z_loss=0.1 requires objective.name=next_token or classify, not binary",
        ),
        (
            TEXT,
            ["objective.temperature=1"],
            "objective.temperature=1 requires objective.name=contrastive, not next_token",
        ),
        (
            PICTURES,
            ["objective=contrastive", "batch.accumulate=2"],
            "objective.name=contrastive does not support batch.accumulate=2; use 1",
        ),
        (
            PICTURES,
            ["objective=contrastive", "batch.global_size=1"],
            "objective.name=contrastive requires batch.global_size of at least 2, not 1",
        ),
        (TEXT, ["data.source=text"], "data.source=text requires data.path; set a file, a directory or a glob"),
        (
            TEXT,
            ["data.path=a.txt"],
            "data.path=a.txt requires data.source=text or jsonl or parquet or chat or preference or tokens, not stdlib",
        ),
        (TEXT, ["data.field=body"], "data.field=body requires data.source=jsonl or parquet, not stdlib"),
        (
            TEXT,
            ["data.source=digits"],
            (
                "data.source=digits does not support model.family=decoder; use stdlib, text, jsonl,"
                " parquet, chat, preference, tokens"
            ),
        ),
        (PICTURES, ["data.source=stdlib"], "data.source=stdlib does not support model.family=vit; use digits"),
        (TEXT, ["data.buckets=[8]"], "data.buckets=[8] does not support data.packing=true; use false"),
        (
            TEXT,
            ["data={packing: false, sequence_length: 64, buckets: [16, 8, 64]}"],
            (
                "data.buckets=[16, 8, 64] must be ascending and below data.sequence_length=64, which is"
                " the last bucket; use [8, 16]"
            ),
        ),
        (
            TEXT,
            ["data.packing=false", "data.buckets=[8]", "train={tokens: 100000}"],
            "data.buckets=[8] does not support train.tokens=100000; use train.steps",
        ),
        (
            TEXT,
            ["memory.spill=unified", "memory.budget=4"],
            ("memory.spill=unified does not support memory.budget=4; use one of the two"),
        ),
        (TEXT, ["data.weight=2"], "data.weight=2 requires data.mixture; leave it out"),
        (
            TEXT,
            ["data={source: text, mixture: [{source: stdlib}]}"],
            "data.source=text has no effect with data.mixture; set it in the sources of the mixture",
        ),
        (
            TEXT,
            ["data.mixture=[{source: stdlib}, {source: jsonl}]"],
            "data.mixture[1].source=jsonl requires data.mixture[1].path; set a file, a directory or a glob",
        ),
        (
            TEXT,
            ["data.mixture=[{source: stdlib}, {source: digits}]"],
            (
                "data.mixture[1].source=digits does not support model.family=decoder; use stdlib, text,"
                " jsonl, parquet, chat, preference, tokens"
            ),
        ),
        (
            PICTURES,
            ["data={mixture: [{source: digits}]}"],
            "model.family=vit does not support data.mixture; use data.source=digits",
        ),
        (TEXT, ["batch.accumulate=3"], "batch.accumulate=3 does not divide batch.global_size=8"),
        (TEXT, ["mesh.fsdp=0"], "mesh.fsdp=0 must be at least 1, or -1 for the remaining devices"),
        (
            TEXT,
            ["mesh.fsdp=-1", "mesh.tensor=-1"],
            "mesh.fsdp=-1 and mesh.tensor=-1 are both set; use -1 for one axis only",
        ),
        (
            PICTURES,
            ["mesh.context=2"],
            "mesh.context=2 requires model.family=decoder, not vit",
        ),
        (
            TEXT,
            ["mesh.context=2", "memory.attention=reference"],
            "mesh.context=2 does not support memory.attention=reference; use auto or blockwise",
        ),
        (
            TEXT,
            ["rules.mlp=[tensr]"],
            "rules.mlp[0]='tensr' is unknown; expected one of fsdp, context, tensor; did you mean tensor?",
        ),
        (TEXT, ["rules.embed=[tensor]"], "rules.embed[0]='tensor' is unknown; expected one of fsdp, context"),
        (TEXT, ["rules.mlp=[fsdp, fsdp]"], "rules.mlp=[fsdp, fsdp] repeats an axis; use [fsdp]"),
        (
            PICTURES,
            ["rules.vocab=[]"],
            "model.family=vit does not support rules.vocab; use embed, heads, kv_heads, mlp",
        ),
        (
            TEXT,
            ["rules.heads=[]"],
            "rules.kv_heads=[tensor] requires tensor in rules.heads=[]; use it in both or in neither",
        ),
        (TEXT, ["mesh.stage=0"], "mesh.stage=0 must be at least 1, or -1 for the remaining devices"),
    ],
)
def test_refused(base, overrides, line):
    assert lines(base, *overrides) == [line]


@pytest.mark.parametrize(
    ("base", "overrides"),
    [
        (TEXT, ["optimizer.warmup=99", "train.profile=[100, 100]"]),
        (TEXT, ["checkpoint.keep_best=true", "train.evaluate_every=5"]),
        (TEXT, ["objective={label_smoothing: 0.1, z_loss: 1e-4}"]),
        (TEXT, ["data={source: jsonl, path: a.jsonl, field: body}"]),
        (TEXT, ["data.mixture=[{source: stdlib, weight: 3}, {source: text, path: a}]"]),
        (TEXT, ["model.vocab=64", "data={source: tokens, path: a}"]),
        (TEXT, ["model.rope={scaling: yarn, factor: 4}"]),
        (TEXT, ["zero=3", "mesh.fsdp=1"]),
        (PICTURES, ["objective={name: contrastive, temperature: 0.5}", "model.outputs=32"]),
        (PICTURES, ["objective=regress_l1", "model.outputs=1"]),
        (PICTURES, ["model={family: mlp, inputs: embedding, categories: 18}"]),
        (PICTURES, ["model={family: convnet, stages: [8, 8, 8, 8]}"]),
    ],
)
def test_allowed(base, overrides):
    assert isinstance(load_config(base, overrides), Config)


def test_all_problems_are_reported_at_once():
    found = lines(TEXT, "model.kv_heads=3", "batch.accumulate=3", "mesh.context=0")
    assert [line.partition("=")[0] for line in found] == ["model.kv_heads", "batch.accumulate", "mesh.context"]


def test_steps():
    assert load_config(TEXT).steps == 100
    cfg = load_config(TEXT, ["train={tokens: 100_001}", "batch.global_size=10", "data.sequence_length=100"])
    assert cfg.steps == 101


def test_triton_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    over = "memory.attention=triton"
    assert load_config(TEXT, [over]).memory.attention == "triton"
    monkeypatch.setattr("jaxmem.config.check_memory.find_spec", lambda _: None)
    [line] = lines(TEXT, over)
    assert line == "memory.attention=triton requires jax-triton; pip install 'jaxmem[cuda13]', or use auto"


def test_mosaic_requires_16_bits() -> None:
    over = "memory.attention=mosaic"
    assert load_config(TEXT, [over]).memory.attention == "mosaic"
    [line] = lines(TEXT, over, "precision.compute=float32")
    assert line == "memory.attention=mosaic does not support precision.compute=float32; use triton"


def test_a_path_that_the_locale_cannot_write(monkeypatch: pytest.MonkeyPatch) -> None:
    load_config(TEXT, ["output=größer"])
    monkeypatch.setattr(os, "fsencode", lambda path: path.encode("ascii"))
    [line] = lines(TEXT, "output=größer")
    assert line == "output='gr\\xf6\\xdfer' cannot be encoded as a file name in utf-8; set PYTHONUTF8=1"
