"""The share of one device of a micro-batch: the sequences, tokens, heads and vocabulary entries that it computes."""

import functools
import math
from dataclasses import dataclass

import jax
from jax.typing import DTypeLike

from jaxmem.config.mesh import Mesh, Rules
from jaxmem.config.networks import Decoder, Model, Vit
from jaxmem.config.sections import Config
from jaxmem.sharding.table import Table, has_vocab_on_stages, make_tables


@dataclass(frozen=True)
class DeviceShare:
    """One device of a mesh, in the forward and backward pass of a micro-batch."""

    model: Model
    mesh: Mesh
    rules: Rules
    sequences: float  # of a micro-batch, on all devices
    length: int  # tokens of a sequence
    prompt: int  # trainable tokens before each sequence
    vocab_stages: int  # pipeline stages that the embedding and output matrices are divided among

    @property
    def rows(self) -> float:
        """Sequences. With `mesh.context`, a part of a sequence counts as a fraction."""
        return self.sequences / (self.mesh.row_shards * self.mesh.context)

    @property
    def complete_rows(self) -> int:
        """Sequences of which the device has all positions, or a part. A mesh axis of -1 counts as one device."""
        return max(1, int(self.sequences // max(1, self.mesh.row_shards)))

    @property
    def row_length(self) -> int:
        """Tokens of a sequence, including the prompt."""
        return self.length + self.prompt

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch, without prompts."""
        return self.rows * self.length

    def stream(self, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        """The residual stream of a decoder between layers, [rows, time, embed]."""
        rows = max(round(self.rows * self.mesh.context), 1)
        time = self.length // (self.mesh.context * self.mesh.tensor)
        return jax.ShapeDtypeStruct((rows, time, self.decoder.embed), dtype)

    def shards(self, axis: str) -> int:
        """The number of devices over which a logical axis of the weights is sharded for computation."""
        return math.prod(getattr(self.mesh, over) for over in _compute_table(self.rules)[axis])

    @property
    def heads(self) -> int:
        """Query heads of a decoder or ViT that the device computes. A mesh axis of -1 counts as one device."""
        assert isinstance(self.model, Decoder | Vit)
        return self.model.heads // self._head_shards

    @property
    def kv_heads(self) -> int:
        """KV heads of a decoder that the device computes: they are repeated if `tensor` does not divide them."""
        shards = self._head_shards
        return math.lcm(self.decoder.kv_heads, shards) // shards

    @property
    def _head_shards(self) -> int:
        return max(1, self.shards("heads"))

    @property
    def vocab(self) -> int:
        """Vocabulary entries for which the device computes logits; 0 without a vocabulary."""
        if not isinstance(self.model, Decoder):
            return 0
        return -(-self.model.vocab // (self.vocab_stages * self.shards("vocab")))

    @property
    def decoder(self) -> Decoder:
        assert isinstance(self.model, Decoder)
        return self.model

    @property
    def part_of_model(self) -> Model:
        """The model with the heads, hidden units and vocabulary that `tensor` and pipeline stages leave to a device."""
        model = self.model
        tensor = self.mesh.tensor
        if not isinstance(model, Decoder):
            return model
        vocab = model.vocab // self.vocab_stages
        if tensor == 1:
            return model.replace(vocab=vocab)
        experts = model.experts
        if experts is not None:
            widths = {"shared": experts.shared, "dense_mlp": experts.dense_mlp}
            experts = experts.replace(**{name: width and width // tensor for name, width in widths.items()})
        heads = {"heads": self.heads, "kv_heads": self.kv_heads}
        return model.replace(**heads, mlp=model.mlp // tensor, vocab=-(-vocab // tensor), experts=experts)


def share_of(cfg: Config) -> DeviceShare:
    """The share of one device of a config."""
    sequences = cfg.batch.global_size / cfg.batch.accumulate
    stages = cfg.mesh.stage if has_vocab_on_stages(cfg.model, cfg.mesh, cfg.rules, cfg.adapter) else 1
    length = cfg.data.sequence_length
    return DeviceShare(cfg.model, cfg.mesh, cfg.rules, sequences, length, cfg.prompt_length, stages)


@functools.lru_cache(maxsize=256)
def _compute_table(rules: Rules) -> Table:
    return make_tables(zero=0, section=rules).compute
