"""Attention with a window that applies in some calls only; `Extras.has_window` decides when the program runs.

Layers of one scan share a program, so layers with and without a window are two branches of this program. The branches
have the same inputs, outputs and saved arrays; only one of them runs.
"""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from .arguments import Extras, Options
from .blockwise import SAVED


class OptionalWindow(NamedTuple):
    """The functions of an implementation (`blockwise.py`), for calls with `has_window`."""

    kernel: Any

    def attend(self, q: Any, k: Any, v: Any, options: Options, extras: Extras) -> tuple[jax.Array, jax.Array]:
        if hasattr(self.kernel, "gradients"):
            return _attend(self.kernel, options, q, k, v, extras)
        return _branches(lambda *how: self.kernel.attend(q, k, v, *how), options, extras)

    def gradients(
        self, q: Any, k: Any, v: Any, out: Any, lse: Any, d_out: Any, options: Options, extras: Extras
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        return _branches(lambda *how: self.kernel.gradients(q, k, v, out, lse, d_out, *how), options, extras)


def with_optional_window(kernel: Any, extras: Extras) -> Any:
    """The implementation itself, or with `has_window` a wrapper that runs one of the two branches."""
    return kernel if extras.has_window is None else OptionalWindow(kernel)


def _branches(run: Callable[[Options, Extras], Any], options: Options, extras: Extras) -> Any:
    """`run` with the window or without it."""
    share, extras, has_window = options.window_share, extras._replace(has_window=None), extras.has_window
    scope = nullcontext() if share is None else jax.named_scope("runs_{}_in_{}".format(*share))
    with scope:
        return jax.lax.cond(
            has_window,
            lambda: run(options, extras),
            lambda: run(dataclasses.replace(options, window=None), extras),
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(kernel: Any, options: Options, q: Any, k: Any, v: Any, extras: Extras) -> tuple[jax.Array, jax.Array]:
    return _branches(lambda *how: kernel.attend(q, k, v, *how), options, extras)


def _forward(kernel: Any, options: Options, q: Any, k: Any, v: Any, extras: Extras) -> tuple[Any, Any]:
    out, lse = (checkpoint_name(x, SAVED) for x in _attend(kernel, options, q, k, v, extras))
    return (out, lse), (q, k, v, out, lse, extras)


def _backward(kernel: Any, options: Options, saved: Any, cotangents: tuple[Any, Any]) -> tuple[Any, ...]:
    q, k, v, out, lse, extras = saved
    return *OptionalWindow(kernel).gradients(q, k, v, out, lse, cotangents[0], options, extras), None


_attend.defvjp(_forward, _backward)
