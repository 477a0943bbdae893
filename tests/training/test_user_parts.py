"""Models, losses, data and optimizers that a script passes to `train`, `plan` and `evaluate`."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmem
from jaxmem.checkpoint.metrics import read_rows
from jaxmem.config import load_config
from jaxmem.config.methods import config_with
from jaxmem.config.user import user_objects
from jaxmem.data.user import open_loader
from jaxmem.errors import UserError
from jaxmem.models.cross_entropy import max_update_entries, vocab_cross_entropy
from jaxmem.models.decoder import Decoder
from jaxmem.models.user import Functions
from jaxmem.step.programs import program
from tests.training.user_models import DATA, IMAGES, LM, ROWS, Statistics, Transformer, hand_written, loss, settings

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


PARTS = {"model": Classifier, "loss": loss, "data": DATA}


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "changes",
    [
        {"memory": {"update": "during", "remat": "full"}, "mesh": {"fsdp": 2}},
        {"memory": {"update": "during"}, "adapter": {"kind": "qlora", "rank": 4}, "mesh": {}},
    ],
    ids=["update during", "qlora, update during"],
)
def test_a_model_of_jaxmems_layers_trains_like_the_built_in_family(tmp_path, changes):
    optimizer, devices = {"name": "sgd", "learning_rate": 0.1}, jax.devices()[: changes["mesh"].get("fsdp", 1)]
    raw = settings(tmp_path, data={"sequence_length": 32}, batch={"global_size": 8}, optimizer=optimizer, **changes)
    cfg = load_config({**raw, "name": "built_in", "model": DECODER})

    def next_token(model, batch, keys):
        x = model.features(batch["inputs"], batch["positions"], batch["segment_ids"], keys)
        entries = max_update_entries(cfg.memory.update, x.shape[-1])
        losses = vocab_cross_entropy(model, x, batch["targets"], "auto", max_entries=entries)
        return jnp.mean(losses * batch["mask"])

    built_in = jaxmem.train(cfg, devices)

    def network(rngs, execution):
        return Decoder(cfg.model, rngs, execution)

    own = jaxmem.train(raw, devices, network=network, loss_with_keys=next_token)
    assert own.metrics["loss"] == built_in.metrics["loss"]
    assert own.program.model.trainable_count == built_in.program.model.trainable_count


@pytest.mark.exhaustive
def test_resumes_at_the_next_batch_on_another_mesh(tmp_path):
    jaxmem.train(settings(tmp_path / "two", train={"steps": 2}, optimizer={"schedule": "constant"}), **PARTS)
    resumed = jaxmem.train(
        settings(tmp_path / "two", mesh={"fsdp": 2, "replica": 4}, optimizer={"schedule": "constant"}), **PARTS
    )
    constant = jaxmem.train(settings(tmp_path / "constant", optimizer={"schedule": "constant"}), **PARTS)
    assert resumed.step == 3
    assert resumed.metrics["loss"] == pytest.approx(constant.metrics["loss"], rel=1e-5)


@pytest.mark.exhaustive
def test_evaluates_batches_that_training_did_not_see(tmp_path, capsys):
    raw = settings(tmp_path, train={"steps": 2, "evaluate_every": 2})
    run = jaxmem.train(raw, **PARTS, held_out=DATA[:2])
    for batches in (DATA[:2], iter(DATA[:2])):
        again = jaxmem.evaluate(run.directory, batches, model=Classifier, loss=loss)
        assert again == pytest.approx(run.held_out)
    assert "rows per update" in capsys.readouterr().out


def test_a_script_evaluates_a_run_in_spite_of_settings_that_only_training_reads(tmp_path):
    tokens = np.random.default_rng(1).integers(0, 256, (3, 8, 8)).astype(np.int32)
    batches = [{"inputs": x} for x in tokens]
    network = {"model": DECODER | {"layers": 1}, "batch": {"global_size": 8}, "mesh": {}}
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "some words to train on"}\n' * 20)
    data = {"source": "jsonl", "path": str(texts), "sequence_length": 8, "epochs": 3, "held_out": 0.2}
    train = {"steps": 1, "evaluate_every": 1}
    raw = settings(tmp_path, data=data, train=train, checkpoint={"keep_best": True}, **network)
    run = jaxmem.train(raw, jax.devices()[:1])
    expected = jaxmem.evaluate(run.directory, batches)
    assert jaxmem.evaluate(run.directory, iter(batches)) == expected
    assert jaxmem.evaluate(run.directory, batches[:1]) != expected


def test_a_run_on_batches_of_a_script_is_not_evaluated_on_other_data(tmp_path):
    """Its config names the standard library of Python, which is the default."""
    batches = [{"inputs": np.ones((ROWS, 8), np.int32)}]
    changes = {"model": DECODER | {"layers": 1}, "data": {"sequence_length": 8}, "mesh": {}, "train": {"steps": 1}}
    run = jaxmem.train(settings(tmp_path, **changes), jax.devices()[:1], data=batches)
    with pytest.raises(UserError, match=r"was trained on batches of a script, .*; use --data FILE"):
        jaxmem.evaluate(run.directory)
    assert jaxmem.evaluate(run.directory, batches)["loss"] > 0
    texts = tmp_path / "texts.txt"
    texts.write_text("some words " * 20)
    named = ["data.source=text", f"data.path={texts}"]
    assert jaxmem.evaluate(run.directory, str(texts))["loss"] > 0
    with pytest.raises(UserError, match="at least 2 records"):
        jaxmem.evaluate(run.directory, overrides=named)


@pytest.mark.exhaustive
def test_own_batches_for_the_loss_of_a_config(tmp_path):
    tokens = np.random.default_rng(1).integers(0, 256, (8, 32)).astype(np.int32)
    raw = settings(tmp_path, model=DECODER, data={"sequence_length": 32}, batch={"global_size": 8})
    found = jaxmem.train(raw, data=[{"inputs": tokens}])
    assert found.metrics["count"] == 8 * 31  # the last token of a row has no target


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
def test_plans_and_searches_for_gpus(tmp_path):
    raw = settings(tmp_path)
    plan = jaxmem.plan(raw, "h100-80gb:8", **PARTS)
    parameters = 8 * (9 + 1) + 128 * 16 + 16 + 16 * 2 + 2
    assert plan.program.model.parameter_count == parameters
    found = jaxmem.fit(raw, "h100-80gb:8", compiles=1, allow=["update"], **PARTS)
    assert found.best is not None


@pytest.mark.exhaustive
def test_patterns_name_the_axes_of_weights(tmp_path):
    plan = jaxmem.plan(settings(tmp_path), **PARTS, axes={"layers.0.kernel": (None, "embed")})
    kernel = plan.program.spec.state.params["layers"]["0"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (128, 2)


def test_an_optax_optimizer_with_remainders_has_the_losses_of_a_float32_copy(tmp_path):
    rows = {}
    for master in ("float32", "remainder16"):
        raw = settings(tmp_path / master, precision={"parameters": "bfloat16", "master": master})
        run = jaxmem.train(raw, **PARTS, optimizer=optax.lamb(1e-2))
        rows[master] = [row["loss"] for row in read_rows(run.directory / "metrics.jsonl") if "loss" in row]
    assert rows["remainder16"] == rows["float32"]
    assert rows["float32"][-1] < rows["float32"][0]


def test_the_optimizer_state_is_sharded_over_replica_where_a_dimension_permits(tmp_path):
    raw = settings(tmp_path, mesh={"fsdp": 2, "replica": 4}, rules={"optimizer": ["replica"]})
    parts = {**PARTS, "model": lambda rngs: nnx.Linear(30, 16, rngs=rngs)}
    state = program(config_with(raw, **parts), jax.devices()).spec.state.opt_state
    kernels = [x for x in jax.tree.leaves(state) if x.shape == (30, 16)]
    assert {x.sharding.shard_shape(x.shape) for x in kernels} == {(30, 2)}


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


@pytest.mark.exhaustive
def test_statistics_and_dropout_equal_a_loop_of_flax(tmp_path):
    """Though rows are divided over devices and micro-batches."""
    batch, mesh = {"global_size": ROWS, "accumulate": 2}, {"fsdp": 4, "replica": 2}
    raw = settings(tmp_path, batch=batch, mesh=mesh, zero=1)
    losses, module = hand_written(Mnist, loss, DATA, optax.sgd(0.1), 3, accumulate=2)
    module.eval()
    with jax.numpy_dtype_promotion("standard"):
        held_out = float(nnx.jit(loss)(module, DATA[0])[0])
    raw["train"]["evaluate_every"] = 3
    run = jaxmem.train(raw, **PARTS | {"model": Mnist}, held_out=DATA[:1], optimizer=optax.sgd(0.1))
    assert run.metrics["loss"] == pytest.approx(losses[-1], rel=1e-4)
    for name in ("norm1", "norm2"):
        for kind in ("mean", "var"):
            expected = getattr(getattr(module, name), kind).get_value()
            np.testing.assert_allclose(run.state.params[name][kind], expected, rtol=1e-3, atol=1e-5)
    assert run.held_out["loss"] == pytest.approx(held_out, rel=1e-4)
    assert run.program.model.parameter_count == sum(x.size for x in jax.tree.leaves(nnx.state(module, nnx.Param)))


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
            case "activation":
                return others[0](nnx.relu(first(x, mask)), mask)
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
        ({}, {"data": [{"image": ["a", "b"]}]}, r"batch\['image'\] must be an array of numbers .* not text"),
        ({}, {"loss": None}, "loss"),
        ({}, {"loss_fn": loss}, r"unknown argument loss_fn; did you mean loss\?"),
        ({}, {"loss": "mse"}, r"loss must be a function loss\(model, batch\), not the text mse"),
        ({}, {"model": nnx.Linear(2, 2, rngs=nnx.Rngs(0))}, "model must be a function of rngs.*an instance of Linear"),
        ({}, {"optimizer": optax.adamw}, r"optax.adamw\(1e-3\).*not the function adamw"),
        ({}, {"optimizer": "adamw"}, "optimizer.name in the config, not the text adamw"),
        ({}, {"axes": ["embed"]}, "axes must be a dict"),
        ({}, {"layers": 3}, "layers must be the name of a list of blocks"),
        ({}, {"model": None, "layers": ["blocks"]}, "argument layers requires the argument model"),
        ({}, {"axes": {"*.kernell": (None, "embed")}}, "kernell.*kernel"),
        (
            {},
            {"axes": {"layers.0.k*": (None, "embed"), "layers.0.kernel": ("embed", "mlp")}},
            "layers.0.kernel has no effect: a pattern before it.*put the pattern first",
        ),
        ({}, {"axes": {"layers.0.kernel": ("embed",)}}, "1 axes.*one axis per dimension"),
        ({}, {"axes": {"layers.0.kernel": ("embed", "mpl")}}, "mpl.*mlp"),
        ({"memory": {"remat": "full"}}, {}, "memory.remat=full.*layers="),
        ({"memory": {"update": "during"}}, {}, "memory.update=during.*layers="),
        ({"adapter": {"kind": "dora"}}, {}, "adapter.kind=dora.*argument network"),
        ({"memory": {"update": "during"}}, {"model": Statistics, "layers": "blocks"}, "during.*mean.*after"),
        ({}, {"layers": "layers"}, "layers.*differs from block 0 in"),
        ({}, LM | {"layers": "block"}, "layers=block .*blocks"),
        ({}, LM | {"layers": "blocks", "model": lambda rngs: Wrong(rngs, "sum")}, "block 1 does not receive"),
        ({}, LM | {"layers": "blocks", "model": lambda rngs: Wrong(rngs, "residual")}, "output of block 0 outside"),
        ({}, LM | {"layers": "blocks", "model": lambda rngs: Wrong(rngs, "activation")}, "output of block 0 outside"),
        ({}, LM | {"layers": "blocks", "model": lambda rngs: Wrong(rngs, "mask")}, "block 1 is called with other"),
        ({}, LM | {"layers": "blocks", "model": lambda rngs: Wrong(rngs, "weights")}, "uses down of a block"),
        ({"mesh": {"stage": 2, "fsdp": 4}}, {}, "mesh.stage"),
        ({"mesh": {"tensor": 2, "fsdp": 4}}, {}, "mesh.tensor=2 does not shard the model.*mlp.*axes="),
        ({"mesh": {"tensor": 2, "fsdp": 4}}, LM, "mesh.tensor=2 does not shard the model.*mlp.*axes="),
        ({"mesh": {"context": 2, "fsdp": 4}, "model": DECODER}, {"model": None}, "objective.name=own.*mesh.context"),
        ({"model": DECODER}, {"model": None, "loss": None}, "data: batch 0 has the arrays image, label.*inputs"),
        (
            {"model": DECODER, "data": {"sequence_length": 32}},
            {"model": None, "loss": None, "data": [{"inputs": np.ones((ROWS, 16), np.int32)}]},
            r"inputs has shape .16, 16., not .16, 32.",
        ),
        ({"optimizer": {"beta1": 0.5}}, {"optimizer": optax.sgd(1e-2)}, "optimizer.beta1"),
        ({}, {"optimizer": optax.MultiSteps(optax.adam(1e-2), 2)}, "MultiSteps.*set batch.accumulate"),
        ({"train": {"steps": 2, "evaluate_every": 1}}, {}, "held_out"),
    ],
)
def test_refuses(tmp_path, changes, parts, named):
    with pytest.raises(UserError, match=named):
        jaxmem.train(settings(tmp_path, **changes), **PARTS | parts)
    assert not (tmp_path / "own" / "checkpoints").exists()


@pytest.mark.parametrize("layers", [(), [], ""])
def test_no_layers_need_no_model(layers):
    assert user_objects({"layers": layers}).layers == ()


@pytest.mark.exhaustive
def test_refuses_a_batch_of_another_shape(tmp_path):
    data = [DATA[0], {name: x[:8] for name, x in DATA[1].items()}]
    with pytest.raises(UserError, match=r"batch 2: .*\[8, 4, 4, 1\].*\[16, 4, 4, 1\]"):
        jaxmem.train(settings(tmp_path), **PARTS | {"data": data})


@pytest.mark.exhaustive
def test_data_that_ends_early_ends_the_run(tmp_path, capsys):
    run = jaxmem.train(settings(tmp_path), **PARTS | {"data": iter(DATA[:2])})
    assert run.step == 2
    assert "after step 2 of 3" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"model\.family=own is the model of a script"):  # the file has no `cfg.user`
        jaxmem.train(tmp_path / "own" / "config.yaml")


def test_processes_end_their_data_together(tmp_path):
    """Instead of waiting for a process that has no batch left. Batches that a resume skips need no agreement."""

    def loader(split, answer):
        cfg = config_with(settings(tmp_path), **PARTS | {"data": iter(DATA[:2]), "held_out": DATA[:2]})
        opened = open_loader(cfg, split, range(ROWS), agree=lambda has_data: asked.append(has_data) or answer(has_data))
        opened.restore({"own": 1, "iterators": []})
        return opened

    for split, argument in (("train", "data"), ("held_out", "held_out")):
        asked = []
        assert len(list(loader(split, lambda has_data: has_data))) == 1
        assert asked == [True, False]
        batches = loader(split, lambda _: True)
        next(batches)
        with pytest.raises(
            UserError, match=rf"^{argument}: this process has no batch 3, but another one has; give all"
        ):
            next(batches)


@pytest.mark.exhaustive
def test_a_resumed_run_may_begin_with_batches_without_targets(tmp_path):
    inputs = np.ones((ROWS, 8), np.int32)
    data = [{"inputs": inputs, "mask": np.full(inputs.shape, n == 0, np.float32)} for n in range(2)]
    changes = {"model": DECODER | {"layers": 1}, "data": {"sequence_length": 8}, "mesh": {}}
    for steps in (1, 2):
        run = jaxmem.train(settings(tmp_path, train={"steps": steps}, **changes), jax.devices()[:1], data=data)
    assert (run.step, run.metrics["count"]) == (2, 0)
