"""The step: micro-batches, clipping, schedules, determinism, donation, and state that is born where it lies."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict

from jaxmem import optim
from jaxmem.config import Optimizer
from jaxmem.config.devices import for_devices
from jaxmem.errors import UserError
from jaxmem.planning.compile import compile_program
from jaxmem.planning.targets import parse_target, target_devices
from jaxmem.sharding.weights import is_matrix
from jaxmem.step.kernel_choice import attention_choice
from jaxmem.step.programs import compiler_options, program
from tests.step.conftest import SMALL, Trained, batch_for, config


@pytest.fixture(scope="module")
def plain():
    return Trained(config(), updates=2)


@pytest.mark.exhaustive
def test_the_seed_matters(plain):
    other = program(config(seed=1), jax.devices()[:1]).initialise()
    assert not np.array_equal(plain.first["embedding"]["weight"], other.params["embedding"]["weight"])


def test_all_bits_of_a_seed_count():
    keys = [program(config(seed=seed), jax.devices()[:1]).spec.key for seed in (7, 7 + 2**32, 7 + 2**33)]
    assert keys[0] == jax.random.key(7)
    assert len({tuple(jax.random.key_data(key).tolist()) for key in keys}) == 3


def test_micro_batches_add_up_to_the_large_batch(plain):
    """Though their masks keep different numbers of tokens."""
    batches = [batch_for(plain.built, update) for update in range(2)]
    cut = [{name: x.reshape(4, 2, *x.shape[2:]) for name, x in batch.items()} for batch in batches]
    micro = config(batch={"global_size": 8, "accumulate": 4})
    Trained(micro, updates=2, batches=cut, begin=plain).agrees_with(plain)


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_deterministic_adds_in_no_order_that_changes(deterministic):
    """Neither in XLA's kernels nor in cuDNN's."""
    options = compiler_options("cuda", 1, fetches=False, deterministic=deterministic)
    assert ("xla_gpu_deterministic_ops" in options) == deterministic
    cfg = config(precision={"compute": "bfloat16"}, train={"steps": 1, "deterministic": deterministic})
    chosen = attention_choice(for_devices(cfg, 1), "gpu", 90)
    assert chosen.implementation == ("triton" if deterministic else "cudnn")


@pytest.mark.exhaustive
def test_micro_batches_hold_less():
    def temporaries(accumulate):
        cfg = config(batch={"global_size": 32, "accumulate": accumulate}, data={"sequence_length": 128})
        return program(cfg, jax.devices()[:1]).lower_step().compile().memory_analysis().temp_size_in_bytes

    assert temporaries(8) < 0.5 * temporaries(1)


def test_the_update_is_adamw_on_clipped_mean_gradients():
    """Against optax, on the mean loss of one batch."""
    cfg = config(optimizer={"warmup": 2, "clip": 0.1, "learning_rate": 1e-2, "epsilon": 1e-3})
    trained = Trained(cfg, updates=2)
    built, params = trained.built, jax.tree.map(jnp.asarray, trained.first)

    def mean(params, batch):
        network = nnx.merge(built.model.graphdef, params)
        logits = network.logits(network.features(batch["inputs"], batch["positions"], batch["segment_ids"]))
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.sum(each * batch["mask"]) / jnp.sum(batch["mask"])

    with jax.numpy_dtype_promotion("standard"):
        matrices = jax.tree.map(lambda x: x.ndim > 1, params)
        matrices["blocks"]["attention_norm"] = matrices["blocks"]["mlp_norm"] = {"scale": False}
        tx = optax.chain(
            optax.clip_by_global_norm(0.1),
            optax.adamw(
                lambda step: jnp.asarray([0.005, 0.01])[step], 0.9, 0.95, 1e-3, weight_decay=0.1, mask=matrices
            ),
        )
        state, change, norm = tx.init(params), jax.jit(tx.update), jax.jit(optim.global_norm)
        gradient = jax.jit(jax.value_and_grad(mean))
        for update in range(2):
            batch = jax.tree.map(lambda x: jnp.asarray(x[0]), batch_for(built, update))
            loss, grads = gradient(params, batch)
            assert trained.metrics[update]["loss"] == pytest.approx(float(loss), rel=1e-5)
            assert trained.metrics[update]["gradient_norm"] == pytest.approx(float(norm(grads)), rel=1e-4)
            updates, state = change(grads, state, params)
            params = jax.tree.map(jnp.add, params, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), trained.params, params)


@pytest.mark.exhaustive
def test_every_weight_learns():
    model = {"preset": "tiny", **SMALL, "vocab": 264, "attention_bias": True, "output_bias": True, "qk_norm": True}
    trained = Trained(config(model=model), updates=2)
    for path, (before, after) in _pairs(trained.first, trained.params):
        assert not np.array_equal(before, after), path


@pytest.mark.exhaustive
def test_kernels_called_on_each_device_learn_the_same(plain):
    mesh = {"fsdp": 2, "tensor": 2}
    Trained(config(mesh=mesh, memory={"attention": "triton"}), 4, updates=1, begin=plain).agrees_with(plain)


@pytest.mark.exhaustive
def test_parameters_may_be_stored_in_bfloat16():
    """Matrices: near 1, where scales of norms are, bfloat16 is too coarse for updates."""
    trained = Trained(config(precision={"parameters": "bfloat16"}))
    axes = flatten_dict(trained.built.model.axes)
    for path, leaf in flatten_dict(trained.params).items():
        assert leaf.dtype == (jnp.bfloat16 if is_matrix(axes[path]) else jnp.float32)
    assert np.isfinite(trained.metrics[-1]["loss"])


def test_the_state_is_donated(plain):
    state = jax.device_put(plain.begun, jax.tree.map(lambda x: x.sharding, plain.built.spec.state))
    before = jax.tree.leaves(state.params)
    plain.compiled(state, plain.built.place(batch_for(plain.built)))
    assert all(leaf.is_deleted() for leaf in before)


@pytest.mark.exhaustive
def test_initialising_needs_no_more_than_training():
    cfg = config(model={"preset": "tiny", "layers": 16}, mesh={"fsdp": 4, "tensor": 2})
    built = program(cfg, jax.devices())
    stats = built.lower_initialise().compile().memory_analysis()
    step = built.lower_step().compile().memory_analysis()
    held = lambda s: s.output_size_in_bytes + s.temp_size_in_bytes + s.argument_size_in_bytes - s.alias_size_in_bytes  # noqa: E731
    assert held(stats) < held(step)
    layers = sum(np.prod(x.shape) * 4 for x in jax.tree.leaves(built.spec.state.params["blocks"]))
    assert stats.temp_size_in_bytes < layers / 2  # no second copy of the stack, whole or split


@pytest.mark.exhaustive
def test_no_layout_holds_a_gathered_model_for_the_backward_pass():
    """Under `none`, a layer's weights are gathered again: temporaries do not grow with depth by whole layers."""

    def temporaries(layers):
        cfg = config(
            model={"preset": "tiny", "layers": layers, "mlp": 2048},
            mesh={"fsdp": 8},
            data={"sequence_length": 8},
        )
        return program(cfg, jax.devices()).lower_step().compile().memory_analysis().temp_size_in_bytes

    layer = 3 * 128 * 2048 * 4
    assert temporaries(12) - temporaries(4) < 8 * layer / 2


@pytest.mark.parametrize(
    ("schedule", "middle", "last"), [("cosine", 0.55, 0.1), ("linear", 0.55, 0.1), ("constant", 1.0, 1.0)]
)
def test_schedules_warm_up_and_come_down(schedule, middle, last):
    rate = optim.learning_rate_schedule(
        Optimizer(learning_rate=2.0, schedule=schedule, warmup=10, min_lr_ratio=0.1), 110
    )
    assert float(rate(0)) == pytest.approx(0.2)
    assert float(rate(4)) == pytest.approx(1.0)
    assert float(rate(9)) == pytest.approx(2.0)
    assert float(rate(59)) == pytest.approx(2.0 * middle)
    assert float(rate(109)) == pytest.approx(2.0 * last)


def test_adam_does_not_decay():
    weight = {"w": jnp.ones((4, 8))}

    def update(**settings):
        tx = optim.build(Optimizer(clip=None, **settings), lambda _: 1e-3, {"w": ("embed", "mlp")})
        return tx.update({"w": jnp.full((4, 8), 0.1)}, tx.init(weight), weight)[0]["w"]

    np.testing.assert_array_equal(update(name="adam"), update(name="adamw", weight_decay=0.0))
    assert not np.array_equal(update(name="adam"), update(name="adamw", weight_decay=0.1))


def _pairs(a, b):
    return zip(
        [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(a)],
        zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True),
        strict=True,
    )


def test_existing_weights_are_not_initialised():
    built = program(config(), jax.devices()[:1])
    model = built.cfg.model.model_copy(update={"hf": "dir"})
    with pytest.raises(UserError, match=r"model\.hf=dir provides the weights"):
        dataclasses.replace(built, cfg=built.cfg.model_copy(update={"model": model})).initialise()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sizes", "copies"),
    [
        # The loss needs two copies of the head. The random bits of its columns, and float32 values that depend on them,
        # exist for some columns at a time.
        ({"vocab": 65536, "layers": 2, "mlp": 512}, 2 * 65536 * 1024),
        # Gradients are clipped in place: there is no copy of the largest one.
        ({"vocab": 512, "layers": 8, "mlp": 8192}, 8 * 8192 * 1024),
    ],
)
def test_an_update_with_remainders_needs_little_beside_the_gradients(sizes, copies):
    """Compiled for a GPU. `copies`: elements of bfloat16 arrays that may exist beside the gradients."""
    target = parse_target("h100-80gb:1")
    model = {"family": "decoder", "embed": 1024, "heads": 8, "kv_heads": 8, "head_dim": 64, **sizes}
    sections = {
        "model": model,
        "data": {"sequence_length": 256},
        "batch": {"global_size": 1},
        "precision": {"parameters": "bfloat16", "master": "remainder8"},
        "optimizer": {"name": "adamw8bit"},
        "memory": {"remat": "full"},
    }
    built = program(config(**sections), target_devices(target, target.memory))
    compiled = compile_program(built.lower_step(), here=False)
    assert compiled.sizes["temporaries"] < 2 * (built.model.parameter_count + copies)
