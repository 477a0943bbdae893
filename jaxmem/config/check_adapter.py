"""Errors in the section `adapter`, and in settings that train parameters of some layers only."""

from collections.abc import Iterator
from fnmatch import fnmatchcase

from jaxmem.config.adapter import LOW_RANK
from jaxmem.config.names import LAYER_RANGE
from jaxmem.config.networks import Convnet, Decoder
from jaxmem.config.sections import Config
from jaxmem.errors import required, unsupported

MATMUL_FORMATS = ("nf4", "fp4", "mxfp4", "int4", "int8")  # formats that kernels.dequant_matmul supports


def check_adapter(cfg: Config) -> Iterator[str]:
    adapter = cfg.adapter
    if adapter.kind == "none":
        return
    kind = f"adapter.kind={adapter.kind}"
    if not adapter.targets:
        yield "adapter.targets is empty; use patterns such as blocks.*"
    if adapter.kind == "patterns" and "targets" not in adapter.model_fields_set:
        yield "adapter.kind=patterns requires adapter.targets, patterns of weights such as blocks[-2:].*"
    if adapter.kind == "patterns" and isinstance(adapter.targets, dict):
        yield unsupported(kind, "ranks in adapter.targets", "a list of patterns")
    if adapter.kind == "prompt" and isinstance(cfg.model, Decoder) and cfg.data.packing:
        # Only the first document of a row would attend to the prompt.
        yield unsupported(kind, "data.packing=true", "data.packing=false")
    layers = cfg.model.blocks if isinstance(cfg.model, Convnet) else getattr(cfg.model, "layers", adapter.layers)
    if adapter.kind == "last_layers" and adapter.layers > layers:
        of = "blocks of the last stage" if isinstance(cfg.model, Convnet) else "layers of the model"
        yield f"adapter.layers={adapter.layers} exceeds the {layers} {of}; use {layers} or fewer"
    if adapter.matmul != "auto" and cfg.base_precision.parameters not in MATMUL_FORMATS:
        wrong = required(
            f"adapter.matmul={adapter.matmul}", "adapter.base", MATMUL_FORMATS, cfg.base_precision.parameters
        )
        yield f"{wrong}; use adapter.matmul=auto"
    yield from _base(cfg)
    if isinstance(cfg.model, Decoder):
        yield from _vocabulary(cfg, cfg.model)


def check_some_layers(cfg: Config) -> Iterator[str]:
    """Errors in patterns that select layers by number, in `adapter` or in `optimizer.trainable`."""
    some = [pattern for pattern in cfg.trainable_patterns if LAYER_RANGE.search(pattern)]
    if not some:
        return
    trainable = f"training only some layers ({some[0]})"
    if cfg.mesh.stage != 1:
        yield unsupported(f"mesh.stage={cfg.mesh.stage}", trainable, "mesh.stage=1 or parameters of all layers")
    if cfg.memory.update == "during":
        yield unsupported("memory.update=during", trainable, "memory.update=after or parameters of all layers")
    if cfg.base_precision != cfg.precision:  # all layers of a stack are stored in one format
        base = cfg.base_precision.parameters
        yield unsupported(f"adapter.base={base}", trainable, f"adapter.base=null with precision.parameters={base}")


def _base(cfg: Config) -> Iterator[str]:
    adapter, base, run = cfg.adapter, cfg.base_precision, cfg.precision
    kind, given = f"adapter.kind={adapter.kind}", f"adapter.base={adapter.base}"
    if adapter.kind == "qlora" and not base.is_quantized:
        yield unsupported(kind, given, "adapter.base=nf4 or adapter.kind=lora")
    if adapter.kind == "lora" and base.is_quantized and not run.is_quantized:
        yield unsupported(kind, given, "adapter.kind=qlora, or adapter.base=float32 or bfloat16")
    if not base.is_quantized and not adapter.double_quant:
        yield f"adapter.double_quant=false requires a quantized base, not {base.parameters}; remove it"
    if run.is_quantized and (adapter.kind in LOW_RANK or adapter.base is not None):
        use = f"precision.parameters=float32 or bfloat16 with adapter.kind=qlora and adapter.base={run.parameters}"
        yield unsupported(kind, f"precision.parameters={run.parameters}", use)


def _vocabulary(cfg: Config, model: Decoder) -> Iterator[str]:
    kind, ids, key = f"adapter.kind={cfg.adapter.kind}", cfg.adapter.token_indices, "adapter.token_indices"
    adapts = {name: _is_target(cfg, name) for name in ("embedding", "head")}
    if adapts["embedding"] and model.tie_embeddings:
        # An adapter of the embedding would not change the output projection.
        yield unsupported(kind, "embedding in adapter.targets with model.tie_embeddings=true", "other targets")
    if adapts["head"] and cfg.memory.loss_chunk != "auto":
        use = "memory.loss_chunk=auto or targets without head"
        yield unsupported(f"memory.loss_chunk={cfg.memory.loss_chunk}", "head in adapter.targets", use)
    if max(ids, default=0) >= model.vocab:
        yield f"{key} contains {max(ids)}, but model.vocab={model.vocab}; use ids below model.vocab"
    if len(set(ids)) < len(ids):
        yield f"{key} contains an id twice; list each token once"
    if ids and adapts["embedding"]:
        yield unsupported(key, "embedding in adapter.targets", "other targets")
    if ids and any(fnmatchcase("embedding.weight", pattern) for pattern in cfg.optimizer.trainable):
        yield unsupported(key, "embedding.weight in optimizer.trainable", "only one of them")


def _is_target(cfg: Config, name: str) -> bool:
    return cfg.adapter.kind in LOW_RANK and any(fnmatchcase(name, pattern) for pattern in cfg.adapter.targets)
