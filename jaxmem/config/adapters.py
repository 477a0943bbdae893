"""What can be known to be wrong with an adapter before jax starts."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from jaxmem.config.sections import Adapter, Config, Decoder

PRODUCTS = ("nf4", "fp4", "int4", "int8")  # codes that kernels.dequant_matmul knows


def check_adapter(cfg: Config) -> Iterator[str]:
    adapter, usual = cfg.adapter, Adapter()
    if adapter.kind == "none":
        for field in Adapter.model_fields:
            if getattr(adapter, field) != getattr(usual, field):
                yield f"adapter.{field}: adapter.kind: none has none; use lora, dora or qlora"
        return
    if adapter.hf is not None and not (isinstance(cfg.model, Decoder) and cfg.model.hf is not None):
        yield f"adapter.hf: {adapter.hf} belongs to the weights of a model; give model.hf"
    if not adapter.targets:
        yield "adapter.targets: names nothing; give patterns of layers, as blocks.*"
    if cfg.memory.update == "during":
        yield (
            "adapter.kind: memory.update: during goes through all layers and updates all their weights; use"
            " memory.update=after, where what is frozen has no gradient"
        )
    yield from _base(cfg)
    yield from _product(cfg)
    yield from _tables(cfg)


def _base(cfg: Config) -> Iterator[str]:
    adapter, codes = cfg.adapter, cfg.base_precision.quantized
    if adapter.kind == "qlora" and not codes:
        yield f"adapter.base: {adapter.base} is no code, which qlora is about; use nf4, or adapter.kind=lora"
    if adapter.kind == "lora" and codes and not cfg.precision.quantized:
        yield f"adapter.base: {adapter.base} is a code; use adapter.kind=qlora, or float32 or bfloat16"
    if not codes and not adapter.double:
        yield "adapter.double: a base that is not in codes has no constants; leave it out"
    if cfg.precision.quantized:
        yield (
            f"precision.parameters: {cfg.precision.parameters} would be the adapters' own; use float32 or bfloat16, and"
            f" adapter.kind=qlora with adapter.base={cfg.precision.parameters} for the weights that stay"
        )


def _product(cfg: Config) -> Iterator[str]:
    product, base = cfg.adapter.product, cfg.base_precision.parameters
    if product == "auto":
        return
    if base not in PRODUCTS:
        yield f"adapter.product: {product} multiplies with a base in {', '.join(PRODUCTS)}, not {base}; use auto"
    if cfg.mesh.tensor != 1:
        yield f"adapter.product: {product} does not go with mesh.tensor {cfg.mesh.tensor}; use auto, or mesh.tensor=1"


def _tables(cfg: Config) -> Iterator[str]:
    model, targets = cfg.model, tuple(cfg.adapter.targets)
    if not isinstance(model, Decoder):
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
