"""What can be known to be wrong before jax starts, for whatever number of devices.

Each rule yields one line a problem: the key, the reason, what would do. `mesh.py` adds what follows
from the number of devices.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from operator import attrgetter

from jaxmem.config.check_adapter import check_adapter, check_some_layers
from jaxmem.config.check_data import check_data
from jaxmem.config.check_memory import check_memory
from jaxmem.config.mesh import Mesh, Rules
from jaxmem.config.networks import Convnet, Decoder, Mlp, Rope, Vit
from jaxmem.config.optimizers import OPTIMIZERS
from jaxmem.config.recompute import policy_of
from jaxmem.config.sections import Config, Generate
from jaxmem.errors import UserError

DIGIT_CLASSES = 10
DIGIT_LEVELS = 17  # a pixel is 0 to 16

BUCKETS = ("gs", "s3")
CROSS_ENTROPY = ("next_token", "classify")
SMOOTHED = (*CROSS_ENTROPY, "dpo")


def check(cfg: Config) -> Config:
    problems = [line for rule in RULES for line in rule(cfg)]
    if problems:
        raise UserError("\n".join(problems))
    return cfg


REQUIRES = {  # what does nothing but with some values of another key
    "objective.label_smoothing": ("objective.name", SMOOTHED),
    "objective.z_loss": ("objective.name", CROSS_ENTROPY),
    "objective.beta": ("objective.name", ("dpo",)),
    "objective.temperature": ("objective.name", ("contrastive",)),
    "train.spike_threshold": ("train.on_spike", ("stop", "rollback")),
}


def _requirements(cfg: Config) -> Iterator[str]:
    for key, (other, allowed) in REQUIRES.items():
        section, field = key.split(".")
        value = getattr(getattr(cfg, section), field)
        actual = attrgetter(other)(cfg)
        if value != type(getattr(cfg, section)).model_fields[field].default and actual not in allowed:
            yield f"{key}={value:g} requires {other}={' or '.join(allowed)}, not {actual}"


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
            " changed the others by then; use stop or rollback, or memory.update=after"
        )
    for key in ("on_nan", "on_spike"):
        if getattr(train, key) == "rollback" and cfg.checkpoint.every is None:
            yield f"train.{key}: rollback goes back to the last checkpoint; give checkpoint.every"
    if cfg.checkpoint.keep_best and train.evaluate_every is None:
        yield "checkpoint.keep_best: the best is the lowest held-out loss; give train.evaluate_every"
    if train.evaluate_every is not None and data.held_out == 0:
        yield "train.evaluate_every: nothing is held out; give data.held_out more than 0"


def _places_to_write(cfg: Config) -> Iterator[str]:
    if "://" in cfg.output:
        yield f"output: {cfg.output} is no directory; give a bucket to checkpoint.path, and the logs a directory"
    scheme, remote, place = (cfg.checkpoint.path or "").partition("://")
    if "@" in place.partition("/")[0]:
        yield "checkpoint.path: has a name or password before the @, which config.yaml would keep; use the environment"
    if remote and scheme not in BUCKETS:
        yield f"checkpoint.path: {scheme}:// is not known; use a directory, {' or '.join(f'{b}://' for b in BUCKETS)}"


def _paths(cfg: Config) -> Iterator[str]:
    data = cfg.data
    paths = {
        "output": cfg.output,
        "checkpoint.path": cfg.checkpoint.path,
        "adapter.base_run": cfg.adapter.base_run,
        **{f"data.{key}": getattr(data, key) for key in ("path", "tokenizer", "chat_template", "reference_logprobs")},
        **{f"data.mixture[{i}].path": source.path for i, source in enumerate(data.mixture)},
    }
    for key, path in paths.items():
        if path is not None and "\0" in path:
            yield f"{key}: {path!a} has a null byte, which no file's name has"
        elif path is not None and not _nameable(path):
            coding = sys.getfilesystemencoding()
            yield f"{key}: {path!a} cannot be a file's name where names are in {coding}; set PYTHONUTF8=1"


def _nameable(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


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
    objective, model = cfg.objective, cfg.model
    name = objective.name
    if isinstance(model, Decoder) != objective.reads_text:
        texts, pictures = "next_token or dpo", "classify, binary, regress_l1, regress_l2 or contrastive"
        use = pictures if objective.reads_text else texts
        yield f"objective.name: {name} does not go with family {model.family}; use {use}"
    if cfg.memory.loss_chunk != "auto" and not objective.reads_text:
        yield f"memory.loss_chunk: only next_token and dpo have a vocabulary to go through, not {name}; use auto"
    if name == "contrastive":
        if cfg.batch.accumulate > 1:
            yield "batch.accumulate: contrastive takes its negatives from the batch, which this splits; use 1"
        if cfg.batch.global_size < 2:
            yield "batch.global_size: contrastive takes its negatives from the batch; use 2 or more"
    if not isinstance(model, Decoder) and name != "contrastive":
        outputs = DIGIT_CLASSES if name == "classify" else 1
        if model.outputs != outputs:
            yield f"model.outputs: {model.outputs} must be {outputs} for objective {name} on digits"


def _batch(cfg: Config) -> Iterator[str]:
    size, accumulate = cfg.batch.global_size, cfg.batch.accumulate
    if size % accumulate:
        yield f"batch.accumulate: {accumulate} does not divide batch.global_size {size}"


def _precision(cfg: Config) -> Iterator[str]:
    precision = cfg.precision
    if precision.rounding == "stochastic" and precision.parameters == "float32":
        yield (
            f"precision.rounding: stochastic is for weights stored in less than {precision.parameters}; "
            "give precision.parameters=bfloat16, int8, ..."
        )
    if precision.block_size is not None and not (precision.is_quantized or cfg.base_precision.is_quantized):
        yield f"precision.block_size: weights in {precision.parameters} share no constants; use null"
    if precision.master != "none" and precision.parameters != "bfloat16":
        yield (
            f"precision.master: {precision.master} completes weights stored in bfloat16, not in"
            f" {precision.parameters}; use precision.parameters=bfloat16, or precision.master=none"
        )
    if precision.stochastic_rounding and precision.master != "none":
        yield (
            f"precision.rounding: with precision.master: {precision.master} no update is lost in rounding; "
            "use one of the two"
        )
    if precision.loss_scale != "none" and precision.compute != "float16":
        yield (
            f"precision.loss_scale: only float16 gradients need it, not precision.compute: {precision.compute}; "
            "use none"
        )


def _mesh(cfg: Config) -> Iterator[str]:
    axes = {axis: getattr(cfg.mesh, axis) for axis in Mesh.model_fields}
    for axis, size in axes.items():
        if size < 1 and size != -1:
            yield f"mesh.{axis}: must be at least 1, or -1 for the rest of the devices, not {size}"
    policy = policy_of(cfg.memory.remat)
    if cfg.mesh.stage != 1 and policy is not None and not policy.in_stages:
        yield (
            f"memory.remat: {cfg.memory.remat} goes back through all layers one by one, which mesh.stage"
            f" {cfg.mesh.stage} does not; use none, full, every_K, sqrt, dots or {{save: [names]}}"
        )
    if cfg.mesh.context != 1:
        model = cfg.model
        if not isinstance(model, Decoder):
            yield f"mesh.context: {cfg.mesh.context} splits sequences of tokens; family {model.family} has none; use 1"
        elif cfg.memory.attention in ("reference", "mosaic", "triton") and model.window is None:
            yield (
                f"mesh.context={cfg.mesh.context} does not support memory.attention={cfg.memory.attention}; use auto or"
                " blockwise"
            )
    rest = [f"mesh.{axis}" for axis, size in axes.items() if size == -1]
    if len(rest) > 1:
        yield f"{rest[1]}: only one axis can be -1, and {rest[0]} is"


def _rules(cfg: Config) -> Iterator[str]:
    usual, known = Rules().table, cfg.model.dims()
    for dim, over in cfg.rules.table.items():
        if len(set(over)) < len(over):
            yield f"rules.{dim}: {list(over)} names an axis twice; use {list(dict.fromkeys(over))}"
        if over != usual[dim] and dim not in known:
            yield f"rules.{dim}: family {cfg.model.family} has none; it has {', '.join(known)}"
    if "tensor" in cfg.rules.kv_heads and "tensor" not in cfg.rules.heads:
        yield "rules.kv_heads: tensor splits key heads together with heads; give it to rules.heads, or to neither"


def _generate(cfg: Config) -> Iterator[str]:
    if not isinstance(cfg.model, Decoder):
        for field in Generate.model_fields:
            if getattr(cfg.generate, field) != getattr(Generate(), field):
                yield f"generate.{field}: family {cfg.model.family} makes no text; leave it out"


def _optimizer(cfg: Config) -> Iterator[str]:
    optimizer = cfg.optimizer
    for field, value in optimizer:
        having = [name for name, entry in OPTIMIZERS.items() if field in entry.fields]
        if value is not None and having and optimizer.name not in having and field != "kernel":
            yield f"optimizer.{field}={value} requires optimizer.name={', '.join(having)}, not {optimizer.name}"
    if optimizer.kernel == "triton":
        int8 = cfg.precision.parameters == "int8"
        if not int8 and optimizer.name != "adamw8bit":
            yield (
                f"optimizer.kernel: triton updates the state of adamw8bit and weights in int8, not {optimizer.name}"
                f" with weights in {cfg.precision.parameters}; use none"
            )
        if int8 and not cfg.precision.stochastic_rounding:
            yield (
                f"optimizer.kernel: triton rounds weights in int8 by chance, not to the {cfg.precision.rounding};"
                " use none, or precision.rounding=auto"
            )


RULES = (
    _requirements,
    _run,
    _places_to_write,
    _paths,
    _decoder,
    _image_model,
    _objective,
    check_data,
    _batch,
    _precision,
    check_memory,
    _mesh,
    _rules,
    _optimizer,
    _generate,
    check_adapter,
    check_some_layers,
)
