"""What can be known to be wrong before jax starts, for whatever number of devices.

Each rule yields one line a problem: the key, the reason, what would do. `mesh.py` adds what follows
from the number of devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from jaxmem.config.adapters import check_adapter
from jaxmem.config.names import BOUNDARY, IN_CHUNKS, IN_GROUPS, NAMES, on_host
from jaxmem.config.optimizers import FIELDS, OPTIMIZERS, SEARCH_BASES
from jaxmem.config.sections import (
    Config,
    Convnet,
    Data,
    Decoder,
    Generate,
    Mesh,
    Mlp,
    Objective,
    Rope,
    Rules,
    Save,
    Source,
    Vit,
)
from jaxmem.errors import UserError, nearest

BYTE_VOCAB = 257  # 256 bytes and the end of a document
DIGIT_CLASSES = 10
DIGIT_SHAPE = (8, 1)  # pixels a side, channels
DIGIT_LEVELS = 17  # a pixel is 0 to 16

NEEDS_PATH = ("text", "jsonl", "parquet", "chat", "preference", "tokens")
HAS_FIELDS = ("jsonl", "parquet")
BUCKETS = ("gs", "s3")
CROSS_ENTROPY = ("next_token", "classify")
SMOOTHED = (*CROSS_ENTROPY, "dpo")
DIMS = {  # of each family's weights, by the names that `rules` has for them
    "decoder": ("embed", "vocab", "heads", "kv_heads", "mlp"),
    "vit": ("embed", "heads", "kv_heads", "mlp"),
    "convnet": ("embed", "mlp"),
    "mlp": ("embed", "mlp"),
}


def check(cfg: Config) -> Config:
    problems = [line for rule in RULES for line in rule(cfg)]
    if problems:
        raise UserError("\n".join(problems))
    return cfg


def _run(cfg: Config) -> Iterator[str]:
    train, data = cfg.train, cfg.data
    if not re.fullmatch(r"\w[\w.-]*", cfg.name):
        yield f"name: {cfg.name!r} names a directory: letters, digits, and . _ - after the first"
    if (train.steps is None) == (train.tokens is None):
        yield "train.steps: give either train.steps or train.tokens, not " + ("both" if train.steps else "neither")
    elif train.tokens is not None and not isinstance(cfg.model, Decoder):
        yield f"train.tokens: family {cfg.model.family} has no tokens; give train.steps"
    else:
        if cfg.optimizer.warmup >= cfg.steps:
            yield f"optimizer.warmup: {cfg.optimizer.warmup} must be less than the {cfg.steps} steps of the run"
        first, last = train.profile or (1, 1)
        if not first <= last <= cfg.steps:
            yield f"train.profile: [{first}, {last}] must be [from, to], from <= to <= the {cfg.steps} steps of the run"
    if train.on_nan == "skip" and cfg.memory.update == "during":
        yield (
            "train.on_nan: whether a gradient is no number is known after the last layer, and memory.update: during has"
            " changed the others by then; use stop, or memory.update=after"
        )
    if cfg.checkpoint.keep_best and train.evaluate_every is None:
        yield "checkpoint.keep_best: the best is the lowest held-out loss; give train.evaluate_every"
    if train.evaluate_every is not None and data.held_out == 0:
        yield "train.evaluate_every: nothing is held out; give data.held_out more than 0"


def _places_to_write(cfg: Config) -> Iterator[str]:
    if "://" in cfg.output:
        yield f"output: {cfg.output} is no directory; give a bucket to checkpoint.path, and the logs a directory"
    scheme, remote, _ = (cfg.checkpoint.path or "").partition("://")
    if remote and scheme not in BUCKETS:
        yield f"checkpoint.path: {scheme}:// is not known; use a directory, {' or '.join(f'{b}://' for b in BUCKETS)}"


def _decoder(cfg: Config) -> Iterator[str]:
    model = cfg.model
    if not isinstance(model, Decoder):
        return
    if model.heads % model.kv_heads:
        yield f"model.kv_heads: {model.kv_heads} does not divide model.heads {model.heads}"
    if model.head_dim % 2:
        yield f"model.head_dim: {model.head_dim} is odd; rotary positions turn pairs"
    if model.rope.scaling == "none" and model.rope.factor != Rope().factor:
        yield f"model.rope.factor: {model.rope.factor:g} does nothing with model.rope.scaling: none"
    if model.rope.attention_factor is not None and model.rope.scaling != "yarn":
        yield f"model.rope.attention_factor: only model.rope.scaling: yarn has it, not {model.rope.scaling}"
    if model.hf is not None and model.preset is not None:
        yield f"model.preset: model.hf {model.hf} gives the model; leave model.preset out"


def _image_model(cfg: Config) -> Iterator[str]:
    model = cfg.model
    match model:
        case Vit():
            if model.embed % model.heads:
                yield f"model.heads: {model.heads} does not divide model.embed {model.embed}"
            if model.image_size % model.patch:
                yield f"model.patch: {model.patch} does not divide model.image_size {model.image_size}"
        case Mlp():
            if model.inputs == "numbers" and model.categories != Mlp().categories:
                yield "model.categories: only model.inputs: one_hot or embedding has categories"
            if model.categories < DIGIT_LEVELS:
                yield f"model.categories: digits need {DIGIT_LEVELS} or more, for pixels of 0 to {DIGIT_LEVELS - 1}"
        case Convnet():
            most = model.image_size.bit_length()  # each stage but the first halves the image
            if len(model.stages) > most:
                yield f"model.stages: {len(model.stages)} halve {model.image_size} pixels to none; use {most} or fewer"


def _objective(cfg: Config) -> Iterator[str]:
    objective, model, default = cfg.objective, cfg.model, Objective()
    name = objective.name
    if isinstance(model, Decoder) != objective.reads_text:
        texts, pictures = "next_token or dpo", "classify, binary, regress_l1, regress_l2 or contrastive"
        use = pictures if objective.reads_text else texts
        yield f"objective.name: {name} does not go with family {model.family}; use {use}"
    for field, having in (("label_smoothing", SMOOTHED), ("z_loss", CROSS_ENTROPY)):
        if getattr(objective, field) and name not in having:
            yield f"objective.{field}: only {', '.join(having)} have it, not {name}"
    if cfg.memory.loss_chunk != "auto" and not objective.reads_text:
        yield f"memory.loss_chunk: only next_token and dpo have a vocabulary to go through, not {name}; use auto"
    if objective.beta != default.beta and name != "dpo":
        yield f"objective.beta: only dpo has it, not {name}"
    yield from _pairs(cfg)
    if objective.temperature != default.temperature and name != "contrastive":
        yield f"objective.temperature: only contrastive has it, not {name}"
    if name == "contrastive":
        if cfg.batch.accumulate > 1:
            yield "batch.accumulate: contrastive takes its negatives from the batch, which this splits; use 1"
        if cfg.batch.global_size < 2:
            yield "batch.global_size: contrastive takes its negatives from the batch; use 2 or more"
    if not isinstance(model, Decoder) and name != "contrastive":
        outputs = DIGIT_CLASSES if name == "classify" else 1
        if model.outputs != outputs:
            yield f"model.outputs: {model.outputs} must be {outputs} for objective {name} on digits"


def _pairs(cfg: Config) -> Iterator[str]:
    """What dpo asks of data and batch."""
    dpo, data = cfg.objective.name == "dpo", cfg.data
    for key, source in _places(cfg):
        if (source.source == "preference") != dpo and isinstance(cfg.model, Decoder):
            use = "data.source=preference" if dpo else "objective.name=dpo, or data.source=chat"
            yield f"{key}.source: {source.source} does not go with objective {cfg.objective.name}; use {use}"
    if not dpo:
        if data.reference is not None:
            yield f"data.reference: only objective dpo has one, not {cfg.objective.name}"
        return
    if data.mixture:
        yield "data.mixture: the reference's log-probabilities lie beside one source; give data.source and data.path"
    if data.packing:
        yield "data.packing: dpo compares whole answers, each in its own row; use false"
    if cfg.batch.global_size // cfg.batch.accumulate % 2:
        yield (
            f"batch.global_size: {cfg.batch.global_size} over accumulate {cfg.batch.accumulate} makes no pairs, which"
            " dpo compares; use an even number of rows"
        )


def _sources(cfg: Config) -> Iterator[str]:
    default = Source()
    for key, source in _places(cfg):
        kind = source.source
        if kind in NEEDS_PATH and source.path is None:
            yield f"{key}.path: missing; source {kind} needs a file, a directory or a glob"
        if kind not in NEEDS_PATH and source.path is not None:
            yield f"{key}.path: source {kind} has none; those that do: {', '.join(NEEDS_PATH)}"
        if kind not in HAS_FIELDS and source.field != default.field:
            yield f"{key}.field: source {kind} has none; those that do: {', '.join(HAS_FIELDS)}"
        if (kind == "digits") == isinstance(cfg.model, Decoder):
            yield f"{key}.source: {kind} does not go with family {cfg.model.family}"


def _data(cfg: Config) -> Iterator[str]:
    data, model, default = cfg.data, cfg.model, Source()
    if data.mixture:
        for field in Source.model_fields:
            if getattr(data, field) != getattr(default, field):
                yield f"data.{field}: give it to the sources of data.mixture, or give no mixture"
    elif data.weight != default.weight:
        yield "data.weight: only the sources of a data.mixture have weights"
    if isinstance(model, Decoder):
        tokenized = any(source.source != "tokens" for _, source in _places(cfg))
        if data.tokenizer == "bytes" and model.vocab < BYTE_VOCAB and tokenized:
            yield f"model.vocab: {model.vocab} is less than the {BYTE_VOCAB} of data.tokenizer: bytes"
        yield from _chat(data)
    else:
        if data.mixture:
            yield "data.mixture: pictures cannot be mixed; use data.source: digits"
        if (model.image_size, model.channels) != DIGIT_SHAPE:
            size, channels = DIGIT_SHAPE
            yield f"model.image_size: digits need model.image_size {size} and model.channels {channels}"


def _chat(data: Data) -> Iterator[str]:
    kinds = [source.source for source in data.mixture or (data,)]
    if not {"chat", "preference"} & {*kinds}:
        default = Data()
        for field in ("too_long", "broken"):
            if getattr(data, field) != getattr(default, field):
                yield f"data.{field}: only data.source: chat and preference have it, not {data.source}"
    elif "chat" in kinds and data.tokenizer == "bytes" and data.template is None:
        yield "data.template: missing; data.tokenizer: bytes has none of its own; give a file of Jinja"


def _places(cfg: Config) -> list[tuple[str, Source]]:
    """Each source of documents, and its key."""
    return [(f"data.mixture[{i}]", source) for i, source in enumerate(cfg.data.mixture)] or [("data", cfg.data)]


def _batch(cfg: Config) -> Iterator[str]:
    size, accumulate = cfg.batch.global_size, cfg.batch.accumulate
    if size % accumulate:
        yield f"batch.accumulate: {accumulate} does not divide batch.global_size {size}"


def _precision(cfg: Config) -> Iterator[str]:
    precision = cfg.precision
    if precision.rounding == "stochastic" and precision.parameters == "float32":
        yield (
            f"precision.rounding: stochastic is for weights that rest in less than {precision.parameters}; "
            "give precision.parameters=bfloat16, int8, ..."
        )
    if precision.block_size is not None and not (precision.quantized or cfg.base_precision.quantized):
        yield f"precision.block_size: weights in {precision.parameters} share no constants; use null"
    if precision.master != "none" and precision.parameters != "bfloat16":
        yield (
            f"precision.master: {precision.master} completes weights that rest in bfloat16, not in"
            f" {precision.parameters}; use precision.parameters=bfloat16, or precision.master=none"
        )
    if precision.stochastic and precision.master != "none":
        yield (
            f"precision.rounding: with precision.master: {precision.master} no update is lost in rounding; "
            "use one of the two"
        )
    if precision.loss_scale != "none" and precision.compute != "float16":
        yield (
            f"precision.loss_scale: only float16 gradients need it, not precision.compute: {precision.compute}; "
            "use none"
        )


def _names(cfg: Config) -> Iterator[str]:
    remat, known = cfg.memory.remat, NAMES[cfg.model.family]
    if isinstance(remat, Save):
        if not remat.save:
            yield "memory.remat.save: names nothing; give some, or memory.remat=full"
        for name in remat.save:
            if name not in known:
                yield f"memory.remat.save: family {cfg.model.family} has no {name!r}{nearest(name, known)}"
    for name in on_host(cfg.memory.offload):
        if name not in (BOUNDARY, *known):
            yield f"memory.offload: family {cfg.model.family} has no {name!r}{nearest(name, ['activations', *known])}"


def _offload(cfg: Config) -> Iterator[str]:
    """What would move nothing."""
    remat, memory, away = cfg.memory.remat, cfg.memory, on_host(cfg.memory.offload)
    if away and remat == "none":
        yield "memory.remat: none keeps what has no name, which memory.offload cannot move; use full, dots or names"
    if away and cfg.model.family == "convnet":
        yield "memory.offload: a convnet's layers keep little and compute briefly, and would wait for it; use none"
    if away and cfg.mesh.stage != 1:
        yield "mesh.stage: stages keep what they keep of every tick on the device; use 1, or memory.offload=none"
    named = [name for name in away if name != BOUNDARY]
    if named and _is_scheduled(cfg):
        yield f"memory.offload: {named[0]} is kept by no layer under memory.remat: {remat}; use full"
    for name in named:
        for key, hidden in (("mlp_chunk", IN_CHUNKS), ("head_groups", IN_GROUPS)):
            given = getattr(memory, key)
            if given not in ("auto", 1) and name in hidden:
                yield f"memory.offload: {name} is made in pieces by memory.{key}: {given}, and never kept; use auto"


def _chunks(cfg: Config) -> Iterator[str]:
    """What goes through a layer in pieces is there in pieces only."""
    for key, hidden in (("mlp_chunk", IN_CHUNKS), ("head_groups", IN_GROUPS)):
        given, remat = getattr(cfg.memory, key), cfg.memory.remat
        if given == "auto":
            continue
        if cfg.model.family not in ("decoder", "vit"):
            yield f"memory.{key}: family {cfg.model.family} has no sequences; use auto"
        elif isinstance(remat, Save) and (key == "mlp_chunk" or given != 1):
            for name in (name for name in remat.save if name in hidden):
                yield f"memory.remat.save: {name} is made in pieces by memory.{key}: {given}, and never kept; use auto"
    if isinstance(cfg.memory.head_groups, int) and isinstance(cfg.model, Decoder | Vit):
        heads = cfg.model.kv_heads if isinstance(cfg.model, Decoder) else cfg.model.heads
        if heads % cfg.memory.head_groups:
            near = [n for n in range(1, heads + 1) if heads % n == 0]
            yield f"memory.head_groups: {cfg.memory.head_groups} does not divide {heads} key heads; use one of {near}"


def _is_scheduled(cfg: Config) -> bool:
    """Whether only some boundaries of layers are kept."""
    return isinstance(cfg.memory.remat, str) and cfg.memory.remat not in ("none", "full", "dots")


def _update(cfg: Config) -> Iterator[str]:
    """What an update during the backward pass cannot be combined with. It sees one layer's gradient at a time, once."""
    if cfg.memory.update != "during":
        return
    if _is_scheduled(cfg):
        yield (
            f"memory.remat: {cfg.memory.remat} makes boundaries again that memory.update: during keeps; use none, full,"
            " dots or {save: [names]}, or memory.update=after"
        )
    if cfg.batch.accumulate > 1:
        yield (
            f"batch.accumulate: {cfg.batch.accumulate} micro-batches add up in gradients of all layers, which"
            " memory.update: during never holds; use 1, or memory.update=after"
        )
    if cfg.mesh.stage != 1:
        yield (
            "mesh.stage: stages go back through several layers at a time, memory.update: during through one; use 1, or"
            " memory.update=after"
        )
    if cfg.precision.loss_scale != "none":
        yield (
            "precision.loss_scale: whether a gradient overflowed is known after the last layer, and memory.update:"
            " during has changed the others by then; use precision.compute=bfloat16, or memory.update=after"
        )
    if cfg.objective.name == "contrastive":
        yield (
            "objective.name: contrastive goes through the layers twice, memory.update: during once; use"
            " memory.update=after"
        )


def _mesh(cfg: Config) -> Iterator[str]:
    axes = {axis: getattr(cfg.mesh, axis) for axis in Mesh.model_fields}
    for axis, size in axes.items():
        if size < 1 and size != -1:
            yield f"mesh.{axis}: must be at least 1, or -1 for the rest of the devices, not {size}"
    if cfg.mesh.stage != 1 and _is_scheduled(cfg):
        yield (
            f"memory.remat: {cfg.memory.remat} goes back through all layers one by one, which mesh.stage"
            f" {cfg.mesh.stage} does not; use none, full, dots or {{save: [names]}}"
        )
    if cfg.mesh.context != 1:
        model = cfg.model
        if not isinstance(model, Decoder):
            yield f"mesh.context: {cfg.mesh.context} splits sequences of tokens; family {model.family} has none; use 1"
        elif cfg.memory.attention in ("reference", "pallas") and model.window is None:
            yield f"memory.attention: {cfg.memory.attention} does not go round mesh.context; use auto or blockwise"
    rest = [f"mesh.{axis}" for axis, size in axes.items() if size == -1]
    if len(rest) > 1:
        yield f"{rest[1]}: only one axis can be -1, and {rest[0]} is"


def _rules(cfg: Config) -> Iterator[str]:
    usual, dims = Rules().table, DIMS[cfg.model.family]
    for dim, over in cfg.rules.table.items():
        if len(set(over)) < len(over):
            yield f"rules.{dim}: {list(over)} names an axis twice; use {list(dict.fromkeys(over))}"
        if over != usual[dim] and dim not in dims:
            yield f"rules.{dim}: family {cfg.model.family} has none; it has {', '.join(dims)}"
    if "tensor" in cfg.rules.kv_heads and "tensor" not in cfg.rules.heads:
        yield "rules.kv_heads: tensor splits key heads together with heads; give it to rules.heads, or to neither"


def _generate(cfg: Config) -> Iterator[str]:
    if not isinstance(cfg.model, Decoder):
        for field in Generate.model_fields:
            if getattr(cfg.generate, field) != getattr(Generate(), field):
                yield f"generate.{field}: family {cfg.model.family} makes no text; leave it out"


def _optimizer(cfg: Config) -> Iterator[str]:
    optimizer = cfg.optimizer
    for field in FIELDS:
        if getattr(optimizer, field) is not None and field not in OPTIMIZERS[optimizer.name]:
            having = ", ".join(name for name, own in OPTIMIZERS.items() if field in own)
            yield f"optimizer.{field}: {optimizer.name} has none; those that do: {having}"
    if optimizer.trainable and cfg.memory.update == "during":
        yield (
            "optimizer.trainable: memory.update: during goes through all layers and updates all their weights; use"
            " memory.update=after, where what is frozen has no gradient"
        )
    if cfg.mesh.stage != 1 and optimizer.name in SEARCH_BASES:
        yield (
            f"mesh.stage: {optimizer.name} would look for its bases at every update where layers lie on stages;"
            " use 1, or another optimizer"
        )


RULES = (
    _run,
    _places_to_write,
    _decoder,
    _image_model,
    _objective,
    _sources,
    _data,
    _batch,
    _precision,
    _names,
    _offload,
    _chunks,
    _update,
    _mesh,
    _rules,
    _optimizer,
    _generate,
    check_adapter,
)
