"""Generation: what the whole sequence says is likeliest, one token at a time, on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem.config import load_config
from jaxmem.errors import UserError
from jaxmem.inference.generate import Conversation, DecodingState, Generator, Sampling
from jaxmem.sharding.layout import current
from jaxmem.step.programs import program
from tests.support.generation import generate

PROMPT = np.arange(40, 49)


def made(mesh=None, devices=1, generate=None, **model):
    fields = {"layers": 2, "embed": 32, "mlp": 64, "heads": 4, "kv_heads": 2, "head_dim": 8}
    cfg = load_config(
        {
            "name": "x",
            "model": {"preset": "tiny", **fields, **model},
            "data": {"sequence_length": 16},
            "mesh": mesh or {},
            "train": {"steps": 1},
            "generate": generate or {},
        }
    )
    return program(cfg, jax.devices()[:devices])


def built(mesh=None, devices=1, **model):
    one = made(mesh, devices, **model)
    return one, one.initialise().params


@pytest.fixture(scope="module")
def alone():
    return built()


def test_greedy_follows_the_whole_sequence(alone):
    made, params = alone
    forward = jax.jit(nnx.merge(made.model.graphdef, params))
    ids = jnp.asarray(PROMPT, jnp.int32)[None]
    expected = []
    for _ in range(5):
        token = int(jnp.argmax(forward(ids)[0, -1]))
        expected.append(token)
        ids = jnp.concatenate([ids, jnp.asarray([[token]], jnp.int32)], axis=1)
    assert list(generate(made, params, PROMPT, 5)) == expected


@pytest.mark.exhaustive
def test_a_text_that_passes_the_original_length_gets_the_long_factors_from_its_beginning():
    """The rows of a batch pass it at different times, and a prompt in chunks has factors of its whole length."""
    scaling = {"scaling": "longrope", "factor": 4.0, "original_length": 12}
    rope = {**scaling, "short_factors": [1.0] * 4, "long_factors": [1.0, 3.0, 5.0, 9.0]}
    longer = made(generate={"prefill_chunk": 4}, rope=rope)
    params = longer.initialise().params
    forward = jax.jit(nnx.merge(longer.model.graphdef, params))
    prompts = PROMPT, PROMPT[3:8], np.arange(60, 75)
    generated = np.stack(list(Generator(longer, params)(prompts, 6)), axis=1)
    for prompt, tokens in zip(prompts, generated, strict=True):
        for known in (0, 5):
            text = jnp.asarray([*prompt, *tokens[:known]], jnp.int32)
            assert jnp.argmax(forward(text[None])[0, -1]) == tokens[known]


@pytest.mark.exhaustive
def test_a_mesh_says_the_same(alone):
    split, params = built({"fsdp": 4, "tensor": 2}, 8)
    assert list(generate(split, params, PROMPT, 8)) == list(generate(*alone, PROMPT, 8))


@pytest.mark.exhaustive
def test_rows_and_heads_of_the_kv_cache_are_sharded(alone):
    read, prompts = DecodingState.of_rows([0, 0]), np.stack([PROMPT, PROMPT + 9])
    together = list(Generator(*built({"fsdp": 2, "tensor": 2}, 4)).extend(read, prompts, 4))
    assert {x.addressable_shards[0].data.shape for x in read.cache} == {(2, 1, 16, 1, 8)}
    np.testing.assert_array_equal(together, list(Generator(*alone)(prompts, 4)))


def test_tokens_of_a_sharded_batch_are_on_all_devices(monkeypatch):
    """Each of several processes has some of them, and can read only arrays of which it has all."""
    step = Generator._step
    placed = []
    monkeypatch.setattr(Generator, "_step", lambda *inputs: placed.append(step(*inputs)) or placed[-1])
    next(Generator(*built({"fsdp": 2}, 2, layers=1))([PROMPT, PROMPT + 9], 1))
    assert placed[0].is_fully_replicated
    assert len(placed[0].sharding.device_set) == 2


@pytest.mark.exhaustive
def test_temperature_draws_by_the_seed(alone):
    hot = [list(generate(*alone, PROMPT, 12, temperature=2.0, seed=seed)) for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]


def test_every_token_is_sampled_with_other_noise(alone):
    assert len(set(generate(*alone, PROMPT, 12, temperature=1e6, seed=1))) > 3


@pytest.mark.exhaustive
def test_a_low_temperature_is_nearly_greedy_and_a_high_one_is_not(alone):
    greedy, cold, hot = (list(generate(*alone, PROMPT, 12, temperature=value, seed=1)) for value in (0.0, 1e-4, 2.0))
    assert greedy == cold != hot


def test_it_stops_after_the_end_token(alone):
    first = next(generate(*alone, PROMPT, 4))
    assert list(generate(*alone, PROMPT, 4, end=first)) == [first]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kept", "tokens"), [("full", 32), ("int8", 1)])
def test_memory_is_that_of_one_layer_and_one_cache(kept, tokens):
    """Of one more token and of a chunk: what lies beside the cache is the same at any depth, and is no second one."""
    room, one_layer = 4096, 2 * 4096 * 2 * 8 * 4

    def compiled(layers):
        one = made(layers=layers)
        network = nnx.merge(one.model.graphdef, one.spec.state.params)
        cache = jax.eval_shape(lambda: network.empty_cache(1, room, kept))
        step = jax.jit(lambda p, *args: nnx.merge(one.model.graphdef, p).extend(*args), donate_argnums=2)
        given = jax.ShapeDtypeStruct((1, tokens), jnp.int32), cache, jax.ShapeDtypeStruct((), jnp.int32)
        memory = step.lower(one.spec.state.params, *given).compile().memory_analysis()
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
        assert held == layers * one_layer * (1 if kept == "full" else (8 + 4) / (8 * 4))
        assert memory.alias_size_in_bytes == held
        return memory.temp_size_in_bytes

    scores = 4 * 4 * room  # of one token
    few, many = compiled(2), compiled(12)
    assert many - few < one_layer / 4
    assert few < (3 * one_layer if tokens == 1 else 4 * one_layer + 3 * tokens * scores)


@pytest.mark.exhaustive
def test_int8_is_near_the_full_cache(alone):
    """And a prompt in chunks is the prompt."""
    one, params = alone
    network = nnx.merge(one.model.graphdef, params)
    ids = jax.random.randint(jax.random.key(1), (2, 40), 0, 256, jnp.int32)

    extend = jax.jit(network.extend)

    def last(kept):
        cache = network.empty_cache(2, 48, kept)
        for start in range(0, 40, 8):
            logits, cache = extend(ids[:, start : start + 8], cache, jnp.asarray(start, jnp.int32))
        return np.asarray(logits), cache

    full, codes = last("full"), last("int8")
    whole = np.asarray(jax.jit(network)(ids))[:, -1]
    np.testing.assert_allclose(full[0], whole, atol=2e-6)
    assert 1e-5 < np.std(codes[0] - whole) / np.std(whole) < 0.02
    for values, rounded in zip(full[1], codes[1], strict=True):
        step = np.abs(values[0, :, :40]).max(-1, keepdims=True) / 127
        assert (np.abs(rounded.dequantize() - values)[0, :, :40] <= step / 2 * 1.001).all()


def test_large_biases_of_keys_leave_the_other_dimensions_as_they_are():
    """Those of Qwen2.5 are hundreds in a few dimensions. Keys with biases are not quantized, only values."""
    one, params = built(attention_bias=True)
    params["blocks"]["attention"]["k"]["bias"] = params["blocks"]["attention"]["k"]["bias"].at[:, 3].set(300.0)
    params["blocks"]["attention"]["q"]["weight"] *= 8  # scores that depend on all dimensions
    network = nnx.merge(one.model.graphdef, params)
    ids = jax.random.randint(jax.random.key(1), (2, 40), 0, 256, jnp.int32)
    extend = jax.jit(network.extend)

    def logits(storage):
        cache = network.empty_cache(2, 40, storage)
        return np.asarray(extend(ids, cache, jnp.asarray(0, jnp.int32))[0])

    full = logits("full")
    assert 0 < np.std(logits("int8") - full) / np.std(full) < 0.02


@pytest.mark.exhaustive
def test_of_a_conversation_only_what_is_new_is_read(alone, monkeypatch):
    one, params = alone
    small = program(
        one.cfg.model_copy(update={"generate": made(generate={"prefill_chunk": 4}).cfg.generate}), jax.devices()[:1]
    )
    fresh, thread = Generator(one, params), Conversation(Generator(small, params))
    read = []
    step = Generator._step
    monkeypatch.setattr(Generator, "_step", lambda self, *args: (read.append(args[2]), step(self, *args))[1])
    turns = PROMPT, np.arange(60, 66), np.arange(90, 93)
    said = np.zeros(0, np.int32)
    for turn, asked in zip(turns, ([4, 4, 1], [4, 3], [4]), strict=True):
        said = np.append(said, turn).astype(np.int32)
        read.clear()
        answer = list(thread(said, 5))
        assert read == asked + [1] * 4  # the last answer's last token among what is new
        assert answer == [int(tokens[0]) for tokens in fresh([said], 5)]
        said = np.append(said, answer).astype(np.int32)
    other = np.append(said[:10], PROMPT).astype(np.int32)  # another beginning, after what both share
    assert list(thread(other, 5)) == [int(tokens[0]) for tokens in fresh([other], 5)]


@pytest.mark.parametrize(
    ("prompt", "count", "temperature", "message"),
    [
        (PROMPT[:0], 4, 0.0, "the prompt is empty"),
        (PROMPT, 0, 0.0, "tokens=0 must be at least 1"),
        (PROMPT, 4, -1.0, "temperature=-1.0 must be at least 0"),
    ],
)
def test_mistakes_are_named(alone, prompt, count, temperature, message):
    with pytest.raises(UserError, match=message):
        list(generate(*alone, prompt, count, temperature=temperature))


def test_batches_are_sampled_independently(alone):
    generator = Generator(*alone, Sampling(temperature=2.0, seed=1))
    prompts = [PROMPT, PROMPT]
    first, second = (np.stack(list(generator(prompts, 6, batch=batch))) for batch in (0, 1))
    np.testing.assert_array_equal(first, np.stack(list(generator(prompts, 6))))
    assert (first != second).any(axis=0).all()


def test_two_generators_can_take_turns(alone):
    expected = list(generate(*alone, PROMPT, 4))
    streams = [generate(*alone, PROMPT, 4) for _ in range(2)]
    first = next(streams[0])
    assert next(streams[1]) == first
    streams[0].close()
    assert current() is None
    assert [first, *streams[1]] == expected
