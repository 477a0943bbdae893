"""The sections of a config, as frozen pydantic models that reject unknown keys.

`tests/config/test_fields_are_read.py` checks that each field is read. Combinations are checked in `check.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from jaxmem.config.base import Count, Fraction, NotNegative, Positive, Section, StoredFormat
from jaxmem.config.mesh import Mesh, Pipeline, Rules
from jaxmem.config.networks import Convnet, Decoder, Model
from jaxmem.config.optimizers import Optimizer
from jaxmem.config.recompute import NUMBERED, POLICIES
from jaxmem.config.sources import SOURCES, SourceKind, SourceName
from jaxmem.errors import UserError


class Objective(Section):
    """The loss. `objective: classify` is short for `objective: {name: classify}`."""

    name: Literal["next_token", "dpo", "classify", "binary", "regress_l1", "regress_l2", "contrastive"] = "next_token"
    label_smoothing: Fraction = 0.0
    z_loss: NotNegative = 0.0
    temperature: Positive = 0.1  # contrastive
    beta: Positive = 0.1  # dpo: weight of the divergence from the reference

    @property
    def reads_text(self) -> bool:
        return self.name in ("next_token", "dpo")


class Source(Section):
    """One source of documents."""

    source: SourceName = "stdlib"
    path: str | None = None  # a file, a directory or a glob
    field: str = "text"  # the key or column that holds the document (jsonl, parquet)
    weight: Positive = 1.0  # its share of a mixture

    @property
    def kind(self) -> SourceKind:
        return SOURCES[self.source]


class Data(Source):
    """Documents, and the rows that they are cut or packed into."""

    mixture: Annotated[tuple[Source, ...], Field(strict=False)] = ()  # in place of `source`
    sequence_length: Count = 1024
    packing: bool = True
    # Unpacked rows: lengths below `sequence_length`; a batch has the shortest that holds all its records.
    buckets: Annotated[tuple[Count, ...], Field(strict=False)] = ()
    tokenizer: str = "bytes"  # or the path of a tokenizer.json
    epochs: Count | None = None  # at most so many passes over the data, whatever `train.steps` is
    chat_template: str | None = None  # chat: a Jinja file; null: the tokenizer's own
    on_overlong: Literal["cut", "drop"] = "cut"  # chat, preference: records longer than `sequence_length`
    on_invalid: Literal["stop", "skip"] = "stop"  # chat, preference, jsonl, parquet: invalid records
    reference_logprobs: str | None = None  # preference: file with those of the reference model; null: beside the data
    held_out: Fraction = 0.02  # share of the documents for evaluation
    shuffle: bool = True

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of rows, the longest last."""
        return (*self.buckets, self.sequence_length)


class Batch(Section):
    """Rows per update, and the micro-batches whose gradients are accumulated."""

    global_size: Count = 8
    accumulate: Count = 1


class Precision(Section):
    """Formats of stored parameters, computation and gradients."""

    parameters: StoredFormat = "float32"
    block_size: Count | None = None  # quantized weights per scale; by default 256, below 8 bits 64
    compute: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # bfloat16 on accelerators, float32 on CPU
    gradients: Literal["auto", "float32", "bfloat16"] = (
        "auto"  # auto: as the parameters; of quantized ones as `compute`
    )
    # Of bfloat16 weights: a float32 copy, or the 16 or first 8 bits that they lack of it.
    master: Literal["none", "float32", "remainder16", "remainder8"] = "none"
    rounding: Literal["auto", "nearest", "stochastic"] = "auto"  # of updated weights; auto: stochastic if quantized
    loss_scale: Literal["none", "dynamic"] | Positive = "none"

    @property
    def is_quantized(self) -> bool:
        """Whether parameters are stored in an integer, table or 8-bit float format."""
        return self.parameters not in ("float32", "bfloat16")

    @property
    def stochastic_rounding(self) -> bool:
        return self.rounding == "stochastic" or (self.rounding == "auto" and self.is_quantized)


class Save(Section):
    """Names of the activations that layers save for the backward pass; the others are recomputed."""

    save: Annotated[tuple[str, ...], Field(strict=False)]


# `budget`: planning chooses a policy that fits `memory.budget`.
_PLAIN = [name for name, policy in POLICIES.items() if not policy.has_number]
_Policy = Literal[*_PLAIN, "budget"]  # type: ignore[valid-type]
_Numbered = Annotated[str, Field(pattern=NUMBERED)]
Offloaded = Annotated[tuple[str, ...], Field(strict=False, min_length=1)]


class Memory(Section):
    """Activation checkpointing, offload, and what is computed in chunks."""

    remat: _Policy | _Numbered | Save = "none"
    # Stored in host memory: all saved activations (activations) or those with some names, the optimizer's state
    # (optimizer), frozen parameters (frozen).
    offload: Literal["none", "activations", "optimizer", "frozen"] | Offloaded = "none"
    update: Literal["after", "during"] = "after"  # the backward pass
    attention: Literal["auto", "blockwise", "mosaic", "triton", "reference"] = "auto"
    budget: Positive | None = None  # GiB per device; by default all but the reserve
    # A full device runs out of memory (none), or uses its host's at the link's speed (CUDA's unified memory).
    spill: Literal["none", "unified"] = "none"
    loss_chunk: Literal["auto"] | Count = "auto"  # vocabulary entries per slice of the logits
    mlp_chunk: Literal["auto"] | Count = "auto"  # tokens of a row per chunk of norms, projections and MLP
    head_groups: Literal["auto"] | Count = "auto"  # that attention is computed in, one after the other


LOW_RANK = ("lora", "dora", "qlora")  # kinds of adapters that add low-rank matrices


class HashableDict(dict[str, int]):
    """A dict that is never changed, so that the section that contains it is hashable."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


Ranks = Annotated[dict[str, Count], AfterValidator(HashableDict)]


class Adapter(Section):
    """Parameter-efficient fine-tuning: added parameters, or a part of the model's; the others are frozen."""

    kind: Literal["none", "lora", "dora", "qlora", "prompt", "head", "last_layers", "patterns"] = "none"
    rank: Count = 16
    alpha: Positive = 16.0  # the update of an adapter is scaled by alpha / rank
    rslora: bool = False  # alpha / sqrt(rank) (rsLoRA)
    # Patterns of linear layers and embeddings, with a number to each: its rank; the first match counts. With
    # kind=patterns: of weights.
    targets: Annotated[tuple[str, ...], Field(strict=False)] | Ranks = ("blocks.*",)
    dropout: Fraction = 0.0  # of the input of an adapter
    base: StoredFormat | None = None  # frozen weights, stored; null: nf4 for qlora, else precision.parameters
    double_quant: bool = True  # of a quantized base: its scales in 8 bits too
    hf: str | None = None  # a PEFT directory: initial adapters, and every field that is not given here
    lora_plus_ratio: Positive = 1.0  # learning rate of B / that of A (LoRA+)
    # With a quantized base: auto dequantizes each matrix as a whole, the others (kernels.dequant_matmul) never do.
    matmul: Literal["auto", "sliced", "triton"] = "auto"
    virtual_tokens: Count = 20  # prompt: trainable tokens
    layers: Count = 1  # last_layers: number of layers
    base_run: str | None = None  # a run that gives the frozen weights; null: those of model.hf, or new ones


class Train(Section):
    """Length of a run, evaluation, and what follows an invalid gradient or loss."""

    steps: Count | None = None
    tokens: Count | None = None  # in place of `steps`
    log_every: Count = 10
    evaluate_every: Count | None = None
    evaluate_batches: Count = 8
    # On a NaN or infinite gradient: stop and name it, skip that update, or return to the last checkpoint and continue
    # with the following data. `max_skipped`: stop after so many in a row, or so many returns to one checkpoint.
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    max_skipped: Count = 10
    # On a loss `spike_threshold` standard deviations above the mean of the last 100.
    on_spike: Literal["ignore", "stop", "rollback"] = "ignore"
    spike_threshold: Annotated[float, Field(gt=0)] = 10.0
    deterministic: bool = False  # on GPUs: bitwise the same results each time; may be slower
    check_replicas: Count | None = None  # updates between two checks that all replicas are bitwise equal
    profile: Annotated[tuple[Count, Count], Field(strict=False)] | None = None  # [from, to] steps
    trackers: Annotated[tuple[Literal["tensorboard", "wandb"], ...], Field(strict=False)] = ()


class Checkpoint(Section):
    """Where, when and how many checkpoints are saved."""

    path: str | None = None  # a directory or bucket (gs://, s3://) for PATH/NAME; null: checkpoints/ of the run
    every: Count | None = None  # updates; the last one is always saved
    keep: Count = 3
    keep_best: bool = False  # also the one with the lowest held-out loss
    resume: Literal["auto", "never"] = "auto"
    on_failure: Literal["stop", "continue"] = "stop"  # of a write; the last checkpoint must be written


class Generate(Section):
    """Memory of text generation."""

    kv_cache: Literal["full", "int8"] = "full"  # full: the compute dtype
    prefill_chunk: Count = 1024  # tokens of a prompt per pass through the layers


class Cluster(Section):
    """Several processes, on one host or many."""

    heartbeat_timeout: Annotated[int, Field(ge=2)] = 20  # seconds of silence until a process counts as lost
    start_timeout: Count = 300  # seconds to wait for all processes
    preflight: bool = True  # measure compute and communication before training


class Config(Section):
    """A run: all its sections, and the values that follow from several of them."""

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
        """Number of updates: `train.steps`, or as many as `train.tokens` need."""
        if self.train.steps is not None:
            return self.train.steps
        if self.train.tokens is None:
            raise UserError("train.steps and train.tokens are both null; set one of them")
        return -(-self.train.tokens // (self.batch.global_size * self.data.sequence_length))

    def at_length(self, length: int) -> Config:
        """This config with all rows of one length."""
        return self.model_copy(update={"data": self.data.model_copy(update={"sequence_length": length, "buckets": ()})})

    @property
    def trainable_patterns(self) -> tuple[str, ...]:
        """Patterns of the names of trainable parameters; empty: all are trainable."""
        return (*self._own_patterns, *self.optimizer.trainable)

    @property
    def _own_patterns(self) -> tuple[str, ...]:
        """Patterns of the parameters that `adapter.kind` trains."""
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
        """Trainable tokens before each row."""
        return self.adapter.virtual_tokens if self.adapter.kind == "prompt" else 0

    @property
    def row_length(self) -> int:
        """Tokens of the longest row, the prompt of an adapter included."""
        return self.data.sequence_length + self.prompt_length

    @property
    def base_precision(self) -> Precision:
        """`precision` with the stored format of the frozen base model."""
        base = self.adapter.base or ("nf4" if self.adapter.kind == "qlora" else None)
        return self.precision if base is None else self.precision.model_copy(update={"parameters": base})

    @property
    def needs_global_norm_first(self) -> bool:
        """Whether a backward pass computes the norm of all gradients before the one that updates."""
        clips = self.optimizer.clip is not None and self.optimizer.clip_by == "global"
        return clips and self.memory.update == "during"
