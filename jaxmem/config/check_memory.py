"""What can be known to be wrong with what is kept, moved and cut into pieces, before jax starts."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from jaxmem.config.names import BOUNDARY, IN_CHUNKS, IN_GROUPS, STATE_PARTS, is_offloaded, offloaded_activations
from jaxmem.config.networks import Decoder, Vit
from jaxmem.config.recompute import is_scheduled
from jaxmem.config.sections import Config, Save
from jaxmem.errors import nearest


def check_memory(cfg: Config) -> Iterator[str]:
    yield from _names(cfg)
    kernels = (
        ("memory.attention", cfg.memory.attention, "auto"),
        ("optimizer.kernel", cfg.optimizer.kernel, "none"),
        ("adapter.matmul", cfg.adapter.matmul, "auto"),
    )
    for key, value, other in kernels:
        if value == "triton" and find_spec("jax_triton") is None:
            yield f"{key}: triton needs jax-triton: pip install 'jaxmem[cuda13]'; or use {other}"
    if cfg.memory.attention == "mosaic" and cfg.precision.compute == "float32":
        yield "memory.attention: mosaic supports 16-bit dtypes, not precision.compute float32; use triton"
    yield from _offload(cfg)
    yield from _chunks(cfg)
    yield from _spill(cfg)
    yield from _update(cfg)


def _names(cfg: Config) -> Iterator[str]:
    remat, known = cfg.memory.remat, cfg.model.activations
    if isinstance(remat, Save):
        if not remat.save:
            yield "memory.remat.save: names nothing; give some, or memory.remat=full"
        for name in remat.save:
            if name not in known:
                yield f"memory.remat.save: family {cfg.model.family} has no {name!r}{nearest(name, known)}"
    for name in offloaded_activations(cfg.memory.offload):
        if name not in (BOUNDARY, *known):
            said = nearest(name, ["activations", *STATE_PARTS, *known])
            yield f"memory.offload: family {cfg.model.family} has no {name!r}{said}"


def _spill(cfg: Config) -> Iterator[str]:
    if cfg.memory.spill != "none" and cfg.memory.budget is not None:
        yield (
            f"memory.spill: {cfg.memory.spill} spills where the device is full, wherever memory.budget"
            f" {cfg.memory.budget:g} ends; leave one of them out"
        )


def _offload(cfg: Config) -> Iterator[str]:
    """What would move nothing."""
    remat, memory, away = cfg.memory.remat, cfg.memory, offloaded_activations(cfg.memory.offload)
    if away and remat == "none":
        yield "memory.remat: none keeps what has no name, which memory.offload cannot move; use full, dots or names"
    if away and cfg.model.family == "convnet":
        yield "memory.offload: a convnet's layers keep little and compute briefly, and would wait for it; use none"
    if away and cfg.mesh.stage != 1:
        yield "mesh.stage: stages keep what they keep of every tick on the device; use 1, or memory.offload=none"
    if away and remat == "budget":
        yield "memory.remat=budget does not support memory.offload of activations; use full, dots or names"
    if is_offloaded(memory.offload, "optimizer"):
        yield from _state_offloaded(cfg)
    if is_offloaded(memory.offload, "frozen") and not cfg.trainable_patterns:
        yield "memory.offload=frozen moves nothing: all parameters are trainable; use none or optimizer"
    if is_offloaded(memory.offload, "frozen") and cfg.mesh.stage != 1:
        yield "mesh.stage: stages need their layers at every tick, memory.offload: frozen brings one at a time; use 1"
    named = [name for name in away if name != BOUNDARY]
    if named and is_scheduled(cfg.memory.remat):
        yield f"memory.offload: {named[0]} is kept by no layer under memory.remat: {remat}; use full"
    for name in named:
        for key, hidden in (("mlp_chunk", IN_CHUNKS), ("head_groups", IN_GROUPS)):
            given = getattr(memory, key)
            if given not in ("auto", 1) and name in hidden:
                yield f"memory.offload: {name} is made in pieces by memory.{key}: {given}, and never kept; use auto"


def _state_offloaded(cfg: Config) -> Iterator[str]:
    optimizer = cfg.optimizer
    if optimizer.name == "sgd" and not optimizer.momentum and cfg.precision.master == "none":
        yield "memory.offload: sgd without optimizer.momentum keeps nothing that could wait on the host; use none"
    if cfg.mesh.stage != 1:
        yield "mesh.stage: stages update their layers at the same time, memory.offload: optimizer one by one; use 1"
    skips = {"train.on_nan": cfg.train.on_nan == "skip", "precision.loss_scale": cfg.precision.loss_scale != "none"}
    for key in (key for key, given in skips.items() if given):
        yield f"{key}: memory.offload: optimizer moves state that an update left out would not change; use one of them"


def _chunks(cfg: Config) -> Iterator[str]:
    """What goes through a layer in pieces is there in pieces only."""
    for key, hidden in (("mlp_chunk", IN_CHUNKS), ("head_groups", IN_GROUPS)):
        given, remat = getattr(cfg.memory, key), cfg.memory.remat
        if given == "auto":
            continue
        if cfg.model.family not in ("decoder", "vit"):
            yield f"memory.{key}: family {cfg.model.family} has no sequences; use auto"
        elif isinstance(remat, Save) and (key == "mlp_chunk" or given != 1):
            for name in (name for name in remat.save if name in hidden):
                yield f"memory.remat.save: {name} is made in pieces by memory.{key}: {given}, and never kept; use auto"
    if isinstance(cfg.memory.head_groups, int) and isinstance(cfg.model, Decoder | Vit):
        heads = cfg.model.kv_heads if isinstance(cfg.model, Decoder) else cfg.model.heads
        if heads % cfg.memory.head_groups:
            near = [n for n in range(1, heads + 1) if heads % n == 0]
            yield f"memory.head_groups: {cfg.memory.head_groups} does not divide {heads} key heads; use one of {near}"


def _update(cfg: Config) -> Iterator[str]:
    """What an update during the backward pass cannot be combined with. It sees one layer's gradient at a time, once."""
    if cfg.memory.update != "during":
        return
    if is_scheduled(cfg.memory.remat) and cfg.batch.accumulate > 1:
        yield (
            f"memory.remat: {cfg.memory.remat} makes again what lies between boundaries, and memory.update: during goes"
            f" back through all {cfg.batch.accumulate} at once; use none, full, dots or {{save: [names]}}"
        )
    if cfg.batch.accumulate > 1 and offloaded_activations(cfg.memory.offload):
        yield (
            f"batch.accumulate: what layers keep of {cfg.batch.accumulate} micro-batches at once XLA cannot lay out in"
            " host memory, and memory.update: during needs it so; use 1, memory.update=after or memory.offload=none"
        )
    if cfg.batch.accumulate > 1 and cfg.objective.name == "dpo":
        yield (
            f"batch.accumulate: {cfg.batch.accumulate} micro-batches lie between each other's rows under memory.update:"
            " during, and dpo compares neighbours; use 1, or memory.update=after"
        )
    if cfg.mesh.stage != 1:
        yield (
            "mesh.stage: stages go back through several layers at a time, memory.update: during through one; use 1, or"
            " memory.update=after"
        )
    if cfg.precision.loss_scale != "none":
        yield (
            "precision.loss_scale: whether a gradient overflowed is known after the last layer, and memory.update:"
            " during has changed the others by then; use precision.compute=bfloat16, or memory.update=after"
        )
    if cfg.objective.name == "contrastive":
        yield (
            "objective.name: contrastive goes through the layers twice, memory.update: during once; use"
            " memory.update=after"
        )
