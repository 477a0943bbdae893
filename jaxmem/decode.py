"""Continue texts with what was trained.

Prompts are run once and leave their keys and values; each further token reads them and adds its own. For L layers of
`kv_heads` heads the cache takes 2 * L * rows * length * kv_heads * head_dim numbers, split over devices as the heads
are; activations are those of one layer.

Prompts of a batch end together: shorter ones have padding in front, which no position sees. Lengths are rounded up to
powers of two, so that a conversation that grows is compiled for a few lengths only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmem.errors import UserError
from jaxmem.program import Program

LEAST = 16  # the shortest length that is compiled
ENDED = -1  # in the place of a token: the row was over before


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: of the logits over the temperature, among the `top_k` likeliest, and of these among
    the likeliest that together have the probability `top_p` (Holtzman et al., arXiv:1904.09751)."""

    temperature: float = 0.0  # 0 takes the likeliest
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0.0:
            raise UserError(f"temperature: {self.temperature} is not at least 0; 0 takes the likeliest token")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top-k: {self.top_k} is none; give at least 1")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top-p: {self.top_p} is not above 0 and at most 1")

    def pick(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        logits = logits.astype(jnp.float32)
        if self.temperature == 0.0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits = _at_least(logits, jax.lax.top_k(logits, self.top_k)[0][..., -1:])
        if self.top_p < 1.0:
            falling = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
            share = jax.nn.softmax(falling, axis=-1)
            kept = jnp.cumsum(share, axis=-1) - share < self.top_p  # the likeliest always
            least = jnp.min(jnp.where(kept, falling, jnp.inf), axis=-1, keepdims=True)
            logits = _at_least(logits, least)
        return jax.random.categorical(key, logits).astype(jnp.int32)


def _at_least(logits: jax.Array, least: jax.Array) -> jax.Array:
    return jnp.where(logits < least, -jnp.inf, logits)


class Generator:
    """A program's weights, ready to continue prompts. What it compiles for some lengths it keeps."""

    def __init__(self, program: Program, params: Any, sampling: Sampling = Sampling()) -> None:
        if program.cfg.model.family != "decoder":
            raise UserError(f"model.family: {program.cfg.model.family} makes no text; generate needs a decoder")
        self._program, self._params, self._sampling = program, params, sampling

    def __call__(self, prompts: Sequence[np.ndarray], count: int, ends: Collection[int] = ()) -> Iterator[np.ndarray]:
        """Up to `count` tokens after each prompt, those of all rows at a time; a row is over after one of `ends`."""
        if any(not len(prompt) for prompt in prompts):
            raise UserError("prompt: it is empty; give at least one token to start from")
        if count < 1:
            raise UserError(f"tokens: {count} is none; ask for at least 1")
        width = length_for(max(len(prompt) for prompt in prompts))
        tokens = np.zeros((len(prompts), width), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[width - len(prompt) :] = prompt
        first = jnp.asarray([width - len(prompt) for prompt in prompts], jnp.int32)
        key = jax.random.key(self._sampling.seed)
        over = np.zeros(len(prompts), bool)
        with self._program.layout.one_row():
            token, cache = self._start(length_for(width + count), self._params, jnp.asarray(tokens), first, key)
            for length in range(width, width + count):
                found = np.asarray(token)
                yield np.where(over, ENDED, found)
                over |= np.isin(found, list(ends))
                if over.all() or length == width + count - 1:
                    return
                at = jnp.asarray(length, jnp.int32)
                token, cache = self._follow(self._params, token, cache, at, first, key)

    @cached_property
    def _start(self) -> Any:
        def start(size: int, params: Any, tokens: jax.Array, first: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
            logits, cache = nnx.merge(self._program.graphdef, params).prefill(tokens, first)
            more = (0, size - tokens.shape[1])
            room = [(0, 0), (0, 0), more, (0, 0), (0, 0)]  # [layer, batch, time, heads, head_dim]
            return self._sampling.pick(logits, key), jax.tree.map(lambda kept: jnp.pad(kept, room), cache)

        return jax.jit(start, static_argnums=0)

    @cached_property
    def _follow(self) -> Any:
        def follow(
            params: Any, token: jax.Array, cache: Any, length: jax.Array, first: jax.Array, key: jax.Array
        ) -> tuple[jax.Array, Any]:
            network = nnx.merge(self._program.graphdef, params)
            logits, cache = network.extend(token[:, None], cache, length, first)
            return self._sampling.pick(logits, jax.random.fold_in(key, length)), cache

        return jax.jit(follow, donate_argnums=2)


def generate(
    program: Program,
    params: Any,
    prompt: np.ndarray,
    count: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    end: int | None = None,
) -> Iterator[int]:
    """Up to `count` tokens after one prompt, one by one; stops after `end`."""
    made = Generator(program, params, Sampling(temperature, seed=seed))
    for tokens in made([prompt], count, () if end is None else (end,)):
        yield int(tokens[0])


def length_for(size: int) -> int:
    """The next length that is compiled.

    >>> [length_for(size) for size in (1, 16, 17, 100)]
    [16, 16, 32, 128]
    """
    return max(LEAST, 1 << (size - 1).bit_length())
