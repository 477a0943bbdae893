"""Incompatible settings are errors before jax starts, with what to use; compatible ones are not."""

import os
import re

import pytest

from jaxmem.config import Config, load_config
from jaxmem.config.base import read_table
from jaxmem.errors import UserError

TEXT = {"name": "x", "model": {"preset": "tiny"}, "train": {"steps": 100}}
MIXED = {**TEXT, "model": {"preset": "tiny", "qk_norm": True, "experts": {"count": 4, "top_k": 2}}}
LATENT = "{kv_rank: 8, rope_dim: 8, value_dim: 8}"
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
    ("base", "overrides", "parts"),
    [
        (TEXT, ["precision.master=float32"], "precision.master=float32 ... precision.parameters=bfloat16"),
        (TEXT, ["output=gs://bucket/runs"], "output=gs://bucket/runs ... checkpoint.path for a bucket"),
        (TEXT, ['output="a\\0b"'], 'output="a\\u0000b" contains a null byte; remove it'),
        (TEXT, ["checkpoint.path=hdfs://x"], "checkpoint.path=hdfs:// ... a directory, gs:// or s3://"),
        (TEXT, ["pipeline.rounds=2"], "pipeline.rounds=2 ... mesh.stage ... use pipeline.rounds=1"),
        (TEXT, ["optimizer.clip=null", "optimizer.clip_by=weight"], "optimizer.clip_by=weight ... optimizer.clip"),
        (TEXT, ["adapter.kind=patterns"], "adapter.kind=patterns ... adapter.targets"),
        (TEXT, ["adapter.rank=8"], "adapter.rank=8 ... adapter.kind=lora"),
        (
            TEXT,
            ["adapter={kind: lora, base: nf4}"],
            "adapter.kind=lora ... adapter.base=nf4 ... adapter.kind=qlora ... adapter.base=float32",
        ),
        (
            TEXT,
            ["adapter.kind=qlora", "precision.parameters=int8"],
            "precision.parameters=int8 ... precision.parameters=float32 ... adapter.kind=qlora ... adapter.base=int8",
        ),
        (
            TEXT,
            ["adapter={kind: lora, targets: ['*']}", "memory.loss_chunk=64"],
            "memory.loss_chunk=64 ... memory.loss_chunk=auto",
        ),
        (MIXED, ["model.experts.dense_layers=[4]"], "dense_layers contains 4 ... model.layers=4 ... from 0 to 3"),
        (MIXED, ["model.experts.every=5"], "model.experts.every=5 ... no layer with experts ... model.experts=null"),
        (MIXED, ["model.experts.every=2"], "layer 0 has no experts; set model.experts.dense_mlp"),
        (MIXED, ["model.experts.dense_mlp=8"], "dense_mlp=8 requires ... set model.experts.dense_layers"),
        (MIXED, ["model.experts.groups=3"], "model.experts.count=4 ... model.experts.groups=3 ... groups=2"),
        (MIXED, ["model.experts.groups=4"], "top_groups=1 of model.experts.groups=4 ... use 2 to 4"),
        (TEXT, [f"model.latent={LATENT}"], "model.latent ... model.kv_heads=4; use model.kv_heads=8"),
        (TEXT, [f"model.latent={LATENT}", "model.head_dim=8", "model.kv_heads=8"], "model.latent.rope_dim=8 exceeds"),
        (TEXT, ["name=a/b"], "name=a/b ... use letters, digits"),
        (TEXT, ["name=.."], "name=.. ... use letters, digits"),
        (TEXT, ["train.tokens=5"], "train.steps and train.tokens are both set; set exactly one of them"),
        (TEXT, ["train.steps=null"], "train.steps and train.tokens are both null; set exactly one of them"),
        (PICTURES, ["train={tokens: 9}"], "train.tokens=9 ... model.family=decoder"),
        (
            PICTURES,
            ["adapter={kind: qlora, embeddings: bfloat16}"],
            "adapter.embeddings=bfloat16 ... model.family=vit; use adapter.embeddings=null",
        ),
        (TEXT, ["optimizer.warmup=100"], "optimizer.warmup=100 ... train.steps=100 ... optimizer.warmup=99"),
        (
            TEXT,
            ["optimizer.warmup=2", "train={tokens: 16384}"],
            "optimizer.warmup=2 ... train.tokens=16384 (2 updates) ... optimizer.warmup=1",
        ),
        (TEXT, ["train.profile=[5, 4]"], "train.profile=[5, 4] must be ... use train.profile=[4, 5]"),
        (
            TEXT,
            ["train.profile=[5, 101]"],
            "train.profile=[5, 101] must be ... use train.profile=[5, 100]",
        ),
        (
            TEXT,
            ["checkpoint.keep_best=true"],
            "checkpoint.keep_best=true requires train.evaluate_every",
        ),
        (
            TEXT,
            ["train.evaluate_every=5", "data.held_out=0"],
            "train.evaluate_every=5 ... data.held_out=0.02",
        ),
        (
            TEXT,
            ["pipeline.schedule=1f1b", "pipeline.rounds=2", "mesh.stage=2", "batch.accumulate=2"],
            "pipeline.schedule=1f1b ... pipeline.rounds=2 ... pipeline.schedule=interleaved_1f1b",
        ),
        (TEXT, ["pipeline.schedule=circular", "mesh.stage=2"], "pipeline.schedule=circular ... use pipeline.rounds=2"),
        (TEXT, ["memory.remat={save: [mlp_hiden]}"], "memory.remat.save=mlp_hiden ... model.family=decoder"),
        (PICTURES, ["memory.loss_chunk=64"], "memory.loss_chunk=64 ... objective.name=next_token"),
        (
            TEXT,
            ["memory.mlp_chunk=64", "memory.remat={save: [mlp_hidden]}"],
            "memory.mlp_chunk=64 ... memory.remat.save=mlp_hidden ... memory.mlp_chunk=auto",
        ),
        (
            TEXT,
            ["memory.mlp_chunk=1", "memory.offload=[mlp_hidden]", "memory.remat=full"],
            "memory.mlp_chunk=1 ... memory.offload=[mlp_hidden] ... memory.mlp_chunk=auto",
        ),
        (TEXT, ["memory.head_groups=3"], "memory.head_groups=3 ... memory.head_groups=2"),
        (TEXT, ["memory.offload=[atention]", "memory.remat=full"], "memory.offload=atention ... model.family=decoder"),
        (
            TEXT,
            ["memory.offload=activations"],
            "memory.offload=activations ... memory.remat=none ... memory.remat=full",
        ),
        (
            TEXT,
            ["memory.offload=[attention]", "memory.remat=sqrt"],
            "memory.offload=[attention] ... memory.remat=sqrt ... memory.remat=full",
        ),
        (
            TEXT,
            ["memory.offload=activations", "memory.remat=auto"],
            "memory.offload=activations ... memory.remat=auto ... memory.remat=full",
        ),
        (
            TEXT,
            ["memory.offload=optimizer", "optimizer={name: sgd}"],
            "memory.offload=optimizer ... memory.offload=none",
        ),
        (TEXT, ["memory.offload=frozen"], "memory.offload=frozen ... memory.offload=none"),
        (
            TEXT,
            ["memory.offload=[optimiser]", "memory.remat=full"],
            "memory.offload=optimiser ... model.family=decoder",
        ),
        (TEXT, ["model.kv_heads=3"], "model.heads=8 ... model.kv_heads=3 ... model.kv_heads=2"),
        (TEXT, ["model.head_dim=15"], "model.head_dim=15 ... 16"),
        (TEXT, ["model.rope.factor=8"], "model.rope.factor=8 ... model.rope.scaling=linear"),
        (TEXT, ["model.vocab=256"], "model.vocab=256 ... data.tokenizer=bytes"),
        (PICTURES, ["model.heads=3"], "model.embed=64 ... model.heads=3 ... model.heads=2"),
        (PICTURES, ["model.patch=3"], "model.image_size=8 ... model.patch=3 ... model.patch=2"),
        (PICTURES, ["model={family: mlp, categories: 18}"], "model.categories=18 ... model.inputs=one_hot"),
        (
            PICTURES,
            ["model={family: mlp, inputs: one_hot, categories: 16}"],
            "model.categories=16 ... use model.categories=17",
        ),
        (PICTURES, ["model={family: convnet, stages: [8, 8, 8, 8, 8]}"], "model.image_size=8 ... 4 or fewer"),
        (
            PICTURES,
            ["model.image_size=16"],
            "model.image_size=16 ... model.channels=1 ... model.image_size=8 ... model.channels=1",
        ),
        (TEXT, ["objective=binary"], "objective.name=binary ... model.family=decoder ... objective.name=next_token"),
        (PICTURES, ["objective=binary"], "model.outputs=10 ... objective.name=binary ... model.outputs=1"),
        (PICTURES, ["model.outputs=5"], "model.outputs=5 ... objective.name=classify ... model.outputs=10"),
        (
            PICTURES,
            ["objective={name: regress_l2, label_smoothing: 0.1}", "model.outputs=1"],
            "objective.label_smoothing=0.1 ... objective.name=next_token",
        ),
        (
            PICTURES,
            ["objective={name: binary, z_loss: 0.1}", "model.outputs=1"],
            "objective.z_loss=0.1 ... objective.name=next_token",
        ),
        (TEXT, ["objective.temperature=1"], "objective.temperature=1 ... objective.name=contrastive"),
        (
            PICTURES,
            ["objective=contrastive", "batch.accumulate=2"],
            "objective.name=contrastive ... batch.accumulate=2 ... batch.accumulate=1",
        ),
        (
            PICTURES,
            ["objective=contrastive", "batch.global_size=1"],
            "objective.name=contrastive ... batch.global_size=2",
        ),
        (TEXT, ["data.source=text"], "data.source=text requires data.path"),
        (TEXT, ["data.path=a.txt"], "data.path=a.txt ... data.source=text"),
        (TEXT, ["data.field=body"], "data.field=body ... data.source=jsonl"),
        (TEXT, ["data.source=digits"], "data.source=digits ... model.family=decoder ... data.source=stdlib"),
        (PICTURES, ["data.source=stdlib"], "data.source=stdlib ... model.family=vit ... data.source=digits"),
        (TEXT, ["data.weight=2"], "data.weight=2 requires data.mixture"),
        (
            TEXT,
            ["data={source: text, mixture: [{source: stdlib}]}"],
            "data.source=text ... use data.mixture[0].source",
        ),
        (
            TEXT,
            ["data.mixture=[{source: stdlib}, {source: jsonl}]"],
            "data.mixture[1].source=jsonl requires data.mixture[1].path",
        ),
        (
            TEXT,
            ["data.mixture=[{source: stdlib}, {source: digits}]"],
            "data.mixture[1].source=digits ... model.family=decoder ... data.mixture[1].source=stdlib",
        ),
        (PICTURES, ["data={mixture: [{source: digits}]}"], "model.family=vit ... data.source=digits"),
        (TEXT, ["batch.accumulate=3"], "batch.global_size=8 ... batch.accumulate=3 ... batch.accumulate=2"),
        (TEXT, ["mesh.fsdp=0"], "mesh.fsdp=0 ... use mesh.fsdp=1, or -1"),
        (TEXT, ["mesh.fsdp=-1", "mesh.tensor=-1"], "mesh.fsdp=-1 ... mesh.tensor=-1 ... -1 for one axis"),
        (PICTURES, ["mesh.context=2"], "mesh.context=2 ... model.family=decoder"),
        (
            TEXT,
            ["mesh.context=2", "memory.attention=reference"],
            "mesh.context=2 ... memory.attention=reference ... memory.attention=auto",
        ),
        (TEXT, ["mesh.context_method=ring"], "mesh.context_method=ring ... mesh.context=1 ... context_method=auto"),
        (
            TEXT,
            ["mesh.context=2", "mesh.context_method=ring", "memory.attention=cudnn"],
            "mesh.context_method=ring with data.packing=true ... memory.attention=cudnn ... ulysses",
        ),
        (
            TEXT,
            ["mesh.context=2", "mesh.context_method=ring", "mesh.stage=2"],
            "mesh.context_method=ring ... mesh.stage=2 ... mesh.context_method=ulysses or mesh.stage=1",
        ),
        (
            TEXT,
            ["mesh.context=2", "mesh.context_method=ring", "model.preset=gemma2-2b"],
            "mesh.context_method=ring ... layers with and without a window ... mesh.context_method=ulysses",
        ),
        (
            TEXT,
            ["model.preset=gemma2-2b", "model.layers=1"],
            "model.layer_types has 2 values ... model.layers=1; use 1",
        ),
        (
            TEXT,
            ["model.preset=gemma2-2b", "model.window=null"],
            "model.layer_types=[sliding_attention, full_attention] ... model.window",
        ),
        (TEXT, ["model.layer_types=[full_attention]", "model.window=8"], "model.window=8 requires sliding_attention"),
        (
            TEXT,
            ["model.layer_types=[global]"],
            "model.layer_types[0]=global must be sliding_attention or full_attention",
        ),
        (TEXT, ["model.sliding_rope={theta: 5}"], "model.sliding_rope requires model.window"),
        (
            TEXT,
            ["model.qk_norm=all_heads", "model.norms=post", "memory.head_groups=2"],
            "model.qk_norm=all_heads ... memory.head_groups=2 ... memory.head_groups=1",
        ),
        (TEXT, ["rules.mlp=[tensr]"], "rules.mlp[0]=tensr must be fsdp, context or tensor; did you mean tensor?"),
        (TEXT, ["optimizer.name=AdamW"], "optimizer.name=AdamW must be adamw, ... did you mean adamw?"),
        (TEXT, ["rules.embed=[tensor]"], "rules.embed[0]=tensor must be fsdp or context"),
        (TEXT, ["rules.mlp=[fsdp, fsdp]"], "rules.mlp=[fsdp, fsdp] ... [fsdp]"),
        (TEXT, ["rules.replicated=[atention]"], "rules.replicated[0]=atention ... did you mean attention?"),
        (TEXT, ["rules.replicated=[head, head]"], "rules.replicated=[head, head] ... [head]"),
        (TEXT, ["rules.replicated=[experts]"], "[experts] ... use rules.replicated: attention, gate_up, down or head"),
        (TEXT, ["rules.replicated=[head]", "zero=2"], "rules.replicated=[head] ... zero ... 3, not 2"),
        (TEXT, ["rules.logits=[tensor]"], "rules.logits[0]=tensor must be fsdp"),
        (TEXT, ["rules.logits=[fsdp]", "zero=1"], "rules.logits=[fsdp] ... 2, not 1 ... rules.logits=[]"),
        (TEXT, ["rules.logits=[fsdp]", "mesh.stage=2"], "mesh.stage=2 ... rules.logits=[fsdp] ... rules.logits=[]"),
        (TEXT, ["rules.optimizer=[fsdp]"], "rules.optimizer[0]=fsdp must be replica"),
        (PICTURES, ["rules.vocab=[]"], "model.family=vit ... rules.embed, heads, kv_heads or mlp"),
        (TEXT, ["rules.heads=[]"], "rules.kv_heads=[tensor] ... rules.heads=[] ... tensor in both or neither"),
        (
            TEXT,
            ["precision.parameters=dynamic4"],
            "dynamic4 does not support training; use int8 or nf4, or adapter.base",
        ),
        (TEXT, ["data.source=text", "data.path=a.jsonl"], "data.source=text ... data.path=a.jsonl ... source=jsonl"),
        (TEXT, ["data.source=text", "data.path=a.NDJSON"], "data.source=text ... data.path=a.NDJSON ... source=jsonl"),
        (
            TEXT,
            ["data.source=text", "data.path=b.parquet"],
            "data.source=text ... data.path=b.parquet ... source=parquet",
        ),
        (TEXT, ["mesh.stage=0"], "mesh.stage=0 ... use mesh.stage=1, or -1"),
    ],
)
def test_refused(base, overrides, parts):
    """`parts` of the line, in their order."""
    [line] = lines(base, *overrides)
    assert re.search(".*".join(map(re.escape, parts.split(" ... "))), line)


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


def test_a_key_requires_one_other_key():
    keys = [key for keys in read_table("combinations")["requires"].values() for key in keys]
    assert sorted(keys) == sorted(set(keys))


def test_all_problems_are_reported_at_once():
    found = lines(TEXT, "model.kv_heads=3", "batch.accumulate=3", "mesh.context=0")
    assert [line.partition("=")[0] for line in found] == ["model.heads", "batch.global_size", "mesh.context"]


def test_steps():
    assert load_config(TEXT).steps == 100
    cfg = load_config(TEXT, ["train={tokens: 100_001}", "batch.global_size=10", "data.sequence_length=100"])
    assert cfg.steps == 101


def test_triton_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    over = "memory.attention=triton"
    assert load_config(TEXT, [over]).memory.attention == "triton"
    monkeypatch.setattr("jaxmem.config.check_sections.find_spec", lambda _: None)
    [line] = lines(TEXT, over)
    assert "memory.attention=triton requires jax-triton" in line
    assert "memory.attention=auto" in line


def test_cudnn_requires_16_bits() -> None:
    over = "memory.attention=cudnn"
    assert load_config(TEXT, [over]).memory.attention == "cudnn"
    [line] = lines(TEXT, over, "precision.compute=float32")
    assert "memory.attention=cudnn does not support precision.compute=float32" in line


def test_a_path_that_the_locale_cannot_write(monkeypatch: pytest.MonkeyPatch) -> None:
    load_config(TEXT, ["output=größer"])
    monkeypatch.setattr(os, "fsencode", lambda path: path.encode("ascii"))
    [line] = lines(TEXT, "output=größer")
    assert line.startswith("output='gr\\xf6\\xdfer'")
    assert line.endswith("PYTHONUTF8=1")
