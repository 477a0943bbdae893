"""The same bytes and seconds by arithmetic alone, from the config: what one would write on a blackboard.

State is exact: its shapes are traced once and divided as the table of axes says. What the layers keep for the
backward pass is read from jax's own trace of it, so that any recomputation policy counts as what it keeps; what lies
beside it at the fullest moment is arithmetic on a decoder's sizes. Nothing is compiled: the first config of a shape
takes half a second, each further one a millisecond, so that a search can look at thousands.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.extend.core import Literal

from jaxmem import vocabulary
from jaxmem.config import Batch, Checkpoint, Config, Decoder, Mesh, Optimizer, Train
from jaxmem.config.mesh import undivided
from jaxmem.data import batch_spec
from jaxmem.hardware import ATTAINED_BANDWIDTH, ATTAINED_FLOPS, ATTAINED_LINK, Gpu
from jaxmem.planning.timeline import LAUNCH, RATES
from jaxmem.precision import compute_dtype
from jaxmem.program import Program, pipeline_of
from jaxmem.program.objective import objective
from jaxmem.sharding import Axes, Role, Table, is_axes, layout_for, rules, splits


@dataclass(frozen=True)
class Estimate:
    """Bytes of one device in a training step, and how long the step takes on it."""

    parts: dict[str, int]
    kinds: dict[str, int]  # what the largest moment beside the state consists of
    seconds: float | None  # None where nothing is known of the device's speed

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def predict(built: Program) -> dict[str, int | None]:
    """Bytes of one device; None where no formula is known."""
    parts = estimate(built.cfg, _platform(built)).parts
    known: dict[str, int | None] = {**parts, "total": sum(parts.values())}
    if not isinstance(built.cfg.model, Decoder):
        known |= {"activations": None, "total": None}
    return known


def estimate(cfg: Config, platform: str, gpu: Gpu | None = None, per_host: int = 8) -> Estimate:
    """Of a config whose mesh is filled in, on devices of which `per_host` share a host."""
    shape = _shape_of(cfg, platform)
    passes = _passes(shape.model_copy(update={"optimizer": Optimizer()}), cfg.mesh.tensor)
    state = _state(shape.model_copy(update={"memory": shape.memory.model_copy(update={"remat": "none"})}))
    sizes, table = _Sizes(cfg, platform), rules(cfg.zero, undivided(cfg))

    def held(role: Role, leaves: tuple[_Leaf, ...], width: int = 0) -> int:
        return sum(leaf.held(getattr(table, role), cfg.mesh, width) for leaf in leaves)

    parameters = held("weights", state.params)
    one_pass = held("gradients", state.params)
    summed = held("optimizer", state.params, 4) if cfg.batch.accumulate > 1 else 0  # in float32
    copies = sum(
        leaf.held(table.weights, cfg.mesh)
        for leaf in state.params
        if leaf.is_turned(table.weights, table.computing, cfg.mesh)
    )
    kinds = sizes.fullest(passes.saved) | {"weights: copies": copies}
    # Where the optimizer holds only a part of the weights, the new ones are whole before they replace the old ones.
    resting = held("weights", state.params, 4)
    updates = resting if resting > held("optimizer", state.params, 4) else 0
    in_passes = sum(kinds.values())
    parts = {
        "parameters": parameters,
        "master": held("optimizer", state.master),
        "optimizer": held("optimizer", state.optimizer),
        "gradients": max(one_pass + summed, updates - in_passes),
        "activations": in_passes,
        "batch": sizes.batch,
    }
    traffic = _Traffic(cfg, gpu, per_host) if gpu else None
    seconds = traffic.step(passes, held("computing", state.params, sizes.width), parts) if traffic else None
    return Estimate(parts, kinds, seconds)


# ------------------------------------------------------------------ state


@dataclass(frozen=True)
class _Leaf:
    axes: Axes
    shape: tuple[int, ...]
    itemsize: int

    def held(self, table: Table, mesh: Mesh, width: int = 0) -> int:
        """Bytes on one device; `width` bytes a number, where it is not its own."""
        sizes = mesh.model_dump()
        split = splits(self.axes, self.shape, table, sizes)
        dims = (-(-size // math.prod(sizes[a] for a in over)) for size, over in zip(self.shape, split, strict=True))
        return math.prod(dims) * (width or self.itemsize)

    def is_turned(self, resting: Table, used: Table, mesh: Mesh) -> bool:
        """Whether a dimension that is gathered for use is not the first: XLA then keeps a copy in which it is."""
        own = self.axes[1:] if self.axes[:1] == ("layer",) else self.axes
        return any(_parts(axis, resting, mesh) != _parts(axis, used, mesh) for axis in own[1:])


def _parts(axis: str | None, table: Table, mesh: Mesh) -> int:
    return math.prod(getattr(mesh, over) for over in (() if axis is None else table[axis]))


@dataclass(frozen=True)
class _State:
    params: tuple[_Leaf, ...]
    master: tuple[_Leaf, ...]
    optimizer: tuple[_Leaf, ...]


def _shape_of(cfg: Config, platform: str) -> Config:
    """What shapes depend on: the config without its mesh, its batch and what only a run reads."""
    compute = compute_dtype(cfg.precision, platform).name
    chunk = loss_chunk(cfg, platform)
    if chunk is not None and chunk < _held_vocabulary(cfg):
        chunk = max(_held_vocabulary(cfg) // 16, 1)  # how large a slice is says little of the passes: one form for all
    return cfg.model_copy(
        update={
            "name": "shape",
            "output": "",
            "mesh": Mesh(),
            "zero": 0,
            "batch": Batch(global_size=1),
            "train": Train(steps=cfg.steps),
            "checkpoint": Checkpoint(),
            "memory": cfg.memory.model_copy(update={"loss_chunk": chunk or "auto"}),
            "precision": cfg.precision.model_copy(update={"compute": compute}),
        }
    )


def loss_chunk(cfg: Config, platform: str) -> int | None:
    """`memory.loss_chunk` as it comes out for this config's batch and mesh: a whole part of the vocabulary, or less.
    None: there is no vocabulary."""
    if not isinstance(cfg.model, Decoder):
        return None
    itemsize, held = compute_dtype(cfg.precision, platform).itemsize, _held_vocabulary(cfg)
    tokens = math.ceil(_rows(cfg) * cfg.data.sequence_length)
    return vocabulary.width(cfg.memory.loss_chunk, tokens, held, itemsize) or held


def _held_vocabulary(cfg: Config) -> int:
    return -(-cfg.model.vocab // cfg.mesh.tensor) if isinstance(cfg.model, Decoder) else 0


def _alone(cfg: Config) -> Program:
    """On one device that nothing is put on."""
    return Program(cfg, layout_for(cfg, jax.devices()[:1]))


@functools.lru_cache(maxsize=256)
def _state(shape: Config) -> _State:
    built = _alone(shape)
    found: dict[str, list[_Leaf]] = {"parameters": [], "master": [], "optimizer": []}
    for part, named, placed in (
        ("parameters", built.axes, built.state.params),
        ("optimizer", built.opt_axes, built.state.opt_state),
    ):
        axes = jax.tree.leaves(named, is_leaf=is_axes)
        for name, (path, leaf) in zip(axes, jax.tree_util.tree_leaves_with_path(placed), strict=True):
            of_master = any(getattr(step, "name", None) == "master" for step in path)
            found["master" if of_master else part].append(_Leaf(name, leaf.shape, np.dtype(leaf.dtype).itemsize))
    return _State(tuple(found["parameters"]), tuple(found["master"]), tuple(found["optimizer"]))


# ------------------------------------------------------------------ one row's passes


@dataclass(frozen=True)
class _Product:
    """Matrix products of one kind in the two passes of one row."""

    times: int
    flops: int
    weights: int  # bytes of its sides that are weights, however many rows there are
    others: int
    dtype: str


@dataclass(frozen=True)
class _Passes:
    """Forward and backward pass of one row, as jax traces them, on one of the devices that split its layers."""

    saved: int  # bytes that the forward pass keeps for the backward pass; of a decoder, what its layers keep
    products: tuple[_Product, ...]
    kernels: int


# XLA fuses what lies between products into few kernels. Measured on compiled decoders: these read and write two and a
# half times what the products do, and there are about three for each product or write in place.
_AROUND, _KERNELS = 2.5, 3


@functools.lru_cache(maxsize=256)
def _passes(shape: Config, tensor: int) -> _Passes:
    built = _alone(shape.model_copy(update={"model": _split(shape.model, tensor)}))
    objective_ = objective(built.cfg.objective, built.cfg.memory)
    params = jax.tree.map(_unplaced, built.state.params)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), built.batch)

    def loss(params: Any, batch: Any) -> jax.Array:
        return objective_(nnx.merge(built.graphdef, params), batch, None)["loss"]

    forward = jax.make_jaxpr(lambda params, batch: jax.vjp(loss, params, batch)[1])(params, batch).jaxpr
    made_by = {out: eqn for eqn in forward.eqns for out in eqn.outvars}
    kept = {out: made_by[out] for out in forward.outvars if not isinstance(out, Literal) and out in made_by}
    if isinstance(shape.model, Decoder):
        embed = shape.model.embed
        saved = sum(
            _bytes(out.aval) / (tensor if out.aval.shape[-1:] == (embed,) and not _is_factor(out, eqn) else 1)
            for out, eqn in kept.items()
            if eqn.primitive.name == "scan"
        )
    else:
        saved = sum(_bytes(out.aval) for out in kept)

    products: list[_Product] = []
    kernels = 0
    for eqn, times in _equations(jax.make_jaxpr(jax.grad(loss))(params, batch).jaxpr, 1):
        if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            products.append(_product(eqn, times))
        if eqn.primitive.name in ("dot_general", "conv_general_dilated", "dynamic_update_slice"):
            kernels += _KERNELS * times
    return _Passes(int(saved), tuple(products), kernels)


def _is_factor(out: Any, scan: Any) -> bool:
    """Whether a value that each layer keeps went into a product. Of the stream between layers `tensor` splits the time;
    what goes into a product it holds whole."""
    body = scan.params["jaxpr"].jaxpr
    inner = body.outvars[scan.outvars.index(out)]
    return any(eqn.primitive.name == "dot_general" and inner in eqn.invars for eqn, _ in _equations(body, 1))


def _equations(traced: Any, times: int) -> Iterator[tuple[Any, int]]:
    """Every operation of a trace and how often it runs."""
    for eqn in traced.eqns:
        yield eqn, times
        inner = times * eqn.params.get("length", 1) if eqn.primitive.name == "scan" else times
        for value in eqn.params.values():
            for part in value if isinstance(value, (list, tuple)) else (value,):
                part = getattr(part, "jaxpr", part)
                if hasattr(part, "eqns"):
                    yield from _equations(part, inner)


def _product(eqn: Any, times: int) -> _Product:
    left, right, out = (*(x.aval for x in eqn.invars[:2]), eqn.outvars[0].aval)
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        depth = math.prod(left.shape[d] for d in contracted)
    else:
        depth = math.prod(right.shape) // max(right.shape[eqn.params["dimension_numbers"].rhs_spec[0]], 1)
    sides = [(_bytes(x), _is_weight(x)) for x in (left, right, out)]
    weights = sum(size for size, is_weight in sides if is_weight)
    others = sum(size for size, is_weight in sides if not is_weight)
    return _Product(times, 2 * math.prod(out.shape) * depth, weights, others, str(left.dtype))


def _is_weight(x: Any) -> bool:
    """Or its gradient, or a slice of either: what belongs to a batch, here of one row, begins with 1."""
    return x.ndim == 2 or (x.ndim == 3 and x.shape[0] != 1)


def _unplaced(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _bytes(x: Any) -> int:
    """Of an array; keys of random numbers count as nothing."""
    return math.prod(x.shape) * x.dtype.itemsize if hasattr(x.dtype, "itemsize") else 0


def _split(model: Any, tensor: int) -> Any:
    """One device's share of a decoder that `tensor` devices split."""
    if not isinstance(model, Decoder) or tensor == 1:
        return model
    heads = model.heads // tensor
    # Key heads that do not divide are whole everywhere, and each device uses those of its query heads.
    keys = model.kv_heads // tensor if model.kv_heads % tensor == 0 else math.gcd(model.kv_heads, heads)
    share = {"heads": heads, "kv_heads": keys, "mlp": model.mlp // tensor, "vocab": -(-model.vocab // tensor)}
    return model.model_copy(update=share)


class _Sizes:
    """Of one device and one micro-batch of a decoder, in bytes of the compute dtype."""

    def __init__(self, cfg: Config, platform: str) -> None:
        mesh, model = cfg.mesh, cfg.model
        self.cfg = cfg
        self.rows = _rows(cfg)
        self.width = compute_dtype(cfg.precision, platform).itemsize
        split = mesh.replica * mesh.fsdp * mesh.context
        spec = batch_spec(cfg).values()
        self.batch = sum(math.prod(size) * np.dtype(dtype).itemsize // split for size, dtype, _ in spec)
        if isinstance(model, Decoder):
            tokens, width, tensor = self.rows * cfg.data.sequence_length, self.width, mesh.tensor
            self.residual = tokens * model.embed * width
            self.queries = tokens * model.heads * model.head_dim * width / tensor
            self.keys = tokens * model.kv_heads * model.head_dim * width / tensor
            self.hidden = tokens * model.mlp * width / tensor
            self.chunk = loss_chunk(cfg, platform) or 0
            self.is_whole = self.chunk == _held_vocabulary(cfg)
            self.logits = tokens * self.chunk * width
            self.head = model.embed * self.chunk * width
            self.layer = _layer_parameters(model) * width / tensor

    def fullest(self, saved: int) -> dict[str, int]:
        """The larger of two moments: the loss, or one layer's backward pass."""
        kept = {"saved for the backward pass": int(saved * self.rows * _passes_held(self.cfg))}
        if not isinstance(self.cfg.model, Decoder):
            return kept
        wide = 4 / self.width  # float32
        layer = (
            self.layer * (2 if self.cfg.mesh.fsdp > 1 else 1)
            + 6 * self.residual + 4 * self.hidden + (1 + 2 * wide) * self.queries + 2 * (1 + wide) * self.keys
        )  # fmt: skip
        logits, head = self.logits, self.head
        if not self.is_whole:  # a slice's logits, its weight and their gradients, and the features' gradient in float32
            logits += 2 * head + wide * self.residual
            return kept | ({"logits": int(logits)} if logits > layer else {"intermediates": int(layer)})
        if self.cfg.batch.accumulate == 1:
            return kept | {"logits": int(logits + head), "intermediates": int(layer)}
        if logits > layer:
            return kept | {"logits": int(logits + head)}
        return kept | {"logits": int(head), "intermediates": int(layer)}


class _Traffic:
    """Seconds of a step: products and what lies around them, messages that these do not hide, the update."""

    def __init__(self, cfg: Config, gpu: Gpu, per_host: int) -> None:
        self.cfg, self.gpu, self.per_host = cfg, gpu, per_host
        self.memory = gpu.bandwidth_gb_s * 1e9 * ATTAINED_BANDWIDTH

    def step(self, passes: _Passes, weights: int, parts: dict[str, int]) -> float:
        """`weights`: bytes of all of them as one device computes with them."""
        micro = self.cfg.batch.accumulate
        computing = self._computing(passes) * _passes_run(self.cfg) / micro
        messages = self._split_messages(weights) + self._tensor_messages()
        exposed = max(_EXPOSED * messages, messages - computing)
        state = parts["parameters"] + parts["master"] + parts["optimizer"] + parts["gradients"]
        return micro * (computing + exposed + 3 * parts["gradients"] / self.memory) + 3 * state / self.memory

    def _computing(self, passes: _Passes) -> float:
        rows = _rows(self.cfg)
        seconds = passes.kernels * LAUNCH
        for one in passes.products:
            arithmetic = rows * one.flops / (self.gpu.flops * ATTAINED_FLOPS * RATES.get(one.dtype, 1.0))
            moved = one.weights + rows * one.others
            seconds += one.times * _AROUND * moved / self.memory
            if arithmetic > moved / self.memory:
                seconds += one.times * arithmetic
        return seconds

    def _split_messages(self, weights: int) -> float:
        """What data parallelism sends for one micro-batch: weights twice, gradients once, each as one computes."""
        mesh, zero = self.cfg.mesh, self.cfg.zero
        gathers = 2 if zero >= 3 else 0
        reduces = 1 if zero >= 2 else 2
        split = mesh.fsdp * mesh.context
        within = (gathers + reduces) * self._seconds(weights, split, mesh.tensor)
        share = weights / split if zero >= 2 else weights
        return within + 2 * self._seconds(share, mesh.replica, mesh.tensor * split)

    def _tensor_messages(self) -> float:
        """Two sums of the residual stream a layer and pass."""
        model = self.cfg.model
        if not isinstance(model, Decoder):
            return 0.0
        width = 2 if self.cfg.precision.compute != "float32" else 4
        residual = _rows(self.cfg) * self.cfg.data.sequence_length * model.embed * width
        return (
            2
            * (4 if self.cfg.memory.remat == "none" else 5)
            * model.layers
            * self._seconds(residual, self.cfg.mesh.tensor, 1)
        )

    def _seconds(self, size: float, group: int, stride: int) -> float:
        """A ring of `group` devices, each `stride` from the next, that gathers `size` bytes."""
        if group == 1:
            return 0.0
        neighbours = min(group, max(1, self.per_host // stride))
        rate = (
            self.gpu.link_gb_s if neighbours == group else min(self.gpu.link_gb_s, self.gpu.network_gb_s * neighbours)
        )
        return size * (group - 1) / group / (rate * 1e9 * ATTAINED_LINK)


_EXPOSED = 0.3  # of the messages, at least: those that nothing hides


def _passes_run(cfg: Config) -> float:
    """How many passes through all layers take as long as an update's: on stages its ticks, bubble included."""
    pipeline = pipeline_of(cfg)
    return cfg.batch.accumulate if pipeline is None else pipeline.ticks * pipeline.group / pipeline.layers


def _passes_held(cfg: Config) -> float:
    """Of how many passes what is kept is there at once: on stages every tick keeps its own."""
    return 1 if cfg.mesh.stage == 1 else _passes_run(cfg)


def _rows(cfg: Config) -> float:
    """Of one micro-batch on one device."""
    mesh = cfg.mesh
    return cfg.batch.global_size / cfg.batch.accumulate / (mesh.replica * mesh.fsdp * mesh.context)


def _layer_parameters(model: Decoder) -> int:
    heads = 2 * model.heads + 2 * model.kv_heads
    return model.embed * (heads * model.head_dim + 3 * model.mlp)


def _platform(built: Program) -> str:
    return built.layout.mesh.devices.flat[0].platform


def ideal_flops(built: Program) -> float:
    """Of an update, without any recomputation: 2 for each weight of a product and token forward, twice that backward,
    and causal attention's two products, of which half is empty. Pictures: the weights once for each pixel's place
    is not counted, so this is a lower bound there."""
    cfg, model = built.cfg, built.cfg.model
    if model.family != "decoder":
        return 6.0 * built.parameters * cfg.batch.global_size
    length = cfg.data.sequence_length
    looked_up = 0 if model.tie_embeddings else model.vocab * model.embed
    seen = min(model.window or length, length)
    pairs = seen * length - seen * (seen - 1) / 2  # (query, key) that see each other
    attention = 4 * model.layers * model.heads * model.head_dim * pairs
    return cfg.batch.global_size * 3.0 * (2.0 * (built.parameters - looked_up) * length + attention)


def held(tree: Any) -> int:
    """Bytes that one device holds of placed arrays (or their shapes)."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
