"""What a run is: one frozen model a section, unknown keys refused.

A field exists only if something reads it; `tests/config` sees to that. The values here are
what a person wrote; what follows from them together is checked in `check.py`.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from jaxmem.config.base import Count, Fraction, NotNegative, Positive, Section
from jaxmem.config.networks import Convnet, Decoder, Model
from jaxmem.config.optimizers import Optimizer
from jaxmem.config.recompute import NUMBERED, POLICIES
from jaxmem.config.sources import SOURCES, SourceKind, SourceName
from jaxmem.errors import UserError


class Objective(Section):
    """What is minimised. `objective: classify` is short for `objective: {name: classify}`."""

    name: Literal["next_token", "dpo", "classify", "binary", "regress_l1", "regress_l2", "contrastive"] = "next_token"
    label_smoothing: Fraction = 0.0
    z_loss: NotNegative = 0.0
    temperature: Positive = 0.1  # contrastive
    beta: Positive = 0.1  # dpo: how much leaving the reference counts

    @property
    def reads_text(self) -> bool:
        return self.name in ("next_token", "dpo")


class Source(Section):
    """One place that documents come from."""

    source: SourceName = "stdlib"
    path: str | None = None  # a file, a directory or a glob
    field: str = "text"  # the key or column that holds the document (jsonl, parquet)
    weight: Positive = 1.0  # its share of a mixture

    @property
    def kind(self) -> SourceKind:
        return SOURCES[self.source]


class Data(Source):
    mixture: Annotated[tuple[Source, ...], Field(strict=False)] = ()  # in place of `source`
    sequence_length: Count = 1024
    packing: bool = True
    # Unpacked rows: lengths below `sequence_length`, of which each batch has the shortest that holds all its records.
    buckets: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    tokenizer: str = "bytes"  # or the path of a tokenizer.json
    epochs: Count | None = None  # passes over the data, at most, whatever `train.steps` asks for
    chat_template: str | None = None  # of chats: a file of Jinja; none: the tokenizer's own
    on_overlong: Literal["cut", "drop"] = "cut"  # chat, preference: what is longer than `sequence_length`
    on_invalid: Literal["stop", "skip"] = "stop"  # chat, preference, jsonl, parquet: lines or rows that hold none
    reference_logprobs: str | None = None  # preference: a file of the reference model's; null: beside the data
    held_out: Fraction = 0.02  # share of the documents kept for evaluation
    shuffle: bool = True

    @property
    def lengths(self) -> tuple[int, ...]:
        """That rows have, the longest last."""
        return (*self.buckets, self.sequence_length)


class Batch(Section):
    global_size: Count = 8  # sequences an update
    accumulate: Count = 1  # micro-batches an update


class Mesh(Section):
    """Devices along each axis; one may be -1: all that are left. In the order of the device grid, outermost first:
    neighbours along the last axis share the fastest links."""

    stage: int = 1
    replica: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def row_shards(self) -> int:
        """Among how many groups of devices the rows of a batch are divided."""
        return math.prod(getattr(self, axis) for axis in BATCH_AXES)


MESH_AXES = tuple(Mesh.model_fields)
BATCH_AXES = ("replica", "fsdp")  # what the rows of a batch are sharded over

_Over = Annotated[tuple[Literal["fsdp", "context", "tensor"], ...], Field(strict=False)]


class Rules(Section):
    """Which axes of the mesh split which dimension of the weights: the table of `sharding/table.py`. `fsdp` and
    `context` say how weights rest, as far as `zero` splits them; `tensor` also how they are computed with. Where two
    dimensions of a weight name one axis, the first has it."""

    embed: Annotated[tuple[Literal["fsdp", "context"], ...], Field(strict=False)] = ("fsdp", "context")
    vocab: Annotated[tuple[Literal["tensor"], ...], Field(strict=False)] = ("tensor",)
    heads: _Over = ("tensor",)
    kv_heads: _Over = ("tensor",)
    mlp: _Over = ("tensor",)

    @property
    def table(self) -> dict[str, tuple[str, ...]]:
        return {dim: getattr(self, dim) for dim in Rules.model_fields}


class Pipeline(Section):
    """How micro-batches go through the stages of `mesh.stage`."""

    rounds: Count = 1  # how often each goes round, through a group of layers a stage: 1 is GPipe, more is circular


StoredFormat = Literal[
    "float32", "bfloat16", "int8", "int6", "int5", "int4", "int3", "int2", "uint8", "uint6", "uint5", "uint4",
    "uint3", "uint2", "nf4", "fp4", "fp8_e4m3", "fp8_e5m2", "dynamic8", "dynamic4",
]  # fmt: skip


class Precision(Section):
    parameters: StoredFormat = "float32"
    block_size: Count | None = None  # weights in codes that share a constant; by default 256, below 8 bits 64
    compute: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # bfloat16 on accelerators, float32 on CPU
    gradients: Literal["auto", "float32", "bfloat16"] = "auto"  # as the weights; of weights in codes as `compute`
    # What the optimizer updates: a float32 copy of bfloat16 weights, or the bits that they lack, all or the first 8.
    master: Literal["none", "float32", "remainder16", "remainder8"] = "none"
    rounding: Literal["auto", "nearest", "stochastic"] = "auto"  # of updated weights: stochastic where these are codes
    loss_scale: Literal["none", "dynamic"] | Positive = "none"

    @property
    def quantized(self) -> bool:
        """Whether weights rest in codes."""
        return self.parameters not in ("float32", "bfloat16")

    @property
    def stochastic(self) -> bool:
        return self.rounding == "stochastic" or (self.rounding == "auto" and self.quantized)


class Save(Section):
    """By name what the layers keep for the backward pass; everything else is computed again."""

    save: Annotated[tuple[str, ...], Field(strict=False)]


# `budget` is no policy of its own: planning chooses one that fits into `memory.budget`.
_PLAIN = [name for name, policy in POLICIES.items() if not policy.has_number]
_Policy = Literal[*_PLAIN, "budget"]  # type: ignore[valid-type]
_Numbered = Annotated[str, Field(pattern=NUMBERED)]
Offloaded = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


class Memory(Section):
    remat: _Policy | _Numbered | Save = "none"
    # What waits in host memory: all that layers keep (activations), or names of what is kept there and nowhere else;
    # the optimizer's state (optimizer), weights that do not learn (frozen).
    offload: Literal["none", "activations", "optimizer", "frozen"] | Offloaded = "none"
    update: Literal["after", "during"] = "after"  # the backward pass
    attention: Literal["auto", "blockwise", "mosaic", "triton", "reference"] = "auto"
    budget: Positive | None = None  # GiB of each device that the run may take; by default all but what is reserved
    # Where a device is full: it runs out of memory, or takes its host's, at the link's speed (CUDA's unified memory).
    spill: Literal["none", "unified"] = "none"
    loss_chunk: Literal["auto"] | Count = "auto"  # entries of the vocabulary whose logits exist at once
    mlp_chunk: Literal["auto"] | Count = "auto"  # tokens of a row that norms, projections and MLP take at once
    head_groups: Literal["auto"] | Count = "auto"  # into which attention goes, one after the other


LOW_RANK = ("lora", "dora", "qlora")  # kinds of adapters that add low-rank matrices


class HashableDict(dict[str, int]):
    """A dict that nothing changes, so that the section that holds it is hashable as all others are."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


Ranks = Annotated[dict[str, Count], AfterValidator(HashableDict)]


class Adapter(Section):
    """What learns beside the model's own weights, or of them; the others stay as they are."""

    kind: Literal["none", "lora", "dora", "qlora", "prompt", "head", "last_layers", "patterns"] = "none"
    rank: Count = 16
    alpha: Positive = 16.0  # what an adapter adds counts alpha / rank
    rslora: bool = False  # alpha / sqrt(rank) (rsLoRA)
    # Linear layers and embeddings by patterns; with a number to each, its rank. The first that matches counts. Under
    # patterns: weights.
    targets: Annotated[tuple[str, ...], Field(strict=False)] | Ranks = ("blocks.*",)
    dropout: Fraction = 0.0  # of what an adapter sees
    base: StoredFormat | None = None  # frozen weights, stored; null: nf4 for qlora, else precision.parameters
    double_quant: bool = True  # of a base in codes, the constants in 8 bits too
    hf: str | None = None  # a PEFT directory, which gives adapters to begin from and every field that is not given here
    lora_plus_ratio: Positive = 1.0  # the learning rate of B, as a multiple of A's (LoRA+)
    # Products with a base in codes: auto decodes each matrix whole, the others (kernels.dequant_matmul) never do.
    matmul: Literal["auto", "sliced", "triton"] = "auto"
    virtual_tokens: Count = 20  # prompt: tokens that are learnt
    layers: Count = 1  # last_layers: how many
    base_run: str | None = None  # a run whose weights stay; none: those of model.hf, or new ones


class Train(Section):
    steps: Count | None = None
    tokens: Count | None = None  # in place of `steps`
    log_every: Count = 10
    evaluate_every: Count | None = None
    evaluate_batches: Count = 8
    # A gradient that is no number: stop and name it; leave that update out; or go back to the last checkpoint and on
    # with the data that follows. `max_skipped`: stop after so many in a row, or so many times back to one checkpoint.
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    max_skipped: Count = 10
    # A loss so many standard deviations above the mean of the last 100.
    on_spike: Literal["ignore", "stop", "rollback"] = "ignore"
    spike_threshold: Annotated[float, Field(gt=0)] = 10.0
    deterministic: bool = False  # on GPUs the same bits each time; may be slower
    check_replicas: Count | None = None  # updates; then whether all copies of the state hold the same bits
    profile: Annotated[tuple[Count, Count], Field(strict=False)] | None = None  # [from, to] steps
    trackers: Annotated[tuple[Literal["tensorboard", "wandb"], ...], Field(strict=False)] = ()


class Checkpoint(Section):
    path: str | None = None  # a directory or a bucket (gs://, s3://) for PATH/NAME; none: checkpoints/ of the run
    every: Count | None = None  # updates; the last one is always saved
    keep: Count = 3
    keep_best: bool = False  # also the one with the lowest held-out loss
    resume: Literal["auto", "never"] = "auto"
    on_failure: Literal["stop", "continue"] = "stop"  # where one cannot be written; the last one must be


class Generate(Section):
    """How text is made with what was trained."""

    kv_cache: Literal["full", "int8"] = "full"  # what keys and values are kept in: as they are computed with, or codes
    prefill_chunk: Count = 1024  # tokens of a prompt that go through the layers together


class Cluster(Section):
    """Several processes, on one host or many."""

    heartbeat_timeout: Annotated[int, Field(ge=2)] = 20  # seconds of silence after which a process counts as lost
    start_timeout: Count = 300  # seconds to wait for all processes to be there
    preflight: bool = True  # measure how fast they are, and talk, before training


class Config(Section):
    name: str
    seed: Annotated[int, Field(ge=0)] = 0
    output: str = "runs"
    objective: Objective = Objective()
    model: Model
    data: Data = Data()
    batch: Batch = Batch()
    mesh: Mesh = Mesh()
    rules: Rules = Rules()
    pipeline: Pipeline = Pipeline()
    zero: Annotated[int, Field(ge=0, le=3)] = 3  # sharded over fsdp: 1 optimizer state, 2 and gradients, 3 and weights
    precision: Precision = Precision()
    memory: Memory = Memory()
    optimizer: Optimizer = Optimizer()
    adapter: Adapter = Adapter()
    train: Train
    checkpoint: Checkpoint = Checkpoint()
    generate: Generate = Generate()
    cluster: Cluster = Cluster()

    @property
    def steps(self) -> int:
        """Updates in all: `train.steps`, or as many as it takes to see `train.tokens`."""
        if self.train.steps is not None:
            return self.train.steps
        if self.train.tokens is None:
            raise UserError("train.steps: missing; give train.steps or train.tokens")
        return -(-self.train.tokens // (self.batch.global_size * self.data.sequence_length))

    def at_length(self, length: int) -> Config:
        """This config with all rows of one length."""
        return self.model_copy(update={"data": self.data.model_copy(update={"sequence_length": length, "buckets": ()})})

    @property
    def learns(self) -> tuple[str, ...]:
        """Patterns of the weights that learn; none: all do."""
        return (*self._own_patterns, *self.optimizer.trainable)

    @property
    def _own_patterns(self) -> tuple[str, ...]:
        """Of what `adapter.kind` makes learn."""
        model, adapter = self.model, self.adapter
        match adapter.kind:
            case "none":
                return ()
            case "prompt":
                return ("prompt.*",)
            case "head":
                return ("head.*",)
            case "patterns":
                return tuple(adapter.targets)
            case "last_layers":  # and what follows them
                stack = f"stage_{len(model.stages) - 1}.blocks" if isinstance(model, Convnet) else "blocks"
                tied = isinstance(model, Decoder) and model.tie_embeddings
                return (f"{stack}[-{adapter.layers}:].*", "norm.*", *(() if tied else ("head.*",)))
            case _:
                return ("*.lora.*",)

    @property
    def prompt_length(self) -> int:
        """Tokens before each row that an adapter learns."""
        return self.adapter.virtual_tokens if self.adapter.kind == "prompt" else 0

    @property
    def time(self) -> int:
        """Tokens of the longest row as layers see it."""
        return self.data.sequence_length + self.prompt_length

    @property
    def base_precision(self) -> Precision:
        """How the model's own weights rest, without those of adapters."""
        base = self.adapter.base or ("nf4" if self.adapter.kind == "qlora" else None)
        return self.precision if base is None else self.precision.model_copy(update={"parameters": base})

    @property
    def measures_first(self) -> bool:
        """Whether a backward pass finds the length of all gradients before the one that updates."""
        clips = self.optimizer.clip is not None and self.optimizer.clip_by == "global"
        return clips and self.memory.update == "during"
