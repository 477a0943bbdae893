"""Generate tokens with a KV cache (`models/kv_cache.py`), which is updated in place.

Prompts are read in chunks, so that activations exist for only `generate.prefill_chunk` tokens and one layer, for any
length and depth. A conversation keeps its KV cache between turns, and reads only the new tokens of each turn.

Prompts of a batch are padded on the left, so that they end at the same position; no position attends to padding.
Lengths are rounded up, so that a growing conversation is compiled for a few lengths only.
"""

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

MIN_LENGTH = 16  # the shortest length that is compiled
ENDED = -1  # in place of a token: the text has ended before


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled: from logits / temperature, among the `top_k` most likely tokens, and among the
    most likely of these with total probability `top_p` (Holtzman et al., arXiv:1904.09751)."""

    temperature: float = 0.0  # 0: greedy
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0.0:
            raise UserError(f"temperature={self.temperature} must be at least 0; use 0 for the most likely token")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k} must be at least 1")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p={self.top_p} must be above 0 and at most 1")

    def sample(self, logits: jax.Array, key: jax.Array) -> jax.Array:
        """Token ids [rows] of logits [rows, vocabulary]."""
        logits = logits.astype(jnp.float32)
        if self.temperature == 0.0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits = jnp.where(logits < jax.lax.top_k(logits, self.top_k)[0][..., -1:], -jnp.inf, logits)
        if self.top_p < 1.0:
            descending = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
            share = jax.nn.softmax(descending, axis=-1)
            inside = jnp.cumsum(share, axis=-1) - share < self.top_p  # always includes the most likely token
            smallest = jnp.min(jnp.where(inside, descending, jnp.inf), axis=-1, keepdims=True)
            logits = jnp.where(logits < smallest, -jnp.inf, logits)
        return jax.random.categorical(key, logits).astype(jnp.int32)


@dataclass
class DecodingState:
    """The KV cache of a batch, and its positions in use."""

    first: jax.Array  # [rows]: the position at which each text begins, after its padding
    length: int = 0  # positions in use
    cache: KVCache | None = None


class Generator:
    """A program and its weights, ready to continue prompts. Compiled functions are kept for each length."""

    def __init__(self, program: Program, params: Any, sampling: Sampling = Sampling()) -> None:
        cfg: Config = program.cfg
        if cfg.model.family != "decoder":
            raise UserError(f"model.family={cfg.model.family} does not support generation; use a decoder")
        self._program, self._params, self._sampling = program, params, sampling
        self._cache_format, self._chunk = cfg.generate.kv_cache, cfg.generate.prefill_chunk
        own = nnx.merge(program.model.graphdef, program.spec.state.params).prompt
        # The tokens of a soft prompt come before every text.
        self.prompt_tokens = np.zeros(0, np.int32) if own is None else own.vocab + np.arange(own.length, dtype=np.int32)

    def __call__(self, prompts: Sequence[np.ndarray], count: int, ends: Collection[int] = ()) -> Iterator[np.ndarray]:
        """Yields the next token of all texts, [rows], up to `count` times; ENDED for a text after a token of `ends`."""
        if not all(map(len, prompts)):
            raise UserError("the prompt is empty; it must have at least one token")
        width = max(len(prompt) for prompt in prompts) + len(self.prompt_tokens)
        first = [width - len(self.prompt_tokens) - len(prompt) for prompt in prompts]
        tokens = np.zeros((len(prompts), width), np.int32)
        for row, start, prompt in zip(tokens, first, prompts, strict=True):
            row[start:] = [*self.prompt_tokens, *prompt]
        return self.extend(DecodingState(jnp.asarray(first, jnp.int32)), tokens, count, ends)

    def extend(
        self, state: DecodingState, tokens: np.ndarray, count: int, ends: Collection[int] = ()
    ) -> Iterator[np.ndarray]:
        """Reads tokens [rows, length], then yields up to `count` new tokens, which it reads too, except the last."""
        if count < 1:
            raise UserError(f"tokens={count} must be at least 1")
        rows, width = tokens.shape
        ended = np.zeros(rows, bool)
        with self._program.layout.for_generation(rows):
            *chunks, rest = (tokens[:, start : start + self._chunk] for start in range(0, width, self._chunk))
            padding = min(length_for(rest.shape[1]), self._chunk) - rest.shape[1]
            needed = state.length + width + max(count, padding)
            if state.cache is None:
                state.cache = self._empty(rows, cache_size_for(needed))
            elif needed > (room := capacity_of(state.cache)):  # room is doubled, so that few lengths are compiled
                state.cache = self._compiled_grow(state.cache, cache_size_for(max(needed, 2 * room)) - room)
            for chunk in chunks:
                self._step(state, chunk, self._chunk)
            token = self._step(state, np.pad(rest, ((0, 0), (0, padding))), rest.shape[1])
            for generated in range(1, count + 1):
                found = np.asarray(token)
                yield np.where(ended, ENDED, found)
                ended |= np.isin(found, list(ends))
                if ended.all() or generated == count:
                    return
                token = self._step(state, token[:, None], 1)

    def _step(self, state: DecodingState, tokens: Any, count: int) -> jax.Array:
        """Reads the first `count` of these tokens, and samples the next token of each text."""
        length, last = (jnp.asarray(x, jnp.int32) for x in (state.length, count - 1))
        key, tokens = jax.random.key(self._sampling.seed), jnp.asarray(tokens)
        token, state.cache = self._compiled_step(self._params, tokens, state.cache, length, state.first, last, key)
        state.length += count
        return token

    @cached_property
    def _compiled_step(self) -> Any:
        def step(
            params: Any, tokens: jax.Array, cache: KVCache, length: Any, first: jax.Array, last: Any, key: Any
        ) -> tuple[jax.Array, KVCache]:
            network = nnx.merge(self._program.model.graphdef, params)
            logits, cache = network.extend(tokens, cache, length, first, last)
            return self._sampling.sample(logits, jax.random.fold_in(key, length + last)), cache

        return jax.jit(step, donate_argnums=2)

    @cached_property
    def _empty(self) -> Any:
        network = nnx.merge(self._program.model.graphdef, self._program.spec.state.params)
        return jax.jit(partial(network.empty_cache, storage=self._cache_format), static_argnums=(0, 1))

    @cached_property
    def _compiled_grow(self) -> Any:
        return jax.jit(grow, static_argnums=1)


class Conversation:
    """One conversation, whose KV cache is kept while it grows."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._state = DecodingState(jnp.zeros(1, jnp.int32))
        self._tokens = np.zeros(0, np.int32)  # the tokens that were read

    def __call__(self, tokens: np.ndarray, count: int, ends: Collection[int] = ()) -> Iterator[int]:
        """Up to `count` tokens after these. A common beginning with the previous tokens is not read again."""
        if not len(tokens):
            raise UserError("the prompt is empty; it must have at least one token")
        tokens = np.append(self._generator.prompt_tokens, tokens).astype(np.int32)
        # The last token is read again for its logits.
        known = min(len(self._tokens), self._state.length, len(tokens) - 1)
        different = np.flatnonzero(self._tokens[:known] != tokens[:known])
        self._state.length = int(different[0]) if len(different) else known
        self._tokens = tokens
        for token in self._generator.extend(self._state, tokens[None, self._state.length :], count, ends):
            yield int(token[0])
            self._tokens = np.append(self._tokens, token)  # it is read before the next token is sampled


def length_for(size: int) -> int:
    """The number of tokens that a chunk is padded to.

    >>> [length_for(size) for size in (1, 16, 17, 100)]
    [16, 16, 32, 128]
    """
    return max(MIN_LENGTH, 1 << (size - 1).bit_length())


def cache_size_for(size: int) -> int:
    """The positions that a cache is padded to: at most a quarter more than `size`.

    >>> [cache_size_for(size) for size in (1, 100, 130, 161)]
    [16, 112, 160, 192]
    """
    step = max(MIN_LENGTH, 1 << max(0, (size - 1).bit_length() - 3))
    return -(-size // step) * step
