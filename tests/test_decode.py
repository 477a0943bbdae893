"""Generation: what the whole sequence says is likeliest, one token at a time, on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem.config import load_config
from jaxmem.decode import generate
from jaxmem.errors import UserError
from jaxmem.program import program

PROMPT = np.arange(40, 49)


def built(mesh=None, devices=1, **model):
    fields = {"layers": 2, "embed": 32, "mlp": 64, "heads": 4, "kv_heads": 2, "head_dim": 8}
    cfg = load_config(
        {
            "name": "x",
            "model": {"preset": "tiny", **fields, **model},
            "data": {"sequence_length": 16},
            "mesh": mesh or {},
            "train": {"steps": 1},
        }
    )
    made = program(cfg, jax.devices()[:devices])
    return made, made.initialise().params


@pytest.fixture(scope="module")
def alone():
    return built()


def test_greedy_follows_the_whole_sequence(alone):
    made, params = alone
    forward = jax.jit(nnx.merge(made.graphdef, params))
    ids = jnp.asarray(PROMPT, jnp.int32)[None]
    expected = []
    for _ in range(5):
        token = int(jnp.argmax(forward(ids)[0, -1]))
        expected.append(token)
        ids = jnp.concatenate([ids, jnp.asarray([[token]], jnp.int32)], axis=1)
    assert list(generate(made, params, PROMPT, 5)) == expected


@pytest.mark.parametrize("mesh", [{"tensor": 2}, {"fsdp": 4, "tensor": 2}])
def test_a_mesh_says_the_same(alone, mesh):
    split, params = built(mesh, mesh["tensor"] * mesh.get("fsdp", 1))
    assert list(generate(split, params, PROMPT, 8)) == list(generate(*alone, PROMPT, 8))


def test_temperature_draws_by_the_seed(alone):
    hot = [list(generate(*alone, PROMPT, 12, temperature=2.0, seed=seed)) for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]


def test_it_stops_after_the_end_token(alone):
    first = next(generate(*alone, PROMPT, 4))
    assert list(generate(*alone, PROMPT, 4, end=first)) == [first]


def test_the_cache_is_written_in_place():
    """A token's temporaries are those of one layer, whatever the depth."""

    def temporaries(layers):
        made, params = built(layers=layers)
        cache = jax.ShapeDtypeStruct((layers, 1, 4096, 2, 8), jnp.float32)
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        step = jax.jit(lambda p, t, c, n: nnx.merge(made.graphdef, p).extend(t, c, n), donate_argnums=2)
        return step.lower(params, token, (cache, cache), scalar).compile().memory_analysis().temp_size_in_bytes

    one_layer = 2 * 4096 * 2 * 8 * 4
    assert temporaries(10) - temporaries(2) < one_layer


@pytest.mark.parametrize(
    ("prompt", "count", "temperature", "message"),
    [
        (PROMPT[:0], 4, 0.0, "prompt: it is empty"),
        (PROMPT, 0, 0.0, "tokens: 0 is none"),
        (PROMPT, 4, -1.0, "temperature: -1.0"),
    ],
)
def test_mistakes_are_named(alone, prompt, count, temperature, message):
    with pytest.raises(UserError, match=message):
        list(generate(*alone, prompt, count, temperature=temperature))
