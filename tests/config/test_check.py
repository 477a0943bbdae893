"""Impossible combinations are refused before jax starts, with the key to change; possible ones are not."""

from __future__ import annotations

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
            (
                "precision.master: float32 completes weights stored in bfloat16, not in float32;"
                " use precision.parameters=bfloat16, or precision.master=none"
            ),
        ),
        (
            TEXT,
            ["output=gs://bucket/runs"],
            "output: gs://bucket/runs is no directory; give a bucket to checkpoint.path, and the logs a directory",
        ),
        (TEXT, ['output="a\\0b"'], "output: 'a\\x00b' has a null byte, which no file's name has"),
        (
            TEXT,
            ["checkpoint.path=hdfs://x"],
            "checkpoint.path: hdfs:// is not known; use a directory, gs:// or s3://",
        ),
        (TEXT, ["adapter.rank=8"], "adapter.rank: adapter.kind: none has none; use lora, dora, qlora"),
        (
            TEXT,
            ["adapter={kind: lora, base: nf4}"],
            "adapter.base: nf4 is a code; use adapter.kind=qlora, or float32 or bfloat16",
        ),
        (
            TEXT,
            ["adapter.kind=qlora", "precision.parameters=int8"],
            (
                "precision.parameters: int8 would be the adapters' own; use float32 or bfloat16, and adapter.kind=qlora"
                " with adapter.base=int8 for the weights that stay"
            ),
        ),
        (
            TEXT,
            ["adapter={kind: lora, targets: ['*']}", "memory.loss_chunk=64"],
            (
                "memory.loss_chunk: 64 takes the head in slices, which an adapter of it is not in; leave head out of"
                " adapter.targets, or use auto"
            ),
        ),
        (TEXT, ["name=a/b"], "name: 'a/b' names a directory: letters, digits, and . _ - after the first"),
        (TEXT, ["name=.."], "name: '..' names a directory: letters, digits, and . _ - after the first"),
        (TEXT, ["train.tokens=5"], "train.steps: give either train.steps or train.tokens, not both"),
        (TEXT, ["train.steps=null"], "train.steps: give either train.steps or train.tokens, not neither"),
        (PICTURES, ["train={tokens: 9}"], "train.tokens: family vit has no tokens; give train.steps"),
        (TEXT, ["optimizer.warmup=100"], "optimizer.warmup: 100 must be less than the 100 steps of the run"),
        (
            TEXT,
            ["optimizer.warmup=2", "train={tokens: 16384}"],
            "optimizer.warmup: 2 must be less than the 2 steps of the run",
        ),
        (
            TEXT,
            ["train.profile=[5, 4]"],
            "train.profile: [5, 4] must be [from, to], from <= to <= the 100 steps of the run",
        ),
        (
            TEXT,
            ["train.profile=[5, 101]"],
            "train.profile: [5, 101] must be [from, to], from <= to <= the 100 steps of the run",
        ),
        (
            TEXT,
            ["checkpoint.keep_best=true"],
            "checkpoint.keep_best: the best is the lowest held-out loss; give train.evaluate_every",
        ),
        (
            TEXT,
            ["train.evaluate_every=5", "data.held_out=0"],
            "train.evaluate_every: nothing is held out; give data.held_out more than 0",
        ),
        (
            TEXT,
            ["memory.remat=slots_4", "mesh.stage=2"],
            (
                "memory.remat: slots_4 goes back through all layers one by one, which mesh.stage 2 does not;"
                " use none, full, every_K, sqrt, dots or {save: [names]}"
            ),
        ),
        (
            TEXT,
            ["memory.remat={save: [mlp_hiden]}"],
            "memory.remat.save: family decoder has no 'mlp_hiden'; did you mean mlp_hidden?",
        ),
        (
            PICTURES,
            ["memory.loss_chunk=64"],
            "memory.loss_chunk: only next_token and dpo have a vocabulary to go through, not classify; use auto",
        ),
        (
            TEXT,
            ["memory.mlp_chunk=64", "memory.remat={save: [mlp_hidden]}"],
            "memory.remat.save: mlp_hidden is made in pieces by memory.mlp_chunk: 64, and never kept; use auto",
        ),
        (
            TEXT,
            ["memory.head_groups=3"],
            "memory.head_groups: 3 does not divide 4 key heads; use one of [1, 2, 4]",
        ),
        (
            TEXT,
            ["memory.offload=[atention]", "memory.remat=full"],
            "memory.offload: family decoder has no 'atention'; did you mean attention?",
        ),
        (
            TEXT,
            ["memory.offload=activations"],
            "memory.remat: none keeps what has no name, which memory.offload cannot move; use full, dots or names",
        ),
        (
            TEXT,
            ["memory.offload=[attention]", "memory.remat=sqrt"],
            "memory.offload: attention is kept by no layer under memory.remat: sqrt; use full",
        ),
        (
            TEXT,
            ["memory.offload=activations", "memory.remat=budget"],
            "memory.remat=budget does not support memory.offload of activations; use full, dots or names",
        ),
        (
            TEXT,
            ["memory.offload=optimizer", "optimizer={name: sgd}"],
            "memory.offload: sgd without optimizer.momentum keeps nothing that could wait on the host; use none",
        ),
        (
            TEXT,
            ["memory.offload=frozen"],
            "memory.offload=frozen moves nothing: all parameters are trainable; use none or optimizer",
        ),
        (
            TEXT,
            ["memory.offload=[optimizer]", "mesh.stage=2"],
            "mesh.stage: stages update their layers at the same time, memory.offload: optimizer one by one; use 1",
        ),
        (
            TEXT,
            ["memory.offload=[optimiser]", "memory.remat=full"],
            "memory.offload: family decoder has no 'optimiser'; did you mean optimizer?",
        ),
        (TEXT, ["model.kv_heads=3"], "model.kv_heads: 3 does not divide model.heads 8"),
        (TEXT, ["model.head_dim=15"], "model.head_dim: 15 is odd; rotary positions turn pairs"),
        (TEXT, ["model.rope.factor=8"], "model.rope.factor: 8 does nothing with model.rope.scaling: none"),
        (TEXT, ["model.vocab=256"], "model.vocab: 256 is less than the 257 of data.tokenizer: bytes"),
        (PICTURES, ["model.heads=3"], "model.heads: 3 does not divide model.embed 64"),
        (PICTURES, ["model.patch=3"], "model.patch: 3 does not divide model.image_size 8"),
        (
            PICTURES,
            ["model={family: mlp, categories: 18}"],
            "model.categories: only model.inputs: one_hot or embedding has categories",
        ),
        (
            PICTURES,
            ["model={family: mlp, inputs: one_hot, categories: 16}"],
            "model.categories: digits need 17 or more, for pixels of 0 to 16",
        ),
        (
            PICTURES,
            ["model={family: convnet, stages: [8, 8, 8, 8, 8]}"],
            "model.stages: 5 halve 8 pixels to none; use 4 or fewer",
        ),
        (
            PICTURES,
            ["model.image_size=16"],
            "model.image_size: digits need model.image_size 8 and model.channels 1",
        ),
        (
            TEXT,
            ["objective=binary"],
            "objective.name: binary does not go with family decoder; use next_token or dpo",
        ),
        (PICTURES, ["objective=binary"], "model.outputs: 10 must be 1 for objective binary on digits"),
        (PICTURES, ["model.outputs=5"], "model.outputs: 5 must be 10 for objective classify on digits"),
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
            "batch.accumulate: contrastive takes its negatives from the batch, which this splits; use 1",
        ),
        (
            PICTURES,
            ["objective=contrastive", "batch.global_size=1"],
            "batch.global_size: contrastive takes its negatives from the batch; use 2 or more",
        ),
        (TEXT, ["data.source=text"], "data.path: missing; source text needs a file, a directory or a glob"),
        (
            TEXT,
            ["data.path=a.txt"],
            "data.path: source stdlib has none; those that do: text, jsonl, parquet, chat, preference, tokens",
        ),
        (TEXT, ["data.field=body"], "data.field: source stdlib has none; those that do: jsonl, parquet"),
        (TEXT, ["data.source=digits"], "data.source: digits does not go with family decoder"),
        (PICTURES, ["data.source=stdlib"], "data.source: stdlib does not go with family vit"),
        (TEXT, ["data.buckets=[8]"], "data.packing: packed rows are full at any length; with data.buckets use false"),
        (
            TEXT,
            ["data={packing: false, sequence_length: 64, buckets: [16, 8, 64]}"],
            (
                "data.buckets: [16, 8, 64] must rise and stay below data.sequence_length 64, which is the last;"
                " use [8, 16]"
            ),
        ),
        (
            TEXT,
            ["data.packing=false", "data.buckets=[8]", "train={tokens: 100000}"],
            "train.tokens: how many an update has differs from bucket to bucket; give train.steps",
        ),
        (
            TEXT,
            ["memory.spill=unified", "memory.budget=4"],
            (
                "memory.spill: unified spills where the device is full, wherever memory.budget 4 ends; leave one of"
                " them out"
            ),
        ),
        (TEXT, ["data.weight=2"], "data.weight: only the sources of a data.mixture have weights"),
        (
            TEXT,
            ["data={source: text, mixture: [{source: stdlib}]}"],
            "data.source: give it to the sources of data.mixture, or give no mixture",
        ),
        (
            TEXT,
            ["data.mixture=[{source: stdlib}, {source: jsonl}]"],
            "data.mixture[1].path: missing; source jsonl needs a file, a directory or a glob",
        ),
        (
            TEXT,
            ["data.mixture=[{source: stdlib}, {source: digits}]"],
            "data.mixture[1].source: digits does not go with family decoder",
        ),
        (
            PICTURES,
            ["data={mixture: [{source: digits}]}"],
            "data.mixture: pictures cannot be mixed; use data.source: digits",
        ),
        (TEXT, ["batch.accumulate=3"], "batch.accumulate: 3 does not divide batch.global_size 8"),
        (TEXT, ["mesh.fsdp=0"], "mesh.fsdp: must be at least 1, or -1 for the rest of the devices, not 0"),
        (TEXT, ["mesh.fsdp=-1", "mesh.tensor=-1"], "mesh.tensor: only one axis can be -1, and mesh.fsdp is"),
        (
            {**TEXT, "objective": "classify", "model": {"family": "vit"}, "data": {"source": "digits"}},
            ["mesh.context=2"],
            "mesh.context: 2 splits sequences of tokens; family vit has none; use 1",
        ),
        (
            TEXT,
            ["mesh.context=2", "memory.attention=reference"],
            "mesh.context=2 does not support memory.attention=reference; use auto or blockwise",
        ),
        (
            TEXT,
            ["rules.mlp=[tensr]"],
            "rules.mlp[0]: 'tensr' is not one of fsdp, context, tensor; did you mean tensor?",
        ),
        (TEXT, ["rules.embed=[tensor]"], "rules.embed[0]: 'tensor' is not one of fsdp, context"),
        (TEXT, ["rules.mlp=[fsdp, fsdp]"], "rules.mlp: ['fsdp', 'fsdp'] names an axis twice; use ['fsdp']"),
        (PICTURES, ["rules.vocab=[]"], "rules.vocab: family vit has none; it has embed, heads, kv_heads, mlp"),
        (
            TEXT,
            ["rules.heads=[]"],
            "rules.kv_heads: tensor splits key heads together with heads; give it to rules.heads, or to neither",
        ),
        (TEXT, ["mesh.stage=0"], "mesh.stage: must be at least 1, or -1 for the rest of the devices, not 0"),
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


def test_all_problems_are_told_at_once():
    found = lines(TEXT, "model.kv_heads=3", "batch.accumulate=3", "mesh.context=0")
    assert [line.partition(":")[0] for line in found] == ["model.kv_heads", "batch.accumulate", "mesh.context"]


def test_steps():
    assert load_config(TEXT).steps == 100
    cfg = load_config(TEXT, ["train={tokens: 100_001}", "batch.global_size=10", "data.sequence_length=100"])
    assert cfg.steps == 101


def test_triton_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    over = "memory.attention=triton"
    assert load_config(TEXT, [over]).memory.attention == "triton"
    monkeypatch.setattr("jaxmem.config.check_memory.find_spec", lambda _: None)
    [line] = lines(TEXT, over)
    assert line == "memory.attention: triton needs jax-triton: pip install 'jaxmem[cuda13]'; or use auto"


def test_mosaic_takes_16_bits() -> None:
    over = "memory.attention=mosaic"
    assert load_config(TEXT, [over]).memory.attention == "mosaic"
    [line] = lines(TEXT, over, "precision.compute=float32")
    assert line == "memory.attention: mosaic supports 16-bit dtypes, not precision.compute float32; use triton"


def test_a_path_that_the_locale_cannot_write(monkeypatch: pytest.MonkeyPatch) -> None:
    load_config(TEXT, ["output=größer"])
    monkeypatch.setattr(os, "fsencode", lambda path: path.encode("ascii"))
    [line] = lines(TEXT, "output=größer")
    assert line.startswith(
        "output: 'gr\\xf6\\xdfer' cannot be a file's name where names are in utf-8; set PYTHONUTF8=1"
    )
