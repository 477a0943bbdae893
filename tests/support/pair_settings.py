"""The settings whose pairs `tests.support.pairs` tries, each with a value that differs from its default, and the config
of a row of them."""

import atexit
import functools
import json
import math
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from jaxmem.config import Config, load_config
from jaxmem.config.devices import for_devices
from jaxmem.config.mesh import MESH_AXES
from jaxmem.errors import UserError

UPDATES = 3
BASE: dict[str, Any] = {
    "name": "pairs",
    "model": {"preset": "tiny", "vocab": 264, "layers": 5, "embed": 32, "mlp": 64, "heads": 8, "kv_heads": 4,
              "head_dim": 8},
    "data": {"source": "jsonl", "path": "DATA/texts.jsonl", "sequence_length": 24, "held_out": 0.2},
    "batch": {"global_size": 8},
    "optimizer": {"learning_rate": 1e-2},
    "train": {"steps": UPDATES, "log_every": 1},
}  # fmt: skip
PICTURES = (
    'model={"family":"vit","layers":5,"embed":32,"mlp":64,"heads":4,"outputs":1} data.source=digits data.path=null'
)
CHAT = "data.source=chat data.path=DATA/chats.jsonl data.chat_template=DATA/template.jinja"
DPO = "objective.name=dpo data.source=preference data.path=DATA/preferences.jsonl data.packing=false"
EXPERTS = "model.experts.count=4 model.experts.top_k=2"
LONGER = "model.rope.factor=2 model.rope.original_length=16"
WINDOWS = "model.window=8 model.layer_types=[sliding_attention,full_attention]"
GEMMA = (
    "model.norms=both model.activation=gelu_tanh model.norm_offset=true model.scale_embeddings=true"
    f" model.tie_embeddings=true {WINDOWS} model.query_pre_attn_scalar=4"
)
GPT_OSS = (
    "model.activation=swiglu_clamped model.mlp_bias=true model.attention_sinks=true model.attention_bias=true"
    f" model.output_bias=true {WINDOWS}"
)
DEEPSEEK = (
    'model.latent={"kv_rank":16,"rope_dim":4,"value_dim":8} model.kv_heads=8 model.experts.shared=64'
    " model.experts.shared_gate=false model.experts.scale=2 model.experts.groups=2 model.experts.top_groups=1"
    " model.experts.renormalize=false model.experts.dense_layers=[0] model.experts.dense_mlp=48"
    f" model.rope.mscale_all_dim=1 model.rope.mscale=0.7 model.rope.scaling=yarn {LONGER} {EXPERTS}"
)
SHORT_FACTORS, LONG_FACTORS = "model.rope.short_factors=[1,1.1,1.2,1.3]", "model.rope.long_factors=[1.5,2,3,4]"
TWO_SOURCES = (
    'data.mixture=[{"source":"jsonl","path":"DATA/texts.jsonl"},{"source":"text","path":"DATA/texts","weight":2.0}]'
)
# One setting a line: an override, and others that it requires. Values without an entry are the defaults. A line that
# begins with `architecture` sets fields that no published architecture has without the others.
SETTINGS = f"""
memory.remat=full
memory.remat=dots
memory.remat=sqrt
memory.remat=recursive
memory.remat=constant
memory.remat=every_2
memory.remat=slots_2
memory.remat={{"save":[attention,mlp_hidden]}}
memory.offload=activations memory.remat=full
memory.offload=optimizer
memory.offload=frozen adapter.kind=lora
memory.offload=[attention_out] memory.remat={{"save":[attention_out]}}
memory.offload=[activations,optimizer] memory.remat=full
memory.save_dtype=fp8 memory.remat=dots
memory.update=during
memory.attention=blockwise
memory.attention=reference
memory.loss_chunk=50
memory.mlp_chunk=5
memory.head_groups=2
precision.parameters=bfloat16
precision.parameters=int8
precision.parameters=nf4
precision.parameters=int4
precision.parameters=uint8
precision.parameters=fp8_e4m3
precision.block_size=16 precision.parameters=int8
precision.compute=float32
precision.compute=bfloat16
precision.compute=float16
precision.compute=fp8
precision.fp8_scaling=row precision.compute=fp8
precision.fp8_scaling=mxfp8 precision.compute=fp8
precision.fp8_layers=[blocks.mlp.*] precision.compute=fp8
precision.gradients=float32
precision.gradients=bfloat16
precision.master=float32 precision.parameters=bfloat16
precision.master=remainder16 precision.parameters=bfloat16
precision.master=remainder8 precision.parameters=bfloat16
precision.rounding=nearest
precision.rounding=stochastic precision.parameters=bfloat16
precision.loss_scale=dynamic precision.compute=float16
precision.loss_scale=128 precision.compute=float16
optimizer.name=adam
optimizer.name=sgd
optimizer.name=lion
optimizer.name=adafactor
optimizer.name=adam_mini
optimizer.name=muon
optimizer.name=adamw8bit
optimizer.name=adamw4bit
optimizer.name=lion8bit
optimizer.name=momentum8bit
optimizer.name=galore_adamw
optimizer.name=galore_adamw8bit
optimizer.name=qgalore
optimizer.name=apollo
optimizer.name=apollo_mini
optimizer.learning_rate=1e-3
optimizer.schedule=linear
optimizer.schedule=constant
optimizer.warmup=2
optimizer.min_lr_ratio=0
optimizer.clip=null
optimizer.clip=0.1
optimizer.trainable=[blocks.*]
optimizer.trainable=["blocks[-2:].*"]
optimizer.clip_by=previous
optimizer.clip_by=weight
optimizer.kernel=triton optimizer.name=adamw8bit
optimizer.beta1=0.8
optimizer.beta2=0.9
optimizer.epsilon=1e-3
optimizer.momentum=0.5 optimizer.name=sgd
optimizer.rank=4 optimizer.name=apollo
optimizer.refresh_every=1 optimizer.name=apollo
optimizer.scale=0.5 optimizer.name=apollo
optimizer.project_embeddings=true optimizer.name=apollo
optimizer.similarity=0.9 optimizer.name=qgalore
optimizer.residual=true optimizer.name=galore_adamw
optimizer.weight_decay=0.3
adapter.kind=lora
adapter.kind=dora
adapter.kind=qlora
adapter.kind=prompt data.packing=false
adapter.kind=head
adapter.kind=last_layers
adapter.kind=patterns adapter.targets=[blocks.attention.*]
adapter.rank=4 adapter.kind=lora
adapter.alpha=4 adapter.kind=lora
adapter.alpha_pattern={{"*.mlp.*":8}} adapter.kind=lora
adapter.rslora=true adapter.kind=lora
adapter.targets=[blocks.*,embedding,head] adapter.kind=lora
adapter.targets={{"*.mlp.*":8,"blocks.*":4}} adapter.kind=lora
adapter.dropout=0.2 adapter.kind=lora
adapter.base=bfloat16 adapter.kind=lora
adapter.base=int8 adapter.kind=qlora
adapter.double_quant=false adapter.kind=qlora
adapter.embeddings=bfloat16 adapter.kind=qlora
adapter.lora_bias=true adapter.kind=lora
adapter.lora_plus_ratio=4 adapter.kind=lora
adapter.virtual_tokens=8 adapter.kind=prompt data.packing=false
adapter.layers=2 adapter.kind=last_layers
mesh.stage=2
mesh.replica=2
mesh.fsdp=2
mesh.context=2
mesh.context_method=ring mesh.context=2
mesh.tensor=2
pipeline.rounds=2 mesh.stage=2 batch.accumulate=2
pipeline.schedule=gpipe mesh.stage=2 batch.accumulate=2
zero=0
zero=1
zero=2
batch.accumulate=2
batch.accumulate=4
{DPO}
objective.name=classify model.outputs=10 {PICTURES}
objective.name=binary {PICTURES}
objective.name=regress_l1 {PICTURES}
objective.name=regress_l2 {PICTURES}
objective.name=contrastive {PICTURES}
objective.label_smoothing=0.1
objective.z_loss=1e-3
objective.temperature=0.5 objective.name=contrastive {PICTURES}
objective.beta=0.5 {DPO}
rules.embed=[fsdp]
rules.embed=[context]
rules.embed=[context,fsdp]
rules.embed=[]
rules.vocab=[]
rules.heads=[] rules.kv_heads=[]
rules.heads=[tensor,fsdp,context]
rules.heads=[context,fsdp,tensor]
rules.kv_heads=[]
rules.kv_heads=[tensor,fsdp]
rules.mlp=[]
rules.mlp=[tensor,fsdp,context]
rules.mlp=[context,fsdp,tensor]
rules.logits=[fsdp]
rules.replicated=[attention]
rules.replicated=[head]
rules.replicated=[gate_up,down]
rules.replicated=[experts] {EXPERTS}
rules.optimizer=[replica]
architecture=gemma2 {GEMMA} model.attention_soft_cap=5 model.logit_soft_cap=5
architecture=gemma3 {GEMMA} model.qk_norm=true model.sliding_rope={{"theta":100}}
architecture=olmo2 model.norms=post model.qk_norm=all_heads
architecture=qwen2 model.attention_bias=true model.tie_embeddings=true
architecture=qwen3 model.qk_norm=true
architecture=qwen2_moe model.experts.shared=32 model.attention_bias=true model.experts.renormalize=false {EXPERTS}
architecture=qwen3_moe model.experts.every=2 model.experts.dense_mlp=48 model.qk_norm=true {EXPERTS}
architecture=dense_first model.experts.dense_layers=[0] model.experts.dense_mlp=48 model.qk_norm=true {EXPERTS}
architecture=mixtral {EXPERTS}
architecture=gpt_oss {GPT_OSS} {EXPERTS}
architecture=deepseek {DEEPSEEK}
model.norm_epsilon=1e-3
model.window=8
model.dropout=0.2
model.mlp_bias=true
model.rope.theta=1000
model.rope.share=0.5
model.rope.scaling=linear model.rope.factor=2
model.rope.scaling=llama3 {LONGER} model.rope.low_frequency=2 model.rope.high_frequency=3
model.rope.scaling=yarn {LONGER} model.rope.truncate=false model.rope.beta_fast=16 model.rope.beta_slow=2
model.rope.scaling=longrope {LONGER} {SHORT_FACTORS} {LONG_FACTORS}
model.rope.attention_factor=1.2 model.rope.scaling=yarn {LONGER}
model.experts.balance_loss=0.1 {EXPERTS}
model.experts.z_loss=0.1 {EXPERTS}
memory.experts=blockwise {EXPERTS}
memory.experts=triton {EXPERTS}
mesh.expert=2 {EXPERTS}
adapter.experts=mxfp4 adapter.kind=qlora {EXPERTS}
adapter.experts=int4 adapter.kind=qlora {EXPERTS}
adapter.shared_a=true adapter.kind=lora {EXPERTS}
mesh.fsdp=4
batch.global_size=16
data.source=text data.path=DATA/texts
{CHAT}
{TWO_SOURCES} data.path=null data.source=stdlib
data.field=other data.path=DATA/texts.jsonl data.source=jsonl
data.sequence_length=32
data.packing=false
data.documents_per_row=2
data.epochs=1
data.streaming=true
data.on_overlong=drop {CHAT}
data.on_invalid=skip
data.held_out=0.4
data.shuffle=false
train.tokens={24 * 8 * UPDATES} train.steps=null
train.evaluate_every=1
train.evaluate_batches=1 train.evaluate_every=1
train.on_nan=skip
train.max_skipped=2
train.deterministic=true
checkpoint.every=1
checkpoint.keep=1 checkpoint.every=1
checkpoint.keep_best=true checkpoint.every=1 train.evaluate_every=1
checkpoint.resume=never checkpoint.every=1
cluster.elastic=true
cluster.preflight=false
""".strip().splitlines()
# Fields without a setting above, and why.
UNTRIED = {
    "name": "a directory",
    "output": "a directory",
    "checkpoint.path": "a directory",
    "seed": "other losses",
    "memory.budget": "planning replaces it by a policy of memory.remat",
    "adapter.hf": "reads a directory: tests/hf",
    "adapter.base_run": "reads a directory: tests/training",
    "model.hf": "reads a directory: tests/hf",
    "model.quantization": "set by model.hf",
    "model.preset": "sets other fields",
    "model.sliding_rope": "the fields of model.rope",
    "data.weight": "of a source in data.mixture",
    "data.tokenizer": "other ids: tests/data/test_tokenizer.py",
    "data.reference_logprobs": "a file: tests/training/test_preference.py",
    "train.log_every": "the losses are read from the log",
    "train.profile": "tests/training/test_run.py",
    "train.trackers": "tests/training/test_trackers.py",
    "cluster.heartbeat_timeout": "several processes: tests/distributed",
    "cluster.start_timeout": "several processes: tests/distributed",
    "checkpoint.step": "no training: tests/checkpoint",
    "generate.kv_cache": "no training: tests/inference",
    "generate.prefill_chunk": "no training: tests/inference",
}
# Settings of memory and communication, and of saving: the loss is the same without them.
NEUTRAL = ("memory.", "mesh.", "rules.", "pipeline.", "zero=", "batch.accumulate=", "optimizer.kernel=", "checkpoint.",
           "cluster.", "train.on_nan=", "train.max_skipped=",
           "train.deterministic=")  # fmt: skip
DEVICES = 8  # at most

Row = tuple[str, ...]  # settings, at most one per field


@functools.cache
def data_folder() -> Path:
    """The files of `DATA` in settings."""
    folder = Path(tempfile.mkdtemp(prefix="jaxmem-pairs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdefgh \n", k=draw.randint(3, 40))) for _ in range(120)]
    answers = [draw.choice(("yes", "no", "maybe")) for _ in texts]
    files = {
        "texts.jsonl": [{"text": text, "other": text[::-1]} for text in texts],
        "chats.jsonl": [
            {"messages": [{"role": "user", "content": text[:9]}, {"role": "assistant", "content": answer}]}
            for text, answer in zip(texts, answers, strict=True)
        ],
        "preferences.jsonl": [
            {"prompt": text[:9], "chosen": answer, "rejected": answer[::-1]}
            for text, answer in zip(texts, answers, strict=True)
        ],
    }
    for name, lines in files.items():
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "texts").mkdir()
    for place, text in enumerate(texts):  # a file is a record
        (folder / "texts" / f"{place}.txt").write_text(text)
    (folder / "template.jinja").write_text(
        "{% for message in messages %}{{ message.role }}: "
        "{% generation %}{{ message.content }}{% endgeneration %}\n{% endfor %}"
    )
    return folder


def field(setting: str) -> str:
    return setting.partition("=")[0]


def overrides(row: Row) -> list[str]:
    """What the settings of a row require, then the settings."""
    words = [setting.split(" ") for setting in row]
    texts = [word for own in words for word in own[1:]] + [own[0] for own in words]
    texts = [text for text in texts if field(text) != "architecture"]
    return sorted(texts, key=lambda text: field(text).count("."))


def config(given: list[str]) -> Config:
    """The config of some overrides for as many devices as its mesh has."""
    folder = str(data_folder())
    base = BASE | {"data": BASE["data"] | {"path": f"{folder}/texts.jsonl"}}
    cfg = load_config(base, [text.replace("DATA", folder) for text in given])
    devices = math.prod(getattr(cfg.mesh, axis) for axis in MESH_AXES)
    if devices > DEVICES:
        raise UserError(f"{devices} devices")
    return for_devices(cfg, devices)


def refusal(row: Row) -> str | None:
    """The first problem for which the config refuses these settings, each in one line; None: it does not."""
    try:
        config(overrides(row))
    except UserError as error:
        lines = str(error).splitlines()
        for line in lines:
            assert 10 <= len(line) <= 600, line
        return lines[0]
    return None
