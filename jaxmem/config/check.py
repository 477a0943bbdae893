"""Errors in a config that do not depend on the number of devices; `devices.py` adds those that do.

Each rule yields one line per problem: what was given, what is allowed, what to use.
"""

import os
import re
import sys
from collections.abc import Iterator
from operator import attrgetter

from jaxmem.config.check_adapter import check_adapter, check_some_layers
from jaxmem.config.check_data import check_data
from jaxmem.config.check_memory import check_memory
from jaxmem.config.hugging_face import config_json
from jaxmem.config.mesh import Mesh, Rules
from jaxmem.config.networks import Convnet, Decoder, Mlp, Rope, Vit
from jaxmem.config.optimizers import OPTIMIZERS
from jaxmem.config.recompute import policy_of
from jaxmem.config.sections import Config, Generate
from jaxmem.errors import UserError, as_yaml, required, unsupported

DIGIT_CLASSES = 10
DIGIT_LEVELS = 17  # a pixel is 0 to 16

BUCKETS = ("gs", "s3")
TEXT_LOSSES = ("next_token", "dpo")
CROSS_ENTROPY = ("next_token", "classify")


def check(cfg: Config) -> Config:
    """The same config, or an error with a line per problem."""
    problems = [line for rule in RULES for line in rule(cfg)]
    if problems:
        raise UserError("\n".join(problems))
    return cfg


REQUIRES = {  # keys that have an effect only with some values of another key
    "objective.label_smoothing": ("objective.name", (*CROSS_ENTROPY, "dpo")),
    "objective.z_loss": ("objective.name", CROSS_ENTROPY),
    "objective.beta": ("objective.name", ("dpo",)),
    "objective.temperature": ("objective.name", ("contrastive",)),
    "data.reference_logprobs": ("objective.name", ("dpo",)),
    "memory.loss_chunk": ("objective.name", TEXT_LOSSES),
    "data.buckets": ("model.family", ("decoder",)),
    "mesh.context": ("model.family", ("decoder",)),
    **{f"generate.{field}": ("model.family", ("decoder",)) for field in Generate.model_fields},
    "memory.mlp_chunk": ("model.family", ("decoder", "vit")),
    "memory.head_groups": ("model.family", ("decoder", "vit")),
    "precision.master": ("precision.parameters", ("bfloat16",)),
    "precision.loss_scale": ("precision.compute", ("float16",)),
    "train.spike_threshold": ("train.on_spike", ("stop", "rollback")),
}


def _requirements(cfg: Config) -> Iterator[str]:
    for key, (other, allowed) in REQUIRES.items():
        section, field = key.split(".")
        value = getattr(getattr(cfg, section), field)
        actual = attrgetter(other)(cfg)
        if value != type(getattr(cfg, section)).model_fields[field].default and actual not in allowed:
            yield required(f"{key}={as_yaml(value)}", other, allowed, actual)


def _run(cfg: Config) -> Iterator[str]:
    train, checkpoint = cfg.train, cfg.checkpoint
    if not re.fullmatch(r"\w[\w.-]*", cfg.name):
        yield f"name={cfg.name!r} is not the name of a directory; use letters, digits, and . _ - after the first"
    if (train.steps is None) == (train.tokens is None):
        yield f"train.steps and train.tokens are both {'set' if train.steps else 'null'}; set one of them"
    elif train.tokens is not None and not isinstance(cfg.model, Decoder):
        yield required(f"train.tokens={train.tokens}", "model.family", ["decoder"], cfg.model.family)
    else:
        if cfg.optimizer.warmup >= cfg.steps:
            yield f"optimizer.warmup={cfg.optimizer.warmup} must be less than the {cfg.steps} steps of the run"
        first, last = train.profile or (1, 1)
        if not first <= last <= cfg.steps:
            yield f"train.profile=[{first}, {last}] must be [from, to], from <= to <= the {cfg.steps} steps of the run"
    for key in ("on_nan", "on_spike"):
        if getattr(train, key) == "rollback" and checkpoint.every is None:
            yield f"train.{key}=rollback requires checkpoint.every; set a number of updates"
    if checkpoint.keep_best and train.evaluate_every is None:
        yield "checkpoint.keep_best=true requires train.evaluate_every; set a number of updates"
    if train.evaluate_every is not None and cfg.data.held_out == 0:
        yield f"train.evaluate_every={train.evaluate_every} requires data.held_out above 0"


def _places_to_write(cfg: Config) -> Iterator[str]:
    if "://" in cfg.output:
        yield f"output={cfg.output} must be a local directory; use checkpoint.path for a bucket"
    scheme, remote, place = (cfg.checkpoint.path or "").partition("://")
    if "@" in place.partition("/")[0]:  # the message does not show it
        yield "checkpoint.path contains a name or password, which config.yaml would store; use the environment"
    if remote and scheme not in BUCKETS:
        yield f"checkpoint.path={scheme}:// is unknown; use a directory, {' or '.join(f'{b}://' for b in BUCKETS)}"


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
            yield f"{key}={path!a} contains a null byte; remove it"
        elif path is not None and not _is_encodable(path):
            yield f"{key}={path!a} cannot be encoded as a file name in {sys.getfilesystemencoding()}; set PYTHONUTF8=1"


def _is_encodable(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


def _decoder(cfg: Config) -> Iterator[str]:
    model = cfg.model
    if not isinstance(model, Decoder):
        return
    rope = model.rope
    if model.heads % model.kv_heads:
        yield f"model.kv_heads={model.kv_heads} does not divide model.heads={model.heads}"
    if model.head_dim % 2:
        yield f"model.head_dim={model.head_dim} must be even: rotary positions rotate pairs"
    if rope.scaling == "none" and rope.factor != Rope().factor:
        yield required(f"model.rope.factor={rope.factor:g}", "model.rope.scaling", ("linear", "llama3", "yarn"), "none")
    if rope.attention_factor is not None and rope.scaling != "yarn":
        given = f"model.rope.attention_factor={rope.attention_factor:g}"
        yield required(given, "model.rope.scaling", ["yarn"], rope.scaling)
    if model.hf is not None and model.preset is not None:
        yield f"model.hf={model.hf} and model.preset={model.preset} are both set; use one of them"
    try:
        config_json(model)
    except UserError as error:  # it could be trained, but not exported
        yield str(error)


def _image_model(cfg: Config) -> Iterator[str]:
    model = cfg.model
    match model:
        case Vit():
            if model.embed % model.heads:
                yield f"model.heads={model.heads} does not divide model.embed={model.embed}"
            if model.image_size % model.patch:
                yield f"model.patch={model.patch} does not divide model.image_size={model.image_size}"
        case Mlp():
            if model.inputs == "numbers" and model.categories != Mlp().categories:
                given = f"model.categories={model.categories}"
                yield required(given, "model.inputs", ("one_hot", "embedding"), "numbers")
            if model.categories < DIGIT_LEVELS:
                yield f"model.categories={model.categories} must be at least {DIGIT_LEVELS}, the pixel values of digits"
        case Convnet():
            most = model.image_size.bit_length()  # each stage except the first halves the image
            if len(model.stages) > most:
                size, stages = model.image_size, len(model.stages)
                yield f"model.image_size={size} does not support {stages} model.stages; use {most} or fewer"


def _objective(cfg: Config) -> Iterator[str]:
    objective, model, batch = cfg.objective, cfg.model, cfg.batch
    name = f"objective.name={objective.name}"
    if isinstance(model, Decoder) != objective.reads_text:
        use = "next_token or dpo"
        if objective.reads_text:
            use = "classify, binary, regress_l1, regress_l2 or contrastive"
        yield unsupported(name, f"model.family={model.family}", use)
    if objective.name == "contrastive":  # negatives are the other rows of a micro-batch
        if batch.accumulate > 1:
            yield unsupported(name, f"batch.accumulate={batch.accumulate}", "1")
        if batch.global_size < 2:
            yield f"{name} requires batch.global_size of at least 2, not {batch.global_size}"
    elif not isinstance(model, Decoder):
        outputs = DIGIT_CLASSES if objective.name == "classify" else 1
        if model.outputs != outputs:
            yield f"model.outputs={model.outputs} must be {outputs} for {name} on digits"


def _batch(cfg: Config) -> Iterator[str]:
    size, accumulate = cfg.batch.global_size, cfg.batch.accumulate
    if size % accumulate:
        yield f"batch.accumulate={accumulate} does not divide batch.global_size={size}"


def _precision(cfg: Config) -> Iterator[str]:
    precision, parameters = cfg.precision, f"precision.parameters={cfg.precision.parameters}"
    if precision.rounding == "stochastic" and precision.parameters == "float32":
        yield unsupported("precision.rounding=stochastic", parameters, "bfloat16, int8, ...")
    if precision.block_size is not None and not (precision.is_quantized or cfg.base_precision.is_quantized):
        yield f"precision.block_size={precision.block_size} requires quantized parameters, not {parameters}; use null"
    if precision.stochastic_rounding and precision.master != "none":  # with a master copy, rounding loses no update
        master = f"precision.master={precision.master}"
        yield unsupported(f"precision.rounding={precision.rounding}", master, "one of the two")


def _mesh(cfg: Config) -> Iterator[str]:
    axes = {axis: getattr(cfg.mesh, axis) for axis in Mesh.model_fields}
    for axis, size in axes.items():
        if size < 1 and size != -1:
            yield f"mesh.{axis}={size} must be at least 1, or -1 for the remaining devices"
    policy = policy_of(cfg.memory.remat)
    if cfg.mesh.stage != 1 and policy is not None and not policy.in_stages:
        use = "none, full, every_K, sqrt, dots or {save: [names]}"
        yield unsupported(f"mesh.stage={cfg.mesh.stage}", f"memory.remat={cfg.memory.remat}", use)
    if cfg.mesh.context != 1 and isinstance(cfg.model, Decoder):
        attention = cfg.memory.attention
        if attention == "cudnn" or (cfg.model.window is None and attention in ("reference", "mosaic", "triton")):
            yield unsupported(f"mesh.context={cfg.mesh.context}", f"memory.attention={attention}", "auto or blockwise")
    rest = [f"mesh.{axis}=-1" for axis, size in axes.items() if size == -1]
    if len(rest) > 1:
        yield f"{' and '.join(rest)} are both set; use -1 for one axis only"


def _rules(cfg: Config) -> Iterator[str]:
    usual, known = Rules().table, cfg.model.dims()
    for dim, over in cfg.rules.table.items():
        if len(set(over)) < len(over):
            yield f"rules.{dim}={as_yaml(over)} repeats an axis; use {as_yaml(tuple(dict.fromkeys(over)))}"
        if over != usual[dim] and dim not in known:
            yield unsupported(f"model.family={cfg.model.family}", f"rules.{dim}", ", ".join(known))
    if "tensor" in cfg.rules.kv_heads and "tensor" not in cfg.rules.heads:
        heads, kv_heads = as_yaml(cfg.rules.heads), as_yaml(cfg.rules.kv_heads)
        yield f"rules.kv_heads={kv_heads} requires tensor in rules.heads={heads}; use it in both or in neither"


def _optimizer(cfg: Config) -> Iterator[str]:
    optimizer, precision = cfg.optimizer, cfg.precision
    for field, value in optimizer:
        having = [name for name, entry in OPTIMIZERS.items() if field in entry.fields]
        if value is not None and having and optimizer.name not in having and field != "kernel":
            yield f"optimizer.{field}={value} requires optimizer.name={', '.join(having)}, not {optimizer.name}"
    if optimizer.kernel == "triton":
        is_int8 = precision.parameters == "int8"
        if not is_int8 and optimizer.name != "adamw8bit":
            yield (
                "optimizer.kernel=triton requires optimizer.name=adamw8bit or precision.parameters=int8,"
                f" not {optimizer.name} with {precision.parameters}; use none"
            )
        if is_int8 and not precision.stochastic_rounding:
            rounding = f"precision.rounding={precision.rounding}"
            yield unsupported("optimizer.kernel=triton", rounding, "none, or precision.rounding=auto")


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
    check_adapter,
    check_some_layers,
)
