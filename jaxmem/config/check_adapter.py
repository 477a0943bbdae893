"""What can be known to be wrong with an adapter before jax starts."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from jaxmem.config.names import LAYER_RANGE
from jaxmem.config.networks import Convnet, Decoder
from jaxmem.config.sections import LOW_RANK, Adapter, Config

PRODUCTS = ("nf4", "fp4", "int4", "int8")  # codes that kernels.dequant_matmul knows
FIELDS: dict[str, tuple[str, ...]] = {  # the kinds that each belongs to; others belong to all
    **dict.fromkeys(("rank", "alpha", "rslora", "dropout", "lora_plus_ratio"), LOW_RANK),
    "targets": (*LOW_RANK, "patterns"),
    "hf": (*LOW_RANK, "prompt"),
    "virtual_tokens": ("prompt",),
    "layers": ("last_layers",),
}


def check_adapter(cfg: Config) -> Iterator[str]:
    adapter, usual = cfg.adapter, Adapter()
    if adapter.kind == "none":
        for field in Adapter.model_fields:
            if getattr(adapter, field) != getattr(usual, field):
                yield f"adapter.{field}: adapter.kind: none has none; use {', '.join(FIELDS.get(field, LOW_RANK))}"
        return
    for field, kinds in FIELDS.items():
        if adapter.kind not in kinds and getattr(adapter, field) != getattr(usual, field):
            yield f"adapter.{field}: adapter.kind: {adapter.kind} has none; those that do: {', '.join(kinds)}"
    if adapter.hf is not None and not (isinstance(cfg.model, Decoder) and cfg.model.hf is not None):
        yield f"adapter.hf: {adapter.hf} belongs to the weights of a model; give model.hf"
    if adapter.base_run is not None and isinstance(cfg.model, Decoder) and cfg.model.hf is not None:
        yield f"adapter.base_run: model.hf {cfg.model.hf} gives the weights; leave one of the two out"
    if not adapter.targets:
        yield "adapter.targets: names nothing; give patterns, as blocks.*"
    if adapter.kind == "patterns" and isinstance(adapter.targets, dict):
        yield "adapter.targets: patterns of weights have no ranks; give a list"
    yield from _base(cfg)
    yield from _product(cfg)
    yield from _tables(cfg)
    yield from _layers(cfg)
    if adapter.kind == "prompt":
        yield from _prompt(cfg)


def check_some_layers(cfg: Config) -> Iterator[str]:
    """Layers that are named by their numbers, in `adapter` or in `optimizer.trainable`."""
    some = [pattern for pattern in cfg.trainable_patterns if LAYER_RANGE.search(pattern)]
    if not some:
        return
    if cfg.mesh.stage != 1:
        yield (
            f"mesh.stage: {some[0]} are layers of some stages, and the others would wait for them; use 1, or weights of"
            " all layers"
        )
    if cfg.memory.update == "during":
        yield (
            f"memory.update: during goes through all layers alike, and {some[0]} are some of them; use after, or"
            " weights of all layers"
        )
    if cfg.base_precision != cfg.precision:
        yield (
            f"adapter.base: {some[0]} are layers of stacks, which are stored in one format; leave it out, and give"
            " precision.parameters"
        )


def _base(cfg: Config) -> Iterator[str]:
    adapter, codes = cfg.adapter, cfg.base_precision.is_quantized
    if adapter.kind == "qlora" and not codes:
        yield f"adapter.base: {adapter.base} is no code, which qlora is about; use nf4, or adapter.kind=lora"
    if adapter.kind == "lora" and codes and not cfg.precision.is_quantized:
        yield f"adapter.base: {adapter.base} is a code; use adapter.kind=qlora, or float32 or bfloat16"
    if not codes and not adapter.double_quant:
        yield "adapter.double_quant: a base that is not in codes has no constants; leave it out"
    if cfg.precision.is_quantized and (adapter.kind in LOW_RANK or adapter.base is not None):
        yield (
            f"precision.parameters: {cfg.precision.parameters} would be the adapters' own; use float32 or bfloat16, and"
            f" adapter.kind=qlora with adapter.base={cfg.precision.parameters} for the weights that stay"
        )


def _product(cfg: Config) -> Iterator[str]:
    product, base = cfg.adapter.matmul, cfg.base_precision.parameters
    if product == "auto":
        return
    if base not in PRODUCTS:
        yield f"adapter.matmul: {product} multiplies with a base in {', '.join(PRODUCTS)}, not {base}; use auto"
    if cfg.mesh.tensor != 1:
        yield f"adapter.matmul: {product} does not go with mesh.tensor {cfg.mesh.tensor}; use auto, or mesh.tensor=1"


def _tables(cfg: Config) -> Iterator[str]:
    model, targets = cfg.model, tuple(cfg.adapter.targets)
    if not isinstance(model, Decoder):
        return
    if cfg.adapter.kind == "head" and model.tie_embeddings:
        yield (
            "adapter.kind: head is the embedding too (model.tie_embeddings); use adapter.kind=patterns with"
            " adapter.targets=[embedding.weight]"
        )
    if cfg.adapter.kind not in LOW_RANK:
        return
    if model.tie_embeddings and any(fnmatchcase("embedding", pattern) for pattern in targets):
        yield (
            "adapter.targets: the embedding is the output projection too (model.tie_embeddings), which an adapter"
            " of it would not change; leave it out"
        )
    if cfg.memory.loss_chunk != "auto" and any(fnmatchcase("head", pattern) for pattern in targets):
        yield (
            f"memory.loss_chunk: {cfg.memory.loss_chunk} takes the head in slices, which an adapter of it is not in; "
            "leave head out of adapter.targets, or use auto"
        )


def _layers(cfg: Config) -> Iterator[str]:
    most = cfg.model.blocks if isinstance(cfg.model, Convnet) else cfg.model.layers
    if cfg.adapter.kind == "last_layers" and cfg.adapter.layers > most:
        yield f"adapter.layers: {cfg.adapter.layers} are more than the {most} of the last stack; use {most} or fewer"


def _prompt(cfg: Config) -> Iterator[str]:
    if not isinstance(cfg.model, Decoder):
        yield f"adapter.kind: a prompt stands before tokens, and family {cfg.model.family} reads none; use head"
    elif cfg.data.packing:
        yield "data.packing: a prompt stands before a row, whose first document alone would see it; use false"
    if cfg.mesh.context != 1:
        yield f"mesh.context: {cfg.mesh.context} parts rows as they are in the data, which a prompt makes longer; use 1"
