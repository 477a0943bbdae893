"""Generate tokens with a KV cache (`models/kv_cache.py`), which is updated in place.

Prompts are read in chunks, so that activations exist for only `generate.prefill_chunk` tokens and one layer, for any
length and depth. A conversation keeps its KV cache between turns, and reads only the new tokens of each turn.

Prompts of a batch are padded on the left, so that they end at the same position; no position attends to padding.
Lengths are rounded up, so that a growing conversation is compiled for a few lengths only.

With `longrope`, a text that becomes longer than the original length is read again with its long factors.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxmem.config import Config
from jaxmem.errors import UserError
from jaxmem.models.kv_cache import KVCache, capacity_of, grow
from jaxmem.step.programs import Program
from jaxmem.typing import Tree

MIN_LENGTH = 16  # the shortest length that is compiled
ENDED = -1  # in place of a token: the text has ended before
MIN_TEMPERATURE = float(jnp.finfo(jnp.float32).tiny)


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
        # The largest is 0, so that a low temperature makes the others infinite, not this one.
        logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / max(self.temperature, MIN_TEMPERATURE)
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
    """The tokens that a batch has read, and their KV cache."""

    first: np.ndarray  # [rows]: the index of the first token of each text, after its padding
    tokens: np.ndarray  # [rows, length]
    cache: KVCache | None = None
    is_long: np.ndarray | None = None  # whether the cache was computed with the long factors of longrope
    batch: int = 0  # the number of the batch among those of a call, which are sampled independently

    @classmethod
    def of_rows(cls, first: Sequence[int], batch: int = 0) -> Self:
        """Of texts of which no token is read yet."""
        return cls(np.array(first, np.int32), np.zeros((len(first), 0), np.int32), batch=batch)

    @property
    def length(self) -> int:
        return self.tokens.shape[1]


class Generator:
    """A program and its weights, ready to continue prompts. Compiled functions are kept for each length."""

    def __init__(self, program: Program, params: Tree, sampling: Sampling = Sampling()) -> None:
        cfg: Config = program.cfg
        if cfg.model.family != "decoder":
            raise UserError(f"model.family={cfg.model.family} does not support generation; use a decoder")
        self._program = program
        self._params = params
        self._sampling = sampling
        self._cache_format = cfg.generate.kv_cache
        self._chunk = cfg.generate.prefill_chunk
        prompt = nnx.merge(program.model.graphdef, program.spec.state.params).prompt
        # The tokens of a soft prompt come before every text.
        self.prompt_tokens = (
            np.zeros(0, np.int32) if prompt is None else prompt.vocab + np.arange(prompt.length, dtype=np.int32)
        )

    def __call__(
        self, prompts: Sequence[np.ndarray], count: int, ends: Collection[int] = (), *, batch: int = 0
    ) -> Iterator[np.ndarray]:
        """Yields the next token of all texts, [rows], up to `count` times; ENDED for a text after a token of `ends`.
        Equal prompts have other random numbers in each row and in each `batch`."""
        if not all(map(len, prompts)):
            raise UserError("the prompt is empty; it must have at least one token")
        width = max(len(prompt) for prompt in prompts) + len(self.prompt_tokens)
        first = [width - len(self.prompt_tokens) - len(prompt) for prompt in prompts]
        tokens = np.zeros((len(prompts), width), np.int32)
        for row, start, prompt in zip(tokens, first, prompts, strict=True):
            row[start:] = [*self.prompt_tokens, *prompt]
        return self.extend(DecodingState.of_rows(first, batch), tokens, count, ends)

    def extend(
        self, state: DecodingState, tokens: np.ndarray, count: int, ends: Collection[int] = ()
    ) -> Iterator[np.ndarray]:
        """Reads tokens [rows, length], then yields up to `count` new tokens, which it reads too, except the last."""
        if count < 1:
            raise UserError(f"tokens={count} must be at least 1")
        ended = np.zeros(len(tokens), bool)
        token = self._read(state, tokens, count)
        for generated in range(1, count + 1):
            yield np.where(ended, ENDED, token)
            ended |= np.isin(token, list(ends))
            if ended.all() or generated == count:
                return
            token = self._read(state, token[:, None])

    def _read(self, state: DecodingState, tokens: np.ndarray, count: int = 0) -> np.ndarray:
        """Reads tokens [rows, length] in chunks, and samples the next token of each text. The cache gets room for
        `count` tokens after these."""
        lengths = state.length + tokens.shape[1] - state.first
        is_long = self._is_long(lengths)
        if state.is_long is not None and (is_long != state.is_long).any():
            # Other factors change the keys and values of all tokens, so all are read again, as in transformers.
            tokens = np.concatenate([state.tokens, tokens], axis=1)
            state.tokens = state.tokens[:, :0]
        state.is_long = is_long
        chunks = [tokens[:, start : start + self._chunk] for start in range(0, tokens.shape[1], self._chunk)]
        last_chunk = chunks.pop()
        last_length = last_chunk.shape[1]
        padding = 0 if last_length == 1 else min(length_for(last_length), self._chunk) - last_length
        with self._program.layout.for_generation(len(tokens)):  # not around a yield: other generators may run there
            self._make_room(state, state.length + tokens.shape[1] + max(count, padding))
            for chunk in chunks:
                self._step(state, chunk, self._chunk, lengths)
            padded = np.pad(last_chunk, ((0, 0), (0, padding)))
            return np.asarray(self._step(state, padded, last_length, lengths))

    def _is_long(self, lengths: np.ndarray) -> np.ndarray:
        """Whether texts of these lengths have the long factors of each longrope: [rows, ropes]."""
        ropes = self._program.cfg.model.ropes  # type: ignore[union-attr]  # a decoder
        return lengths[:, None] > [rope.original_length for rope in ropes if rope.scaling == "longrope"]

    def _make_room(self, state: DecodingState, needed: int) -> None:
        """Gives the cache room for `needed` tokens."""
        if state.cache is None:
            state.cache = self._empty(len(state.first), cache_size_for(needed))
            return
        room = capacity_of(state.cache)
        if needed > room:  # the cache is doubled, so that few lengths are compiled
            state.cache = self._compiled_grow(state.cache, cache_size_for(max(needed, 2 * room)) - room)

    def _step(self, state: DecodingState, tokens: np.ndarray, count: int, lengths: np.ndarray) -> jax.Array:
        """Reads the first `count` of these tokens, and samples the next token of each text. `lengths`: the number of
        tokens of each text."""
        numbers = [jnp.asarray(x, jnp.int32) for x in (state.length, state.first, count - 1, lengths, state.batch)]
        token, state.cache = self._compiled_step(self._params, jnp.asarray(tokens), state.cache, *numbers)
        state.tokens = np.concatenate([state.tokens, tokens[:, :count]], axis=1)
        return token

    @cached_property
    def _compiled_step(self) -> Tree:
        def step(params: Tree, tokens: jax.Array, cache: KVCache, *numbers: jax.Array) -> tuple[jax.Array, KVCache]:
            length, first, last, lengths, batch = numbers
            network = nnx.merge(self._program.model.graphdef, params)
            logits, cache = network.extend(tokens, cache, length, first, last, lengths)
            key = jax.random.fold_in(jax.random.key(self._sampling.seed), length + last)
            # The first batch has the same key as a text that is generated alone.
            key = jnp.where(batch > 0, jax.random.fold_in(key, batch), key)
            return self._sampling.sample(logits, key), cache

        # Every process reads the tokens of all rows.
        return jax.jit(step, donate_argnums=2, out_shardings=(self._program.layout.replicated(), None))

    @cached_property
    def _empty(self) -> Tree:
        network = nnx.merge(self._program.model.graphdef, self._program.spec.state.params)
        return jax.jit(partial(network.empty_cache, storage=self._cache_format), static_argnums=(0, 1))

    @cached_property
    def _compiled_grow(self) -> Tree:
        return jax.jit(grow, static_argnums=1)


class Conversation:
    """One conversation, whose KV cache is kept while it grows."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._state = DecodingState.of_rows([0])

    def __call__(self, tokens: np.ndarray, count: int, ends: Collection[int] = ()) -> Iterator[int]:
        """Up to `count` tokens after these. A common beginning with the previous tokens is not read again."""
        if not len(tokens):
            raise UserError("the prompt is empty; it must have at least one token")
        tokens = np.append(self._generator.prompt_tokens, tokens).astype(np.int32)
        known = min(self._state.length, len(tokens) - 1)  # the last token is read again for its logits
        different = np.flatnonzero(self._state.tokens[0, :known] != tokens[:known])
        known = int(different[0]) if len(different) else known
        self._state.tokens = self._state.tokens[:, :known]
        for token in self._generator.extend(self._state, tokens[None, known:], count, ends):
            yield int(token[0])


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
