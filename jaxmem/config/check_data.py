"""Errors in the section `data`, before any file is opened."""

from collections.abc import Iterator

from jaxmem.config.networks import Decoder
from jaxmem.config.sections import Config, Data, Source
from jaxmem.config.sources import SOURCES
from jaxmem.errors import as_yaml, required, unsupported

BYTE_VOCAB = 257  # 256 bytes and the end-of-document token
DIGIT_SHAPE = (8, 1)  # width and height in pixels, channels
NEEDS_PATH = tuple(name for name, kind in SOURCES.items() if kind.needs_path)
HAS_FIELDS = tuple(name for name, kind in SOURCES.items() if kind.has_field)
CHATS = tuple(name for name, kind in SOURCES.items() if kind.contents in ("chat", "pairs"))


def check_data(cfg: Config) -> Iterator[str]:
    yield from _pairs(cfg)
    yield from _sources(cfg)
    yield from _data(cfg)


def _pairs(cfg: Config) -> Iterator[str]:
    """The requirements of dpo on data and batch."""
    is_dpo, data, batch = cfg.objective.name == "dpo", cfg.data, cfg.batch
    for key, source in _places(cfg):
        if (source.source == "preference") != is_dpo and isinstance(cfg.model, Decoder):
            use = "data.source=preference" if is_dpo else "objective.name=dpo, or data.source=chat"
            yield unsupported(f"{key}.source={source.source}", f"objective.name={cfg.objective.name}", use)
    if not is_dpo:
        return
    if data.mixture:  # the log-probabilities of the reference model are stored next to a single source
        yield unsupported("objective.name=dpo", "data.mixture", "data.source and data.path")
    if data.packing:
        yield unsupported("objective.name=dpo", "data.packing=true", "false")
    if batch.global_size // batch.accumulate % 2:
        rows = f"batch.global_size={batch.global_size} with batch.accumulate={batch.accumulate}"
        yield f"objective.name=dpo requires an even number of rows in a micro-batch; {rows} is odd"


def _sources(cfg: Config) -> Iterator[str]:
    for key, source in _places(cfg):
        kind = source.source
        if kind in NEEDS_PATH and source.path is None:
            yield f"{key}.source={kind} requires {key}.path; set a file, a directory or a glob"
        if kind not in NEEDS_PATH and source.path is not None:
            yield required(f"{key}.path={source.path}", f"{key}.source", NEEDS_PATH, kind)
        if kind not in HAS_FIELDS and source.field != Source().field:
            yield required(f"{key}.field={source.field}", f"{key}.source", HAS_FIELDS, kind)
        is_image = SOURCES[kind].contents == "images"
        if is_image == isinstance(cfg.model, Decoder):
            use = ", ".join(name for name, one in SOURCES.items() if (one.contents == "images") != is_image)
            yield unsupported(f"{key}.source={kind}", f"model.family={cfg.model.family}", use)


def _data(cfg: Config) -> Iterator[str]:
    data, model, default = cfg.data, cfg.model, Source()
    if data.mixture:
        for field in Source.model_fields:
            if getattr(data, field) != getattr(default, field):
                given = f"data.{field}={as_yaml(getattr(data, field))}"
                yield f"{given} has no effect with data.mixture; set it in the sources of the mixture"
    elif data.weight != default.weight:
        yield f"data.weight={data.weight:g} requires data.mixture; leave it out"
    yield from _buckets(cfg)
    if isinstance(model, Decoder):
        is_tokenized = any(source.source != "tokens" for _, source in _places(cfg))
        if data.tokenizer == "bytes" and model.vocab < BYTE_VOCAB and is_tokenized:
            yield f"model.vocab={model.vocab} must be at least {BYTE_VOCAB} for data.tokenizer=bytes"
        yield from _chat(data)
        return
    if data.mixture:
        yield unsupported(f"model.family={model.family}", "data.mixture", "data.source=digits")
    if (model.image_size, model.channels) != DIGIT_SHAPE:
        size, channels = DIGIT_SHAPE
        given = f"model.image_size={model.image_size} and model.channels={model.channels}"
        yield f"{given} must be {size} and {channels} for digits"


def _buckets(cfg: Config) -> Iterator[str]:
    data = cfg.data
    if not data.buckets:
        return
    given = f"data.buckets={as_yaml(data.buckets)}"
    if data.packing:  # packed rows have no padding at any length
        yield unsupported(given, "data.packing=true", "false")
    lengths = sorted({length for length in data.buckets if length < data.sequence_length})
    if list(data.buckets) != lengths:
        most = f"data.sequence_length={data.sequence_length}"
        yield f"{given} must be ascending and below {most}, which is the last bucket; use {lengths or 'none'}"
    if cfg.train.tokens is not None:  # the tokens of an update depend on its bucket
        yield unsupported(given, f"train.tokens={cfg.train.tokens}", "train.steps")


def _chat(data: Data) -> Iterator[str]:
    kinds = [source.source for source in data.mixture or (data,)]
    for field, having in (("on_overlong", CHATS), ("on_invalid", (*CHATS, *HAS_FIELDS))):
        value = getattr(data, field)
        if not {*having} & {*kinds} and value != getattr(Data(), field):
            yield required(f"data.{field}={value}", "data.source", having, data.source)
    if "chat" in kinds and data.tokenizer == "bytes" and data.chat_template is None:
        yield "data.tokenizer=bytes requires data.chat_template for data.source=chat; set a Jinja file"


def _places(cfg: Config) -> list[tuple[str, Source]]:
    """(key, source) of each source of documents."""
    return [(f"data.mixture[{i}]", source) for i, source in enumerate(cfg.data.mixture)] or [("data", cfg.data)]
