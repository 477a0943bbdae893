"""The derivative of attention, once for all implementations, and the options that are the same for all of them.

An implementation is a module with `attend(q, k, v, options, extras)`, which returns the output and the log-sum-exp, and
`gradients(saved, d_out, options, extras)`, which returns the gradients of q, k and v; if `saved` has a part of the
keys, the first gradient is the contribution of this part. The log-sum-exp has no gradient of its own. `reference` has
no `gradients`: jax differentiates it.

Sinks (Xiao et al., arXiv:2309.17453; gpt-oss) are a logit for each head in the softmax of every row, without a value.
With the log-sum-exp l of the scores of a row and the sink s of its head, the output is multiplied by e^l / (e^l + e^s),
and the log-sum-exp becomes log(e^l + e^s). All implementations compute the probabilities of the backward pass as
e^(score - log-sum-exp), so with this output and this log-sum-exp they return the gradients of attention with sinks.

With `has_window` a window applies in some calls only. Layers of one scan share a program, so calls with and without a
window are two branches of this program, with the same inputs, outputs and saved arrays; only one of them runs.
"""

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxmem.kernels.scopes import run_count
from jaxmem.kernels.typing import Tree

from .arguments import Extras, Options, Residuals

# The name of the output and the log-sum-exp, sequence x (dim + 1) values per head. If a remat policy saves this name
# (`jax.checkpoint_policies.save_only_these_names`), the backward pass does not recompute attention.
SAVED = "attention"


class Implementation(NamedTuple):
    """An implementation with sinks and optional windows."""

    module: Any

    def forward(self, q: Any, k: Any, v: Any, options: Options, extras: Extras) -> tuple[jax.Array, jax.Array]:
        """Output and log-sum-exp."""
        out, lse = _branches(lambda *how: self.module.attend(q, k, v, *how), options, extras)
        if extras.sinks is None:
            return out, lse
        total = jnp.logaddexp(lse, extras.sinks.astype(lse.dtype)[:, None])
        share = jnp.exp(lse - total).swapaxes(1, 2)[..., None]
        return (out.astype(lse.dtype) * share).astype(out.dtype), total

    def gradients(
        self, saved: Residuals, d_out: Tree, options: Options, extras: Extras
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """The gradients of q, k and v, and of the sinks, with the log-sum-exp that includes them."""
        of_arrays = _branches(lambda *how: self.module.gradients(saved, d_out, *how), options, extras)
        if extras.sinks is None:
            return *of_arrays, None
        inner = row_products(saved.out, d_out)
        share = jnp.exp(extras.sinks.astype(saved.lse.dtype)[:, None] - saved.lse)
        return *of_arrays, -jnp.sum(share * inner, axis=(0, 2)).astype(extras.sinks.dtype)

    def attend(self, q: Any, k: Any, v: Any, options: Options, extras: Extras) -> jax.Array:
        """The output, differentiable."""
        if not hasattr(self.module, "gradients"):
            return self.forward(q, k, v, options, extras)[0]
        return differentiable(self, options, q, k, v, extras)


def row_products(out: jax.Array, d_out: jax.Array) -> jax.Array:
    """The dot products of the rows of the output and of its cotangent, [batch, heads, queries] in float32."""
    return jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1).swapaxes(1, 2)


def _branches(run: Callable[[Options, Extras], Tree], options: Options, extras: Extras) -> Tree:
    """`run` with the window or, where `has_window` is false, without it."""
    share = options.window_share
    has_window = extras.has_window
    extras = extras._replace(has_window=None, sinks=None)
    if has_window is None:
        return run(options, extras)
    with nullcontext() if share is None else jax.named_scope(run_count(*share)):
        without = dataclasses.replace(options, window=None)
        return jax.lax.cond(has_window, lambda: run(options, extras), lambda: run(without, extras))


def _run(implementation: Any, options: Options, q: Any, k: Any, v: Any, extras: Extras) -> jax.Array:
    return implementation.forward(q, k, v, options, extras)[0]


def _saving(implementation: Any, options: Options, *inputs: Tree) -> tuple[jax.Array, Tree]:
    q, k, v, extras = inputs
    out, lse = (checkpoint_name(x, SAVED) for x in implementation.forward(q, k, v, options, extras))
    return out, (inputs, out, lse)


def _backward(implementation: Any, options: Options, saved: Tree, d_out: jax.Array) -> tuple[Tree, ...]:
    (q, k, v, extras), out, lse = saved
    dq, dk, dv, d_sinks = implementation.gradients(Residuals(q, k, v, out, lse), d_out, options, extras)
    of_extras = None if d_sinks is None else Extras(sinks=d_sinks)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), of_extras


# (an object with `forward` and `gradients`, options, q, k, v, extras) -> output.
differentiable = jax.custom_vjp(_run, nondiff_argnums=(0, 1))
differentiable.defvjp(_saving, _backward)
