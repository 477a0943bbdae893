"""Errors in the section `memory`."""

from collections.abc import Iterator
from importlib.util import find_spec

from jaxmem.config.mesh import head_group_counts
from jaxmem.config.names import BOUNDARY, IN_CHUNKS, IN_GROUPS, STATE_PARTS, is_offloaded, offloaded_activations
from jaxmem.config.networks import Decoder, Vit
from jaxmem.config.recompute import Save, is_scheduled
from jaxmem.config.sections import Config
from jaxmem.errors import as_yaml, nearest, nearest_numbers, unsupported

CHUNKED = (("mlp_chunk", IN_CHUNKS), ("head_groups", IN_GROUPS))  # keys, and activations that each computes in parts


def check_memory(cfg: Config) -> Iterator[str]:
    yield from _names(cfg)
    kernels = (
        ("memory.attention", cfg.memory.attention, "auto"),
        ("memory.experts", cfg.memory.experts, "auto"),
        ("optimizer.kernel", cfg.optimizer.kernel, "auto"),
        ("adapter.matmul", cfg.adapter.matmul, "auto"),
    )
    for key, value, other in kernels:
        if value == "triton" and find_spec("jax_triton") is None:
            yield f"{key}=triton requires jax-triton; run pip install 'jaxmem[cuda13]', or use {key}={other}"
    if cfg.memory.experts != "auto" and getattr(cfg.model, "experts", None) is None:
        yield f"memory.experts={cfg.memory.experts} has no effect without model.experts; use memory.experts=auto"
    yield from _offload(cfg)
    yield from _chunks(cfg)
    yield from _update(cfg)


def _names(cfg: Config) -> Iterator[str]:
    remat, known = cfg.memory.remat, cfg.model.activations
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
    memory, remat = cfg.memory, f"memory.remat={cfg.memory.remat}"
    offload = f"memory.offload={as_yaml(memory.offload)}"
    away = offloaded_activations(memory.offload)
    if away:
        if memory.remat in ("none", "auto"):  # with none, saved activations have no names
            yield unsupported(offload, remat, "memory.remat=full, dots or {save: [names]}")
        if cfg.model.family == "convnet":  # a layer takes less time than its transfer
            yield unsupported(offload, "model.family=convnet", "memory.offload=none")
    if is_offloaded(memory.offload, "optimizer"):
        yield from _state_offloaded(cfg, offload)
    if is_offloaded(memory.offload, "frozen") and not cfg.trainable_patterns:
        yield f"{offload} has no effect: all parameters are trainable; use memory.offload=none or optimizer"
    named = [name for name in away if name != BOUNDARY]
    if named and is_scheduled(memory.remat):
        yield unsupported(offload, remat, "memory.remat=full")
    for key, hidden in CHUNKED:
        chunk = getattr(memory, key)
        if chunk not in ("auto", 1) and set(named) & set(hidden):
            yield unsupported(offload, f"memory.{key}={chunk}", f"memory.{key}=auto")


def _state_offloaded(cfg: Config, offload: str) -> Iterator[str]:
    optimizer = cfg.optimizer
    if optimizer.name == "sgd" and not optimizer.momentum and cfg.precision.master == "none":
        yield (
            f"{offload} has no effect: optimizer.name=sgd with optimizer.momentum=0 has no state; "
            "use memory.offload=none"
        )
    # Even a skipped update would have to copy the state.
    if cfg.train.on_nan == "skip":
        yield unsupported(offload, "train.on_nan=skip", "train.on_nan=stop, or memory.offload without optimizer")
    if cfg.precision.loss_scale != "none":
        use = "precision.loss_scale=none, or memory.offload without optimizer"
        yield unsupported(offload, f"precision.loss_scale={cfg.precision.loss_scale}", use)


def _chunks(cfg: Config) -> Iterator[str]:
    """Conflicts of chunks with `memory.remat.save`: a saved activation would have to exist completely."""
    model, memory = cfg.model, cfg.memory
    if not isinstance(model, Decoder | Vit):
        return
    for key, hidden in CHUNKED:
        chunk, remat = getattr(memory, key), memory.remat
        if isinstance(remat, Save) and chunk != "auto" and (key == "mlp_chunk" or chunk != 1):
            for name in (name for name in remat.save if name in hidden):
                yield unsupported(f"memory.{key}={chunk}", f"memory.remat.save={name}", f"memory.{key}=auto")
    if isinstance(memory.head_groups, int):
        known = head_group_counts(model.heads, model.kv_heads if isinstance(model, Decoder) else model.heads)
        if memory.head_groups not in known:
            near = nearest_numbers(memory.head_groups, known)
            given = (
                f"model.heads={model.heads} cannot be split into memory.head_groups={memory.head_groups} equal groups"
            )
            yield f"{given}; use memory.head_groups={near}"


def _update(cfg: Config) -> Iterator[str]:
    """Conflicts of an update during the backward pass with several micro-batches."""
    if cfg.memory.update != "during" or cfg.batch.accumulate == 1:
        return
    remat, accumulate = cfg.memory.remat, f"batch.accumulate={cfg.batch.accumulate}"
    # A layer is updated after all micro-batches, so the saved activations of all of them must exist at once.
    pairs = [
        (is_scheduled(remat), f"memory.remat={remat}", "memory.remat=none, full, dots or {save: [names]}"),
        (
            offloaded_activations(cfg.memory.offload),
            f"memory.offload={as_yaml(cfg.memory.offload)}",
            "memory.offload=none",
        ),
        (cfg.objective.name == "dpo", "objective.name=dpo", "batch.accumulate=1"),
    ]
    for is_wrong, other, use in pairs:
        if is_wrong:
            yield unsupported("memory.update=during", f"{accumulate} with {other}", f"{use}, or memory.update=after")
