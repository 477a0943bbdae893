"""What can be known to be wrong with the data of a run, before jax starts and before any file is opened."""

from __future__ import annotations

from collections.abc import Iterator

from jaxmem.config.networks import Decoder
from jaxmem.config.sections import Config, Data, Source
from jaxmem.config.sources import SOURCES

BYTE_VOCAB = 257  # 256 bytes and the end of a document
DIGIT_SHAPE = (8, 1)  # pixels a side, channels
NEEDS_PATH = tuple(name for name, kind in SOURCES.items() if kind.needs_path)
HAS_FIELDS = tuple(name for name, kind in SOURCES.items() if kind.has_field)
CHATS = tuple(name for name, kind in SOURCES.items() if kind.contents in ("chat", "pairs"))


def check_data(cfg: Config) -> Iterator[str]:
    yield from _pairs(cfg)
    yield from _sources(cfg)
    yield from _data(cfg)


def _pairs(cfg: Config) -> Iterator[str]:
    """What dpo asks of data and batch."""
    dpo, data = cfg.objective.name == "dpo", cfg.data
    for key, source in _places(cfg):
        if (source.source == "preference") != dpo and isinstance(cfg.model, Decoder):
            use = "data.source=preference" if dpo else "objective.name=dpo, or data.source=chat"
            yield f"{key}.source: {source.source} does not go with objective {cfg.objective.name}; use {use}"
    if not dpo:
        if data.reference_logprobs is not None:
            yield f"data.reference_logprobs: only objective dpo has one, not {cfg.objective.name}"
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
    yield from _buckets(cfg)
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


def _buckets(cfg: Config) -> Iterator[str]:
    data = cfg.data
    if not data.buckets:
        return
    if not isinstance(cfg.model, Decoder):
        yield f"data.buckets: family {cfg.model.family} has no sequences; leave them out"
    if data.packing:
        yield "data.packing: packed rows are full at any length; with data.buckets use false"
    lengths = sorted({length for length in data.buckets if length < data.sequence_length})
    if list(data.buckets) != lengths:
        yield (
            f"data.buckets: {list(data.buckets)} must rise and stay below data.sequence_length {data.sequence_length},"
            f" which is the last; use {lengths or 'none'}"
        )
    if cfg.train.tokens is not None:
        yield "train.tokens: how many an update has differs from bucket to bucket; give train.steps"


def _chat(data: Data) -> Iterator[str]:
    kinds = [source.source for source in data.mixture or (data,)]
    default = Data()
    for field, having in (("on_overlong", CHATS), ("on_invalid", (*CHATS, *HAS_FIELDS))):
        if not {*having} & {*kinds} and getattr(data, field) != getattr(default, field):
            yield f"data.{field}: only data.source: {', '.join(having)} have it, not {data.source}"
    if "chat" in kinds and data.tokenizer == "bytes" and data.chat_template is None:
        yield "data.chat_template: missing; data.tokenizer: bytes has none of its own; give a file of Jinja"


def _places(cfg: Config) -> list[tuple[str, Source]]:
    """Each source of documents, and its key."""
    return [(f"data.mixture[{i}]", source) for i, source in enumerate(cfg.data.mixture)] or [("data", cfg.data)]
