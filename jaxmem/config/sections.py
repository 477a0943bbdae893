"""The sections of a config, as frozen pydantic models that reject unknown keys.

`tests/config/test_fields_are_read.py` checks that each field is read. Combinations are checked in `check.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Literal, get_args

from pydantic import Field, PrivateAttr

from jaxmem.config.adapter import Adapter
from jaxmem.config.base import (
    RUNS,
    Count,
    Fraction,
    Length,
    ListOf,
    NameIn,
    NotNegative,
    Positive,
    Scaling,
    Section,
    StoredFormat,
    Texts,
    Total,
    setting,
)
from jaxmem.config.mesh import Mesh, Pipeline, Rules
from jaxmem.config.networks import Decoder, Model, Network, Quantization, UserModel
from jaxmem.config.optimizers import OPTIMIZERS, Optimizer
from jaxmem.config.recompute import Memory
from jaxmem.config.user import NO_USER_OBJECTS, UserObjects
from jaxmem.errors import UserError


@dataclass(frozen=True)
class SourceKind:
    """A kind of data source, with the class in `jaxmem.data` that reads it."""

    reader: str  # module:class in jaxmem.data, a subclass of `records.RecordSource`
    contents: Literal["text", "chat", "pairs", "tokens", "images"]
    needs_path: bool = True
    has_field: bool = False  # `field` names the key or column of the document
    suffixes: tuple[str, ...] = ()  # suffixes of the files to read in a directory; empty: all files


_LINES = (".jsonl", ".ndjson")
COLUMNS = (".parquet", ".arrow")

SOURCES = {
    "stdlib": SourceKind("text:TextFiles", "text", needs_path=False),
    "text": SourceKind("text:TextFiles", "text"),
    "jsonl": SourceKind("jsonl:JsonTexts", "text", has_field=True, suffixes=_LINES),
    "parquet": SourceKind("jsonl:JsonTexts", "text", has_field=True, suffixes=(".parquet",)),
    "arrow": SourceKind("jsonl:JsonTexts", "text", has_field=True, suffixes=(".arrow",)),
    "chat": SourceKind("chat:Conversations", "chat", suffixes=(*_LINES, *COLUMNS)),
    "preference": SourceKind("chat:Preferences", "pairs", suffixes=(*_LINES, *COLUMNS)),
    "digits": SourceKind("digits:Digits", "images", needs_path=False),
    "images": SourceKind("images:ImageFolder", "images", suffixes=(".png", ".jpg", ".jpeg", ".webp", ".bmp")),
    "tokens": SourceKind("cache:TokenCache", "tokens"),
}


class Objective(Section):
    """The loss. `objective: classify` is short for `objective: {name: classify}`."""

    name: Literal["next_token", "dpo", "classify", "binary", "regress_l1", "regress_l2", "contrastive", "own"] = (
        setting(
            "next_token",
            "the loss; next_token and dpo for text, own for the function that a script passes, others for images",
        )
    )
    label_smoothing: Fraction = setting(0.0, "share of the target probability spread over all classes")
    z_loss: NotNegative = setting(0.0, "weight of the z-loss, the squared log-sum-exp of the logits")
    temperature: Positive = setting(0.1, "temperature of a contrastive loss: similarities are divided by it")
    beta: Positive = setting(0.1, "beta of DPO: weight of the divergence from the reference model")


class Source(Section):
    """One source of documents."""

    source: Annotated[str, NameIn(SOURCES)] = setting(
        "stdlib", "kind of data; stdlib is the source text of Python's standard library"
    )
    path: str | None = setting(
        None, "a file, a directory, a glob, or a dataset of the hub: org/name, hf://datasets/org/name/data/*.parquet"
    )
    field: str = setting("text", "key or column that contains the document")
    weight: Positive = setting(1.0, "share of this source in the documents of data.mixture")

    @property
    def kind(self) -> SourceKind:
        return SOURCES[self.source]


class Data(Source):
    """Documents, and the sequences (the rows of a batch) that they are cut or packed into."""

    mixture: ListOf[Source] = setting((), "several sources instead of data.source")
    sequence_length: Length = setting(1024, "tokens per sequence")
    packing: bool = setting(
        True, "true: several documents per sequence, each attends only to itself; false: one per sequence, padded"
    )
    documents_per_row: Count = setting(31, "most documents per packed sequence; fused attention needs memory for each")
    tokenizer: str = setting("bytes", "bytes, the path of a tokenizer.json or its directory, or org/name of the hub")
    epochs: Count | None = setting(
        None,
        "largest number of passes over the data; the run may end before train.steps, and its last batches are partly"
        " padding, because their rows end one after the other",
    )
    streaming: bool = setting(
        False,
        "read the files one after the other while the run trains; files of the hub are fetched when needed",
    )
    chat_template: str | None = setting(None, "a Jinja file or a tokenizer_config.json; null: the tokenizer's template")
    on_overlong: Literal["cut", "drop"] = setting("cut", "what to do with a record longer than sequence_length")
    on_invalid: Literal["stop", "skip"] = setting("stop", "what to do with an invalid record")
    reference_logprobs: str | None = setting(None, "log-probabilities of the reference model; null: next to the data")
    held_out: Fraction = setting(
        0.02,
        "share of the records for evaluation; a long text (above 16 KiB) is several records, and some of them may be"
        " held out",
    )
    shuffle: bool = setting(True, "whether documents are read in random order")

    @property
    def has_conversations(self) -> bool:
        """Whether a source has conversations or preferences."""
        return any(SOURCES[source.source].contents in ("chat", "pairs") for source in self.mixture or (self,))

    @property
    def max_segments(self) -> int:
        """Largest number of segments of a packed sequence: its documents, and the padding."""
        return 1 + self.documents_per_row


class Batch(Section):
    """Sequences or images per update (rows), and the micro-batches whose gradients are accumulated."""

    global_size: Count = setting(8, "sequences or images per update, over all devices")
    accumulate: Count = setting(1, "micro-batches per update; each has global_size / accumulate sequences or images")


class Precision(Section):
    """Formats of stored parameters, computation and gradients."""

    parameters: StoredFormat = setting("float32", "stored format of the parameters")
    block_size: Count | None = setting(None, "weights per block scale; null: 256, or 64 below 8 bits (mxfp4: 32)")
    compute: Literal["auto", "float32", "bfloat16", "float16", "fp8"] = setting(
        "auto",
        "dtype of the computation; auto: bfloat16 on accelerators, float32 on CPU; fp8: bfloat16, with matmuls of"
        " precision.fp8_layers in FP8",
    )
    fp8_scaling: Scaling = setting(
        "tensor",
        "scales of FP8 matmuls: one per operand (faster), one per row and column (more precise), or one per 32 values"
        " (mxfp8: compute capability 10.x)",
    )
    fp8_layers: Texts = setting(("*blocks.*",), "patterns of the names of linear layers whose matmuls are in FP8")
    gradients: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "dtype of gradients; auto: the dtype of the parameters, or the compute dtype if they are quantized (bfloat16"
        " instead of float16)",
    )
    master: Literal["none", "float32", "remainder16", "remainder8"] = setting(
        "none",
        "stored next to bfloat16 weights: a float32 copy, its lower 16 bits (remainder16), or 8 of these (remainder8)",
    )
    rounding: Literal["auto", "nearest", "stochastic"] = setting(
        "auto", "rounding of updated weights; auto: stochastic if they are not float32 and have no master"
    )
    loss_scale: Literal["none", "dynamic"] | Positive = setting(
        "none", "loss scaling against underflow of gradients: dynamic, or a constant factor"
    )

    @property
    def is_quantized(self) -> bool:
        """Whether parameters are stored in an integer, table or 8-bit float format."""
        return self.parameters not in ("float32", "bfloat16")

    def is_fp8(self, layer: str) -> bool:
        """Whether the matmuls of the linear layer of this name are in FP8."""
        return self.compute == "fp8" and any(fnmatchcase(layer, pattern) for pattern in self.fp8_layers)

    @property
    def stochastic_rounding(self) -> bool:
        is_narrow = self.parameters != "float32" and self.master == "none"
        return self.rounding == "stochastic" or (self.rounding == "auto" and is_narrow)


class Train(Section):
    """Length of a run, evaluation, and the response to an invalid gradient or loss."""

    steps: Total | None = setting(None, "number of updates; set this or train.tokens")
    tokens: Total | None = setting(None, "number of tokens to train on, instead of train.steps")
    log_every: Count = setting(10, "updates between two log entries")
    evaluate_every: Count | None = setting(None, "updates between two evaluations; null: none")
    evaluate_batches: Count = setting(8, "largest number of held-out batches per evaluation")
    on_nan: Literal["stop", "skip"] = setting("stop", "on a NaN or infinite loss or gradient: stop, or skip the update")
    max_skipped: Count = setting(10, "largest number of consecutive skipped updates before the run stops")
    deterministic: bool = setting(False, "on GPUs: bitwise reproducible results; may be slower")
    profile: Annotated[tuple[Count, Count], Field(strict=False)] | None = setting(
        None, "[first, last]: steps to profile"
    )
    trackers: ListOf[Literal["tensorboard", "wandb"]] = setting((), "services that also receive the metrics")


class Checkpoint(Section):
    """Where, when and how many checkpoints are saved."""

    path: str | None = setting(
        None, "directory or bucket (gs://, s3://); checkpoints are saved in PATH/NAME; null: the directory of the run"
    )
    every: Count | None = setting(None, "updates between two checkpoints; the last update is always saved")
    keep: Count = setting(3, "number of checkpoints to keep")
    keep_best: bool = setting(False, "also keep the checkpoint with the lowest held-out loss")
    step: Annotated[int, Field(ge=0)] | Literal["best"] | None = setting(
        None,
        "checkpoint that evaluate, generate, chat and export read: a step, or best (lowest held-out loss); null: the"
        " newest",
    )
    resume: Literal["auto", "never"] = setting("auto", "whether a run continues from its last checkpoint")


class Generate(Section):
    """Memory of text generation."""

    kv_cache: Literal["full", "int8"] = setting(
        "full", "format of the KV cache; full: the compute dtype; int8: keys of model.attention_bias stay full"
    )
    prefill_chunk: Count = setting(1024, "tokens of a prompt per pass through the layers")


class Cluster(Section):
    """Several processes, on one host or many."""

    heartbeat_timeout: Annotated[int, Field(ge=2)] = setting(20, "seconds without a heartbeat until a process is lost")
    start_timeout: Count = setting(300, "seconds to wait for all processes")
    preflight: bool = setting(True, "measure compute and communication before training")
    elastic: bool = setting(False, "with too few devices: less mesh.replica or mesh.fsdp, more batch.accumulate")


class Config(Section):
    """The config of a run: its sections, and values that are derived from several sections."""

    name: str = setting(..., "name of the run's directory in output")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = setting(0, "seed of weights, data order, dropout and rounding")
    output: str = setting(RUNS, "directory of all runs")
    objective: Objective = Objective()
    model: Model
    data: Data = Data()
    batch: Batch = Batch()
    mesh: Mesh = Mesh()
    rules: Rules = Rules()
    pipeline: Pipeline = Pipeline()
    zero: Annotated[int, Field(ge=0, le=3)] = setting(  # the tables of each value: `sharding.table.make_tables`
        3,
        "what is sharded over mesh.fsdp, mesh.expert and mesh.context; 0: nothing, 1: optimizer state, 2: also"
        " gradients, 3: also weights",
    )
    precision: Precision = Precision()
    memory: Memory = Memory()
    optimizer: Optimizer = Optimizer()
    adapter: Adapter = Adapter()
    train: Train
    checkpoint: Checkpoint = Checkpoint()
    generate: Generate = Generate()
    cluster: Cluster = Cluster()
    _user: UserObjects = PrivateAttr(default_factory=lambda: NO_USER_OBJECTS)

    @property
    def user(self) -> UserObjects:
        """The Python objects that a script passed in addition to the config."""
        return self._user

    def with_user(self, user: UserObjects) -> Config:
        """A copy with these objects."""
        cfg = self.model_copy()
        cfg._user = user
        return cfg

    @property
    def is_registered(self) -> bool:
        """Whether a script registered the optimizer or the family of models."""
        is_known = type(self.model) in get_args(Network)  # the family of a script may be a subclass
        return callable(OPTIMIZERS[self.optimizer.name].implementation) or not is_known

    @property
    def reads_text(self) -> bool:
        """Whether rows are sequences of tokens, from the sources of text in `data`."""
        if self.objective.name == "own" and self.user.data is not None:
            return False
        has_images = isinstance(self.model, UserModel) and self.data.kind.contents == "images"
        return isinstance(self.model, Decoder | UserModel) and not has_images

    @property
    def steps(self) -> int:
        """The number of updates: `train.steps`, or as many as `train.tokens` require."""
        if self.train.steps is not None:
            return self.train.steps
        if self.train.tokens is None:
            raise UserError("train.steps and train.tokens are both null; set exactly one of them")
        return -(-self.train.tokens // (self.batch.global_size * self.data.sequence_length))

    @property
    def trainable_patterns(self) -> tuple[str, ...]:
        """Patterns of the names of trainable parameters; empty: all are trainable."""
        return (*self.adapter.trainable_patterns(self.model), *self.optimizer.trainable)

    @property
    def prompt_length(self) -> int:
        """Trainable tokens before each sequence."""
        return self.adapter.virtual_tokens if self.adapter.kind == "prompt" else 0

    @property
    def row_length(self) -> int:
        """Tokens of the longest sequence, including the prompt of an adapter."""
        return self.data.sequence_length + self.prompt_length

    @property
    def base_quantization(self) -> Quantization | None:
        """How the files of the model store quantized matrices, if the frozen base model is stored in the same way."""
        scheme = getattr(self.model, "quantization", None)
        adapter = self.adapter
        if scheme is None or scheme.format is None or adapter.base_run is not None or adapter.experts is not None:
            return None
        is_asked = adapter.kind == "qlora" if adapter.base is None else adapter.base == scheme.format
        return scheme if is_asked and self.precision.block_size in (None, scheme.block_size) else None

    @property
    def base_precision(self) -> Precision:
        """`precision` with the stored format of the frozen base model."""
        if (scheme := self.base_quantization) is not None:
            return self.precision.replace(parameters=scheme.format, block_size=scheme.block_size)
        base = self.adapter.base or ("nf4" if self.adapter.kind == "qlora" else None)
        return self.precision if base is None else self.precision.replace(parameters=base)

    @property
    def expert_precision(self) -> Precision:
        """`precision` with the stored format of frozen experts."""
        stored = self.adapter.experts
        return self.base_precision if stored is None else self.precision.replace(parameters=stored)

    @property
    def embedding_precision(self) -> Precision:
        """`precision` with the stored format of frozen embeddings and output projection."""
        stored = self.adapter.embeddings
        return self.base_precision if stored is None else self.precision.replace(parameters=stored)

    @property
    def needs_global_norm_first(self) -> bool:
        """Whether a first backward pass computes the norm of all gradients before the one that updates the weights."""
        clips = self.optimizer.clip is not None and self.optimizer.clip_by == "global"
        return clips and self.memory.update == "during"
