"""Activation checkpointing: which activations of a layer are saved for the backward pass. With N layers whose boundary
(input) takes B bytes and whose intermediates take A bytes, the backward pass needs

    none   N * A          no recomputation
    dots   N * (matmuls)  recomputes all but matmuls
    full   N * B + A      one extra forward pass (Chen et al., arXiv:1604.06174)
    names  N * (named)    recomputes all but activations with these names

and with `recompute_plan.py` fewer boundaries than N, at the cost of more forward passes.

`memory.save_dtype: fp8` saves boundaries and named activations in e4m3 with a float32 scale per block. The forward pass
computes with the exact values; the backward pass reads the rounded ones, and recomputes the others from them. COAT (Xi
et al., arXiv:2410.19313) saves activations of the same width, in formats for each kind of operation.

With every policy, a weight gathered over `fsdp` is gathered again in the backward pass. If it were saved, each device
would store the complete model, as it does for models of scripts without `layers` (models/user.py).
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive, Var
from jax.interpreters import ad, batching, mlir, partial_eval

from jaxmem.config.names import BOUNDARY
from jaxmem.config.recompute import POLICIES, policy_of
from jaxmem.errors import UserError, nearest
from jaxmem.quant import QTensor, even_block_size, quantize
from jaxmem.sharding.host import HOST_MEMORY

Policy = Callable[..., bool]
Remat = str | tuple[str, ...]
Forms = set[tuple[int, ...]]

# The primitives of `sharding.gathering.gather` and of pipeline stages, which preserve the shape of the weight. The last
# ones index the weight of a layer in a stack, or copy it from host memory.
_FETCH = (
    "custom_vjp_call", "convert_element_type", "bitcast_convert_type", "sharding_constraint", "name",
    "optimization_barrier", "dynamic_slice", "squeeze", "device_put",
)  # fmt: skip


def _save_all_but_weights(weights: Forms) -> Policy:
    """A policy that saves everything except weights between storage and computation, which it recognizes by shape."""

    def policy(primitive: Any, *operands: Any, **_: Any) -> bool:
        return not (primitive.name in _FETCH and operands[0].shape in weights)

    return policy


def saved_names(remat: Remat) -> tuple[str, ...] | None:
    """The names of the activations that layers save besides their input; None: all activations, also without names."""
    if isinstance(remat, tuple):
        return remat
    if (known := policy_of(remat)) is not None:  # scheduled policies save the inputs of layers only
        return known.saved
    raise UserError(f"memory.remat: unknown policy {remat!r}{nearest(remat, POLICIES)}")


def policy(saved: tuple[str, ...] | None, weights: Forms, host: tuple[str, ...] = ()) -> Policy:
    """The `jax.checkpoint` policy. `saved`: as `saved_names` returns them. `weights` are the shapes of the weights of a
    layer. `host` names activations that are saved too, but in host memory; with BOUNDARY all saved activations are in
    host memory."""
    if saved is None:
        return _save_all_but_weights(weights)
    if host:
        offloaded = (*host, *saved) if BOUNDARY in host else host
        return jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[name for name in saved if name not in offloaded],
            names_which_can_be_offloaded=list(dict.fromkeys(offloaded)),
            offload_src="device",
            offload_dst=HOST_MEMORY,
        )
    return jax.checkpoint_policies.save_only_these_names(*saved)


def recompute_from_inputs(function: Callable[..., jax.Array], *inputs: jax.Array) -> jax.Array:
    """Computes function(*inputs) and saves only the inputs for the backward pass. Use it for element-wise functions,
    whose recomputation needs no matmul and is fused into the kernels that use the result."""

    @jax.custom_vjp
    def run(*inputs: jax.Array) -> jax.Array:
        return function(*inputs)

    run.defvjp(lambda *saved: (function(*saved), saved), lambda saved, g: jax.vjp(function, *saved)[1](g))
    return run(*inputs)


SAVED_FORMAT, SAVED_BLOCK = "fp8_e4m3", 128

_rounded_names: ContextVar[Collection[str]] = ContextVar("rounded_names", default=())


@contextmanager
def rounding(names: Collection[str]) -> Iterator[None]:
    """While a layer is traced: its activations with these names are saved in FP8."""
    token = _rounded_names.set(names)
    try:
        yield
    finally:
        _rounded_names.reset(token)


def saved_as(x: jax.Array, name: str) -> jax.Array:
    """x, named for the recompute policies."""
    if name not in _rounded_names.get() or not is_rounded(x):
        named: jax.Array = checkpoint_name(x, name)
        return named
    stored = jax.tree.map(lambda leaf: checkpoint_name(leaf, name), encode(jax.lax.stop_gradient(x)))
    return _exact_then_rounded.bind(x, decode(stored))


def encode(x: jax.Array) -> Any:
    """x as it is saved."""
    if not is_rounded(x):
        return x
    size = x.shape[-1]
    # Blocks do not cross the shards of a dimension that `tensor` shards; heads have one block.
    q = quantize(x, SAVED_FORMAT, size if size <= SAVED_BLOCK else even_block_size(size, SAVED_BLOCK) or SAVED_BLOCK)
    # As bytes: jax rounds saved floats to their own dtype by an operation that makes e4m3 above 240 infinite.
    return dataclasses.replace(q, codes=jax.lax.bitcast_convert_type(q.codes, jnp.uint8))


def decode(stored: Any) -> jax.Array:
    if not isinstance(stored, QTensor):
        return stored
    codes = jax.lax.bitcast_convert_type(stored.codes, jnp.float8_e4m3fn)
    return dataclasses.replace(stored, codes=codes).dequantize()


def is_rounded(x: jax.Array) -> bool:
    """Whether x is saved in FP8. Integers and random keys are not, nor are arrays of single values."""
    return x.ndim > 1 and x.shape[-1] > 1 and jnp.issubdtype(x.dtype, jnp.floating)


# (x, d), where d is x as it was saved: x in the forward pass, d where the backward pass recomputes it. The gradient is
# that of x.
_exact_then_rounded = Primitive("exact_then_rounded")
_exact_then_rounded.def_impl(lambda x, _: x)
_exact_then_rounded.def_abstract_eval(lambda x, _: x)


def _derivative(primals: Sequence[jax.Array], tangents: Sequence[Any]) -> tuple[jax.Array, Any]:
    return _exact_then_rounded.bind(*primals), tangents[0]


def _batched(arrays: Sequence[jax.Array], dims: Sequence[Any]) -> tuple[jax.Array, int]:
    """Both are mapped over the first dimension."""
    size = next(x.shape[dim] for x, dim in zip(arrays, dims, strict=True) if dim is not None)
    mapped = [batching.bdim_at_front(x, dim, size) for x, dim in zip(arrays, dims, strict=True)]
    return _exact_then_rounded.bind(*mapped), 0


def _partial_evaluation(_policy: Any, unknown: Sequence[bool], instantiated: Sequence[bool], eqn: Any) -> Any:
    """For the backward pass the operation has d in place of x, so that x is not recomputed. Where jax moves out of a
    loop what is the same in each iteration, x is unknown: the operation stays as it is."""
    if any(unknown):
        operands = zip(eqn.invars, instantiated, strict=True)
        missing = [x for x, is_there in operands if isinstance(x, Var) and not is_there]
        return None, eqn, [True], [True], missing
    rounded = eqn.invars[1]
    residuals = [rounded] if isinstance(rounded, Var) and not instantiated[1] else []
    return eqn, eqn.replace(invars=[rounded, rounded]), [False], [True], residuals


ad.primitive_jvps[_exact_then_rounded] = _derivative
batching.primitive_batchers[_exact_then_rounded] = _batched
mlir.register_lowering(_exact_then_rounded, mlir.lower_fun(lambda x, _: x, multiple_results=False))
partial_eval.partial_eval_jaxpr_custom_rules[_exact_then_rounded] = _partial_evaluation
