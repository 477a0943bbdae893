"""What the loss of a script may do with the layers of its model, and the rows that it sees."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxmem.config import load_config
from jaxmem.config.methods import config_with
from jaxmem.config.user import UserObjects
from jaxmem.errors import UserError
from jaxmem.estimate.passes import passes_of
from jaxmem.inference.evaluate import Evaluator
from jaxmem.models.linear import Linear
from jaxmem.stack.apply import apply_call, stack_call, stacked
from jaxmem.step.programs import program

ROWS, TIME, EMBED = 8, 4, 8  # TIME is also the number of rows of a micro-batch
draw = np.random.default_rng(0).normal
BATCH = {name: draw(size=(ROWS, TIME, size)).astype(np.float32) for name, size in {"x": 4, "y": 3}.items()}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(EMBED, EMBED, rngs=rngs)

    def __call__(self, x):
        return x + nnx.gelu(self.up(x))

    def scaled(self, x):
        return x * self.up.bias[...]


class CrossBlock(nnx.Module):
    def __init__(self, rngs):
        self.up, self.read = nnx.Linear(EMBED, EMBED, rngs=rngs), nnx.Linear(EMBED, EMBED, rngs=rngs)

    def __call__(self, x, memory, positions, mask):
        attended = jnp.einsum("ts,bse->bte", mask, self.read(memory))
        return x + nnx.gelu(self.up(x + positions)) + attended


class EncoderDecoder(nnx.Module):
    """The layers of the decoder read an array with rows, positions without rows, and a mask."""

    def __init__(self, rngs, layers=2, reads_encoder=False, learns_positions=False):
        self.start, self.out = nnx.Linear(4, EMBED, rngs=rngs), nnx.Linear(EMBED, 3, rngs=rngs)
        positions = jax.random.normal(rngs.params(), (TIME, EMBED))
        self.positions = nnx.Param(positions) if learns_positions else None
        self.encoder = nnx.List([Block(rngs) for _ in range(layers)])
        self.decoder = nnx.List([CrossBlock(rngs) for _ in range(layers)])
        self.reads_encoder = reads_encoder

    def __call__(self, inputs):
        x = self.start(inputs)
        for block in self.encoder:
            x = block(x)
        memory = x if self.reads_encoder else jnp.concatenate([inputs, inputs], axis=-1)
        positions = jnp.sin(jnp.ones((TIME, EMBED))) if self.positions is None else self.positions[...]
        mask = jnp.tril(jnp.ones((TIME, TIME)))
        for block in self.decoder:
            x = block(x, memory, positions, mask)
        return self.out(x)


class Alternating(EncoderDecoder):
    """Each block is called for both inputs before the next block."""

    def __call__(self, inputs):
        x, y = self.start(inputs), self.start(-inputs)
        for block in self.encoder:
            x, y = block(x), block(y)
        return self.out(x - 2 * y)


class Shared(EncoderDecoder):
    """Two lists with the same weights."""

    def __init__(self, rngs):
        super().__init__(rngs)
        for block, other in zip(self.encoder, self.decoder, strict=True):
            other.up = block.up


class BlockOfBlocks(nnx.Module):
    def __init__(self, rngs):
        self.blocks, self.dropouts = nnx.List([Block(rngs) for _ in range(2)]), nnx.List([nnx.Dropout(0.0)])

    def __call__(self, x):
        for part in (*self.blocks, *self.dropouts):
            x = part(x)
        return x


class Nested(EncoderDecoder):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.encoder, self.dropouts = nnx.List([BlockOfBlocks(rngs) for _ in range(2)]), nnx.List([nnx.Dropout(0.0)])


class ByMethod(EncoderDecoder):
    def __call__(self, inputs):
        x = self.start(inputs)
        for block in self.encoder:
            x = block.scaled(x)
        return self.out(x)


class WithArrays(nnx.Module):
    """Integers that are not trained, and parts with the names of adapters."""

    def __init__(self, rngs):
        self.prompt, self.lora = nnx.Linear(4, EMBED, rngs=rngs), nnx.Linear(EMBED, 3, rngs=rngs)
        self.order, self.table = nnx.Variable(jnp.arange(EMBED)[::-1]), nnx.data(jnp.arange(300, 300 + TIME))
        self.positions = nnx.Embed(400, EMBED, rngs=rngs)

    def __call__(self, inputs):
        return self.lora(self.prompt(inputs)[..., self.order[...]] + self.positions(self.table))


class Complex(nnx.Module):
    def __init__(self, rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (4, 3), jnp.complex64))

    def __call__(self, inputs):
        return jnp.abs(inputs @ self.weight[...])


class Normalized(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.WeightNorm(nnx.Linear(4, 3, rngs=rngs), rngs=rngs)

    def __call__(self, inputs):
        return self.linear(inputs)


class DropoutBlock(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(super().__call__(x))


class WithDropout(EncoderDecoder):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.encoder = nnx.List([DropoutBlock(rngs) for _ in range(2)])


class OfParameter(nnx.Module):
    """The input of its layers is a parameter."""

    def __init__(self, rngs):
        self.start = nnx.Param(jax.random.normal(rngs.params(), (ROWS, TIME, EMBED)))
        self.blocks, self.out = nnx.List([Block(rngs) for _ in range(2)]), nnx.Linear(EMBED, 3, rngs=rngs)

    def __call__(self, _):
        x = self.start[...]
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.up = Linear(rngs, EMBED, EMBED, ("embed", "mlp"))

    def __call__(self, x):
        return x + jax.nn.gelu(self.up(x))


class OfLayers(nnx.Module):
    """A network of jaxmem's layers."""

    def __init__(self, rngs, execution, learns_scales=False):
        self.execution = execution
        self.start, self.out = Linear(rngs, 4, EMBED, (None, "embed")), Linear(rngs, EMBED, 3, ("embed", None))
        self.blocks = stacked(Layer, 2, rngs)
        # For each layer.
        self.scales = nnx.Param(jnp.ones((2, EMBED)), axes=(None, None)) if learns_scales else None

    def __call__(self, x):
        return self.out(self.layers(self.start(x))[0])

    def layers(self, x):
        """Also returns an output of each layer."""

        def layer(block, x, scale, _):
            x = block(x * scale)
            return x, jnp.mean(x**2)

        scales = jnp.ones((2, EMBED)) if self.scales is None else self.scales[...]
        return apply_call(stack_call(self.blocks, layer, x, scales, options=self.execution.stack))


def squares(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def pairs(model, batch):
    """A loss of pairs of rows: the other rows of the batch are the negatives of a row."""
    features = model(batch["x"]).reshape(len(batch["x"]), -1).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(features @ features.T, jnp.arange(len(features))).mean()


def with_penalty(model, batch):
    return squares(model, batch) + 0.1 * jnp.sum(model.blocks.up.weight[...] ** 2)


def with_state(model, batch):
    return squares(model, batch) + sum(jnp.sum(x) for x in jax.tree.leaves(nnx.state(model, nnx.Param)))


def twice(model, batch):
    return squares(model, batch) + jnp.mean(model(batch["y"] @ jnp.ones((3, 4))) ** 2)


def in_a_loop(model, batch):
    x, _ = jax.lax.scan(lambda x, _: (model.layers(x)[0], None), model.start(batch["x"]), length=2)
    return jnp.mean(model.out(x) ** 2)


def with_outputs(model, batch):
    x, outputs = model.layers(model.start(batch["x"]))
    return jnp.mean(model.out(x) ** 2) + jnp.mean(outputs)


def with_metric_of_outputs(model, batch):
    x, outputs = model.layers(model.start(batch["x"]))
    return jnp.mean(model.out(x) ** 2), {"outputs": jnp.mean(outputs)}


FLAX = {"model": EncoderDecoder, "layers": ("encoder", "decoder")}
SGD = {"name": "sgd", "learning_rate": 1.0, "schedule": "constant", "clip": None}


def built(parts, update="during", accumulate=1, mesh=None, **memory):
    raw = {
        "name": "own",
        "batch": {"global_size": ROWS, "accumulate": accumulate},
        "mesh": mesh or {},
        "memory": {"remat": "full", "update": update, **memory},
        "train": {"steps": 3},
    }
    raw |= {} if "optimizer" in parts else {"optimizer": SGD}
    cfg = config_with(raw, **{"loss": squares, "data": [BATCH], **parts})
    return program(cfg, jax.devices()[: int(np.prod([*raw["mesh"].values()]))])


def after_an_update(parts, update="during", accumulate=1, mesh=None, **memory):
    """The parameters and the metrics."""
    step = built(parts, update, accumulate, mesh, **memory)
    batch = {"mask": np.ones(ROWS, np.float32), **BATCH}
    batch = {name: x.reshape(accumulate, -1, *x.shape[1:]) for name, x in batch.items()}
    state, metrics = step.lower_step().compile()(step.initialise(), step.place(batch))
    return jax.tree.map(np.asarray, state.params), {name: float(x) for name, x in metrics.items()}


@pytest.mark.parametrize(
    "parts",
    [FLAX, {"network": OfLayers}, {"model": OfParameter, "layers": "blocks"}],
    ids=["flax", "jaxmem", "parameter"],
)
def test_layers_may_read_the_batch_and_fixed_arrays_besides_their_input(parts):
    expected, _ = after_an_update(parts, "after")
    params, _ = after_an_update(parts, "during")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), params, expected)


def test_a_loss_sees_all_rows_of_a_micro_batch_and_no_others():
    parts = {"network": OfLayers, "loss": pairs}
    _, expected = after_an_update(parts, "after", 2)
    _, metrics = after_an_update(parts, "after", 2, {"replica": 2})
    for name in ("loss", "gradient_norm"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5)


def test_a_loss_may_use_the_weights_of_layers_if_there_are_micro_batches():
    parts = {"network": OfLayers, "loss": with_penalty}
    expected, _ = after_an_update(parts, "after")
    params, _ = after_an_update(parts, "after", 2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), params, expected)


def test_the_passes_of_two_inputs_through_a_list_may_alternate():
    _, expected = after_an_update({"model": Alternating}, "after", remat="none")
    _, metrics = after_an_update({"model": Alternating, "layers": "encoder"}, "after")
    for name in ("loss", "gradient_norm"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5)


def test_dropout_differs_between_two_passes_through_a_list():
    def loss(model, batch):
        return squares(model, batch), {"difference": jnp.mean(jnp.abs(model(batch["x"]) - model(batch["x"])))}

    _, metrics = after_an_update({"model": WithDropout, "layers": "encoder", "loss": loss}, "after")
    assert metrics["difference"] > 0.1


def test_arrays_of_a_model_that_are_no_parameters_stay_as_they_are():
    parts = {"model": WithArrays}
    params, metrics = after_an_update(parts, "after", remat="none")
    module = WithArrays(nnx.Rngs(jax.random.key(0)))
    assert metrics["loss"] == pytest.approx(float(squares(module, BATCH)), rel=1e-5)
    for name in ("order", "table"):
        np.testing.assert_array_equal(params[name], getattr(module, name)[...])
    assert passes_of(built(parts, "after", remat="none").cfg, "cpu").matmuls


def test_a_list_of_a_single_block_is_a_stack():
    single = {**FLAX, "model": lambda rngs: EncoderDecoder(rngs, layers=1)}
    assert built(single).spec.model.flax_model.stacks == {("encoder",): 1, ("decoder",): 1}


def test_a_list_in_the_blocks_of_a_list_is_no_stack():
    nested = {**FLAX, "model": Nested, "layers": "encoder*"}
    assert built(nested).spec.model.flax_model.stacks == {("encoder",): 2}


@pytest.mark.parametrize(
    ("parts", "changes", "named"),
    [
        ({**FLAX, "model": partial(EncoderDecoder, reads_encoder=True)}, {}, "during.*decoder.*an encoder.*after"),
        ({**FLAX, "model": partial(EncoderDecoder, learns_positions=True)}, {}, "during.*decoder.*positions.*after"),
        ({"network": partial(OfLayers, learns_scales=True)}, {}, "during.*blocks, whose layers read.*after"),
        ({"network": OfLayers, "loss": twice}, {}, "during.*applies blocks more than once.*after"),
        ({"network": OfLayers, "loss": in_a_loop}, {}, "during.*loop.*after"),
        ({"network": OfLayers, "loss": with_penalty}, {}, "during.*weights of blocks outside.*after"),
        ({"network": OfLayers, "loss": with_outputs}, {}, "during.*second result of apply_call.*after"),
        ({"network": OfLayers, "loss": with_metric_of_outputs}, {}, "during.*second result of apply_call.*after"),
        ({**FLAX, "model": Shared}, {}, "layers=decoder: encoder.0.up.bias is also a weight of a block"),
        ({**FLAX, "model": ByMethod}, {}, "layers=encoder: the model uses scaled of a block"),
        ({"model": Complex}, {"update": "after", "remat": "none"}, "parameter weight has dtype complex64"),
        ({"model": Normalized}, {"update": "after", "remat": "none"}, r"key \('kernel',\) in linear.scales"),
        ({**FLAX, "model": Nested, "layers": "dropouts"}, {}, "no list of blocks; the model has .*encoder"),
        (FLAX, {"accumulate": 2}, "during with objective.name=own.*batch.accumulate=2.*update=after"),
        ({**FLAX, "loss": with_state}, {"update": "after"}, "layers=decoder: .*nnx.state.*remove the argument layers"),
        ({**FLAX, "optimizer": optax.lars(1.0)}, {}, "during.*argument optimizer.*lars.*after.*optimizer.clip"),
        (
            {**FLAX, "optimizer": optax.lars(1.0)},
            {"update": "after", "offload": "optimizer"},
            "offload=optimizer.*none",
        ),
    ],
    ids=[
        *("encoder", "positions", "scales", "twice", "loop", "penalty", "outputs", "metric"),
        *("shared", "method", "complex", "tuples", "no weights"),
        *("micro-batches", "state"),
        *("optimizer", "optimizer on the host"),
    ],
)
def test_refuses(parts, changes, named):
    with pytest.raises(UserError, match=named):
        built(parts, **changes).lower_step()


def test_a_metric_of_the_weights_of_layers_has_no_gradient_that_would_be_lost():
    def loss(model, batch):
        return squares(model, batch), {"norm": jnp.sum(model.blocks.up.weight[...] ** 2)}

    _, metrics = after_an_update({"network": OfLayers, "loss": loss})
    assert metrics["norm"] > 0


def mean_over_real_rows(network, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(network(batch["inputs"]), batch["targets"])
    return (losses * batch["mask"]).sum() / batch["mask"].sum()


def on_digits(rows, accumulate):
    cfg = load_config(
        {
            "name": "x",
            "objective": "own",
            "model": {"family": "mlp", "layers": 1, "embed": 16, "mlp": 16, "outputs": 10},
            "data": {"source": "digits", "held_out": 0.02},
            "batch": {"global_size": rows, "accumulate": accumulate},
            "precision": {"compute": "float32"},
            "optimizer": SGD,
            "train": {"steps": 1},
        }
    )
    return program(cfg.with_user(UserObjects(loss=mean_over_real_rows)), jax.devices()[:1])


def test_rows_of_padding_do_not_count_in_an_evaluation():
    """The last batch of the held-out images is not full; its second micro-batch has no image."""
    means = []
    for rows, accumulate in ((3, 1), (32, 2)):
        built = on_digits(rows, accumulate)
        with Evaluator(built) as evaluate:
            means.append(evaluate(built.initialise().params))
    assert means[0] == pytest.approx(means[1], rel=1e-5)


def test_a_micro_batch_of_padding_has_no_gradient():
    images = {"inputs": draw(size=(8, 8, 8, 1)).astype(np.float32), "targets": np.arange(8, dtype=np.int32)}
    images["mask"] = (np.arange(8) < 4).astype(np.float32)
    norms = []
    for rows, accumulate in ((4, 1), (8, 2)):
        built = on_digits(rows, accumulate)
        batch = {name: x[:rows].reshape(accumulate, 4, *x.shape[1:]) for name, x in images.items()}
        _, metrics = built.lower_step().compile()(built.initialise(), built.place(batch))
        norms.append(float(metrics["gradient_norm"]))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


class OnImages(nnx.Module):
    def __init__(self, rngs):
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(x.reshape(len(x), -1))


def test_the_mask_stays_in_float32():
    """In bfloat16 a count of more than 256 rows would be rounded."""
    counts = []

    def loss(model, batch):
        logits = model(batch["inputs"])
        counts.append(jnp.sum(batch["mask"]).dtype)
        return jnp.mean(logits.astype(jnp.float32) ** 2)

    sections = {"data": {"source": "digits"}, "batch": {"global_size": 8}, "precision": {"compute": "bfloat16"}}
    cfg = config_with({"name": "x", "train": {"steps": 1}, **sections}, model=OnImages, loss=loss)
    program(cfg, jax.devices()[:1]).lower_step()
    assert {*counts} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("update", ["after", "during"])
def test_a_metric_with_the_name_of_the_losses_of_routers_is_not_trained(update):
    def loss(model, batch):
        mean = squares(model, batch)
        return mean, {"router_loss": mean}

    _, expected = after_an_update({"network": OfLayers}, update)
    _, metrics = after_an_update({"network": OfLayers, "loss": loss}, update)
    assert metrics["gradient_norm"] == pytest.approx(expected["gradient_norm"], rel=1e-6)
    assert metrics["router_loss"] == pytest.approx(metrics["loss"])


@pytest.mark.parametrize(
    ("metrics", "named"),
    [
        ({"state": 0.0}, "metric state must .* not have the name .* loss, .*gradient_norm"),
        ({"gradient_norm": 0.0}, "metric gradient_norm must .* not have the name"),
        (np.zeros(3), r"tuple \(scalar, ndarray\).* a dict of metrics"),
    ],
)
def test_refuses_metrics(metrics, named):
    with pytest.raises(UserError, match=named):
        built({**FLAX, "loss": lambda model, batch: (squares(model, batch), metrics)}).lower_step()
