"""Attention sinks (Xiao et al., arXiv:2309.17453; gpt-oss): a logit for each head in the softmax of every row, without
a value.

With the log-sum-exp l of the scores of a row and the sink s of its head, the output is multiplied by e^l / (e^l + e^s),
and the log-sum-exp becomes log(e^l + e^s). All kernels compute the probabilities of the backward pass as e^(score -
log-sum-exp), so with this output and this log-sum-exp they return the gradients of attention with sinks.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .arguments import Extras, Options
from .blockwise import SAVED


class WithSinks(NamedTuple):
    """The functions of an implementation (`blockwise.py`), for calls with `sinks`."""

    kernel: Any

    def attend(self, q: Any, k: Any, v: Any, options: Options, extras: Extras) -> tuple[jax.Array, jax.Array]:
        implementation = getattr(self.kernel, "kernel", self.kernel)  # without `OptionalWindow`
        run = _attend if hasattr(implementation, "gradients") else _forward
        return run(self.kernel, options, q, k, v, extras)

    def gradients(self, *arguments: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.kernel.gradients(*arguments)


def with_sinks(kernel: Any, extras: Extras) -> Any:
    """The implementation itself, or with `sinks` a wrapper that adds them."""
    return kernel if extras.sinks is None else WithSinks(kernel)


def gradient(sinks: jax.Array, out: jax.Array, lse: jax.Array, d_out: jax.Array) -> jax.Array:
    """The gradient of the sinks. `lse` includes them."""
    inner = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    share = jnp.exp(sinks.astype(lse.dtype)[:, None] - lse)
    return -jnp.sum(share * inner, axis=(0, 2)).astype(sinks.dtype)


def _forward(kernel: Any, options: Options, q: Any, k: Any, v: Any, extras: Extras) -> tuple[jax.Array, jax.Array]:
    assert extras.sinks is not None
    out, lse = kernel.attend(q, k, v, options, extras)
    total = jnp.logaddexp(lse, extras.sinks.astype(lse.dtype)[:, None])
    share = jnp.exp(lse - total).swapaxes(1, 2)[..., None]
    return (out.astype(lse.dtype) * share).astype(out.dtype), total


_attend = jax.custom_vjp(_forward, nondiff_argnums=(0, 1))


def _saving(kernel: Any, options: Options, q: Any, k: Any, v: Any, extras: Extras) -> tuple[Any, Any]:
    out, lse = (checkpoint_name(x, SAVED) for x in _attend(kernel, options, q, k, v, extras))
    return (out, lse), (q, k, v, out, lse, extras)


def _backward(kernel: Any, options: Options, saved: Any, cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    q, k, v, out, lse, extras = saved
    found = kernel.gradients(q, k, v, out, lse, cotangents[0], options, extras)
    return *found, Extras(sinks=gradient(extras.sinks, out, lse, cotangents[0]))


_attend.defvjp(_saving, _backward)
