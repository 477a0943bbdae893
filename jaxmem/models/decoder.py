"""Decoder-only language models: Llama, Mistral, Qwen, Gemma, OLMo 2, Phi, Mixtral, gpt-oss, DeepSeek-V2."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxmem.config import networks
from jaxmem.config.names import stack_name
from jaxmem.kernels.scopes import purpose
from jaxmem.models.attention import Attention, AttentionSpec, Tokens, context_order
from jaxmem.models.block import Block, GatedMlp
from jaxmem.models.embedding import Embedding
from jaxmem.models.layers import Features, Ids, RMSNorm, RowKeys, soft_cap, split_keys
from jaxmem.models.linear import Linear
from jaxmem.models.network import (
    STATISTICS,
    Execution,
    Flow,
    Layers,
    MatrixPart,
    Network,
    NetworkPart,
    Part,
    run_parts,
)
from jaxmem.models.rope import Angles, angles, document_lengths, select
from jaxmem.sharding.arrays import constrain
from jaxmem.sharding.layout import current
from jaxmem.sharding.trees import Path
from jaxmem.stack.apply import stack_call, stacked
from jaxmem.stack.call import StackCall, StackOptions, creating_in
from jaxmem.typing import Tree


class _SharedInputs(NamedTuple):
    """Inputs of attention that all layers share."""

    angles: Angles
    sliding: Angles | None  # the angles of layers with a window, if they differ
    segment_ids: Ids | None

    def of_layer(self, has_window: Bool[Array, ""] | None) -> Tokens:
        chosen = self.angles
        if has_window is not None and self.sliding is not None:
            chosen = select(has_window, self.sliding, self.angles)
        return Tokens(chosen, self.segment_ids, has_window)


class Decoder(Network):
    """A transformer with causal attention, gated MLPs or experts, and rotary positions.

    Layers may differ in their window and their rotary positions; whether a layer has the window is an input of the
    layer. The weights of such layers have the same shapes, so they are one stack, `blocks`, and one program. If only
    some layers have experts, each kind of layer has stacks of its own (`config.names.layer_stacks`).
    """

    def __init__(self, cfg: networks.Decoder, rngs: nnx.Rngs, execution: Execution = Execution()):
        self.cfg = cfg
        self.execution = execution
        self.embedding = Embedding(rngs, cfg.vocab, cfg.embed)
        *before, last = self._stacks.items()
        with creating_in(None):  # only the layers of the last stack are divided among pipeline stages
            for name, stacks in before:
                setattr(self, name, stacked(partial(self._layers, stacks), len(stacks[0]), rngs))
        setattr(self, last[0], stacked(partial(self._layers, last[1]), len(last[1][0]), rngs))
        self.norm = self._norm()
        self.head = None if cfg.tie_embeddings else Linear(rngs, cfg.embed, cfg.vocab, ("embed", "vocab"))
        self.prompt: Any = nnx.data(None)  # trainable embeddings before the tokens (jaxmem.adapters)

    @property
    def _stacks(self) -> dict[str, tuple[range, ...]]:
        """The layers of each stack, or of each group of stacks, by its name."""
        groups = self.cfg.stacks
        if len(groups) == 1:
            return {"blocks": groups[0]}
        return {f"blocks{stack_name(range(stacks[0].start, stacks[-1].stop))}": stacks for stacks in groups}

    def _layers(self, stacks: tuple[range, ...], rngs: nnx.Rngs) -> nnx.Module:
        """One layer of a stack, or, for a group of stacks, one repetition of the pattern of their layers, such as a
        dense and an expert layer, which is treated as one layer."""
        blocks = {stack_name(layers): self._block(rngs, self.cfg.has_experts[layers[0]]) for layers in stacks}
        return nnx.Dict(blocks) if len(blocks) > 1 else blocks.popitem()[1]

    def _block(self, rngs: nnx.Rngs, has_experts: bool) -> Block:
        cfg = self.cfg
        windows = [window for window in cfg.windows if window is not None]
        spec = AttentionSpec(
            *(cfg.embed, cfg.heads, cfg.kv_heads, cfg.head_dim),
            causal=True,
            window=cfg.window if windows else None,
            window_share=(len(windows), cfg.layers),
            scale=self._score_scale,
            soft_cap=cfg.attention_soft_cap,
            bias=cfg.attention_bias,
            output_bias=cfg.output_bias,
            qk_norm=cfg.norm_epsilon if cfg.qk_norm else None,
            joint_qk_norm=cfg.qk_norm == "all_heads",
            norm_offset=float(cfg.norm_offset),
            sinks=cfg.attention_sinks,
            values=None if cfg.latent is None else cfg.latent.value_dim,
        )
        # Attention is created before the MLP: this order determines the random weights.
        if cfg.latent is None:
            attention = Attention(rngs, spec, self.execution)
        else:
            from jaxmem.models.latent_attention import LatentAttention

            attention = LatentAttention(rngs, spec, cfg.latent, self.execution)
        mlp: Any
        if has_experts:
            from jaxmem.models.experts import Experts

            mlp = Experts(rngs, cfg, self.execution.experts)
        else:
            width = cfg.mlp if cfg.experts is None else cfg.experts.dense_mlp
            assert width is not None
            mlp = GatedMlp(rngs, cfg.embed, width, bias=cfg.mlp_bias, activation=cfg.activation)
        before = cfg.norms in ("pre", "both")
        after = cfg.norms in ("post", "both")
        pairs = [(self._norm(), self._norm()) if has_norms else (None, None) for has_norms in (before, after)]
        return Block(attention, mlp, pairs[0], cfg.dropout, pairs[1])

    @property
    def _score_scale(self) -> float | None:
        """The factor on attention scores; None: 1 / sqrt(head_dim)."""
        cfg = self.cfg
        if cfg.latent is not None and cfg.rope.mscale_all_dim is not None:
            return cfg.head_dim**-0.5 * cfg.rope.magnitude(cfg.rope.mscale_all_dim) ** 2
        return None if cfg.query_pre_attn_scalar is None else cfg.query_pre_attn_scalar**-0.5

    def _norm(self) -> RMSNorm:
        return RMSNorm(self.cfg.embed, self.cfg.norm_epsilon, offset=float(self.cfg.norm_offset))

    def __call__(
        self, tokens: Ids, positions: Ids | None = None, segment_ids: Ids | None = None, keys: RowKeys | None = None
    ) -> Float[Array, "batch time vocab"]:
        """Logits of the token after each position. `keys` enables dropout."""
        return self.logits(self.features(tokens, positions, segment_ids, keys))

    def parts(
        self, tokens: Ids, positions: Ids | None = None, segment_ids: Ids | None = None, keys: RowKeys | None = None
    ) -> list[NetworkPart]:
        """The parts, of which the last one returns Flow(the input of the output projection, statistics of routers)."""
        if self.prompt is not None:
            tokens, positions, segment_ids = self._after_prompt(tokens, positions, segment_ids)
        mixtures = sum(self.cfg.has_experts)

        def begin(network: Decoder, flow: Flow) -> Flow:
            x = network._after_lookup(tokens, flow.x)
            # Statistics are summed per token, next to x, so that every way to apply a stack treats them like x.
            return flow._replace(x=(x, _no_statistics(x) if mixtures else None))

        def layer(
            block: Block, carry: tuple[Features, Tree], layer_inputs: Tree, tokens: _SharedInputs
        ) -> tuple[Features, Tree]:
            keys, has_window = layer_inputs
            x, _, router = block(carry[0], tokens.of_layer(has_window), keys)
            return x, carry[1] if router is None else carry[1] + router / mixtures

        def finish(network: Decoder, flow: Flow) -> Flow:
            carry = flow.x
            if network.prompt is not None:
                carry = jax.tree.map(lambda x: x[:, network.prompt.length :], carry)
            return Flow(network.norm(carry[0]), carry[1])

        inputs = None if keys is None else split_keys(keys, self.cfg.layers), self._has_window
        shared = self._shared(tokens, positions, segment_ids)
        layers = self._layers_of(layer, inputs, shared, self.execution.stack)
        return [self._lookup(tokens), Part(begin), *layers, Part(finish)]

    def _layers_of(
        self, layer: Callable[..., Any], inputs: Tree, shared: Tree, options: StackOptions
    ) -> list[NetworkPart]:
        """The stacks, with `layer(block, x, input, shared)` for each layer; `inputs` has an entry for each layer."""

        def take(layers: range) -> Tree:
            part = slice(layers.start, layers.stop, layers.step)
            return inputs if len(layers) == self.cfg.layers else jax.tree.map(lambda x: x[part], inputs)

        def part(name: str, stacks: tuple[range, ...]) -> Layers:
            def group(blocks: Tree, x: Tree, inputs: Tree, shared: Tree) -> Tree:
                for layers, layer_inputs in zip(stacks, inputs, strict=True):
                    block = blocks if len(stacks) == 1 else getattr(blocks, stack_name(layers))
                    x = layer(block, x, layer_inputs, shared)
                return x, None

            # Pipeline stages divide the layers of the last stack among them; all stages compute the layers before it.
            is_last = name == [*self._stacks][-1]
            stack_options = options if is_last else dataclasses.replace(options, order=None)
            stack_inputs = tuple(map(take, stacks))

            def call(network: Decoder, flow: Flow) -> StackCall:
                blocks = getattr(network, name)
                return stack_call(blocks, group, flow.x, stack_inputs, shared, options=stack_options)

            return Layers((name,), call)

        return [part(name, stacks) for name, stacks in self._stacks.items()]

    def _after_prompt(
        self, tokens: jax.Array, positions: jax.Array | None, segment_ids: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """Prepends the tokens of the prompt to each sequence. They belong to its first document."""
        rows = tokens.shape[0]
        length = self.prompt.length

        def prepend(prompt: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.concatenate([jnp.broadcast_to(prompt, (rows, length)), x], axis=1)

        if positions is not None:
            positions = prepend(jnp.arange(length, dtype=jnp.int32), positions + length)
        segment_ids = None if segment_ids is None else prepend(segment_ids[:, :1], segment_ids)
        return prepend(self.prompt.tokens, tokens), positions, segment_ids

    @purpose("logits")
    def logits(self, x: Features) -> Float[Array, "batch time vocab"]:
        x = constrain(x, "vocab_batch", "vocab_time", "embed")
        y = self.embedding.project(x) if self.head is None else self.head(x)
        if (cap := self.cfg.logit_soft_cap) is not None:
            y = soft_cap(y.astype(jnp.float32), cap)  # as in slices of the vocabulary
        # Removes the padding of a vocabulary whose size is not divisible by the number of devices.
        return constrain(y, "vocab_batch", "vocab_time", "vocab")[..., : self.cfg.vocab]

    @property
    def projection_path(self) -> Path:
        """The path of the weight of the output projection."""
        return ("embedding" if self.head is None else "head", "weight")

    @property
    def projection(self) -> nnx.Param | None:
        """The weight of the output projection; None where an adapter contributes to the logits."""
        if self.head is None:
            return self.embedding.weight
        return self.head.weight if self.head.lora is None else None

    def empty_cache(self, rows: int, capacity: int, storage: str = "full") -> Tree:
        """A KV cache for `rows` texts of up to `capacity` tokens, stored in full precision or in int8."""
        from jaxmem.models.kv_cache import empty_cache

        return empty_cache(self.cfg, rows, capacity, self.execution.dtype, storage)

    def extend(
        self,
        tokens: Ids,
        cache: Tree,
        length: Int[Array, ""],
        first: Int[Array, "batch"] | None = None,
        last: Int[Array, ""] | None = None,
        lengths: Int[Array, "batch"] | None = None,
    ) -> tuple[Float[Array, "batch vocab"], Any]:
        """Reads `tokens` after those that the cache has.

        Args:
            tokens: [batch, time].
            cache: Keys and values of earlier tokens.
            length: The index in the cache at which `tokens` start.
            first: The index of the first token of each text that is not padding (texts are padded on the left).
            last: The index of the token whose logits are returned, by default the last; tokens after it are padding,
                which the next call overwrites.
            lengths: The number of tokens of each text, by default up to the last of `tokens`; if its factors of
                longrope differ from those of the cache, the caller reads the text again from its beginning.

        Returns:
            The logits after `tokens`, and the cache with `tokens` written in place.
        """
        from jaxmem.models.kv_cache import CacheSlot

        positions = jnp.broadcast_to(length + jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        if first is not None:  # padding is before the first token, so its position does not matter
            positions = jnp.maximum(positions - first[:, None], 0)
        shared = self._shared(tokens, positions, lengths=None if lengths is None else lengths[:, None])

        def layer(block: Block, carry: tuple[jax.Array, Tree], layer_inputs: Tree, _: None) -> Tree:
            (x, cache), (i, has_window) = carry, layer_inputs
            return block(x, shared.of_layer(has_window), slot=CacheSlot(cache, i, length, first))[:2]

        layers = jnp.arange(self.cfg.layers, dtype=jnp.int32), self._has_window
        # Without a backward pass nothing is recomputed.
        options = dataclasses.replace(self.execution.stack, remat="none")
        x = self._after_lookup(tokens, self._lookup(tokens).run(self, Flow(None)).x)
        x, cache = run_parts(self, self._layers_of(layer, layers, None, options), Flow((x, cache))).x
        x = x[:, -1:] if last is None else jax.lax.dynamic_slice_in_dim(x, last, 1, axis=1)
        return self.logits(self.norm(x))[:, 0], cache

    def _lookup(self, tokens: Ids) -> MatrixPart:
        """The lookup of the embeddings of tokens. Tokens of a prompt, which are not in the vocabulary, are replaced."""
        ids = tokens if self.prompt is None else jnp.minimum(tokens, self.cfg.vocab - 1)
        dtype = self.execution.dtype
        return MatrixPart(
            lambda network, flow: flow._replace(x=network.embedding(ids, dtype)),
            ("embedding", "weight"),
            lambda network, _: network.embedding.separate(ids, dtype),
        )

    def _after_lookup(self, tokens: Ids, x: Features) -> Features:
        """The input of the first layer, from the embeddings of tokens."""
        dtype = self.execution.dtype
        # The scale is rounded to the compute dtype, as in transformers.
        x = x * jnp.asarray(self.embedding_scale, dtype) if self.cfg.scale_embeddings else x
        if self.prompt is None:
            return x
        return constrain(self.prompt(tokens, x, dtype), "batch", "stream", "embed")

    @property
    def embedding_scale(self) -> float:
        """The factor of the embeddings of tokens, but not of a prompt."""
        return self.cfg.embed**0.5 if self.cfg.scale_embeddings else 1.0

    @property
    def _has_window(self) -> Bool[Array, "layers"] | None:
        """Whether each layer has the window; None if layers do not differ."""
        windows = self.cfg.windows
        return jnp.asarray([window is not None for window in windows]) if self.cfg.windows_differ else None

    def _shared(
        self,
        tokens: Ids,
        positions: Ids | None,
        segment_ids: Ids | None = None,
        lengths: Int[Array, "batch #time"] | None = None,
    ) -> _SharedInputs:
        cfg = self.cfg
        if positions is None:
            order = context_order(current(), tokens.shape[1], self.execution.context_method, self.cfg.window)
            row = jnp.arange(tokens.shape[1], dtype=jnp.int32) if order is None else jnp.asarray(order)
            positions = jnp.broadcast_to(row, tokens.shape)
        rotated = cfg.head_dim if cfg.latent is None else cfg.latent.rope_dim
        lengths = document_lengths(positions, segment_ids) if lengths is None else lengths
        first, *others = (angles(positions, rope, rotated, lengths) for rope in cfg.ropes)
        return _SharedInputs(first, others[0] if others else None, segment_ids)


def _no_statistics(x: Features) -> Float[Array, "batch time statistics"]:
    """Zeros for each token of x, sharded like x."""
    # Computed from x, so that a vmap over micro-batches maps them too.
    zeros = jnp.where(False, x[..., :1].astype(jnp.float32), jnp.zeros(len(STATISTICS)))
    return constrain(zeros, "batch", "stream", None)
