"""Continue texts with what was trained.

What was read leaves its keys and values (`models/kv_cache.py`); each further token reads them and adds its own.
Prompts are read in chunks, so that activations are those of `generate.prefill_chunk` tokens and one layer, whatever
the length and the depth. A conversation's cache is kept between its turns: of each only what is new is read.

Prompts of a batch end together: shorter ones have padding in front, which no position sees. Lengths are rounded up, so
that a conversation that grows is compiled for a few lengths only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmem.config import Config
from jaxmem.errors import UserError
from jaxmem.models.kv_cache import KVCache, capacity_of, grow
from jaxmem.step import Program

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


@dataclass
class Read:
    """What was read of some rows."""

    first: jax.Array  # of each, the place where it begins
    length: int = 0  # places that are taken
    cache: KVCache | None = None


class Generator:
    """A program's weights, ready to continue prompts. What it compiles for some lengths it keeps."""

    def __init__(self, program: Program, params: Any, sampling: Sampling = Sampling()) -> None:
        cfg: Config = program.cfg
        if cfg.model.family != "decoder":
            raise UserError(f"model.family: {cfg.model.family} makes no text; generate needs a decoder")
        self._program, self._params, self._sampling = program, params, sampling
        self._kept, self._chunk = cfg.generate.kv_cache, cfg.generate.prefill_chunk
        own = nnx.merge(program.model.graphdef, program.spec.state.params).prompt
        # Read before every text, as any tokens are.
        self.before = np.zeros(0, np.int32) if own is None else own.vocab + np.arange(own.length, dtype=np.int32)

    def __call__(self, prompts: Sequence[np.ndarray], count: int, ends: Collection[int] = ()) -> Iterator[np.ndarray]:
        """Up to `count` tokens after each prompt, those of all rows at a time; a row is over after one of `ends`."""
        if not all(map(len, prompts)):
            raise UserError("prompt: it is empty; give at least one token to start from")
        width = max(len(prompt) for prompt in prompts) + len(self.before)
        first = [width - len(self.before) - len(prompt) for prompt in prompts]
        tokens = np.zeros((len(prompts), width), np.int32)
        for row, start, prompt in zip(tokens, first, prompts, strict=True):
            row[start:] = [*self.before, *prompt]
        return self.more(Read(jnp.asarray(first, jnp.int32)), tokens, count, ends)

    def more(self, read: Read, tokens: np.ndarray, count: int, ends: Collection[int] = ()) -> Iterator[np.ndarray]:
        """Reads [rows, time] tokens, then gives up to `count` of its own, which it reads too, all but the last."""
        if count < 1:
            raise UserError(f"tokens: {count} is none; ask for at least 1")
        return self._more(read, tokens, count, ends)

    def _more(self, read: Read, tokens: np.ndarray, count: int, ends: Collection[int]) -> Iterator[np.ndarray]:
        rows, width = tokens.shape
        over = np.zeros(rows, bool)
        with self._program.layout.for_generation(rows):
            *chunks, rest = (tokens[:, start : start + self._chunk] for start in range(0, width, self._chunk))
            padding = min(length_for(rest.shape[1]), self._chunk) - rest.shape[1]
            most = read.length + width + max(count, padding)
            if read.cache is None:
                read.cache = self._empty(rows, room_for(most))
            elif most > (room := capacity_of(read.cache)):  # twice, so that few lengths are compiled
                read.cache = self._wider(read.cache, room_for(max(most, 2 * room)) - room)
            for chunk in chunks:
                self._step(read, chunk, self._chunk)
            token = self._step(read, np.pad(rest, ((0, 0), (0, padding))), rest.shape[1])
            for made in range(1, count + 1):
                found = np.asarray(token)
                yield np.where(over, ENDED, found)
                over |= np.isin(found, list(ends))
                if over.all() or made == count:
                    return
                token = self._step(read, token[:, None], 1)

    def _step(self, read: Read, tokens: Any, count: int) -> jax.Array:
        """Reads so many of these tokens, and draws the one that follows."""
        length, last = (jnp.asarray(x, jnp.int32) for x in (read.length, count - 1))
        key = jax.random.key(self._sampling.seed)
        token, read.cache = self._extend(self._params, jnp.asarray(tokens), read.cache, length, read.first, last, key)
        read.length += count
        return token

    @cached_property
    def _extend(self) -> Any:
        def extend(
            params: Any, tokens: jax.Array, cache: KVCache, length: Any, first: jax.Array, last: Any, key: Any
        ) -> tuple[jax.Array, KVCache]:
            network = nnx.merge(self._program.model.graphdef, params)
            logits, cache = network.extend(tokens, cache, length, first, last)
            return self._sampling.pick(logits, jax.random.fold_in(key, length + last)), cache

        return jax.jit(extend, donate_argnums=2)

    @cached_property
    def _empty(self) -> Any:
        network = nnx.merge(self._program.model.graphdef, self._program.spec.state.params)
        return jax.jit(partial(network.empty_cache, storage=self._kept), static_argnums=(0, 1))

    @cached_property
    def _wider(self) -> Any:
        return jax.jit(grow, static_argnums=1)


class Thread:
    """One conversation, whose beginning stays read while it grows."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._read = Read(jnp.zeros(1, jnp.int32))
        self._tokens = np.zeros(0, np.int32)  # that were read

    def __call__(self, tokens: np.ndarray, count: int, ends: Collection[int] = ()) -> Iterator[int]:
        """Up to `count` tokens after these, which may begin as those before them did: that much is not read again."""
        if not len(tokens):
            raise UserError("prompt: it is empty; give at least one token to start from")
        tokens = np.append(self._generator.before, tokens).astype(np.int32)
        known = min(len(self._tokens), self._read.length, len(tokens) - 1)  # the last one's logits are wanted
        apart = np.flatnonzero(self._tokens[:known] != tokens[:known])
        self._read.length = int(apart[0]) if len(apart) else known
        self._tokens = tokens
        for made in self._generator.more(self._read, tokens[None, self._read.length :], count, ends):
            yield int(made[0])
            self._tokens = np.append(self._tokens, made)  # read before the next one is made


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
    """The next number of tokens that is compiled.

    >>> [length_for(size) for size in (1, 16, 17, 100)]
    [16, 16, 32, 128]
    """
    return max(LEAST, 1 << (size - 1).bit_length())


def room_for(size: int) -> int:
    """And of a cache: a quarter more than is asked for at most.

    >>> [room_for(size) for size in (1, 100, 130, 161)]
    [16, 112, 160, 192]
    """
    step = max(LEAST, 1 << max(0, (size - 1).bit_length() - 3))
    return -(-size // step) * step
