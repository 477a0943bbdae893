"""Errors in the sections `data` (before any file is opened), `memory` and `adapter`."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import PurePath

from jaxmem.config.adapter import LOW_RANK
from jaxmem.config.combinations import SOURCES_OF, value_of
from jaxmem.config.mesh import head_group_counts
from jaxmem.config.names import (
    BOUNDARY,
    IN_CHUNKS,
    IN_GROUPS,
    LAYER_RANGE,
    STATE_PARTS,
    is_offloaded,
    offloaded_activations,
)
from jaxmem.config.networks import Convnet, Decoder, ImageInput, Vit
from jaxmem.config.recompute import Save, is_scheduled
from jaxmem.config.sections import SOURCES, Config, Data, Source
from jaxmem.errors import as_yaml, nearest, nearest_numbers, one_of, required, unsupported

BYTE_VOCAB = 257  # 256 bytes and the end-of-document token
DIGIT_SHAPE = (8, 1)  # height and width in pixels, channels


def check_data(cfg: Config) -> Iterator[str]:
    data = cfg.data
    model = cfg.model
    if cfg.user.data is not None:
        yield from _batches(cfg)
        return
    sources = {f"data.mixture[{i}]": source for i, source in enumerate(data.mixture)} or {"data": data}
    kinds = {source.source for source in sources.values()}
    for key, source in sources.items():
        yield from _source(cfg, key, source)
    if data.mixture:
        for field, info in Source.model_fields.items():
            value = getattr(data, field)
            if value != info.default:
                yield f"data.{field}={as_yaml(value)} has no effect with data.mixture; use data.mixture[0].{field}"
    if data.streaming:
        yield from _streaming(data, kinds)
    rows = cfg.batch.global_size // cfg.batch.accumulate
    if cfg.objective.name == "dpo" and rows % 2:
        given = f"batch.global_size={cfg.batch.global_size} with batch.accumulate={cfg.batch.accumulate}"
        even = f"batch.global_size={(rows + 1) * cfg.batch.accumulate}"
        yield f"{given} has {rows} sequences per micro-batch; objective.name=dpo requires an even number; use {even}"
    if isinstance(model, ImageInput) and data.source == "digits":
        if (model.image_size, model.channels) != DIGIT_SHAPE:
            given = f"model.image_size={model.image_size} with model.channels={model.channels}"
            yield f"{given} does not match data.source=digits; use model.image_size=8 and model.channels=1"
    elif isinstance(model, Decoder):
        yield from _text(data, model, kinds)


def _streaming(data: Data, kinds: set[str]) -> Iterator[str]:
    streams = [name for name, kind in SOURCES.items() if kind.contents in ("text", "chat") and kind.needs_path]
    for kind in sorted(kinds - {*streams}):
        yield unsupported("data.streaming=true", f"data.source={kind}", f"data.streaming=false, or {one_of(streams)}")
    if data.held_out and "text" in kinds:
        given = f"data.streaming=true has no held-out records of data.source=text (data.held_out={data.held_out:g})"
        yield f"{given}: they are a share of the first file, and a text file is one record; use data.held_out=0"


def _batches(cfg: Config) -> Iterator[str]:
    """Errors in the settings of a run with the argument `data`."""
    if cfg.data.epochs is not None:
        yield f"data.epochs={cfg.data.epochs} has no effect with the argument data; use train.steps"
    held_out = cfg.user.held_out
    if cfg.train.evaluate_every and held_out is not None and not held_out.repeats:
        yield "held_out must be an iterable that can be read again, such as a list"


def _text(data: Data, model: Decoder, kinds: set[str]) -> Iterator[str]:
    """Errors in the settings of text. `kinds`: the kinds of all sources."""
    if data.tokenizer == "bytes" and model.vocab < BYTE_VOCAB and kinds != {"tokens"}:
        given = f"model.vocab={model.vocab} must be at least {BYTE_VOCAB} for data.tokenizer=bytes"
        yield f"{given}; use model.vocab={BYTE_VOCAB} or set data.tokenizer"
    for field in ("on_overlong", "on_invalid"):
        value = getattr(data, field)
        having = SOURCES_OF[field]
        if kinds.isdisjoint(having) and value != getattr(Data(), field):
            yield required(f"data.{field}={value}", "data.source", having, data.source)
    if "chat" in kinds and data.tokenizer == "bytes" and data.chat_template is None:
        use = "set it to a Jinja file, or set data.tokenizer to the tokenizer of a chat model"
        yield f"data.source=chat with data.tokenizer=bytes requires data.chat_template; {use}"


def _source(cfg: Config, key: str, source: Source) -> Iterator[str]:
    """Errors in one source. `key`: `data`, or `data.mixture[0]`."""
    kind = source.source
    given = f"{key}.source={kind}"
    is_dpo = cfg.objective.name == "dpo"
    is_text = cfg.reads_text
    if (kind == "preference") != is_dpo and is_text:
        use = f"{key}.source=preference" if is_dpo else f"objective.name=dpo or {key}.source=chat"
        yield unsupported(given, f"objective.name={cfg.objective.name}", use)
    if source.kind.needs_path and source.path is None:
        yield f"{given} requires {key}.path; set it to a file, a directory or a glob"
    suffix = PurePath(source.path or "").suffix.lower()
    other = next((name for name, other in SOURCES.items() if suffix in other.suffixes), None)
    if kind == "text" and other:  # lines of JSON would be texts with braces and escapes
        yield unsupported(given, f"{key}.path={source.path}", f"{key}.source={other}")
    for field in ("path", "field"):
        value = getattr(source, field)
        having = SOURCES_OF[field]
        if kind not in having and value != getattr(Source(), field):
            yield required(f"{key}.{field}={value}", f"{key}.source", having, kind)
    if (source.kind.contents == "images") == is_text:
        names = [name for name, source in SOURCES.items() if (source.contents == "images") != is_text]
        yield unsupported(given, f"model.family={cfg.model.family}", f"{key}.source={one_of(names)}")


CHUNKED = (("mlp_chunk", IN_CHUNKS), ("head_groups", IN_GROUPS))  # keys, and activations that each computes in parts


def check_memory(cfg: Config) -> Iterator[str]:
    yield from _names(cfg)
    for key in ("memory.attention", "memory.experts", "optimizer.kernel"):
        if value_of(cfg, key) == "triton" and find_spec("jax_triton") is None:
            yield f"{key}=triton requires jax-triton; run pip install 'jaxmem[cuda13]', or use {key}=auto"
    yield from _offload(cfg)
    yield from _chunks(cfg)
    yield from _update(cfg)


def _names(cfg: Config) -> Iterator[str]:
    remat = cfg.memory.remat
    known = cfg.model.activations
    of = f"activation of model.family={cfg.model.family}"
    if isinstance(remat, Save):
        if not remat.save:
            yield "memory.remat.save is empty; set names of activations, or use memory.remat=full"
        for name in remat.save:
            if name not in known:
                yield f"memory.remat.save={name} is not an {of}{nearest(name, known)}"
    for name in offloaded_activations(cfg.memory.offload):
        if name not in (BOUNDARY, *known):
            hint = nearest(name, ["activations", *STATE_PARTS, *known])
            yield f"memory.offload={name} is unknown for model.family={cfg.model.family}{hint}"


def _offload(cfg: Config) -> Iterator[str]:
    memory = cfg.memory
    remat = f"memory.remat={memory.remat}"
    offload = f"memory.offload={as_yaml(memory.offload)}"
    away = offloaded_activations(memory.offload)
    if away:
        if memory.remat in ("none", "auto"):  # with none, saved activations have no names
            yield unsupported(offload, remat, "memory.remat=full, dots or {save: [names]}")
        if cfg.model.family == "convnet":  # a layer takes less time than its transfer
            yield unsupported(offload, "model.family=convnet", "memory.offload=none")
    optimizer = cfg.optimizer
    has_state = optimizer.name != "sgd" or optimizer.momentum or cfg.precision.master != "none"
    if is_offloaded(memory.offload, "optimizer") and not has_state:
        yield f"{offload} has no effect: sgd with optimizer.momentum=0 has no state; use memory.offload=none"
    if is_offloaded(memory.offload, "frozen") and not cfg.trainable_patterns:
        yield f"{offload} has no effect: all parameters are trainable; use memory.offload=none or optimizer"
    if set(away) - {BOUNDARY} and is_scheduled(memory.remat):
        yield unsupported(offload, remat, "memory.remat=full")


def _chunks(cfg: Config) -> Iterator[str]:
    """Conflicts of chunks with activations that are saved or offloaded, which would have to exist completely."""
    model = cfg.model
    memory = cfg.memory
    stored = {name: f"memory.offload={as_yaml(memory.offload)}" for name in offloaded_activations(memory.offload)}
    if isinstance(memory.remat, Save):
        stored |= {name: f"memory.remat.save={name}" for name in memory.remat.save}
    for key, hidden in CHUNKED:
        chunk = getattr(memory, key)
        if chunk == "auto" or (key == "head_groups" and chunk == 1):
            continue
        for setting in dict.fromkeys(setting for name, setting in stored.items() if name in hidden):
            yield unsupported(f"memory.{key}={chunk}", setting, f"memory.{key}=auto")
    if isinstance(memory.head_groups, int) and isinstance(model, Decoder | Vit):
        known = head_group_counts(model.heads, model.kv_heads if isinstance(model, Decoder) else model.heads)
        if memory.head_groups not in known:
            near = nearest_numbers(memory.head_groups, known)
            given = f"memory.head_groups={memory.head_groups}"
            yield f"model.heads={model.heads} cannot be split into {given} equal groups; use memory.head_groups={near}"


def _update(cfg: Config) -> Iterator[str]:
    """What `memory.update=during` does not support with several micro-batches, except with pipeline stages: a stage
    updates the weights of a layer in the backward pass of the last micro-batch."""
    if cfg.memory.update != "during" or cfg.batch.accumulate == 1 or cfg.mesh.stage != 1:
        return
    memory = cfg.memory
    given = f"memory.update=during with batch.accumulate={cfg.batch.accumulate}"
    # A layer is updated after all micro-batches, so the saved activations of all of them must exist at once.
    if is_scheduled(memory.remat):
        use = "memory.remat=none, full, dots or {save: [names]}, or memory.update=after"
        yield unsupported(given, f"memory.remat={memory.remat}", use)
    if offloaded_activations(memory.offload):
        use = "memory.offload=none, or memory.update=after"
        yield unsupported(given, f"memory.offload={as_yaml(memory.offload)}", use)
    if cfg.objective.name == "dpo":
        yield unsupported(given, "objective.name=dpo", "batch.accumulate=1, or memory.update=after")


def check_adapter(cfg: Config) -> Iterator[str]:
    adapter = cfg.adapter
    if adapter.kind == "none":
        return
    kind = f"adapter.kind={adapter.kind}"
    if not adapter.targets:
        yield "adapter.targets is empty; use patterns of layer names such as [blocks.*]"
    if adapter.kind == "patterns" and "targets" not in adapter.model_fields_set:
        yield 'adapter.kind=patterns requires adapter.targets; use patterns of weight names such as ["blocks[-2:].*"]'
    if adapter.kind == "patterns" and isinstance(adapter.targets, dict):
        yield unsupported(kind, "ranks in adapter.targets", "a list of patterns")
    if adapter.kind == "prompt" and isinstance(cfg.model, Decoder) and cfg.data.packing:
        # Only the first document of a row would attend to the prompt.
        yield unsupported(kind, "data.packing=true", "data.packing=false")
    field = "blocks" if isinstance(cfg.model, Convnet) else "layers"
    layers = getattr(cfg.model, field, adapter.layers)
    if adapter.kind == "last_layers" and adapter.layers > layers:
        yield f"adapter.layers={adapter.layers} exceeds model.{field}={layers}; use adapter.layers={layers} or less"
    yield from _base(cfg)
    if isinstance(cfg.model, Decoder):
        yield from _vocabulary(cfg, cfg.model)


def check_some_layers(cfg: Config) -> Iterator[str]:
    """Errors in patterns that select layers by number, in `adapter` or in `optimizer.trainable`."""
    pattern = next(filter(LAYER_RANGE.search, cfg.trainable_patterns), None)
    if pattern is None:
        return
    trainable = f"training only some layers ({pattern})"
    if cfg.mesh.stage != 1:
        yield unsupported(f"mesh.stage={cfg.mesh.stage}", trainable, "mesh.stage=1, or a pattern of all layers")
    if cfg.memory.update == "during":
        yield unsupported("memory.update=during", trainable, "memory.update=after, or a pattern of all layers")
    if cfg.base_precision != cfg.precision:  # all layers of a stack are stored in one format
        base = cfg.base_precision.parameters
        yield unsupported(f"adapter.base={base}", trainable, f"adapter.base=null with precision.parameters={base}")


def _base(cfg: Config) -> Iterator[str]:
    adapter = cfg.adapter
    base = cfg.base_precision
    run = cfg.precision
    if not base.is_quantized and not adapter.double_quant:
        use = "use adapter.kind=qlora, or remove adapter.double_quant"
        yield f"adapter.double_quant=false requires quantized base weights, not {base.parameters}; {use}"
    if run.is_quantized and (adapter.kind in LOW_RANK or adapter.base is not None):
        use = f"precision.parameters=float32 or bfloat16 with adapter.kind=qlora and adapter.base={run.parameters}"
        yield unsupported(f"adapter.kind={adapter.kind}", f"precision.parameters={run.parameters}", use)


def _vocabulary(cfg: Config, model: Decoder) -> Iterator[str]:
    kind = f"adapter.kind={cfg.adapter.kind}"
    if _is_target(cfg, "embedding") and model.tie_embeddings:
        # An adapter of the embedding would not change the output projection.
        other = "adapter.targets that match embedding, with model.tie_embeddings=true"
        yield unsupported(kind, other, "targets such as blocks.*")
    if _is_target(cfg, "head") and cfg.memory.loss_chunk != "auto":
        use = "memory.loss_chunk=auto, or targets such as blocks.*"
        yield unsupported(f"memory.loss_chunk={cfg.memory.loss_chunk}", "adapter.targets that match head", use)


def _is_target(cfg: Config, name: str) -> bool:
    return cfg.adapter.kind in LOW_RANK and any(fnmatchcase(name, pattern) for pattern in cfg.adapter.targets)
