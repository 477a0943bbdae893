"""A model, loss and data of your own, in Flax, with the config's memory savers, meshes and checkpoints.

    python scripts/own_model.py                                      # on this machine's devices
    python scripts/own_model.py --simulate 4 mesh.fsdp=4 memory.update=during
    jaxmem launch -n 2 -- python scripts/own_model.py              # or without launch, by Slurm

The code of the model does not know how its weights are sharded, recomputed or quantized.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxmem
from jaxmem.config.load import read_config
from jaxmem.distributed.join import joined
from jaxmem.training.run import Result

VOCAB, EMBED, HEADS, LAYERS, LENGTH = 256, 64, 4, 4, 64
SETTINGS = {
    "name": "own-model",
    "batch": {"global_size": 8},
    "mesh": {"fsdp": -1},
    "memory": {"remat": "full"},  # each block is recomputed in the backward pass
    "optimizer": {"name": "adamw8bit", "learning_rate": 3e-3},
    "train": {"steps": 40, "log_every": 10},
}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(EMBED, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, EMBED, decode=False, rngs=rngs)
        self.up = nnx.Linear(EMBED, 4 * EMBED, rngs=rngs)
        self.down = nnx.Linear(4 * EMBED, EMBED, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(x)))


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, tokens: jax.Array) -> jax.Array:  # [rows, length] -> [rows, length, vocab]
        x = self.embed(tokens)
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.embed.attend(x)


def loss(model: Transformer, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["inputs"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def batches(seed: int, rows: int) -> Iterator[dict[str, np.ndarray]]:
    """The rows of this process: bytes of a text file, and the next byte of each."""
    text = np.frombuffer(Path(jax.__file__).read_bytes(), np.uint8).astype(np.int32)
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(text) - LENGTH - 1, rows)
        tokens = np.stack([text[start : start + LENGTH + 1] for start in starts])
        yield {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def main(overrides: Sequence[str] = ()) -> Result:
    """Trains, or returns the result of a run that is complete."""
    settings = read_config(SETTINGS, overrides)
    with joined():
        data = batches(jax.process_index(), settings["batch"]["global_size"] // jax.process_count())
        return jaxmem.train(settings, model=Transformer, loss=loss, data=data, layers="blocks")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a model of this script.")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--simulate", type=int, metavar="N", help="train on N simulated CPU devices")
    options = parser.parse_intermixed_args()
    if options.simulate:
        jaxmem.simulate(options.simulate)
    raise SystemExit(main(options.overrides).exit_code)
