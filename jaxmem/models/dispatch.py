"""Sends tokens to the devices that store their experts, and results back, over n devices along the mesh axis `expert`.

Each of these devices has other tokens. `all_gather` sends every token to all of them, and reduce-scatters the results.
`all_to_all` (Lepikhin et al., arXiv:2006.16668) sends a token to the devices of its `top_k` experts, once to each of
them (as in DeepSeek-V3, arXiv:2412.19437), and adds the results that come back. With uniform routing these are
1 - (1 - 1/n)^top_k of the devices, so all-to-all sends this share of the bytes (`share_of_devices`): 23 % for two of
eight devices, 66 % for `top_k` 8. It is used if `top_k` is at most n. With more choices nearly every token is sent to
nearly all devices, and all-gather needs less memory: all-to-all sorts `top_k` copies of the tokens by device.

No token is dropped, so with both methods a device has room for the tokens of all others. `jax.lax.ragged_all_to_all`
sends only the rows that are used. XLA supports it on GPUs; CPUs send the padding too, with the same results.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmem.kernels.grouped_matmul import rows_of_groups, sort_rows, sum_of_groups

AXIS = "expert"
# (tokens [*tokens, embed], experts and weights of their results [*tokens, top_k]) -> results [*tokens, embed]
Run = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def uses_all_to_all(top_k: int, devices: int) -> bool:
    return devices > 1 and top_k <= devices


def share_of_devices(top_k: int, devices: int) -> float:
    """The expected share of the devices that a token is sent to, with uniform and independent choices.

    >>> [round(share_of_devices(top_k, 8), 3) for top_k in (1, 2, 8)]
    [0.125, 0.234, 0.656]
    """
    return 1 - (1 - 1 / devices) ** top_k


def all_gather(run: Run, x: jax.Array, choices: jax.Array, shares: jax.Array) -> jax.Array:
    """`run` with the tokens of all devices; returns the results of this device's tokens, summed over devices."""
    y = run(*jax.lax.all_gather((x, choices, shares), AXIS, axis=0, tiled=True))
    return jax.lax.psum_scatter(y, AXIS, scatter_dimension=0, tiled=True)


def all_to_all(
    run: Run,
    x: Float[Array, "*tokens embed"],
    choices: Int[Array, "*tokens top_k"],
    shares: Float[Array, "*tokens top_k"],
    count: int,
) -> Float[Array, "*tokens embed"]:
    """`run` with the tokens that chose experts of this device, which stores `count` experts; returns the results of
    this device's tokens. `run` receives [devices x tokens] rows; rows without a token have the expert -1."""
    shape = x.shape
    top_k = choices.shape[-1]
    devices = jax.lax.axis_size(AXIS)
    x, choices, shares = (a.reshape(-1, a.shape[-1]) for a in (x, choices, shares))
    tokens = x.shape[0]
    device = choices // count
    is_repeated = jnp.any(jnp.tril(device[:, :, None] == device[:, None, :], -1), axis=-1)
    sent = sort_rows(jnp.where(is_repeated, devices, device), devices)
    sizes = sent.stops - sent.starts
    received = _swap(sizes)
    zeros = 0 * sizes  # jax maps a ragged all-to-all only if all of its offsets are mapped
    block = jax.lax.axis_index(AXIS) * tokens + zeros
    blocks = jnp.arange(devices, dtype=jnp.int32) * tokens + zeros
    there = Slices(sent.starts, sizes, block, received)
    back = Slices(blocks, received, _swap(sent.starts), sizes)

    slots = sent.starts[:, None] + jnp.arange(tokens, dtype=jnp.int32)
    rows = sent.rows.at[slots].get(mode="clip").reshape(-1)
    is_sent = (slots < sent.stops[:, None]).reshape(-1, 1)
    theirs = _swap(jnp.where(is_sent, choices[rows], -1)), _swap(shares[rows])
    y = run(_send(rows_of_groups(x, sent), devices * tokens, there, back), *theirs)
    return sum_of_groups(_send(y, tokens * top_k, back, there), sent, tokens).reshape(shape)


class Slices(NamedTuple):
    """Rows that a device sends to each of the others, and the number of rows that it receives from each."""

    starts: Int[Array, " devices"]
    sizes: Int[Array, " devices"]
    places: Int[Array, " devices"]  # their first rows in the result of the receiver
    received: Int[Array, " devices"]


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _send(x: Float[Array, "rows width"], rows: int, there: Slices, _back: Slices) -> Float[Array, "received width"]:
    """The rows that the other devices send, in an array of `rows` rows, whose unused rows are 0. `_back` sends their
    gradient back."""
    return jax.lax.platform_dependent(x, jnp.zeros((rows, x.shape[1]), x.dtype), there, cpu=_padded, default=_ragged)


_send.defvjp(
    lambda x, rows, there, back: (_send(x, rows, there, back), (there, back, jnp.zeros((x.shape[0], 0)))),
    lambda _, saved, g: (_send(g, saved[2].shape[0], saved[1], saved[0]), None, None),
)


def _ragged(x: jax.Array, result: jax.Array, slices: Slices) -> jax.Array:
    return jax.lax.ragged_all_to_all(x, result, *slices, axis_name=AXIS)


def _padded(x: jax.Array, result: jax.Array, slices: Slices) -> jax.Array:
    """`_ragged` with blocks of one size: all the rows that one device may send to another."""
    size = min(x.shape[0], result.shape[0])
    within = jnp.arange(size, dtype=jnp.int32)
    blocks = _swap(x.at[slices.starts[:, None] + within].get(mode="fill", fill_value=0))
    rows = jnp.where(within < slices.received[:, None], _swap(slices.places)[:, None] + within, result.shape[0])
    return result.at[rows].set(blocks, mode="drop")


def _swap(x: jax.Array) -> jax.Array:
    """Sends the first of n parts of the first dimension to the first device, the second part to the second one."""
    return jax.lax.all_to_all(x, AXIS, 0, 0, tiled=True)
