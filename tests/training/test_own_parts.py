"""Models, losses, data and optimizers that a script passes to `train`, `plan` and `evaluate`."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmem
from jaxmem.config import load_config
from jaxmem.errors import UserError
from jaxmem.models.cross_entropy import max_update_entries, vocab_cross_entropy
from jaxmem.models.decoder import Decoder
from jaxmem.models.own import Functions

ROWS = 16
IMAGES = np.random.default_rng(0).normal(size=(4, ROWS, 4, 4, 1)).astype(np.float32)
DATA = [{"image": x, "label": (x.sum((1, 2, 3)) > 0).astype(np.int32)} for x in IMAGES]
DECODER = {"vocab": 264, "layers": 2, "embed": 32, "mlp": 64, "heads": 4, "kv_heads": 2, "head_dim": 8}


class Classifier(nnx.Module):
    """A network of Flax's layers, with a list of modules and dropout."""

    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 8, (3, 3), rngs=rngs)
        self.layers = nnx.List([nnx.Linear(128, 16, rngs=rngs), nnx.Linear(16, 2, rngs=rngs)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = self.layers[0](nnx.relu(self.conv(x)).reshape(len(x), -1))
        return self.layers[1](self.dropout(nnx.relu(x)))


def loss(model, batch):
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), {"accuracy": (logits.argmax(-1) == batch["label"]).mean()}


PARTS = {"model": Classifier, "loss": loss, "data": DATA}


def settings(tmp_path, **changes):
    return {
        "name": "own",
        "output": str(tmp_path),
        "batch": {"global_size": ROWS},
        "mesh": {"fsdp": 8},
        "train": {"steps": 3, "log_every": 1},
        **changes,
    }


def test_sharding_changes_no_loss(tmp_path):
    def model(rngs):
        network = Classifier(rngs)
        network.dropout.rate = 0.0
        return network

    parts = PARTS | {"model": model}
    alone = jaxmem.train(settings(tmp_path / "one", mesh={}), jax.devices()[:1], **parts)
    for name, changes in {
        "zero3": {},
        "accumulate": {"batch": {"global_size": ROWS, "accumulate": 2}, "mesh": {"fsdp": 4, "replica": 2}, "zero": 1},
    }.items():
        found = jaxmem.train(settings(tmp_path / name, **changes), **parts)
        assert found.metrics["loss"] == pytest.approx(alone.metrics["loss"], rel=1e-5)
        assert found.metrics["accuracy"] == pytest.approx(alone.metrics["accuracy"])
        kernel = found.state.params["layers"]["0"]["kernel"]
        assert kernel.sharding.shard_shape(kernel.shape) == ((16, 16) if name == "zero3" else (128, 16))


@pytest.mark.parametrize(
    "changes",
    [
        {"memory": {"update": "during", "remat": "full"}},
        {"memory": {"update": "during"}, "adapter": {"kind": "qlora", "rank": 4}},
    ],
    ids=["update during", "qlora, update during"],
)
def test_a_model_of_jaxmems_layers_trains_like_the_built_in_family(tmp_path, changes):
    raw = settings(tmp_path, data={"sequence_length": 32}, batch={"global_size": 8}, **changes)
    cfg = load_config({**raw, "name": "built_in", "model": DECODER})

    def next_token(model, batch, keys):
        x = model.features(batch["inputs"], batch["positions"], batch["segment_ids"], keys)
        entries = max_update_entries(cfg.memory.update, x.shape[-1])
        losses = vocab_cross_entropy(model, x, batch["targets"], "auto", max_entries=entries)
        return jnp.mean(losses * batch["mask"])

    built_in = jaxmem.train(cfg)
    own = jaxmem.train(raw, model=lambda rngs, execution: Decoder(cfg.model, rngs, execution), loss=next_token)
    assert own.metrics["loss"] == built_in.metrics["loss"]
    assert own.program.model.trainable == built_in.program.model.trainable


def test_resumes_at_the_next_batch_on_another_mesh(tmp_path):
    jaxmem.train(settings(tmp_path / "two", train={"steps": 2}, optimizer={"schedule": "constant"}), **PARTS)
    resumed = jaxmem.train(
        settings(tmp_path / "two", mesh={"fsdp": 2, "replica": 4}, optimizer={"schedule": "constant"}), **PARTS
    )
    constant = jaxmem.train(settings(tmp_path / "constant", optimizer={"schedule": "constant"}), **PARTS)
    assert resumed.step == 3
    assert resumed.metrics["loss"] == pytest.approx(constant.metrics["loss"], rel=1e-5)


def test_evaluates_batches_that_training_did_not_see(tmp_path, capsys):
    raw = settings(tmp_path, train={"steps": 2, "evaluate_every": 2})
    run = jaxmem.train(raw, **PARTS, held_out=DATA[:2])
    again = jaxmem.evaluate(run.directory, DATA[:2], model=Classifier, loss=loss)
    assert again == pytest.approx(run.held_out)
    assert "rows per update" in capsys.readouterr().out


def test_own_batches_for_the_loss_of_a_config(tmp_path):
    tokens = np.random.default_rng(1).integers(0, 256, (8, 32)).astype(np.int32)
    raw = settings(tmp_path, model=DECODER, data={"sequence_length": 32}, batch={"global_size": 8})
    found = jaxmem.train(raw, data=[{"inputs": tokens}])
    assert found.metrics["count"] == 8 * 31  # the last token of a row has no target


def test_an_optax_optimizer_and_other_kinds_of_models(tmp_path):
    class Dense(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(2)(x.reshape(len(x), -1))

    def bridge(rngs):
        return nnx.bridge.lazy_init(nnx.bridge.ToNNX(Dense(), rngs=rngs), IMAGES[0])

    def functions(rngs):
        init = lambda key: {"w": jax.random.normal(key, (16, 2)) / 10, "b": jnp.zeros(2)}  # noqa: E731
        return Functions(rngs, init, lambda params, x: x.reshape(len(x), -1) @ params["w"] + params["b"])

    for name, model in {"linen": bridge, "functions": functions}.items():
        run = jaxmem.train(
            settings(tmp_path / name, train={"steps": 60}), **PARTS | {"model": model}, optimizer=optax.adam(0.1)
        )
        assert "learning_rate" not in run.metrics
        assert run.metrics["accuracy"] > 0.8


def test_plans_and_searches_for_gpus(tmp_path):
    raw = settings(tmp_path)
    plan = jaxmem.plan(raw, "h100-80gb:8", **PARTS)
    parameters = 8 * (9 + 1) + 128 * 16 + 16 + 16 * 2 + 2
    assert plan.program.model.parameters == parameters
    found = jaxmem.fit(raw, "h100-80gb:8", compiles=1, allow=["optimizer"], **PARTS)
    assert found.best is not None


def test_patterns_name_the_axes_of_weights(tmp_path):
    plan = jaxmem.plan(settings(tmp_path), **PARTS, axes={"layers.0.kernel": (None, "embed")})
    kernel = plan.program.spec.state.params["layers"]["0"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (128, 2)


class Mnist(nnx.Module):
    """Like the network for MNIST of Flax's examples: convolutions, BatchNorm, pooling, dropout, linear layers."""

    def __init__(self, rngs):
        self.conv1 = nnx.Conv(1, 8, (3, 3), use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.conv2 = nnx.Conv(8, 8, (3, 3), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(8, momentum=0.9, rngs=rngs)
        self.linear1 = nnx.Linear(32, 16, rngs=rngs)
        self.linear2 = nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.norm1(self.dropout(self.conv1(x)))), (2, 2), strides=(2, 2))
        x = nnx.relu(self.norm2(self.conv2(x))).reshape(len(x), -1)
        return self.linear2(nnx.relu(self.dropout(self.linear1(x))))


@jax.numpy_dtype_promotion("standard")
def hand_written(model, loss, data, optimizer, steps, accumulate=1):
    """The losses, the loss of the first batch after the last update, and the module, of a loop of Flax and optax on one
    device. Dropout has the keys of `train`."""
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
    module.eval()
    return losses, float(loss(module, data[0])[0]), module


@pytest.mark.parametrize(
    "changes",
    [{"mesh": {}}, {}, {"batch": {"global_size": ROWS, "accumulate": 2}, "mesh": {"fsdp": 4, "replica": 2}, "zero": 1}],
    ids=["one device", "zero3", "accumulate"],
)
def test_statistics_and_dropout_equal_a_loop_of_flax(tmp_path, changes):
    raw = settings(tmp_path, **changes)
    devices = jax.devices() if raw["mesh"] else jax.devices()[:1]
    losses, held_out, module = hand_written(Mnist, loss, DATA, optax.sgd(0.1), 3, raw["batch"].get("accumulate", 1))
    raw["train"]["evaluate_every"] = 3
    run = jaxmem.train(raw, devices, **PARTS | {"model": Mnist}, held_out=DATA[:1], optimizer=optax.sgd(0.1))
    assert run.metrics["loss"] == pytest.approx(losses[-1], rel=1e-4)
    for name in ("norm1", "norm2"):
        for kind in ("mean", "var"):
            expected = getattr(getattr(module, name), kind).get_value()
            np.testing.assert_allclose(run.state.params[name][kind], expected, rtol=1e-3, atol=1e-5)
    assert run.held_out["loss"] == pytest.approx(held_out, rel=1e-4)
    assert run.program.model.parameters == sum(x.size for x in jax.tree.leaves(nnx.state(module, nnx.Param)))


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


def test_a_transformer_of_flax_equals_a_loop_of_flax(tmp_path):
    losses, *_ = hand_written(Transformer, next_token, TOKENS, optax.adamw(1e-2), 3)
    run = jaxmem.train(settings(tmp_path), **LM | {"model": Transformer}, optimizer=optax.adamw(1e-2))
    assert run.metrics["loss"] == pytest.approx(losses[-1], rel=1e-4)


def test_a_list_of_blocks_is_computed_layer_by_layer(tmp_path):
    as_list = jaxmem.train(settings(tmp_path / "list"), **LM)
    expected = as_list.metrics["loss"]
    for name, changes in {
        "during": {"memory": {"remat": "full", "update": "during"}, "batch": {"global_size": ROWS, "accumulate": 2}},
    }.items():
        run = jaxmem.train(settings(tmp_path / name, **changes), **LM, layers="blocks")
        assert run.metrics["loss"] == pytest.approx(expected, rel=1e-6)
        kernel = run.state.params["blocks"]["attention"]["query"]["kernel"]
        assert kernel.shape == (2, 16, 2, 8)
        assert kernel.sharding.shard_shape(kernel.shape) == (2, 2, 2, 8)
        assert run.program.model.parameters == as_list.program.model.parameters
    deep = {**LM, "model": lambda rngs: Transformer(rngs, 4), "layers": "blocks"}
    stored = {remat: jaxmem.plan(settings(tmp_path, memory={"remat": remat}), **deep) for remat in ("none", "full")}
    sizes = {remat: plan.bytes_per_device["activations"] for remat, plan in stored.items()}
    assert sizes["full"] < 0.6 * sizes["none"]


@pytest.mark.parametrize(
    ("layers", "changes"),
    [
        ("blocks", {"adapter": {"kind": "lora", "rank": 4, "targets": {"blocks[1:].*": 4}}}),
        ("blocks", {"adapter": {"kind": "qlora", "rank": 4}, "memory": {"remat": "full", "update": "during"}}),
    ],
    ids=["some layers", "qlora"],
)
def test_low_rank_adapters_of_flax_layers(tmp_path, layers, changes):
    raw = settings(tmp_path, optimizer={"learning_rate": 0.02, "schedule": "constant"}, train={"steps": 8}, **changes)
    run = jaxmem.train(raw, **LM, layers=layers, held_out=TOKENS[:1])
    assert run.metrics["loss"] < 3.4  # log 32 = 3.47
    block = run.state.params["blocks"] if layers else run.state.params["blocks"]["0"]
    query = block["attention"]["query"]
    lora = query["lora"]
    assert lora["a"].shape[-2:] == (16, 4)
    assert lora["b"].shape[-2:] == (4, 16)
    if changes["adapter"]["kind"] == "qlora":
        assert block["gate"]["kernel"].format == "nf4"
        assert query["bias"].dtype == jnp.float32
        return
    # Merged into the kernels, the adapters give the same loss.
    found = jaxmem.evaluate(run.directory, TOKENS[:1], model=without_dropout, loss=next_token, layers=layers)["loss"]
    module = nnx.jit(lambda: without_dropout(nnx.Rngs(0)))()
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        variable.set_value(merged(run.state.params, [str(key) for key in path], is_stacked=layers is not None))
    with jax.numpy_dtype_promotion("standard"):
        assert float(next_token(module, TOKENS[0])[0]) == pytest.approx(found, rel=1e-5)


def merged(params, path, *, is_stacked):
    """The weight at a path, with its adapter merged into it."""
    layer = int(path.pop(1)) if is_stacked and path[0] == "blocks" else ...
    for key in path[:-1]:
        params = params[key]
    w, lora = params[path[-1]][layer], params.get("lora")
    if lora is None or path[-1] != "kernel":
        return w
    scale = lora["layer_scale"][layer] if "layer_scale" in lora else 16 / 4
    return w + scale * (lora["a"][layer] @ lora["b"][layer]).reshape(w.shape)


class Statistics(nnx.Module):
    """Blocks with BatchNorm."""

    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.BatchNorm(1, rngs=rngs) for _ in range(2)])
        self.out = nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.out(x.reshape(len(x), -1))


def test_blocks_with_statistics(tmp_path):
    parts = PARTS | {"model": Statistics, "optimizer": optax.sgd(0.1)}
    as_list = jaxmem.train(settings(tmp_path / "list"), **parts).state.params["blocks"]
    stacked = jaxmem.train(settings(tmp_path, memory={"remat": "full"}), **parts, layers="blocks").state.params[
        "blocks"
    ]
    for name in ("mean", "var", "scale"):
        expected = np.stack([as_list[key][name] for key in "01"])
        np.testing.assert_allclose(stacked[name], expected, rtol=1e-5, atol=1e-6)


class Wrong(Transformer):
    """Uses its blocks in other ways than one after the other."""

    def __init__(self, rngs, use):
        super().__init__(rngs)
        self.use = use

    def all_blocks(self, x, mask):
        first, *others = self.blocks
        match self.use:
            case "sum":
                return sum((block(x, mask) for block in others), first(x, mask))
            case "residual":
                return others[0](x + first(x, mask), mask)
            case "mask":
                return others[0](first(x, mask), mask + 0)
            case "weights":
                return x + first.down.bias.get_value()


@pytest.mark.parametrize(
    ("changes", "parts", "named"),
    [
        ({}, {"loss": lambda model, batch: model(batch["image"])}, r"float32\[\d+, 2\].*scalar"),
        ({}, {"data": []}, "data is empty"),
        ({}, {"data": 3}, "data must be an iterable"),
        ({}, {"data": [[1, 2]]}, "dict of arrays, not list"),
        ({}, {"loss": None}, "loss"),
        ({}, {"axes": {"*.kernell": (None, "embed")}}, "kernell.*kernel"),
        ({}, {"axes": {"layers.0.kernel": ("embed",)}}, "1 axes.*one axis per dimension"),
        ({}, {"axes": {"layers.0.kernel": ("embed", "mpl")}}, "mpl.*mlp"),
        ({"memory": {"remat": "full"}}, {}, "memory.remat=full.*layers="),
        ({"memory": {"update": "during"}}, {}, "memory.update=during.*layers="),
        ({"adapter": {"kind": "dora"}}, {}, "adapter.kind=dora.*execution"),
        ({"memory": {"update": "during"}}, {"model": Statistics, "layers": "blocks"}, "during.*mean.*after"),
        ({}, {"layers": "layers"}, "layers.*differs from block 0 in"),
        ({}, LM | {"layers": "block"}, "layers=block .*blocks"),
        ({}, LM | {"layers": "blocks", "model": lambda rngs: Wrong(rngs, "sum")}, "block 1 does not receive"),
        ({}, LM | {"layers": "blocks", "model": lambda rngs: Wrong(rngs, "residual")}, "output of block 0 outside"),
        ({}, LM | {"layers": "blocks", "model": lambda rngs: Wrong(rngs, "mask")}, "block 1 is called with other"),
        ({}, LM | {"layers": "blocks", "model": lambda rngs: Wrong(rngs, "weights")}, "uses down of a block"),
        ({"mesh": {"stage": 2, "fsdp": 4}}, {}, "mesh.stage"),
        ({"mesh": {"context": 2, "fsdp": 4}, "model": DECODER}, {"model": None}, "objective.name=own.*mesh.context"),
        ({"model": DECODER}, {"model": None, "loss": None}, "data: batch 0 has the arrays image, label.*inputs"),
        (
            {"model": DECODER, "data": {"sequence_length": 32}},
            {"model": None, "loss": None, "data": [{"inputs": np.ones((ROWS, 16), np.int32)}]},
            r"inputs has shape .16, 16., not .16, 32.",
        ),
        ({"optimizer": {"beta1": 0.5}}, {"optimizer": optax.sgd(1e-2)}, "optimizer.beta1"),
        ({"train": {"steps": 2, "evaluate_every": 1}}, {}, "held_out"),
    ],
)
def test_refuses(tmp_path, changes, parts, named):
    with pytest.raises(UserError, match=named):
        jaxmem.train(settings(tmp_path, **changes), **PARTS | parts)
    assert not (tmp_path / "own" / "checkpoints").exists()


def test_refuses_a_batch_of_another_shape(tmp_path):
    data = [DATA[0], {name: x[:8] for name, x in DATA[1].items()}]
    with pytest.raises(UserError, match=r"batch 2: .*\[8, 4, 4, 1\].*\[16, 4, 4, 1\]"):
        jaxmem.train(settings(tmp_path), **PARTS | {"data": data})


def test_data_that_ends_early_ends_the_run(tmp_path, capsys):
    run = jaxmem.train(settings(tmp_path), **PARTS | {"data": iter(DATA[:2])})
    assert run.step == 2
    assert "after step 2 of 3" in capsys.readouterr().out


def test_a_saved_config_needs_the_script(tmp_path):
    jaxmem.train(settings(tmp_path, train={"steps": 1}), **PARTS)
    with pytest.raises(UserError, match=r"model\.family=own needs"):
        jaxmem.train(tmp_path / "own" / "config.yaml")


def applied_twice(model, batch):
    """The stack of blocks in two calls of the model."""
    first, second = (next_token(model, {"tokens": tokens})[0] for tokens in (batch["tokens"], batch["tokens"][:, ::-1]))
    return (first + second) / 2


def applied_in_a_loop(model, batch):
    """The stack of blocks in the body of a loop."""
    x, mask = model.embed(batch["tokens"][:, :-1]), nnx.make_causal_mask(batch["tokens"][:, :-1])
    x, _ = jax.lax.scan(lambda x, _: (model.all_blocks(x, mask), None), x, length=2)
    logits = model.embed.attend(model.norm(x))
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()


@pytest.mark.parametrize("loss", [applied_twice, applied_in_a_loop])
def test_a_stack_that_is_applied_twice_has_the_sum_of_both_gradients(tmp_path, loss):
    one_batch = jaxmem.train(settings(tmp_path / "one", train={"steps": 1}), **LM | {"loss": loss})
    cfg = settings(tmp_path / "two", batch={"global_size": ROWS, "accumulate": 2}, zero=1, train={"steps": 1})
    run = jaxmem.train(cfg, **LM | {"loss": loss}, layers="blocks")
    assert run.metrics["gradient_norm"] == pytest.approx(one_batch.metrics["gradient_norm"], rel=1e-4)
