"""Lifetimes and the fullest moment: against programs whose memory one can count, and against XLA's own simulation."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.planning.breakdown import Breakdown
from jaxmem.planning.buffers import Allocation, Buffer, Lifetimes, Temporaries, read_allocations
from jaxmem.planning.hlo import read_module
from tests.planning.conftest import module_of


def temporary(function: Any, *arguments: Any) -> tuple[Any, Any]:
    compiled = jax.jit(function).lower(*arguments).compile()
    module = read_module(compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto())
    allocations = read_allocations(module, compiled.memory_analysis().serialized_buffer_assignment_proto)
    held = {kind: sum(one.size for one in allocations if one.kind == kind) for kind in ("argument", "output")}
    stats = compiled.memory_analysis()
    assert held == {"argument": stats.argument_size_in_bytes, "output": stats.output_size_in_bytes}
    (one,) = [one for one in allocations if one.kind == "temporary"]
    assert one.size == stats.temp_size_in_bytes
    return one, Temporaries(one, Lifetimes(module)).peak


def test_values_that_live_at_once_are_held_at_once() -> None:
    def function(x: jax.Array) -> jax.Array:
        first = x @ x
        second = first @ x
        return (first.T @ second).sum()  # both, and their product

    allocation, moment = temporary(function, jnp.ones((64, 64)))
    large = [held.size for held in moment.regions if held.size >= 64 * 64 * 4]
    assert large == [64 * 64 * 4] * len(large)
    assert len(large) in (3, 4)  # first, second, what is made of them, perhaps a transposed copy
    assert moment.unused + sum(held.size for held in moment.regions) == allocation.size
    assert moment.unused < 0.05 * allocation.size


def test_a_loop_s_carry_is_one_place_with_many_names() -> None:
    def function(x: jax.Array) -> jax.Array:
        _, stacked = jax.lax.scan(lambda x, _: (jnp.sin(x @ x), x), x, length=6)
        return jnp.einsum("lij,lkj->ik", stacked, stacked).sum()

    _, moment = temporary(function, jnp.ones((64, 64)))
    stack = max(moment.regions, key=lambda held: held.size)
    assert stack.size == 6 * 64 * 64 * 4
    assert len({name[0].opcode for buffer in stack.buffers for name in buffer.aliases}) > 1


def test_what_is_dead_is_not_held() -> None:
    def function(x: jax.Array) -> jax.Array:
        for _ in range(6):
            x = jnp.sort(x @ x)  # which is not fused
        return x.sum()

    _, moment = temporary(function, jnp.ones((64, 64)))
    assert sum(held.size >= 64 * 64 * 4 for held in moment.regions) <= 3


def test_allocations_of_several_memory_colors_are_in_memory_together() -> None:
    """XLA has an allocation of temporaries for each color, such as that of buffers that NCCL registers."""
    module = module_of(lambda x: jnp.sort(jnp.sort(x @ x) @ x), jnp.ones((64, 64)))
    places = [instruction for instruction in module.entry.instructions if instruction.opcode != "parameter"]
    colors = [(128, 96), (1024, 960), (64, 64)]  # bytes of an allocation, and of its only buffer, which is at its end
    allocations = [
        Allocation("temporary", size, None, False, (Buffer(size - used, used, ((places[0], ()),)),))
        for size, used in colors
    ]
    on_host = Allocation("temporary", 4096, None, True, (Buffer(0, 4096, ((places[0], ()),)),))
    breakdown = Breakdown(module, [*allocations, on_host])
    assert breakdown.temporaries.size == 128 + 1024 + 64
    assert [region.size for region in breakdown.temporaries.peak.regions] == [96, 960, 64]
    assert breakdown.temporaries.peak.unused == 32 + 64
    assert sum(buffer.size for buffer in breakdown.buffers) == 128 + 1024 + 64
    assert Breakdown(module, []).temporaries.size == 0
