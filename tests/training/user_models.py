"""Models, losses and data of a script, and the same training as a loop of Flax and optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

ROWS = 16
IMAGES = np.random.default_rng(0).normal(size=(4, ROWS, 4, 4, 1)).astype(np.float32)
DATA = [{"image": x, "label": (x.sum((1, 2, 3)) > 0).astype(np.int32)} for x in IMAGES]


def loss(model, batch):
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), {"accuracy": (logits.argmax(-1) == batch["label"]).mean()}


def settings(tmp_path, **changes):
    return {
        "name": "own",
        "output": str(tmp_path),
        "batch": {"global_size": ROWS},
        "mesh": {"fsdp": 8},
        "train": {"steps": 3, "log_every": 1},
        **changes,
    }


@jax.numpy_dtype_promotion("standard")
def hand_written(model, loss, data, optimizer, steps, accumulate=1):
    """The losses and the trained module of a loop of Flax and optax on one device. Dropout has the keys of `train`."""
    module = nnx.jit(lambda: model(nnx.Rngs(jax.random.key(0))))()
    tx = nnx.Optimizer(module, optimizer, wrt=nnx.Param)

    @nnx.jit
    def step(module, tx, batch, number):
        key = jax.random.split(jax.random.fold_in(jax.random.key(0), number), (accumulate, ROWS // accumulate))
        module.train()
        total, grads = 0.0, None
        for i in range(accumulate):
            for n, (_, variable) in enumerate(nnx.to_flat_state(nnx.state(module, nnx.RngKey))):
                variable.set_value(jax.random.fold_in(key[i, 0], n))
            for _, variable in nnx.to_flat_state(nnx.state(module, nnx.RngCount)):
                variable.set_value(jnp.zeros_like(variable.get_value()))
            part = {name: jnp.split(x, accumulate)[i] for name, x in batch.items()}
            one, more = nnx.value_and_grad(lambda module, part=part: loss(module, part)[0])(module)
            total += one / accumulate
            grads = more if grads is None else jax.tree.map(jnp.add, grads, more)
        tx.update(module, jax.tree.map(lambda g: g / accumulate, grads))
        return total

    losses = [float(step(module, tx, data[number % len(data)], number)) for number in range(steps)]
    return losses, module


TOKENS = [{"tokens": np.random.default_rng(i).integers(0, 32, (ROWS, 9)).astype(np.int32)} for i in range(2)]


class TransformerBlock(nnx.Module):
    def __init__(self, rngs, mlp=32):
        self.norm1, self.norm2 = nnx.LayerNorm(16, rngs=rngs), nnx.RMSNorm(16, rngs=rngs)
        # A new initializer for each block, as Flax's examples have it.
        start = nnx.initializers.normal(0.1)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, kernel_init=start, rngs=rngs)
        self.gate, self.up = nnx.Linear(16, mlp, rngs=rngs), nnx.Einsum("btd,df->btf", (16, mlp), rngs=rngs)
        self.down, self.dropout = nnx.Linear(mlp, 16, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.dropout(self.attention(self.norm1(x), mask=mask))
        normal = self.norm2(x)
        return x + self.dropout(self.down(nnx.gelu(self.gate(normal)) * self.up(normal)))


class Transformer(nnx.Module):
    """Like the language models of Flax's examples: learned positions, blocks in a list, tied embeddings."""

    def __init__(self, rngs, layers=2):
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        self.positions = nnx.Param(0.02 * jax.random.normal(rngs.params(), (8, 16)))
        self.blocks = nnx.List([TransformerBlock(rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(16, rngs=rngs)

    def __call__(self, tokens):
        x, mask = self.embed(tokens) + self.positions[...], nnx.make_causal_mask(tokens)
        return self.embed.attend(self.norm(self.all_blocks(x, mask)))

    def all_blocks(self, x, mask):
        for block in self.blocks:
            x = block(x, mask)
        return x


def without_dropout(rngs):
    network = Transformer(rngs)
    for block in network.blocks:
        block.dropout.rate = 0.0
    return network


def next_token(model, batch):
    logits = model(batch["tokens"][:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean(), {}


LM = {"model": without_dropout, "loss": next_token, "data": TOKENS}


class Statistics(nnx.Module):
    """Blocks with BatchNorm."""

    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.BatchNorm(1, rngs=rngs) for _ in range(2)])
        self.out = nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x.reshape(len(x), -1))
