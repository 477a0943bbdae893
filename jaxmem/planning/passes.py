"""One row's forward and backward pass, as jax traces them: what is kept from one for the other, and every product.

Nothing is compiled. The first config of a shape takes half a second; all that differ from it in mesh and batch alone
share the trace.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jax.extend.core import Literal

from jaxmem.config import (
    Batch,
    Checkpoint,
    Config,
    Data,
    Decoder,
    Memory,
    Mesh,
    Objective,
    Optimizer,
    Precision,
    Rules,
    Train,
)
from jaxmem.config.names import BOUNDARY, offloaded_activations
from jaxmem.planning.hlo import mean_runs
from jaxmem.planning.share import held_vocabulary, layers_together, loss_chunk
from jaxmem.quant.precision import compute_dtype
from jaxmem.sharding import layout_for
from jaxmem.sharding.weights import differentiable, with_gradients
from jaxmem.step import Program
from jaxmem.step.objective import objective

DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host


def shape_of(cfg: Config, platform: str) -> Config:
    """What shapes depend on: the config without its mesh, its batch and what only a run reads."""
    compute = compute_dtype(cfg.precision, platform).name
    chunk, held = loss_chunk(cfg, platform), held_vocabulary(cfg)
    if chunk is not None and chunk < held:
        chunk = max(held // 16, 1)  # how large a slice is says little of the passes: one form for all
    if cfg.objective.name == "dpo":  # a row of a pair goes through the layers and the vocabulary as any other
        data = Data(sequence_length=cfg.data.sequence_length, tokenizer=cfg.data.tokenizer)
        cfg = cfg.model_copy(update={"objective": Objective(), "data": data})
    return cfg.model_copy(
        update={
            "name": "shape",
            "output": "",
            "mesh": Mesh(),
            "rules": Rules(),
            "zero": 0,
            "batch": Batch(global_size=1),
            "train": Train(steps=cfg.steps),
            "checkpoint": Checkpoint(),
            "memory": cfg.memory.model_copy(update={"loss_chunk": chunk or "auto", "budget": None}),
            "precision": cfg.precision.model_copy(update={"compute": compute}),
        }
    )


def alone(cfg: Config) -> Program:
    """On one device that nothing is put on."""
    return Program(cfg, layout_for(cfg, jax.devices()[:1]))


@dataclass(frozen=True)
class Product:
    """Matrix products of one kind in the two passes of one row."""

    times: int
    flops: int
    weights: int  # bytes of its sides that are weights, however many rows there are
    others: int
    dtype: str


@dataclass(frozen=True)
class Passes:
    """Forward and backward pass of one row, as jax traces them, on one of the devices that split its layers."""

    saved: int  # bytes that the forward pass keeps for the backward pass; of a decoder, what its layers keep
    hosted: int  # and those that it keeps in host memory
    products: tuple[Product, ...]
    kernels: int


# XLA fuses what lies between products into few kernels. Measured on compiled decoders: these read and write two and a
# half times what the products do, and there are about three for each product or write in place.
AROUND, _KERNELS = 2.5, 3
# Kernels: of Pallas by Triton, by Mosaic GPU, there also with what it adds to; of Triton.
OURS = ("pallas_call", "mpmd_map", "run_state", "triton_kernel_call")


def passes_of(cfg: Config, platform: str) -> Passes:
    """Of a config whose mesh is filled in. Where `tensor` does not split the hidden units or the vocabulary it splits
    the time beside them: the same products in other shapes."""
    away = offloaded_activations(cfg.memory.offload)
    moves_all = away == (BOUNDARY,)  # what would be kept without it
    same = {"update": "after", "offload": "none" if moves_all or not away else away}
    if (together := layers_together(cfg)) > 1:
        same["remat"] = f"every_{together}"
    shape = shape_of(cfg, platform)
    shape = shape.model_copy(
        update={
            "optimizer": Optimizer(trainable=cfg.optimizer.trainable),
            "memory": shape.memory.model_copy(update=same),
            "train": Train(steps=1, deterministic=cfg.train.deterministic),
            # What weights rest in is no matter: products take them in the dtype that they compute in.
            "precision": Precision(parameters="bfloat16", compute=shape.precision.compute),
        }
    )
    if cfg.base_precision.quantized and cfg.adapter.kind != "none":
        kind = "lora" if cfg.adapter.kind == "qlora" else cfg.adapter.kind
        shape = shape.model_copy(
            update={"adapter": cfg.adapter.model_copy(update={"kind": kind, "base": "bfloat16", "double_quant": True})}
        )
    found = _passes(one_share(shape, cfg), cfg.mesh.tensor)
    return dataclasses.replace(found, saved=0, hosted=found.saved) if moves_all else found


def _passes(shape: Config, tensor: int) -> Passes:
    """In two halves, each traced once for all configs that do not differ in it."""
    memory = shape.memory
    layers = shape.model_copy(update={"memory": memory.model_copy(update={"loss_chunk": "auto"})})
    loss = shape.model_copy(update={"memory": Memory(loss_chunk=memory.loss_chunk)})
    one, two = _of_layers(layers, tensor), _of_loss(loss, tensor)
    products = one.products + two.products
    return Passes(one.saved + two.saved, one.hosted + two.hosted, products, one.kernels + two.kernels)


@functools.lru_cache(maxsize=256)
def _of_layers(shape: Config, tensor: int) -> Passes:
    """From a row to what its layers make of it."""
    half = _Half(shape)
    return half.passes(half.features, (), tensor)


@functools.lru_cache(maxsize=256)
def _of_loss(shape: Config, tensor: int) -> Passes:
    """From there to the loss: the output projection."""
    half = _Half(shape)
    return half.passes(half.loss, (jax.eval_shape(half.features, half.params, half.batch),), tensor)


class _Half:
    """What a half of the passes takes: weights and one row, on one device."""

    def __init__(self, shape: Config) -> None:
        built = alone(shape)
        self._built, self._shape, self._objective = built, shape, objective(built.cfg.objective, built.cfg.memory)
        self.params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jax.numpy.bfloat16), built.model.shapes)
        self.batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), built.spec.batch)

    def features(self, params: Any, batch: Any) -> Any:
        return self._objective.features(nnx.merge(self._built.model.graphdef, params), batch, None)

    def loss(self, params: Any, batch: Any, features: Any) -> jax.Array:
        return self._objective.sums(nnx.merge(self._built.model.graphdef, params), features, batch)["loss"]

    def passes(self, run: Callable[..., Any], given: tuple[Any, ...], tensor: int) -> Passes:
        """Of `run(params, batch, *given)`, with the gradients of `given` and of the weights that learn."""

        def both(params: Any, batch: Any, *given: Any) -> tuple[Any, Any]:
            """What is kept, and the gradients."""

            def of(at: Any, *given: Any) -> Any:
                return run(with_gradients(params, at, self._built.model.partial_stacks), batch, *given)

            y, back = jax.vjp(of, differentiable(self._built.model.select(params)), *given)
            return jax.tree.leaves(back), back(jax.tree.map(jax.numpy.ones_like, y))

        traced, (outs, _) = jax.make_jaxpr(both, return_shape=True)(self.params, self.batch, *given)
        saved = _saved(traced.jaxpr, len(outs), self._shape.model, tensor)
        products: list[Product] = []
        kernels = 0
        for eqn, times in equations(traced.jaxpr, 1):
            if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
                products.append(product(eqn, times))
            if eqn.primitive.name in ("dot_general", "conv_general_dilated", "dynamic_update_slice"):
                kernels += _KERNELS * times
            elif eqn.primitive.name in OURS and not eqn.params.get("interpret"):  # of two, that for GPUs
                products.append(kernel(eqn, times))
                kernels += times
        return Passes(int(saved[DEVICE]), int(saved[HOST]), tuple(products), kernels)


def _saved(traced: Any, outs: int, model: Any, tensor: int) -> dict[Any, float]:
    """Bytes of the first results of a trace by where they lie: those that it computes; of a decoder those of layers."""
    made_by = {out: eqn for eqn in traced.eqns for out in eqn.outvars}
    forward = traced.outvars[:outs]
    kept = {out: made_by[out] for out in forward if not isinstance(out, Literal) and out in made_by}
    saved = dict.fromkeys(jax.memory.Space, 0.0)
    for out, eqn in kept.items():
        if not isinstance(model, Decoder):
            saved[_space(out)] += _bytes(out.aval)
        elif eqn.primitive.name == "scan" and not _leaves_layers(out, eqn):
            is_stream = out.aval.shape[-1:] == (model.embed,) and not _is_factor(out, eqn)
            saved[_space(out)] += _bytes(out.aval) / (tensor if is_stream else 1)
    return saved


def _space(out: Any) -> Any:
    return getattr(out.aval, "memory_space", DEVICE)  # random keys have none


def _leaves_layers(out: Any, scan: Any) -> bool:
    """Whether it is the stream behind the last layer: [row, time, embed], handed on from layer to layer."""
    inner = scan.params["jaxpr"].jaxpr.outvars[scan.outvars.index(out)]
    return out.aval.ndim == 3 and inner.aval.shape == out.aval.shape


def _is_factor(out: Any, scan: Any) -> bool:
    """Whether a value that each layer keeps went into a product. Of the stream between layers `tensor` splits the time;
    what goes into a product it holds whole."""
    body = scan.params["jaxpr"].jaxpr
    inner = body.outvars[scan.outvars.index(out)]
    return any(eqn.primitive.name == "dot_general" and inner in eqn.invars for eqn, _ in equations(body, 1))


def equations(traced: Any, times: int) -> Iterator[tuple[Any, int]]:
    """Every operation of a trace and how often it runs."""
    for eqn in traced.eqns:
        yield eqn, times
        yield from inside(eqn, times)


def inside(eqn: Any, times: int) -> Iterator[tuple[Any, int]]:
    """Those that an operation which runs so often stands for, and how often they run."""
    if eqn.primitive.name == "scan":
        times *= eqn.params["length"]
    elif eqn.primitive.name == "while":
        times = int(times * mean_runs(str(eqn.source_info.name_stack)))
    elif eqn.primitive.name in OURS:  # its grid and its loops are its own affair
        return
    for value in eqn.params.values():
        for part in value if isinstance(value, (list, tuple)) else (value,):
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                yield from equations(part, times)


def product(eqn: Any, times: int) -> Product:
    left, right, out = (*(x.aval for x in eqn.invars[:2]), eqn.outvars[0].aval)
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        depth = math.prod(left.shape[d] for d in contracted)
    else:
        depth = math.prod(right.shape) // max(right.shape[eqn.params["dimension_numbers"].rhs_spec[0]], 1)
    sides = [(_bytes(x), _is_weight(x)) for x in (left, right, out)]
    weights = sum(size for size, is_weight in sides if is_weight)
    others = sum(size for size, is_weight in sides if not is_weight)
    return Product(times, 2 * math.prod(out.shape) * depth, weights, others, str(left.dtype))


def kernel(eqn: Any, times: int) -> Product:
    """One of ours, which says how much it computes for each number that it makes."""
    said = (eqn.ctx.xla_metadata or {}).get("flops_per_output", 0)
    out = eqn.outvars[0].aval
    moved = sum(_bytes(x.aval) for x in (*eqn.invars, *eqn.outvars))
    return Product(times, int(float(said) * math.prod(out.shape)), 0, moved, str(out.dtype))


def _is_weight(x: Any) -> bool:
    """Or its gradient, or a slice of either: what belongs to a batch, here of one row, begins with 1."""
    return x.ndim == 2 or (x.ndim == 3 and x.shape[0] != 1)


def unplaced(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _bytes(x: Any) -> int:
    """Of an array; keys of random numbers count as nothing."""
    return math.prod(x.shape) * x.dtype.itemsize if hasattr(x.dtype, "itemsize") else 0


def one_share(shape: Config, cfg: Config) -> Config:
    """With one device's share of a decoder that `tensor` devices of the config split."""
    model, tensor = shape.model, cfg.mesh.tensor
    if not isinstance(model, Decoder) or tensor == 1:
        return shape
    split_heads = tensor if "tensor" in cfg.rules.heads else 1
    heads = model.heads // split_heads
    # Key heads that do not divide are whole everywhere, and each device uses those of its query heads.
    keys = model.kv_heads // split_heads if model.kv_heads % split_heads == 0 else math.gcd(model.kv_heads, heads)
    share = {"heads": heads, "kv_heads": keys, "mlp": model.mlp // tensor, "vocab": -(-model.vocab // tensor)}
    return shape.model_copy(update={"model": model.model_copy(update=share)})
