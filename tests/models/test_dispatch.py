"""Tokens to the devices of their experts and back: all-to-all equals all-gather, and sends what the plan counts."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.models.dispatch import all_gather, all_to_all, share_of_devices
from jaxmem.planning.communication import collective
from jaxmem.planning.compile import without_cache
from jaxmem.planning.targets import parse_target, target_devices
from tests.planning.conftest import module_of

DEVICES, COUNT, TOKENS, WIDTH = 4, 2, 10, 6


def experts(w, x, choices, shares):
    """The experts of one device, by definition."""
    own = (jax.nn.one_hot(choices - COUNT * jax.lax.axis_index("expert"), COUNT) * shares[..., None]).astype(x.dtype)
    return jnp.einsum("td,edf,te->tf", x, w, own.sum(1))


def dispatched(how, w, *tokens, devices):
    mesh = Mesh(np.array(devices), ("expert",), axis_types=(AxisType.Auto,))
    run = jax.shard_map(
        lambda w, *tokens: how(partial(experts, w), *tokens), mesh=mesh, in_specs=P("expert"), out_specs=P("expert"),
        check_vma=False,
    )  # fmt: skip
    return run(w, *tokens)


@pytest.mark.exhaustive
@pytest.mark.parametrize("top_k", [1, 3])
def test_all_to_all_equals_all_gather_and_float64(top_k):
    rng = np.random.default_rng(0)
    rows, total = DEVICES * TOKENS, DEVICES * COUNT
    x, w, shares = (rng.standard_normal(s) for s in ((rows, WIDTH), (total, WIDTH, WIDTH), (rows, top_k)))
    choices = np.argsort(rng.random((rows, total)), axis=1)[:, :top_k].astype(np.int32)
    choices[:TOKENS] = np.arange(top_k)  # one device sends all of its tokens to the same devices
    g = rng.standard_normal((rows, WIDTH))
    for how in (all_gather, partial(all_to_all, count=COUNT)):

        def run(w, x, shares, how=how):
            return dispatched(how, w, x, choices, shares, devices=jax.devices()[:DEVICES])

        y, back = jax.vjp(jax.jit(run), *(jnp.asarray(a, jnp.float32) for a in (w, x, shares)))
        np.testing.assert_allclose(y, np.einsum("ti,tkio,tk->to", x, w[choices], shares), atol=1e-5)
        _, of_x, of_shares = back(jnp.asarray(g, jnp.float32))
        np.testing.assert_allclose(of_x, np.einsum("to,tkio,tk->ti", g, w[choices], shares), atol=1e-5)
        np.testing.assert_allclose(of_shares, np.einsum("ti,tkio,to->tk", x, w[choices], g), atol=1e-5)


@pytest.mark.exhaustive
def test_a_gpu_sends_rows_to_the_devices_that_need_them():
    """The tokens, their results and both gradients; the collectives of the tokens' choices are small."""
    devices, top_k, width = 8, 2, 4096
    targets = target_devices(parse_target(f"h100-80gb:{devices}"), 80 << 30)
    sharding = NamedSharding(Mesh(np.array(targets), ("expert",), axis_types=(AxisType.Auto,)), P("expert"))
    rows, total = devices * TOKENS, devices * COUNT

    def spec(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def gradients(w, x, choices, shares):
        how = partial(all_to_all, count=COUNT)
        return jax.grad(lambda x: jnp.sum(dispatched(how, w, x, choices, shares, devices=targets) ** 2))(x)

    tokens = spec(rows, width), spec(rows, top_k, dtype=jnp.int32), spec(rows, top_k, dtype=jnp.float32)
    with without_cache():
        module = module_of(gradients, spec(total, width, width), *tokens)
    starts = [one for one in module.walk() if one.opcode == "async-start"]
    started = {inner for one in starts for inner in one.called[0].instructions}
    sent = [found for one in module.walk() if one not in started and (found := collective(one, devices, devices))]
    large = [one for one in sent if one.wire_bytes > 10_000]
    assert [one.kind for one in large] == ["ragged-all-to-all"] * 4
    expected = 7 * TOKENS * share_of_devices(top_k, devices) * width * 2
    assert [one.wire_bytes for one in large] == pytest.approx([expected] * 4, rel=1e-3)
