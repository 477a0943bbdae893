"""The server against the ordinary step, how old gradients may be, and the bytes through its link."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem.config import load_config
from jaxmem.data import Loader
from jaxmem.planning import plan_program
from jaxmem.step import program
from scripts.course.parameter_server import ParameterServer, busiest_link, gradient_of, train

WORKERS = 4
PAIR = 2  # of a real network: each worker compiles for its device


@pytest.fixture(scope="module")
def cfg(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(20):
        (folder / f"{number}.txt").write_text(" ".join(f"{number * i % 17} bottles" for i in range(80)))
    return load_config(
        {
            "name": "served",
            "model": {"preset": "tiny", "layers": 1, "embed": 32, "mlp": 64, "heads": 2, "kv_heads": 2, "head_dim": 16},
            "data": {"source": "text", "path": str(folder), "sequence_length": 32},
            "batch": {"global_size": 8},
            "mesh": {"replica": PAIR},
            "optimizer": {"schedule": "constant", "learning_rate": 3e-3, "epsilon": 1e-3},
            "train": {"steps": 4},
        }
    )


@pytest.fixture(scope="module")
def ordinary(cfg):
    """(program, plan, initial weights, batches, losses) of the compiled step, with its all-reduce."""
    built = program(cfg, jax.devices()[:PAIR])
    planned = plan_program(built)
    state = built.initialise()
    initial = jax.device_get(state.params)
    with Loader(built.cfg) as loader:
        batches = [next(loader) for _ in range(cfg.steps)]
    losses = []
    for batch in batches:
        state, metrics = planned.step(state, built.place(batch))
        losses.append(float(metrics["loss"]))
    return built, planned, initial, batches, losses


def shares(batches):
    """Each worker's rows of each batch."""
    rows = batches[0]["inputs"].shape[1] // PAIR
    return [[{k: x[:, w * rows : (w + 1) * rows] for k, x in batch.items()} for batch in batches] for w in range(PAIR)]


@pytest.mark.exhaustive
def test_synchronous_is_the_ordinary_step(ordinary):
    """Also with clipping by the norm of all gradients, which no single weight's gradient knows."""
    built, _, initial, batches, losses = ordinary
    assert built.cfg.optimizer.clip == 1.0
    server = ParameterServer(initial, built.spec.optimizer, PAIR, jax.devices()[PAIR])
    seen = train(server, gradient_of(built), shares(batches), jax.devices()[:PAIR])
    assert np.mean(seen, axis=0) == pytest.approx(losses, rel=1e-5)
    assert losses[-1] < losses[0]
    assert server.updates == len(losses)
    assert {x.device for x in jax.tree.leaves(server.params)} == {jax.devices()[PAIR]}


def test_bytes_through_the_busiest_link(ordinary):
    built, planned, initial, batches, _ = ordinary
    size = sum(x.nbytes for x in jax.tree.leaves(initial))
    by_server, by_ring = busiest_link(size, PAIR)
    server = ParameterServer(initial, built.spec.optimizer, PAIR, jax.devices()[PAIR])
    train(server, gradient_of(built), [share[:2] for share in shares(batches)], jax.devices()[:PAIR])
    assert server.received == server.sent == 2 * by_server
    counted = planned.as_json()["collectives"]["all-reduce"]["wire_bytes"]
    assert counted == pytest.approx(by_ring, rel=0.05)


# A problem whose answer is known: the weights that a random linear map was made with.


def linear(worker: int, steps: int, rows: int = 16):
    draw = np.random.default_rng(worker)
    x = draw.normal(size=(steps, rows, 8)).astype(np.float32)
    return [{"x": one, "y": one @ TRUE} for one in x]


TRUE = np.arange(8, dtype=np.float32) / 4
NOTHING = {"b": np.zeros((), np.float32), "w": np.zeros(8, np.float32)}


@jax.jit
def squared(params, batch):
    return jax.value_and_grad(lambda p: jnp.mean((batch["x"] @ p["w"] + p["b"] - batch["y"]) ** 2))(params)


@pytest.mark.parametrize("staleness", [0, 2])
def test_asynchronous_converges_within_its_bound(staleness):
    steps = 60
    server = ParameterServer(NOTHING, optax.sgd(0.05), WORKERS, jax.devices()[7], staleness=staleness)
    losses = train(server, squared, [linear(n, steps) for n in range(WORKERS)], jax.devices()[:WORKERS])
    np.testing.assert_allclose(server.params["w"], TRUE, atol=1e-2)
    assert all(seen[-1] < 1e-3 * seen[0] for seen in losses)
    assert server.updates == WORKERS * steps
    assert server.worst_lead <= staleness
    assert 0 < server.worst_staleness <= (WORKERS - 1) * (2 * staleness + 1)


def test_no_worker_is_further_ahead_than_allowed():
    """The second worker never pushes, and the first may do two steps more than it."""
    server = ParameterServer(NOTHING, optax.sgd(0.1), 2, jax.devices()[7], staleness=2)

    def step():
        server.push(jax.tree.map(jnp.ones_like, server.pull(0, jax.devices()[0])), 0)

    for _ in range(3):
        step()
    assert server.worst_lead == 2
    with pytest.raises(RuntimeError, match="another worker has failed"), server.working(1):
        raise RuntimeError("another worker has failed")
    with pytest.raises(RuntimeError, match="another worker has failed"):
        step()
    assert server.updates == 3


def test_a_worker_that_fails_stops_the_others():
    def broken(params, batch):
        if batch["x"][0, 0] == linear(2, 3)[1]["x"][0, 0]:
            raise ValueError("worker 2 found something")
        return squared(params, batch)

    server = ParameterServer(NOTHING, optax.sgd(0.1), WORKERS, jax.devices()[7])
    with pytest.raises((ValueError, RuntimeError), match=r"worker 2 found something|another worker has failed"):
        train(server, broken, [linear(n, 3) for n in range(WORKERS)], jax.devices()[:WORKERS])


def test_workers_may_stop_at_different_times():
    server = ParameterServer(NOTHING, optax.adam(0.1), 2, jax.devices()[7], staleness=1)
    train(server, squared, [linear(0, 2), linear(1, 9)], jax.devices()[:2])
    assert server.updates == 11
