"""What each kind of layer keeps for the backward pass, from the compiled gradient of a stack of them.

    python -m tests.stack.saved_activations                      a table, as in docs/activations.md
    python -m tests.stack.saved_activations --target cpu --json

Eight layers of a kind after each other in a loop, in bfloat16, compiled for a target that need not be here: what lies
in the loop's stacks when memory is fullest was kept, layer by layer. A second of a core for each.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from jaxmem.machine import devices

LAYERS, ROWS, TIME, EMBED, HIDDEN, HEADS, KEY_HEADS, VOCAB, SIDE = 8, 2, 512, 256, 704, 4, 2, 1408, 32


@dataclass(frozen=True)
class Kind:
    """`make` of random numbers gives a layer, None: it has no weights, and is a number; `apply` of it and x gives x
    again."""

    make: Callable[[Any], Any] | None
    apply: Callable[[Any, Any], Any]
    frozen: bool = False
    image: bool = False


def kinds() -> dict[str, Kind]:
    import jax
    import jax.numpy as jnp

    from jaxmem.models import attention as attentions
    from jaxmem.models import block, cross_entropy, image_networks, layers
    from jaxmem.models.embedding import Embedding
    from jaxmem.models.linear import Linear
    from jaxmem.models.network import Execution

    def attention(rngs: Any) -> Any:
        spec = attentions.AttentionSpec(EMBED, HEADS, KEY_HEADS, EMBED // HEADS, causal=True)
        return attentions.Attention(rngs, spec, Execution(attention="blockwise"))

    def dropped(number: Any, x: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(0), number.astype(jnp.uint32))
        return layers.dropout(x, 0.1, jax.random.split(key, ROWS))

    def embedded(table: Any, x: Any) -> Any:
        return x + table(jnp.zeros((ROWS, TIME), jnp.int32), x.dtype)

    def whole(head: Any, x: Any) -> Any:
        return x + _mean(cross_entropy.cross_entropy(head(x), jnp.zeros((ROWS, TIME), jnp.int32)), x)

    def sliced(head: Any, x: Any) -> Any:
        labels, weight = jnp.zeros((ROWS, TIME), jnp.int32), head.weight
        loss = cross_entropy.SlicedLoss(("embed", "vocab"), cross_entropy.slices_for(VOCAB // 4, x, VOCAB))
        return x + _mean(loss(x, weight.get_value(), labels), x)

    def apply(layer: Any, x: Any) -> Any:
        return layer(x)

    linear = partial(Linear, inputs=EMBED, outputs=EMBED, axes=("embed", "embed"))
    head = partial(Linear, inputs=EMBED, outputs=VOCAB, axes=("embed", "vocab"))
    return {
        "linear": Kind(linear, apply),
        "linear that does not learn": Kind(linear, apply, frozen=True),
        "RMS norm": Kind(lambda _: layers.RMSNorm(EMBED, 1e-5), apply),
        "layer norm": Kind(lambda _: layers.LayerNorm(EMBED), apply),
        "attention, blockwise": Kind(attention, lambda layer, x: layer(x)[0]),
        "gated MLP": Kind(lambda rngs: block.GatedMlp(rngs, EMBED, HIDDEN), apply),
        "MLP with GELU": Kind(lambda rngs: block.DenseMlp(rngs, EMBED, HIDDEN), apply),
        "ReLU": Kind(None, lambda _, x: jax.nn.relu(x)),
        "residual connection": Kind(None, lambda _, x: x + x),
        "dropout": Kind(None, dropped),
        "embedding": Kind(lambda rngs: Embedding(rngs, VOCAB, EMBED), embedded),
        "logits and loss, whole": Kind(head, whole),
        "logits and loss, in slices": Kind(head, sliced),
        "convolution": Kind(
            lambda rngs: image_networks.Convolution(rngs, EMBED, EMBED, ("mlp", "embed")), apply, image=True
        ),
    }


def _mean(loss: Any, x: Any) -> Any:
    return loss.mean().astype(x.dtype)


def kept(kind: Kind, target: str) -> list[Any]:
    """Shapes of what a layer keeps of its tokens or pixels; what is made of weights alone is not among them."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from jaxmem.planning.buffers import Lifetimes, Temporaries, read_allocations
    from jaxmem.planning.compile import compile_program
    from jaxmem.planning.targets import parse_target, target_devices
    from jaxmem.stack.apply import stacked

    aim = parse_target(target)
    place = jax.sharding.SingleDeviceSharding(target_devices(aim, 1000 * aim.memory)[0])
    placed = lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=place)  # noqa: E731
    graphdef: Any = None
    state: Any = placed(jnp.zeros(LAYERS))
    if kind.make is not None:
        graphdef, found = nnx.split(nnx.eval_shape(lambda: stacked(kind.make, LAYERS, nnx.Rngs(0))))
        state = jax.tree.map(placed, nnx.to_pure_dict(found))

    def loss(x: Any, weights: Any) -> Any:
        def layer(x: Any, own: Any) -> tuple[Any, None]:
            return kind.apply(own if graphdef is None else nnx.merge(graphdef, own), x), None

        y, _ = jax.lax.scan(layer, x, weights, length=LAYERS)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    shape = (ROWS, SIDE, SIDE, EMBED) if kind.image else (ROWS, TIME, EMBED)
    lowered = jax.jit(jax.grad(loss, 0 if kind.frozen else (0, 1))).lower(placed(jnp.zeros(shape)), state)
    compiled = compile_program(lowered, here=aim.is_here, runs=False)
    lives = Lifetimes(compiled.module)
    temporaries = [one for one in read_allocations(compiled.module, compiled.assignment) if one.kind == "temporary"]
    shapes = [region.buffers[0].shape for one in temporaries for region in Temporaries(one, lives).peak.regions]
    stacks = [shape for shape in shapes if shape.dims[:1] == (LAYERS,)]
    return [shape for shape in stacks if (SIDE if kind.image else TIME) in shape.dims]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h100-80gb")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    devices.use_cpu_without_gpu(only_compile=True)
    rows = []
    for name, kind in kinds().items():
        held, tokens = kept(kind, given.target), ROWS * (SIDE * SIDE if kind.image else TIME)
        size = sum(shape.bytes for shape in held) // LAYERS
        shapes = Counter(f"{shape.dtype}[{','.join(map(str, shape.dims[1:]))}]" for shape in held)
        rows.append({"kind": name, "bytes": size, "numbers": size / tokens / EMBED / 2, "kept": shapes})
        if not given.json:
            told = ", ".join(f"{count} x {shape}" if count > 1 else shape for shape, count in shapes.items())
            print(f"| {name} | {rows[-1]['numbers']:.2f} | {told or 'nothing'} |", flush=True)
    if given.json:
        print(json.dumps({"target": given.target, "rows": rows}))


if __name__ == "__main__":
    main()
