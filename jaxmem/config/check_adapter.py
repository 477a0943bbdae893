"""Errors in the section `adapter`, and in settings that train parameters of some layers only."""

from collections.abc import Iterator
from fnmatch import fnmatchcase

from jaxmem.config.names import LAYER_RANGE
from jaxmem.config.networks import Convnet, Decoder
from jaxmem.config.sections import LOW_RANK, Adapter, Config
from jaxmem.errors import as_yaml, required, unsupported

MATMUL_FORMATS = ("nf4", "fp4", "int4", "int8")  # formats that kernels.dequant_matmul supports
FIELDS: dict[str, tuple[str, ...]] = {  # the kinds that have each field; all kinds have the other fields
    **dict.fromkeys(("rank", "alpha", "alpha_pattern", "rslora", "lora_bias", "dropout", "lora_plus_ratio"), LOW_RANK),
    "token_indices": LOW_RANK,
    "targets": (*LOW_RANK, "patterns"),
    "hf": (*LOW_RANK, "prompt"),
    "virtual_tokens": ("prompt",),
    "layers": ("last_layers",),
}


def check_adapter(cfg: Config) -> Iterator[str]:
    adapter, usual = cfg.adapter, Adapter()
    for field in Adapter.model_fields:
        value, kinds = getattr(adapter, field), FIELDS.get(field, LOW_RANK)
        is_allowed = adapter.kind in kinds or (field not in FIELDS and adapter.kind != "none")
        if not is_allowed and value != getattr(usual, field):
            yield required(f"adapter.{field}={as_yaml(value)}", "adapter.kind", kinds, adapter.kind)
    if adapter.kind == "none":
        return
    hf = cfg.model.hf if isinstance(cfg.model, Decoder) else None
    if adapter.hf is not None and hf is None:
        yield f"adapter.hf={adapter.hf} requires model.hf; set the directory of its base model"
    if adapter.base_run is not None and hf is not None:
        yield f"adapter.base_run={adapter.base_run} and model.hf={hf} are both set; use one of them"
    if not adapter.targets:
        yield "adapter.targets is empty; use patterns such as blocks.*"
    if adapter.kind == "patterns" and isinstance(adapter.targets, dict):
        yield unsupported("adapter.kind=patterns", "ranks in adapter.targets", "a list")
    if adapter.kind == "dora" and adapter.lora_bias:
        yield unsupported("adapter.kind=dora", "adapter.lora_bias=true", "false")
    yield from _base(cfg)
    yield from _matmul(cfg)
    yield from _vocabulary(cfg)
    yield from _layers(cfg)
    if adapter.token_indices:
        yield from _token_indices(cfg)
    if adapter.kind == "prompt":
        yield from _prompt(cfg)


def check_some_layers(cfg: Config) -> Iterator[str]:
    """Errors in patterns that select layers by number, in `adapter` or in `optimizer.trainable`."""
    some = [pattern for pattern in cfg.trainable_patterns if LAYER_RANGE.search(pattern)]
    if not some:
        return
    trainable = f"some layers as trainable ({some[0]})"
    if cfg.mesh.stage != 1:
        yield unsupported(f"mesh.stage={cfg.mesh.stage}", trainable, "1, or parameters of all layers")
    if cfg.memory.update == "during":
        yield unsupported("memory.update=during", trainable, "after, or parameters of all layers")
    if cfg.base_precision != cfg.precision:  # all layers of a stack are stored in one format
        base = cfg.base_precision.parameters
        yield unsupported(f"adapter.base={base}", trainable, f"null, and precision.parameters={base}")


def _base(cfg: Config) -> Iterator[str]:
    adapter, base, own = cfg.adapter, cfg.base_precision, cfg.precision
    if adapter.kind == "qlora" and not base.is_quantized:
        yield unsupported("adapter.kind=qlora", f"adapter.base={adapter.base}", "nf4, or adapter.kind=lora")
    if adapter.kind == "lora" and base.is_quantized and not own.is_quantized:
        use = "adapter.kind=qlora, or float32 or bfloat16"
        yield unsupported("adapter.kind=lora", f"adapter.base={adapter.base}", use)
    if not base.is_quantized and not adapter.double_quant:
        yield f"adapter.double_quant=false requires a quantized base, not {base.parameters}; leave it out"
    if own.is_quantized and (adapter.kind in LOW_RANK or adapter.base is not None):
        use = f"float32 or bfloat16, and adapter.kind=qlora with adapter.base={own.parameters}"
        yield unsupported(f"adapter.kind={adapter.kind}", f"precision.parameters={own.parameters}", use)


def _matmul(cfg: Config) -> Iterator[str]:
    matmul, base = f"adapter.matmul={cfg.adapter.matmul}", cfg.base_precision.parameters
    if cfg.adapter.matmul == "auto":
        return
    if base not in MATMUL_FORMATS:
        yield f"{required(matmul, 'adapter.base', MATMUL_FORMATS, base)}; use auto"
    if cfg.mesh.tensor != 1:
        yield unsupported(matmul, f"mesh.tensor={cfg.mesh.tensor}", "auto, or mesh.tensor=1")


def _vocabulary(cfg: Config) -> Iterator[str]:
    model, kind, targets = cfg.model, f"adapter.kind={cfg.adapter.kind}", tuple(cfg.adapter.targets)
    if not isinstance(model, Decoder):
        return
    if cfg.adapter.kind == "head" and model.tie_embeddings:
        use = "adapter.kind=patterns with adapter.targets=[embedding.weight]"
        yield unsupported(kind, "model.tie_embeddings=true", use)
    if cfg.adapter.kind not in LOW_RANK:
        return
    if model.tie_embeddings and any(fnmatchcase("embedding", pattern) for pattern in targets):
        # An adapter of the embedding would not change the output projection.
        yield unsupported(kind, "embedding in adapter.targets with model.tie_embeddings=true", "other targets")
    if cfg.memory.loss_chunk != "auto" and any(fnmatchcase("head", pattern) for pattern in targets):
        use = "auto, or adapter.targets without head"
        yield unsupported(f"memory.loss_chunk={cfg.memory.loss_chunk}", "head in adapter.targets", use)


def _token_indices(cfg: Config) -> Iterator[str]:
    model, ids, key = cfg.model, cfg.adapter.token_indices, "adapter.token_indices"
    if not isinstance(model, Decoder):
        yield unsupported(key, f"model.family={model.family}", "a decoder")
        return
    if max(ids) >= model.vocab:
        yield f"{key} contains {max(ids)}, but model.vocab={model.vocab}; use ids below model.vocab"
    if len(set(ids)) < len(ids):
        yield f"{key} contains an id twice; name each token once"
    if model.tie_embeddings:  # the output projection would need the trained rows too
        yield unsupported(key, "model.tie_embeddings=true", "a model with an output projection of its own")
    if any(fnmatchcase("embedding", pattern) for pattern in cfg.adapter.targets):
        yield unsupported(key, "embedding in adapter.targets", "other targets")
    if any(fnmatchcase("embedding.weight", pattern) for pattern in cfg.optimizer.trainable):
        yield unsupported(key, "embedding.weight in optimizer.trainable", "one of the two")


def _layers(cfg: Config) -> Iterator[str]:
    layers, most = cfg.adapter.layers, cfg.model.blocks if isinstance(cfg.model, Convnet) else cfg.model.layers
    if cfg.adapter.kind == "last_layers" and layers > most:
        yield f"adapter.layers={layers} exceeds the {most} layers of the last stack; use {most} or fewer"


def _prompt(cfg: Config) -> Iterator[str]:
    if not isinstance(cfg.model, Decoder):
        yield unsupported("adapter.kind=prompt", f"model.family={cfg.model.family}", "adapter.kind=head")
    elif cfg.data.packing:  # only the first document of a row would attend to the prompt
        yield unsupported("adapter.kind=prompt", "data.packing=true", "false")
    if cfg.mesh.context != 1:
        yield unsupported("adapter.kind=prompt", f"mesh.context={cfg.mesh.context}", "1")
