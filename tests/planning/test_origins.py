"""Which inputs a value comes from, through loops, fusions and tuples."""

import jax
import jax.numpy as jnp

from jaxmem.planning.hlo import Instruction, Module
from jaxmem.planning.origins import BATCH, NOWHERE, OPTIMIZER, WEIGHTS, trace_origins
from tests.planning.conftest import module_of

INPUTS = {"weights": WEIGHTS, "optimizer": OPTIMIZER, "batch": BATCH}


def of_input(one: Instruction) -> int:
    return INPUTS[one.op_name.partition("[")[0]]


def results(module: Module) -> list[int]:
    return list(trace_origins(module, of_input)[module.entry.root])


def test_results_come_from_what_they_were_computed_from() -> None:
    def function(weights: jax.Array, optimizer: jax.Array, batch: jax.Array) -> tuple[jax.Array, ...]:
        cast = jnp.tanh(weights.T.astype(jnp.bfloat16))
        return cast, batch @ weights, optimizer * 2, jnp.arange(7) * 3

    x = jnp.ones((4, 4))
    expected = [WEIGHTS, WEIGHTS | BATCH, OPTIMIZER, NOWHERE]
    assert results(module_of(function, x, x, x)) == expected


def test_what_a_loop_carries_reaches_it_in_any_iteration() -> None:
    def function(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, ...]:
        def body(_: int, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            _, second, third, same = carry
            return jnp.sin(second), jnp.sin(third), third * 2, same  # weights reach the first in the second iteration

        start = jnp.zeros((4, 4))
        return jax.lax.fori_loop(0, 10, body, (start, start, weights, batch))

    x = jnp.ones((4, 4))
    assert results(module_of(function, x, x)) == [WEIGHTS, WEIGHTS, WEIGHTS, BATCH]


def test_a_slice_of_weights_in_a_loop_is_weights_and_what_it_meets_is_not() -> None:
    def function(weights: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.tanh(x @ w), w.astype(jnp.bfloat16)

        return jax.lax.scan(body, batch, weights)

    assert results(module_of(function, jnp.ones((3, 4, 4)), jnp.ones((2, 4)))) == [WEIGHTS | BATCH, WEIGHTS]
