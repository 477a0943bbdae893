"""Errors in a config that do not depend on the number of devices; `devices.py` adds the others.

Each rule yields a line per problem: the given setting, what is allowed, what to use instead.
"""

import os
import re
from collections.abc import Iterator

from jaxmem.config.check_sections import check_adapter, check_data, check_memory, check_some_layers
from jaxmem.config.combinations import check_combinations
from jaxmem.config.mesh import Rules, WeightKind, divisors, unsupported_by_ring
from jaxmem.config.names import offloaded_activations
from jaxmem.config.networks import Convnet, Decoder, Family, ImageInput, Mlp, Rope, UserModel, Vit
from jaxmem.config.sections import Config
from jaxmem.errors import UserError, as_yaml, nearest_numbers, one_of, unsupported

DIGIT_CLASSES = 10
DIGIT_LEVELS = 17  # a pixel is 0 to 16
BUCKETS = ("gs", "s3")


def check(cfg: Config) -> Config:
    """The same config, or an error with a line per problem."""
    problems = [line for rule in RULES for line in rule(cfg)]
    if problems:
        raise UserError("\n".join(problems))
    return cfg


def _run(cfg: Config) -> Iterator[str]:
    train = cfg.train
    warmup = cfg.optimizer.warmup
    if not re.fullmatch(r"\w[\w.-]*", cfg.name):
        use = 'use letters, digits, "_", "-" and ".", and start with a letter, a digit or "_"'
        yield f"name={as_yaml(cfg.name)} is not a valid name of a run; {use}"
    if (train.steps is None) == (train.tokens is None):
        yield f"train.steps and train.tokens are both {'set' if train.steps else 'null'}; set exactly one of them"
        return
    if warmup >= cfg.steps:
        length = f"train.steps={train.steps}" if train.steps else f"train.tokens={train.tokens} ({cfg.steps} updates)"
        given = f"the run ends before the warmup: optimizer.warmup={warmup}, but {length}"
        yield f"{given}; use optimizer.warmup={cfg.steps - 1} or less, or a longer run"
    first, last = train.profile or (1, 1)
    if not first <= last <= cfg.steps:
        low, high = sorted(min(step, cfg.steps) for step in (first, last))
        given = f"train.profile=[{first}, {last}] must be [first step, last step], at most {cfg.steps}"
        yield f"{given}; use train.profile=[{low}, {high}]"


def _places_to_write(cfg: Config) -> Iterator[str]:
    if "://" in cfg.output:
        yield f"output={cfg.output} must be a local directory; use checkpoint.path for a bucket"
    scheme, remote, place = (cfg.checkpoint.path or "").partition("://")
    if "@" in place.partition("/")[0]:  # the message does not show it
        yield "checkpoint.path contains a password; remove it, and set the credentials as environment variables"
    if remote and scheme not in BUCKETS:
        yield f"checkpoint.path={scheme}:// is not supported; use a directory, gs:// or s3://"


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
            yield f"{key}={as_yaml(path)} contains a null byte; remove it"
        try:
            os.fsencode(path or "")
        except UnicodeEncodeError as error:
            yield f"{key}={path!a} cannot be encoded as {error.encoding}, as file names are; set PYTHONUTF8=1"


def _model(cfg: Config) -> Iterator[str]:
    model = cfg.model
    match model:
        case Decoder():
            yield from decoder_errors(model)
        case Vit():
            if model.embed % model.heads:
                yield indivisible("model.embed", model.embed, "model.heads", model.heads)
            if model.image_size % model.patch:
                yield indivisible("model.image_size", model.image_size, "model.patch", model.patch)
        case Mlp():
            if model.categories < DIGIT_LEVELS:
                given = f"model.categories={model.categories} must be at least {DIGIT_LEVELS} for data.source=digits"
                yield f"{given}; use model.categories={DIGIT_LEVELS}"
        case Convnet():
            most = model.image_size.bit_length()  # each stage except the first halves the image
            if len(model.stages) > most:
                given = f"model.stages has {len(model.stages)} values"
                yield f"{given}, but model.image_size={model.image_size} supports {most}; use {most} or fewer"


def _objective(cfg: Config) -> Iterator[str]:
    objective = cfg.objective
    model = cfg.model
    name = f"objective.name={objective.name}"
    is_text = objective.name in ("next_token", "dpo")
    if objective.name == "own":
        return
    if isinstance(model, UserModel):
        yield unsupported(name, "model.family=own", "the argument loss: train(cfg, model=..., loss=...)")
        return
    if isinstance(model, Decoder) != is_text:
        use = "classify, binary, regress_l1, regress_l2 or contrastive" if is_text else "next_token or dpo"
        yield unsupported(name, f"model.family={model.family}", f"objective.name={use}")
    has_outputs = cfg.data.source == "digits" if objective.name == "classify" else objective.name != "contrastive"
    if isinstance(model, ImageInput) and has_outputs:
        outputs = DIGIT_CLASSES if objective.name == "classify" else 1
        if model.outputs != outputs:
            yield f"model.outputs={model.outputs} does not match {name}; use model.outputs={outputs}"


def _user(cfg: Config) -> Iterator[str]:
    """Errors for a model of Flax's layers: settings that change how its layers are computed."""
    if cfg.user.model is None:
        return
    memory = cfg.memory
    adapter = cfg.adapter
    needs_network = {
        f"adapter.kind={adapter.kind}": adapter.kind not in ("none", "lora", "qlora", "patterns"),
        f"adapter.dropout={as_yaml(adapter.dropout)}": adapter.dropout > 0,
        "adapter.lora_bias=true": adapter.lora_bias,
        "precision.compute=fp8": cfg.precision.compute == "fp8",
    }
    for setting in (setting for setting, is_set in needs_network.items() if is_set):
        yield f"{setting} requires jaxmem's layers, the argument network; remove it"
    needs_layers = {
        f"memory.remat={as_yaml(memory.remat)}": memory.remat not in ("none", "auto"),
        f"memory.update={memory.update}": memory.update == "during",
        f"memory.offload={as_yaml(memory.offload)}": bool(offloaded_activations(memory.offload)),
    }
    for setting in (setting for setting, is_set in needs_layers.items() if is_set and not cfg.user.layers):
        yield (
            f"{setting} requires the argument layers, the name of the model's list of equal blocks; use "
            'train(cfg, model=..., layers="blocks"), see docs/how-to/from-a-script.md'
        )


def _batch(cfg: Config) -> Iterator[str]:
    batch = cfg.batch
    if batch.global_size % batch.accumulate:
        yield indivisible("batch.global_size", batch.global_size, "batch.accumulate", batch.accumulate)


def _precision(cfg: Config) -> Iterator[str]:
    precision = cfg.precision
    parameters = f"precision.parameters={precision.parameters}"
    if precision.block_size is not None and not (precision.is_quantized or cfg.base_precision.is_quantized):
        given = f"precision.block_size={precision.block_size}"
        yield f"{given} requires quantized parameters, not {parameters}; use precision.block_size=null"
    if precision.parameters.startswith("dynamic"):  # they have no code for -absmax, which each update would reduce
        yield f"{parameters} does not support training; use int8 or nf4, or adapter.base={precision.parameters}"


def _mesh(cfg: Config) -> Iterator[str]:
    for axis, size in cfg.mesh.sizes.items():
        if size < 1 and size != -1:
            yield f"mesh.{axis}={size} must be at least 1; use mesh.{axis}=1, or -1 for all remaining devices"
    is_ring = cfg.mesh.context != 1 and cfg.mesh.context_method == "ring"
    if is_ring and isinstance(cfg.model, Decoder) and (what := unsupported_by_ring(cfg.model, cfg.mesh)):
        use = "mesh.context_method=ulysses" + " or mesh.stage=1" * (cfg.mesh.stage != 1)
        yield unsupported("mesh.context_method=ring", what, use)
    unset = [f"mesh.{axis}=-1" for axis, size in cfg.mesh.sizes.items() if size == -1]
    if len(unset) > 1:
        yield f"{' and '.join(unset)} are both set; use -1 for one axis only"


def _rules(cfg: Config) -> Iterator[str]:
    usual = Rules().table
    known = cfg.model.dims()
    if isinstance(cfg.model, UserModel):  # its weights may name any of these dimensions
        known = {dim: {} for dim in usual}
    for key, over in cfg.rules:
        if len(set(over)) < len(over):
            yield f"rules.{key}={as_yaml(over)} repeats a name; use rules.{key}={as_yaml(tuple(dict.fromkeys(over)))}"
    for dim, over in cfg.rules.table.items():
        if over != usual[dim] and dim not in known:
            yield unsupported(f"model.family={cfg.model.family}", f"rules.{dim}", f"rules.{one_of(known)}")
    if "tensor" in cfg.rules.kv_heads and "tensor" not in cfg.rules.heads:
        heads = as_yaml(cfg.rules.heads)
        kv_heads = as_yaml(cfg.rules.kv_heads)
        yield f"rules.kv_heads={kv_heads} requires tensor in rules.heads={heads}; use tensor in both or neither"
    for key, least in (("logits", 2), ("replicated", 3), ("optimizer", 1)):
        over = getattr(cfg.rules, key)
        if over and cfg.zero < least:
            yield f"rules.{key}={as_yaml(over)} requires zero of at least {least}, not {cfg.zero}; use rules.{key}=[]"
    kinds = weight_kinds(cfg.model)
    for kind in cfg.rules.replicated:
        if kind not in kinds:
            use = f"rules.replicated: {one_of(kinds)}" if kinds else "rules.replicated=[]"
            yield f"rules.replicated=[{kind}] names weights that the model does not have; use {use}"


RULES = (
    check_combinations,
    _run,
    _places_to_write,
    _paths,
    _model,
    _objective,
    _user,
    check_data,
    _batch,
    _precision,
    check_memory,
    _mesh,
    _rules,
    check_adapter,
    check_some_layers,
)


def weight_kinds(model: Family) -> tuple[WeightKind, ...]:
    """The kinds of weights of a model, for `rules.replicated`. All matrices of a mixture are the kind `experts`."""
    dims = model.dims()
    has_experts = getattr(model, "experts", None) is not None
    mlp: tuple[WeightKind, ...] = ("experts",) if has_experts else ("gate_up", "down") if "mlp" in dims else ()
    attention: tuple[WeightKind, ...] = ("attention",) if "heads" in dims else ()
    return (*attention, *mlp, *(("head",) if "vocab" in dims else ()))


def decoder_errors(model: Decoder) -> Iterator[str]:
    if model.heads % model.kv_heads:
        yield indivisible("model.heads", model.heads, "model.kv_heads", model.kv_heads)
    experts = model.experts
    if experts is not None and experts.top_k > experts.count:
        given = f"model.experts.top_k={experts.top_k} exceeds model.experts.count={experts.count}"
        yield f"{given}; use model.experts.top_k={experts.count} or less"
    for rope in model.ropes:
        yield from _rope(rope, model.head_dim if model.latent is None else model.latent.rope_dim)
    yield from _layer_types(model)
    if wrong := [*_dense_layers(model), *_deepseek(model)]:
        yield from wrong
        return
    from jaxmem.config.hugging_face import config_json

    try:
        config_json(model)
    except UserError as error:  # such a model could be trained, but not exported
        yield str(error)


def _dense_layers(model: Decoder) -> Iterator[str]:
    if (experts := model.experts) is None:
        return
    if max(experts.dense_layers, default=0) >= model.layers:
        given = f"model.experts.dense_layers contains {max(experts.dense_layers)}, but model.layers={model.layers}"
        yield f"{given}; use numbers from 0 to {model.layers - 1}"
    elif not any(model.has_experts):
        given = f"model.experts.every={experts.every} and model.experts.dense_layers={as_yaml(experts.dense_layers)}"
        yield f"{given} leave no layer with experts; use model.experts=null, or remove one of them"
    elif experts.dense_mlp is None and not all(model.has_experts):
        number = model.has_experts.index(False)
        yield f"layer {number} has no experts; set model.experts.dense_mlp to the hidden width of its MLP"
    elif experts.dense_mlp is not None and all(model.has_experts):
        given = f"model.experts.dense_mlp={experts.dense_mlp} requires layers without experts"
        yield f"{given}; set model.experts.dense_layers, or remove model.experts.dense_mlp"


def _deepseek(model: Decoder) -> Iterator[str]:
    if (latent := model.latent) is not None:
        for name in ("rope_dim", "value_dim"):
            size = getattr(latent, name)
            if size > model.head_dim - (name == "rope_dim"):
                given = f"model.latent.{name}={size} exceeds model.head_dim={model.head_dim}, the width of a key"
                yield f"{given}; use a smaller model.latent.{name}"
        if model.kv_heads != model.heads:
            given = f"model.latent computes keys of all heads, but model.kv_heads={model.kv_heads}"
            yield f"{given}; use model.kv_heads={model.heads}"
    if (experts := model.experts) is not None:
        least = -(-experts.top_k * experts.groups // experts.count)  # groups that hold top_k experts
        if experts.count % experts.groups:
            yield indivisible("model.experts.count", experts.count, "model.experts.groups", experts.groups)
        elif not least <= experts.top_groups <= experts.groups:
            given = f"model.experts.top_groups={experts.top_groups} of model.experts.groups={experts.groups} groups"
            yield f"{given}; use {least} to {experts.groups} for model.experts.top_k={experts.top_k}"


def _rope(rope: Rope, head_dim: int) -> Iterator[str]:
    size = int(head_dim * rope.share)
    if size % 2 or not size:
        if rope.share < 1:
            given = f"model.rope.share={as_yaml(rope.share)} of model.head_dim={head_dim} is {size} dimensions"
            use = f"model.rope.share={as_yaml(2 * max(size // 2, 1) / head_dim)}"
            yield f"{given}; rotary positions require an even number above 0; use {use}"
        else:
            yield f"model.head_dim={head_dim} must be even for rotary positions; use model.head_dim={head_dim + 1}"
    if rope.scaling == "longrope" and {len(rope.short_factors), len(rope.long_factors)} != {size // 2}:
        given = f"{len(rope.short_factors)} and {len(rope.long_factors)}"
        yield (
            f"model.rope.scaling=longrope requires {size // 2} values in model.rope.short_factors and "
            f"in model.rope.long_factors, not {given}; set both lists"
        )


def _layer_types(model: Decoder) -> Iterator[str]:
    types = model.layer_types
    if len(types) > model.layers:
        given = f"model.layer_types has {len(types)} values, but model.layers={model.layers}"
        yield f"{given}; use {model.layers} or fewer"
    if model.window is not None and not any(model.windows):
        given = f"model.window={model.window} requires sliding_attention in model.layer_types"
        yield f"{given}; add it, or use model.window=null"
    if model.sliding_rope is not None and not any(model.windows):
        yield "model.sliding_rope requires model.window; use e.g. model.window=1024, or remove model.sliding_rope"


def indivisible(key: str, value: int, other: str, divisor: int) -> str:
    use = nearest_numbers(divisor, divisors(value))
    return f"{key}={value} is not divisible by {other}={divisor}; use {other}={use}"
