"""A compiled module, read: order, shapes, how often what runs, and the arithmetic of its products."""

import jax
import jax.numpy as jnp

from jaxmem.planning.hlo import Instruction, dot_flops, total_flops, trip_count
from tests.planning.conftest import module_of

X, W = jnp.ones((4, 8)), jnp.ones((8, 8))


def looped(x: jax.Array) -> jax.Array:
    def outer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        inner = jax.lax.fori_loop(0, 3, lambda _, y: jnp.sin(y @ W), x)
        return inner, None

    return jax.lax.scan(outer, x, length=5)[0]


def test_matmuls_in_loops_count_once_per_iteration() -> None:
    assert total_flops(module_of(looped, X)) == 5 * 3 * 2 * 4 * 8 * 8


def test_batched_matmuls_and_convolutions() -> None:
    def both(a: jax.Array, b: jax.Array, image: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array]:
        convolved = jax.lax.conv_general_dilated(
            image, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.einsum("bij,bjk->bik", a, b), convolved

    module = module_of(both, jnp.ones((3, 4, 5)), jnp.ones((3, 5, 6)), jnp.ones((2, 8, 8, 3)), jnp.ones((3, 3, 3, 7)))
    assert total_flops(module) == 2 * 3 * 4 * 5 * 6 + 2 * (2 * 6 * 6 * 7) * (3 * 3 * 3)


def test_trip_counts_and_executions() -> None:
    module = module_of(looped, X)
    loops = {trip_count(one): one for one in module.walk() if one.opcode == "while"}
    assert set(loops) == {3, 5}
    body = max(loops[3].called, key=lambda called: len(called.instructions))
    assert module.executions[body] == 15


def test_a_branch_counts_as_often_as_its_name_says() -> None:
    def step(x: jax.Array, due: jax.Array) -> jax.Array:
        with jax.named_scope("runs_1_in_4"):
            return jax.lax.cond(due, lambda x: jnp.sin(x @ W) @ W, lambda x: x @ W, x)

    one = 2 * 4 * 8 * 8
    assert total_flops(module_of(step, X, jnp.array(True))) == one * (2 * 1 / 4 + 1 * 3 / 4)
    by_index = total_flops(module_of(lambda x, n: step(x, n > 3), X, jnp.array(5)))
    assert by_index == one * (2 * 1 / 4 + 1 * 3 / 4)


def test_operands_run_before_their_users() -> None:
    module = module_of(looped, X)
    for computation in module.computations:
        place = {one: n for n, one in enumerate(computation.instructions)}
        assert all(place[operand] < place[one] for one in place for operand in one.operands)
        assert computation.root in place


def test_shapes_of_tuples_and_of_narrow_types() -> None:
    module = module_of(lambda x: (x.astype(jnp.bfloat16), x.astype(jnp.int8)), X)
    root = module.entry.root.shape
    assert [str(part) for part in root.parts] == ["bfloat16[4,8]", "int8[4,8]"]
    assert (root.bytes, root.at((0,)).bytes) == (96, 64)


def test_instructions_know_the_source_that_made_them() -> None:
    made = [one for one in module_of(looped, X).walk() if dot_flops(one)]
    assert made
    assert all(_in_looped(one) for one in made)


def _in_looped(one: Instruction) -> bool:
    first = looped.__code__.co_firstlineno
    return any(
        frame.file == __file__ and frame.function.startswith("looped") and first < frame.line < first + 10
        for frame in one.frames
    )
