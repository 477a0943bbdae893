"""Errors in the section `data`, before any file is opened."""

from collections.abc import Iterator

from jaxmem.config.combinations import OF_SOURCES
from jaxmem.config.networks import Decoder, ImageInput
from jaxmem.config.sections import Config, Data, Source
from jaxmem.config.sources import SOURCES
from jaxmem.errors import as_yaml, one_of, required, unsupported

BYTE_VOCAB = 257  # 256 bytes and the end-of-document token
DIGIT_SHAPE = (8, 1)  # height and width in pixels, channels


def check_data(cfg: Config) -> Iterator[str]:
    data, model = cfg.data, cfg.model
    if cfg.own.data is not None:
        return
    sources = {f"data.mixture[{i}]": source for i, source in enumerate(data.mixture)} or {"data": data}
    for key, source in sources.items():
        yield from _source(cfg, key, source)
    if data.mixture:
        for field, info in Source.model_fields.items():
            if (value := getattr(data, field)) != info.default:
                yield f"data.{field}={as_yaml(value)} has no effect with data.mixture; use data.mixture[0].{field}"
    elif data.weight != Source().weight:
        yield f"data.weight={data.weight:g} requires data.mixture; remove data.weight"
    yield from _buckets(data)
    if cfg.objective.name == "dpo" and cfg.batch.global_size // cfg.batch.accumulate % 2:
        rows = cfg.batch.global_size // cfg.batch.accumulate
        given = f"batch.global_size={cfg.batch.global_size} with batch.accumulate={cfg.batch.accumulate}"
        even = f"batch.global_size={(rows + 1) * cfg.batch.accumulate}"
        yield f"{given} has {rows} sequences per micro-batch; objective.name=dpo requires an even number; use {even}"
    if isinstance(model, ImageInput) and data.source == "digits":
        if (model.image_size, model.channels) != DIGIT_SHAPE:
            given = f"model.image_size={model.image_size} with model.channels={model.channels}"
            yield f"{given} does not match data.source=digits; use model.image_size=8 and model.channels=1"
    elif isinstance(model, Decoder):
        yield from _text(data, model, {source.source for source in sources.values()})


def _text(data: Data, model: Decoder, kinds: set[str]) -> Iterator[str]:
    """Errors in the settings of text. `kinds`: the kinds of all sources."""
    if data.tokenizer == "bytes" and model.vocab < BYTE_VOCAB and kinds != {"tokens"}:
        given = f"model.vocab={model.vocab} must be at least {BYTE_VOCAB} for data.tokenizer=bytes"
        yield f"{given}; use model.vocab={BYTE_VOCAB} or set data.tokenizer"
    for field in ("on_overlong", "on_invalid"):
        value, having = getattr(data, field), OF_SOURCES[f"data.{field}"][1]
        if not kinds & {*having} and value != getattr(Data(), field):
            yield required(f"data.{field}={value}", "data.source", having, data.source)
    if "chat" in kinds and data.tokenizer == "bytes" and data.chat_template is None:
        yield (
            "data.source=chat with data.tokenizer=bytes requires data.chat_template; "
            "set data.chat_template to a Jinja file, or data.tokenizer to the tokenizer of a chat model"
        )


def _source(cfg: Config, key: str, source: Source) -> Iterator[str]:
    """Errors in one source. `key`: `data`, or `data.mixture[0]`."""
    kind, given = source.source, f"{key}.source={source.source}"
    is_dpo, is_text = cfg.objective.name == "dpo", cfg.reads_text
    if (kind == "preference") != is_dpo and is_text:
        use = f"{key}.source=preference" if is_dpo else f"objective.name=dpo or {key}.source=chat"
        yield unsupported(given, f"objective.name={cfg.objective.name}", use)
    if source.kind.needs_path and source.path is None:
        yield f"{given} requires {key}.path; set it to a file, a directory or a glob"
    for field in ("path", "field"):
        value, having = getattr(source, field), OF_SOURCES[f"data.{field}"][1]
        if kind not in having and value != getattr(Source(), field):
            yield required(f"{key}.{field}={value}", f"{key}.source", having, kind)
    if (source.kind.contents == "images") == is_text:
        names = [name for name, one in SOURCES.items() if (one.contents == "images") != is_text]
        yield unsupported(given, f"model.family={cfg.model.family}", f"{key}.source={one_of(names)}")


def _buckets(data: Data) -> Iterator[str]:
    lengths = tuple(sorted({length for length in data.buckets if length < data.sequence_length}))
    if data.buckets != lengths:
        most = f"data.sequence_length={data.sequence_length}"
        use = f"data.buckets={as_yaml(lengths)}"
        yield f"data.buckets={as_yaml(data.buckets)} must be ascending and less than {most}; use {use}"
