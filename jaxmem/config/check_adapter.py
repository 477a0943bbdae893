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
    kind, hf = f"adapter.kind={adapter.kind}", getattr(cfg.model, "hf", None)
    if adapter.hf is not None and hf is None:
        yield f"adapter.hf={adapter.hf} requires model.hf; set model.hf to the directory of the base model"
    if adapter.base_run is not None and hf is not None:
        yield f"adapter.base_run={adapter.base_run} and model.hf={hf} are both set; remove one of them"
    if not adapter.targets:
        yield "adapter.targets is empty; use patterns of layer names such as [blocks.*]"
    if adapter.kind == "patterns" and "targets" not in adapter.model_fields_set:
        yield 'adapter.kind=patterns requires adapter.targets; use patterns of weight names such as ["blocks[-2:].*"]'
    if adapter.kind == "patterns" and isinstance(adapter.targets, dict):
        yield unsupported(kind, "ranks in adapter.targets", "a list of patterns")
    if adapter.kind == "prompt" and isinstance(cfg.model, Decoder) and cfg.data.packing:
        # Only the first document of a row would attend to the prompt.
        yield unsupported(kind, "data.packing=true", "data.packing=false")
    layers = cfg.model.blocks if isinstance(cfg.model, Convnet) else getattr(cfg.model, "layers", adapter.layers)
    if adapter.kind == "last_layers" and adapter.layers > layers:
        of = "blocks of the last stage" if isinstance(cfg.model, Convnet) else "layers of the model"
        yield f"adapter.layers={adapter.layers} exceeds the {layers} {of}; use adapter.layers={layers} or less"
    if adapter.matmul != "auto" and cfg.base_precision.parameters not in MATMUL_FORMATS:
        base = cfg.base_precision.parameters
        yield required(f"adapter.matmul={adapter.matmul}", "adapter.base", MATMUL_FORMATS, base)
    yield from _base(cfg)
    yield from _experts(cfg)
    if isinstance(cfg.model, Decoder):
        yield from _vocabulary(cfg, cfg.model)


def check_some_layers(cfg: Config) -> Iterator[str]:
    """Errors in patterns that select layers by number, in `adapter` or in `optimizer.trainable`."""
    some = [pattern for pattern in cfg.trainable_patterns if LAYER_RANGE.search(pattern)]
    if not some:
        return
    trainable = f"training only some layers ({some[0]})"
    if cfg.mesh.stage != 1:
        yield unsupported(f"mesh.stage={cfg.mesh.stage}", trainable, "mesh.stage=1, or a pattern of all layers")
    if cfg.memory.update == "during":
        yield unsupported("memory.update=during", trainable, "memory.update=after, or a pattern of all layers")
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
        yield (
            f"adapter.double_quant=false requires quantized base weights, not {base.parameters}; "
            "use adapter.kind=qlora, or remove adapter.double_quant"
        )
    if run.is_quantized and (adapter.kind in LOW_RANK or adapter.base is not None):
        use = f"precision.parameters=float32 or bfloat16 with adapter.kind=qlora and adapter.base={run.parameters}"
        yield unsupported(kind, f"precision.parameters={run.parameters}", use)


def _experts(cfg: Config) -> Iterator[str]:
    adapter = cfg.adapter
    if not isinstance(cfg.model, Decoder) or cfg.model.experts is None:
        if adapter.shared_a:
            yield "adapter.shared_a=true requires a mixture of experts (model.experts); remove adapter.shared_a"
    elif adapter.kind == "dora":
        yield unsupported("adapter.kind=dora", "model.experts", "adapter.kind=lora or qlora")
    elif adapter.kind in LOW_RANK and adapter.dropout > 0:
        yield unsupported(f"adapter.dropout={adapter.dropout}", "model.experts", "adapter.dropout=0")


def _vocabulary(cfg: Config, model: Decoder) -> Iterator[str]:
    kind, ids, key = f"adapter.kind={cfg.adapter.kind}", cfg.adapter.token_indices, "adapter.token_indices"
    adapts = {name: _is_target(cfg, name) for name in ("embedding", "head")}
    if adapts["embedding"] and model.tie_embeddings:
        # An adapter of the embedding would not change the output projection.
        yield unsupported(
            kind, "adapter.targets that match embedding, with model.tie_embeddings=true", "targets such as blocks.*"
        )
    if adapts["head"] and cfg.memory.loss_chunk != "auto":
        use = "memory.loss_chunk=auto, or targets such as blocks.*"
        yield unsupported(f"memory.loss_chunk={cfg.memory.loss_chunk}", "adapter.targets that match head", use)
    if max(ids, default=0) >= model.vocab:
        yield f"{key} contains {max(ids)}, but model.vocab={model.vocab}; use token ids from 0 to {model.vocab - 1}"
    if len(set(ids)) < len(ids):
        twice = next(i for i in ids if ids.count(i) > 1)
        yield f"{key} contains {twice} more than once; list each token id once"
    if ids and adapts["embedding"]:
        yield unsupported(key, "adapter.targets that match embedding", "targets such as blocks.*")
    if ids and any(fnmatchcase("embedding.weight", pattern) for pattern in cfg.optimizer.trainable):
        yield f"{key} and embedding.weight in optimizer.trainable are both set; remove one of them"


def _is_target(cfg: Config, name: str) -> bool:
    return cfg.adapter.kind in LOW_RANK and any(fnmatchcase(name, pattern) for pattern in cfg.adapter.targets)
