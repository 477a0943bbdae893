"""Every two settings together: a config with both trains to the plain config's loss, or is refused in one line.

    python -m tests.support.pairs --results FILE       # all pairs; a stopped command continues where it was
    python -m tests.support.pairs --rows 10 --seed 7   # ten rows
    python -m tests.support.pairs --try memory.remat=sqrt precision.parameters=int8

A row is a config with a setting for many fields, drawn so that it has many pairs that no row before it has (a covering
array). It trains a tiny model for three updates, evaluates it and, if it saves checkpoints, resumes before the last
update. Its losses must be those of the same row on one device without any of the settings that change memory and
communication only (NEUTRAL). A pair counts as tried when a row with it has trained. A row that is refused, which some
settings are only when the model is known, is reduced to the fewest settings that are refused, and no later row has all
of them. At the end the pairs that are refused alone are listed with the reason.

FILE has a line of JSON per row; with --failed the rows in it that failed are tried again. With --reduce a row that
fails is reduced to the fewest settings that still fail.
"""

import argparse
import atexit
import contextlib
import dataclasses
import functools
import gc
import io
import itertools
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if __name__ == "__main__":
    from jaxmem.machine.devices import simulate

    # As in tests/conftest.py: compiled fast rather than fast.
    quick = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    quick += " --xla_cpu_use_fusion_emitters=false --xla_cpu_max_isa=AVX"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick}"
    simulate(8)

import jax
import numpy as np

from jaxmem.config import Config, load_config
from jaxmem.config.devices import for_devices
from jaxmem.config.mesh import MESH_AXES
from jaxmem.errors import UserError
from jaxmem.kernels import triton_launch
from jaxmem.step.programs import Program
from jaxmem.training.run import run
from jaxmem.training.telemetry import DivergedError
from tests.kernels import interpreter

triton_launch.INTERPRETER = interpreter.interpret

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
    "generate.kv_cache": "no training: tests/inference",
    "generate.prefill_chunk": "no training: tests/inference",
}
# Settings of memory and communication, and of saving: the loss is the same without them.
NEUTRAL = ("memory.", "mesh.", "rules.", "pipeline.", "zero=", "batch.accumulate=", "optimizer.kernel=", "checkpoint.",
           "cluster.", "train.on_nan=", "train.max_skipped=",
           "train.deterministic=")  # fmt: skip
# Up to ten times as long to compile, or to run in the interpreter: only in rows that begin with it.
SLOW = ("galore", "memory.experts=triton")
LONGEST = 28  # settings of a row
DEVICES = 8  # at most
FRESH = 10  # rows after which compiled programs are forgotten

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


class Cover:
    """Rows until each pair of settings is in a row that has trained, or is refused.

    `left`: the pairs that are neither. `refused`: the refused pairs, and why. Call `add` or `refuse` with a row before
    the next one is drawn.
    """

    def __init__(self, seed: int, done: Iterable[Row] = (), settings: Sequence[str] = SETTINGS) -> None:
        self._draw, self._settings = random.Random(seed), settings
        self._fields = sorted({field(setting) for setting in settings})
        self._wrong: dict[frozenset[str], str] = {}  # settings that a run refused together, and why
        self.left = {
            frozenset(pair) for pair in itertools.combinations(settings, 2) if field(pair[0]) != field(pair[1])
        }
        self.refused: dict[frozenset[str], str] = {}
        self._order = sorted(map(sorted, self.left), reverse=True)
        self._draw.shuffle(self._order)
        alone = [setting for setting in settings if refusal((setting,))]
        assert not alone, alone
        for row in done:
            self.add(row)

    def add(self, row: Row) -> None:
        """A row that has trained."""
        self.left -= {frozenset(pair) for pair in itertools.combinations(row, 2)}

    def refuse(self, row: Row, message: str) -> None:
        """The fewest settings that are refused when the model is known."""
        self._wrong[frozenset(row)] = message

    def refusal(self, row: Row) -> str | None:
        for settings, message in self._wrong.items():
            if settings <= {*row}:
                return message
        return refusal(row)

    def next_row(self) -> Row | None:
        while self._order:
            first = tuple(self._order[-1])
            if frozenset(first) not in self.left:
                self._order.pop()
            elif message := self.refusal(first):
                self.refused[frozenset(first)] = message
                self.left.discard(frozenset(first))
            else:
                return self._longer(first)
        return None

    def _longer(self, row: Row) -> Row:
        """The row with a setting for other fields, each with a pair that is left."""
        for name in self._draw.sample(self._fields, len(self._fields)):
            if len(row) == LONGEST or any(field(setting) == name for setting in row):
                continue
            new = {
                setting: sum(frozenset((setting, other)) in self.left for other in row) + self._draw.random()
                for setting in self._settings
                if field(setting) == name
            }
            for setting in sorted(new, key=new.__getitem__, reverse=True)[:3]:
                is_slow = any(slow in setting and not any(slow in other for other in row) for slow in SLOW)
                if new[setting] >= 1 and not is_slow and not self.refusal((*row, setting)):
                    row = (*row, setting)
                    break
        return row


def trained(given: list[str]) -> list[float]:
    """The losses of the updates, then the loss of held-out data after each of them if the config evaluates."""
    with tempfile.TemporaryDirectory() as folder:
        paths = [f"output={folder}", f"checkpoint.path={folder}/saved"]
        if any("objective.name=dpo" in text for text in given):  # beside the data, it would be that of another row
            paths.append(f"data.reference_logprobs={folder}/reference.npz")
        cfg = config([*given, *paths])
        devices = jax.devices()[: math.prod(getattr(cfg.mesh, axis) for axis in MESH_AXES)]
        losses = _losses(cfg, devices)
        if cfg.checkpoint.every is not None and cfg.checkpoint.resume == "auto":
            shutil.rmtree(max(Path(folder, "saved", cfg.name).glob("[0-9]*"), key=lambda path: int(path.name)))
            resumed = _losses(cfg, devices)
            assert resumed == losses, f"resumed: {resumed}, not {losses}"
    return losses


def _losses(cfg: Config, devices: Sequence[Any]) -> list[float]:
    # What a run says of its memory takes up to a quarter of the time of a row.
    only_folder = mock.patch(
        "jaxmem.training.run.write_description", lambda _, folder, **_more: folder.mkdir(parents=True, exist_ok=True)
    )
    with contextlib.redirect_stdout(io.StringIO()), only_folder:
        result = run(cfg, devices)
    lines = map(json.loads, (result.directory / "metrics.jsonl").read_text().splitlines())
    losses = {name: {line["step"]: line[name] for line in lines if name in line} for name in ("loss", "held_out_loss")}
    return [loss for by_step in losses.values() for _, loss in sorted(by_step.items())]


def tolerance(row: Row) -> float:
    """Of the losses: rounding, and with stored or computed values of few bits what rounding decides."""
    cfg = config(overrides(row))
    if cfg.precision.compute in ("bfloat16", "float16", "fp8") or cfg.precision.gradients == "bfloat16":
        return 2e-2
    if cfg.memory.save_dtype == "fp8":
        return 2e-2
    is_coarse = cfg.precision.parameters != "float32"
    return 5e-3 if is_coarse or cfg.optimizer.name != "sgd" else 1e-4


@functools.lru_cache(4)
def plain_losses(given: tuple[str, ...]) -> list[float]:
    """The losses on one device."""
    return trained(list(given))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a row: `refusal`, the line that refused it; `failure`, what is wrong with it. None: it trained to
    the losses of the plain config."""

    failure: str | None = None
    refusal: str | None = None

    @property
    def kind(self) -> str:
        """Rows whose outcomes have the same kind are wrong in the same way."""
        return self.refusal or (self.failure or "").partition(":")[0]


def outcome(row: Row) -> Outcome:
    result = _compared(row)
    if result.kind == "loss" and "precision.compute=fp8" in overrides(row):
        # Between matmuls in FP8, sums in bfloat16 differ by layout in their last bit, which decides how the next matmul
        # rounds. In float32 this is rare, so the losses agree unless something is wrong.
        plain_losses.cache_clear()
        with mock.patch("jaxmem.step.execution.compute_dtype", return_value=np.dtype("float32")):
            result = _compared(row)
        plain_losses.cache_clear()
    return result


def _compared(row: Row) -> Outcome:
    given = overrides(row)
    try:
        mine = trained(given)
        plain = plain_losses(tuple(text for text in given if not text.startswith(NEUTRAL)))
    except DivergedError as error:
        return Outcome(f"diverged: {error}")
    except UserError as error:  # some settings are refused when the model is known
        is_line = len(str(error).splitlines()) == 1
        return Outcome(refusal=str(error)) if is_line else Outcome(f"UserError of several lines: {error}")
    except Exception as error:  # noqa: BLE001, whatever it is, it is a fault
        return Outcome(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    cfg = config(given)
    is_coarse_dpo = cfg.objective.name == "dpo" and cfg.precision.compute != "float32"
    # The scale of a micro-batch decides which updates overflow. DPO's margins are differences between sums of
    # log-probabilities, so rounding decides where its updates lead.
    if is_coarse_dpo or cfg.precision.loss_scale == "dynamic":
        mine, plain = mine[:1], plain[:1]
    # APOLLO scales a gradient by its norm, which is noise if that is 0. Activations that are saved in FP8 change the
    # gradients that FP8 matmuls round.
    is_rounded_twice = {"precision.compute=fp8", "memory.save_dtype=fp8"} <= {*given}
    if is_rounded_twice or any("optimizer.name=apollo" in text for text in given):
        mine, plain = mine[:2], plain[:2]
    off = max(abs(a / b - 1) for a, b in zip(mine, plain, strict=True))
    first = abs(mine[0] / plain[0] - 1)
    wrong = not (off < tolerance(row) and first < min(tolerance(row), 2e-2 if is_coarse_dpo else 1e-2))
    return Outcome(f"loss: {mine} where the plain config has {plain}" if wrong else None)


class _AcceptedError(Exception):
    """Ends a run whose config is not refused."""


def _accept(built: Program, _: str | None) -> None:
    built.lower_step()  # traces the step, which may refuse it
    raise _AcceptedError


def refused_at_run(row: Row) -> Outcome:
    """The outcome of a row, as far as a run is refused: without compiling or training."""
    with mock.patch("jaxmem.planning.result.plan_program", _accept):
        try:
            trained(overrides(row))
        except UserError as error:
            return Outcome(refusal=str(error))
        except Exception:  # noqa: BLE001, another fault than that which is reduced
            return Outcome()
    raise AssertionError("the run was not ended")


def reduced(row: Row, kind: str, outcome: Callable[[Row], Outcome]) -> Row:
    """The fewest settings of a row with an outcome of this kind."""
    size = len(row) // 2
    while size:
        for start in range(0, len(row), size):
            fewer = row[:start] + row[start + size :]
            if refusal(fewer) is None and outcome(fewer).kind == kind:
                row = fewer
                break
        else:
            size //= 2
        size = min(size, len(row) // 2)
    return row


@dataclasses.dataclass
class Results:
    """A file with a line of JSON per row. While a row is tried, it is in a file beside it: XLA may end the process."""

    path: Path | None

    @property
    def _current(self) -> Path | None:
        return self.path and self.path.with_suffix(".current")

    def begin(self, row: Row) -> None:
        if self._current:
            self._current.write_text(json.dumps(row))

    def end(self) -> None:
        if self._current:
            self._current.unlink()

    def record_ended(self) -> None:
        """Records the row that has ended the process before."""
        if self._current and self._current.exists():
            self.write(tuple(json.loads(self._current.read_text())), Outcome("ended the process"), 0, -1)
            self.end()

    def read(self) -> list[tuple[Row, Outcome]]:
        """The rows whose settings are still in SETTINGS, each with its last outcome."""
        lines = self.path.read_text().splitlines() if self.path and self.path.exists() else ()
        rows = {}
        for line in map(json.loads, lines):
            if {*line["row"]} <= {*SETTINGS}:
                rows[tuple(line["row"])] = Outcome(line["failure"], line["refusal"])
        return list(rows.items())

    def write(self, row: Row, result: Outcome, seconds: float, left: int) -> None:
        if self.path:
            with self.path.open("a") as file:
                entry = {"row": row, "seconds": round(seconds, 1), "left": left, **dataclasses.asdict(result)}
                file.write(json.dumps(entry) + "\n")


def try_row(row: Row, cover: Cover, results: Results, *, reduce: bool = False) -> Outcome:
    """Trains a row, and tells `cover` and `results` what became of it."""
    results.begin(row)
    start = time.monotonic()
    try:
        result = outcome(row)
    finally:
        results.end()
    seconds = time.monotonic() - start
    if result.refusal:
        row = reduced(row, result.kind, refused_at_run)
        cover.refuse(row, result.refusal)
    else:
        cover.add(row)
    results.write(row, result, seconds, len(cover.left))
    print(f"{len(row)} settings, {len(cover.left)} pairs left, {seconds:.0f} s", flush=True)
    if result != Outcome():
        print(f"  {result.failure or result.refusal}\n  {' '.join(overrides(row))}", flush=True)
    if result.failure and reduce:
        fewest = reduced(row, result.kind, outcome)
        print(f"  reduced to: {' '.join(overrides(fewest))}\n  {outcome(fewest).failure}", flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, metavar="FILE", help="write a line per row; continue its run")
    parser.add_argument("--rows", type=int, help="stop after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--failed", action="store_true", help="first the rows that failed, again")
    parser.add_argument("--reduce", action="store_true", help="a row that fails to the fewest settings that still fail")
    parser.add_argument("--try", nargs="+", dest="row", metavar="KEY=VALUE", help="this row only")
    args = parser.parse_args()
    results = Results(args.results)
    results.record_ended()
    tried = results.read()
    # Another order at each start: a row that failed would come again first.
    cover = Cover(args.seed + len(tried), [row for row, result in tried if result == Outcome()])
    for row, result in tried:
        if result.refusal:
            cover.refuse(row, result.refusal)
    rows = [tuple(args.row)] if args.row else [row for row, result in tried if result.failure] if args.failed else []
    failed = 0
    for count in itertools.count():
        row = rows.pop(0) if rows else None if args.row else cover.next_row()
        if row is None or count == args.rows:
            break
        if count % FRESH == FRESH - 1:
            jax.clear_caches()
            gc.collect()
        failed += try_row(row, cover, results, reduce=args.reduce).failure is not None
    for pair, message in cover.refused.items():
        print(f"refused: {' with '.join(sorted(pair))}: {message}")
    print(f"{failed} rows failed; {len(cover.left)} pairs left, {len(cover.refused)} refused")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
