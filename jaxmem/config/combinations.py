"""Settings that require or exclude other settings. A combination that needs arithmetic is checked by a function of
`check.py` or of the modules that it imports."""

import re
from collections.abc import Iterator
from typing import Any

from jaxmem.config.adapter import LOW_RANK
from jaxmem.config.base import Section
from jaxmem.config.optimizers import OPTIMIZERS
from jaxmem.config.sections import Config, Generate
from jaxmem.config.sources import SOURCES
from jaxmem.errors import as_yaml, required, unsupported

NEEDS_PATH = tuple(name for name, kind in SOURCES.items() if kind.needs_path)
HAS_FIELDS = tuple(name for name, kind in SOURCES.items() if kind.has_field)
CHATS = tuple(name for name, kind in SOURCES.items() if kind.contents in ("chat", "pairs"))
CROSS_ENTROPY = ("next_token", "classify")
_DECODER = ("model.family", ("decoder",))

REQUIRES: dict[str, tuple[str, tuple[str, ...]]] = {  # keys that have an effect only with some values of another key
    "objective.label_smoothing": ("objective.name", (*CROSS_ENTROPY, "dpo")),
    "objective.z_loss": ("objective.name", CROSS_ENTROPY),
    "objective.beta": ("objective.name", ("dpo",)),
    "objective.temperature": ("objective.name", ("contrastive",)),
    "data.reference_logprobs": ("objective.name", ("dpo",)),
    "memory.loss_chunk": ("objective.name", ("next_token", "dpo")),
    "data.buckets": _DECODER,
    "mesh.context": _DECODER,
    "train.tokens": _DECODER,
    **{f"generate.{field}": _DECODER for field in Generate.model_fields},
    "memory.mlp_chunk": ("model.family", ("decoder", "vit")),
    "memory.head_groups": ("model.family", ("decoder", "vit")),
    "model.rope.factor": ("model.rope.scaling", ("linear", "llama3", "yarn", "longrope")),
    "model.rope.attention_factor": ("model.rope.scaling", ("yarn", "longrope")),
    "model.rope.truncate": ("model.rope.scaling", ("yarn",)),
    "model.rope.short_factors": ("model.rope.scaling", ("longrope",)),
    "model.rope.long_factors": ("model.rope.scaling", ("longrope",)),
    "model.categories": ("model.inputs", ("one_hot", "embedding")),
    "precision.master": ("precision.parameters", ("bfloat16",)),
    "precision.loss_scale": ("precision.compute", ("float16",)),
    "train.spike_threshold": ("train.on_spike", ("stop", "rollback")),
    **dict.fromkeys(
        (
            *("adapter.rank", "adapter.alpha", "adapter.alpha_pattern", "adapter.rslora", "adapter.lora_bias"),
            *("adapter.dropout", "adapter.lora_plus_ratio", "adapter.token_indices"),
        ),
        ("adapter.kind", LOW_RANK),
    ),
    "adapter.targets": ("adapter.kind", (*LOW_RANK, "patterns")),
    "adapter.experts": ("adapter.kind", ("qlora",)),
    "adapter.hf": ("adapter.kind", (*LOW_RANK, "prompt")),
    "adapter.virtual_tokens": ("adapter.kind", ("prompt",)),
    "adapter.layers": ("adapter.kind", ("last_layers",)),
}
OF_SOURCES = {  # as REQUIRES, for keys that `data` and each source of `data.mixture` have
    "data.path": ("data.source", NEEDS_PATH),
    "data.field": ("data.source", HAS_FIELDS),
    "data.on_overlong": ("data.source", CHATS),
    "data.on_invalid": ("data.source", (*CHATS, *HAS_FIELDS)),
}
# (setting, a key that must be set for it, what to do).
NEEDS = (
    ("train.on_nan=rollback", "checkpoint.every", "use e.g. checkpoint.every=100 (updates)"),
    ("train.on_spike=rollback", "checkpoint.every", "use e.g. checkpoint.every=100 (updates)"),
    ("checkpoint.keep_best=true", "train.evaluate_every", "use e.g. train.evaluate_every=100 (updates)"),
    ("optimizer.clip_by!=global", "optimizer.clip", "use e.g. optimizer.clip=1.0"),
    ("adapter.hf!=null", "model.hf", "set model.hf to the directory of the base model"),
    ("adapter.shared_a=true", "model.experts", "use a mixture of experts, or remove adapter.shared_a"),
    ("adapter.experts!=null", "model.experts", "use a mixture of experts, or remove adapter.experts"),
    ("memory.experts!=auto", "model.experts", "use memory.experts=auto"),
    ("memory.expert_groups!=1", "model.experts", "use memory.expert_groups=1"),
    ("model.layer_types=sliding_attention", "model.window", "use e.g. model.window=1024 (tokens)"),
)
BOTH = (("model.hf", "model.preset"), ("adapter.base_run", "model.hf"))  # keys of which only one may be set
# (setting, a setting that it does not support, what to use instead). `=a|b`: one of these values; `!=a`: any other.
# `a=b with c=d`: both settings. `a=b` also describes a list a that contains b.
CONFLICTS = (
    (
        "precision.rounding=stochastic",
        "precision.parameters=float32",
        "precision.parameters=bfloat16 or a quantized format",
    ),
    ("train.evaluate_every!=null", "data.held_out=0", "e.g. data.held_out=0.02"),
    # With a master copy, rounding to nearest loses no update.
    ("precision.rounding=stochastic", "precision.master!=none", "precision.rounding=nearest or precision.master=none"),
    ("memory.attention=cudnn|mosaic", "precision.compute=float32", "memory.attention=triton or auto"),
    ("pipeline.schedule=gpipe", "pipeline.rounds!=1", "pipeline.schedule=circular"),
    ("pipeline.schedule=1f1b", "pipeline.rounds!=1", "pipeline.schedule=interleaved_1f1b"),
    ("pipeline.schedule=circular|interleaved_1f1b", "pipeline.rounds=1", "pipeline.rounds=2"),
    ("pipeline.rounds!=1", "mesh.stage=1", "pipeline.rounds=1"),
    ("mesh.stage!=1", "rules.logits=fsdp", "rules.logits=[]"),
    ("memory.expert_groups!=1", "memory.offload!=frozen", "memory.offload=frozen or memory.expert_groups=1"),
    ("memory.expert_groups!=1", "adapter.kind=last_layers|patterns", "adapter.kind=qlora or memory.expert_groups=1"),
    ("mesh.context_method!=auto", "mesh.context=1", "mesh.context=2 or more, or mesh.context_method=auto"),
    ("mesh.context!=1", "memory.attention=reference", "memory.attention=auto"),
    ("mesh.context_method=ring|all_gather with model.window!=null", "memory.attention=cudnn", "memory.attention=auto"),
    (
        "mesh.context_method=ring|all_gather with data.packing=true",
        "memory.attention=cudnn",
        "memory.attention=auto or mesh.context_method=ulysses",
    ),
    ("model.qk_norm=all_heads", "memory.head_groups!=1|auto", "memory.head_groups=1"),
    # Spilling starts when the device is full, not at a budget.
    ("memory.spill!=none", "memory.budget!=null", "memory.spill=none or memory.budget=null"),
    # During the backward pass, overflow and NaN are known only after most layers have been updated.
    ("memory.update=during", "train.on_nan=skip", "train.on_nan=stop or rollback, or memory.update=after"),
    ("memory.update=during", "precision.loss_scale!=none", "precision.loss_scale=none or memory.update=after"),
    # Even a skipped update would have to copy the state.
    ("memory.offload=optimizer", "train.on_nan=skip", "train.on_nan=stop, or memory.offload without optimizer"),
    (
        "memory.offload=optimizer",
        "precision.loss_scale!=none",
        "precision.loss_scale=none, or memory.offload without optimizer",
    ),
    (
        "optimizer.kernel=triton",
        "optimizer.name!=adamw8bit with precision.parameters!=int8",
        "optimizer.kernel=none, optimizer.name=adamw8bit or precision.parameters=int8",
    ),
    (
        "optimizer.kernel=triton with precision.parameters=int8",
        "precision.rounding=nearest",
        "optimizer.kernel=none or precision.rounding=auto",
    ),
    # A pipeline needs the layers and the loss as separate functions; a script passes one function for both.
    ("objective.name=own", "mesh.stage!=1", "mesh.stage=1"),
    # With `context`, tokens are in another order, on which the loss of a script may depend.
    ("objective.name=own", "mesh.context!=1", "mesh.context=1"),
    # Negatives are the other rows of a micro-batch.
    ("objective.name=contrastive", "batch.accumulate!=1", "batch.accumulate=1"),
    ("objective.name=contrastive", "batch.global_size=1", "batch.global_size=2"),
    # The log-probabilities of the reference model are stored next to a single source.
    ("objective.name=dpo", "data.mixture!=[]", "data.source and data.path"),
    ("objective.name=dpo", "data.packing=true", "data.packing=false"),
    # Packed rows have no padding at any length.
    ("data.buckets!=[]", "data.packing=true", "data.packing=false"),
    ("data.streaming=true with data.mixture!=[]", "data.epochs!=null", "data.epochs=null"),
    # The number of tokens of an update depends on its bucket.
    ("data.buckets!=[]", "train.tokens!=null", "train.steps"),
    ("model.family=vit|convnet|mlp|image_text", "data.mixture!=[]", "data.source=digits or images"),
    # Only data.source=digits has numeric labels, a second view of each image, and integer pixels.
    ("data.source=images", "objective.name=contrastive|regress_l1|regress_l2", "objective.name=classify or binary"),
    ("model.family=image_text", "objective.name!=contrastive|own", "objective.name=contrastive"),
    ("model.family=image_text", "mesh.stage!=1", "mesh.stage=1"),
    *(
        ("model.family=image_text", f"model.text.{key}!=null", "the sizes of a dense decoder")
        for key in ("preset", "hf", "experts")
    ),
    ("adapter.kind=last_layers|head", "model.family=image_text", "adapter.kind=patterns"),
    ("data.source=images", "model.family=own", "the argument data: train(cfg, model=..., data=...)"),
    ("data.source=images", "model.inputs=one_hot|embedding", "model.inputs=numbers"),
    *(
        ("adapter.kind=none", f"adapter.{key}", "adapter.kind=lora, qlora or another kind")
        for key in ("base!=null", "double_quant=false", "matmul!=auto", "base_run!=null")
    ),
    ("adapter.kind=qlora", "adapter.base=float32|bfloat16", "adapter.base=nf4 or adapter.kind=lora"),
    (
        "adapter.kind=lora",
        "adapter.base!=null|float32|bfloat16",
        "adapter.kind=qlora or adapter.base=float32 or bfloat16",
    ),
    ("adapter.kind=dora", "adapter.lora_bias=true", "adapter.lora_bias=false"),
    ("adapter.kind=dora", "model.experts!=null", "adapter.kind=lora or qlora"),
    ("adapter.dropout!=0", "model.experts!=null", "adapter.dropout=0"),
    ("adapter.kind=last_layers", "model.family=own", "adapter.kind=patterns"),
    ("adapter.kind=prompt", "model.family!=decoder", "adapter.kind=head"),
    ("adapter.kind=prompt", "mesh.context!=1", "mesh.context=1"),
    ("adapter.kind=head", "model.tie_embeddings=true", "adapter.kind=patterns with adapter.targets=[embedding.weight]"),
    # The output projection would need the trained rows too.
    ("adapter.token_indices!=[]", "model.tie_embeddings=true", "a model with model.tie_embeddings=false"),
    ("adapter.token_indices!=[]", "model.family!=decoder", "model.family=decoder"),
    ("adapter.matmul=sliced|triton", "mesh.tensor!=1", "adapter.matmul=auto or mesh.tensor=1"),
)


def requirements() -> dict[str, tuple[str, tuple[str, ...]]]:
    """For each key that has an effect only with some values of another key: (the other key, these values)."""
    found = dict(REQUIRES)
    for field in dict.fromkeys(field for entry in OPTIMIZERS.values() for field in entry.fields if field != "kernel"):
        having = tuple(name for name, entry in OPTIMIZERS.items() if field in entry.fields)
        found[f"optimizer.{field}"] = ("optimizer.name", having)
    return found


def check_combinations(cfg: Config) -> Iterator[str]:
    for key, (other, values) in requirements().items():
        path, _, field = key.rpartition(".")
        if (info := getattr(type(value_of(cfg, path)), "model_fields", {}).get(field)) is None:
            continue  # another family of models
        value, actual = value_of(cfg, key), value_of(cfg, other)
        if value != info.default and actual not in values:
            yield required(f"{key}={as_yaml(value)}", other, values, actual)
    for setting, key, use in NEEDS:
        if (given := _matching(cfg, setting)) and value_of(cfg, key) is None:
            yield f"{given} requires {key}; {use}"
    for key, other in BOTH:
        if None not in (value := value_of(cfg, key), another := value_of(cfg, other)):
            yield f"{key}={value} and {other}={another} are both set; remove one of them"
    for setting, excluded, use in CONFLICTS:
        if (given := _matching(cfg, setting)) and (other := _matching(cfg, excluded)):
            yield unsupported(given, other, use)


def _matching(cfg: Config, term: str) -> str:
    """The setting of a config as `key=value` if a term of the tables describes it, otherwise an empty text."""
    found = []
    for part in term.split(" with "):
        key, operator, expected = re.split("(!?=)", part)
        value = value_of(cfg, key)
        items = map(as_yaml, (value, *value) if isinstance(value, tuple) else (value,))
        if any(item in expected.split("|") for item in items) == (operator == "!="):
            return ""
        found.append(key if expected == "[]" or isinstance(value, Section) else f"{key}={as_yaml(value)}")
    return " with ".join(found)


def value_of(cfg: Config, key: str) -> Any:
    """The value of a key; None if the family of the model does not have it."""
    value: Any = cfg
    for field in key.split("."):
        value = getattr(value, field, None)
    return value
