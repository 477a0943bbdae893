"""Estimated time: what a kernel moves, what a message hides behind, and the bounds between which an estimate lies."""

import jax
import jax.numpy as jnp
import pytest

from jaxmem.kernels import attention
from jaxmem.machine.gpus import GPUS, LAUNCH_SECONDS, MATMUL_SECONDS
from jaxmem.machine.links import collective_seconds, link_rate, slowdown
from jaxmem.planning.communication import FROM_HOST, TO_HOST, Transfer
from jaxmem.planning.compile import compile_elsewhere, without_cache
from jaxmem.planning.hlo import Computation, HloShape, Instruction, Module, read_module
from jaxmem.planning.targets import parse_target, target_devices
from jaxmem.planning.timeline import (
    COMPUTE,
    NETWORK,
    WAIT,
    Kernel,
    Timeline,
    Transmission,
    moved_bytes,
    timeline,
)
from tests.planning.conftest import module_of

H100 = GPUS["h100-80gb"]
SIZE = 64 * 2**20  # float32 elements of a large array
F32 = HloShape("float32", 32, (SIZE,))


def program_of(*order: tuple[str, str, list[str]]) -> Module:
    """Instructions (name, opcode, operands) on one large array, in this order."""
    made: dict[str, Instruction] = {}
    for number, (name, opcode, operands) in enumerate(order):
        shape = HloShape("tuple", 0, (), (F32, F32)) if opcode == "all-gather-start" else F32
        one = Instruction(number, name, opcode, shape, 0, "")
        one.operands = [made[operand] for operand in operands]
        made[name] = one
    main = Computation(1, "main", list(made.values()), list(made.values())[-1])
    for one in made.values():
        one.computation = main
    return Module([main], main, {one.id: one for one in made.values()})


GATHER = collective_seconds(H100, "all-gather", 7 * F32.bytes, 8, 8)
KERNEL = Kernel(0.0, 2 * F32.bytes / H100.memory_rate, LAUNCH_SECONDS)
BESIDE = KERNEL.beside(link_rate(H100, "all-gather", 8, 8), H100)  # seconds of a kernel beside the all-gather


@pytest.mark.parametrize(("kernels", "hidden"), [(0, 0), (1, 1), (3, 3)])
def test_a_message_is_exposed_but_for_the_kernels_beside_it(kernels: int, hidden: int) -> None:
    names = [f"work{n}" for n in range(kernels)]
    module = program_of(
        ("x", "parameter", []),
        ("start", "all-gather-start", ["x"]),
        *((name, "negate", ["x"]) for name in names),
        ("done", "all-gather-done", ["start"]),
    )
    found = timeline(module, H100, 8, 8)
    one = found.traffic["all-gather"]
    assert one.exposed_seconds == pytest.approx(GATHER - hidden * BESIDE)
    assert one.exposed_bytes == pytest.approx(one.wire_bytes * one.exposed_seconds / GATHER, rel=1e-6)
    assert found.seconds == pytest.approx(GATHER)
    assert found.network.exposed_share == pytest.approx(one.exposed_seconds / GATHER)


def test_spans_of_a_wait_are_its_exposed_seconds() -> None:
    module = program_of(
        ("x", "parameter", []),
        ("start", "all-gather-start", ["x"]),
        ("work", "negate", ["x"]),
        ("done", "all-gather-done", ["start"]),
        ("last", "negate", ["x"]),
    )
    found = timeline(module, H100, 8, 8)
    waits = [span for span in found.spans if span.kind == WAIT]
    assert sum(span.end - span.begin for span in waits) == pytest.approx(found.network.exposed_seconds)
    sent = [span for span in found.spans if span.row == NETWORK]
    assert [(span.kind, span.begin) for span in sent] == [("all-gather", 0.0)]
    compute = [span for span in found.spans if span.row == COMPUTE]
    assert sum(span.end - span.begin for span in compute) == pytest.approx(found.seconds)
    rows = found.rows()
    assert rows[COMPUTE][-1][1] == pytest.approx(1.0)
    assert [kind for _, _, kind in rows[COMPUTE]] == ["kernel", WAIT, "kernel"]


def test_collectives_on_one_link_do_not_overlap() -> None:
    module = program_of(
        ("x", "parameter", []),
        ("first", "all-gather-start", ["x"]),
        ("second", "all-gather-start", ["x"]),
        ("one", "all-gather-done", ["first"]),
        ("two", "all-gather-done", ["second"]),
    )
    found = timeline(module, H100, 8, 8)
    assert found.seconds == pytest.approx(found.network.seconds)
    assert found.traffic["all-gather"].executed == 2


def test_what_is_waited_for_is_the_message_that_has_the_link() -> None:
    """Not the one that waits behind it."""
    module = program_of(
        ("x", "parameter", []),
        ("first", "all-gather-start", ["x"]),
        ("second", "all-gather-start", ["x"]),
        ("two", "all-gather-done", ["second"]),
        ("one", "all-gather-done", ["first"]),
    )
    found = timeline(module, H100, 8, 8)
    assert [one.traffic.exposed_share for one in found.collectives] == [1.0, 1.0]


def test_an_enough_hidden_message_costs_nothing() -> None:
    work = [(f"work{n}", "negate", ["x"]) for n in range(60)]
    module = program_of(
        ("x", "parameter", []), ("start", "all-gather-start", ["x"]), *work, ("done", "all-gather-done", ["start"])
    )
    found = timeline(module, H100, 8, 8)
    assert found.traffic["all-gather"].exposed_bytes == 0
    slowed = GATHER * (1 - KERNEL.seconds / BESIDE)  # kernels beside the all-gather do less
    assert found.seconds == pytest.approx(60 * KERNEL.seconds + slowed)
    assert found.bound == "memory"


def test_copies_from_the_host_may_be_the_limit() -> None:
    copies = [
        Transmission(
            Instruction(1, "copy", "copy-start", F32, 0, ""), Transfer(kind, 1, True), 2, 0.0, seconds, exposed
        )
        for kind, seconds, exposed in ((FROM_HOST, 3.0, 2.5), (TO_HOST, 2.0, 0.0))
    ]
    found = Timeline(seconds=6.5, arithmetic=1.0, memory=0.5, transmissions=copies)
    assert found.bound == "host copies"
    assert found.roofline == 6.0


def test_large_matmuls_are_limited_by_arithmetic() -> None:
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    found = timeline(module_of(lambda a, b: a @ b, x, x), H100, 1, 1)
    assert found.flops == 2 * 4096**3
    assert found.bound == "arithmetic"
    assert found.arithmetic == pytest.approx(found.flops / H100.matmul_rate("float32") + MATMUL_SECONDS, rel=0.05)


def test_attention_attains_less_of_the_peak_than_matmuls() -> None:
    q = jax.ShapeDtypeStruct((1, 4096, 8, 128), jnp.bfloat16)
    devices = target_devices(parse_target("h100-80gb"), H100.memory)
    place = jax.sharding.SingleDeviceSharding(devices[0])
    run = jax.jit(lambda q: attention(q, q, q, causal=True, implementation="cudnn"), in_shardings=place)
    with without_cache():
        found = timeline(read_module(compile_elsewhere(run.lower(q))[0]), H100, 1, 1)
    rate = H100.attention_rate("bfloat16", 2048.5, 128, backward=False)
    assert rate < H100.matmul_rate("bfloat16")
    assert found.arithmetic == pytest.approx(LAUNCH_SECONDS + MATMUL_SECONDS + found.flops / rate, rel=1e-3)


def test_a_slice_moves_only_the_slice() -> None:
    stack = jax.ShapeDtypeStruct((100, 64, 64), jnp.float32)

    def read(stack: jax.Array, n: jax.Array) -> jax.Array:
        return jnp.sin(jax.lax.dynamic_index_in_dim(stack, n, keepdims=False))

    kernels = [one for one in module_of(read, stack, jnp.int32(3)).entry.instructions if one.opcode == "fusion"]
    assert sum(map(moved_bytes, kernels)) < 4 * 64 * 64 * 4


def test_kernels_beside_a_collective_are_slower() -> None:
    """A compute-bound kernel has fewer multiprocessors, a memory-bound one less of the memory's rate."""
    arithmetic, memory = slowdown(H100, 3e11)
    assert Kernel(1.0, 0.1).beside(3e11, H100) == arithmetic
    assert Kernel(0.1, 1.0).beside(3e11, H100) == memory
    assert 1 < arithmetic < memory < 1.5


def test_kernels_that_reduce_attain_less_of_the_memory() -> None:
    times = [
        timeline(program_of(("x", "parameter", []), ("y", opcode, ["x"])), H100, 1, 1).seconds
        for opcode in ("negate", "reduce")
    ]
    assert times == [KERNEL.seconds, LAUNCH_SECONDS + 2 * F32.bytes / H100.reduction_rate]
    assert times[0] < times[1]


def test_without_rates_all_communication_is_exposed() -> None:
    module = program_of(
        ("x", "parameter", []), ("start", "all-gather-start", ["x"]), ("done", "all-gather-done", ["start"])
    )
    found = timeline(module, None, 8, 8)
    assert found.seconds == 0.0
    assert found.traffic["all-gather"].exposed_bytes == found.traffic["all-gather"].wire_bytes == 7 * F32.bytes
