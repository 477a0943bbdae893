"""Messages between devices: kinds, groups and bytes, from real programs and from XLA's ways of writing groups."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.machine.gpus import GPUS
from jaxmem.planning.collectives import LATENCY, Collective, _groups, collective
from jaxmem.planning.hlo import Instruction, Shape
from tests.planning.conftest import module_of


def sent(function, spec, *, shape=(8, 16), devices=8):
    mesh = Mesh(np.array(jax.devices()[:devices]).reshape(2, devices // 2), ("a", "b"))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    module = module_of(mapped, x)
    return [found for one in module.walk() if (found := collective(one, devices, 4))]


@pytest.mark.parametrize(
    ("function", "kind", "group", "neighbours", "wire_bytes"),
    [
        # The array has 8 x 16 float32, of which a device holds 1/8: 64 bytes.
        (lambda x: jax.lax.psum(x, ("a", "b")), "all-reduce", 8, 4, 2 * 64 * 7 // 8),
        (lambda x: jax.lax.psum(x, "a"), "all-reduce", 2, 1, 2 * 64 // 2),
        (lambda x: jax.lax.psum(x, "b"), "all-reduce", 4, 4, 2 * 64 * 3 // 4),
        (lambda x: jax.lax.all_gather(x, "b", tiled=True)[:1], "all-gather", 4, 4, 4 * 64 * 3 // 4),
        (lambda x: jax.lax.all_gather(x, "a", tiled=True)[:1], "all-gather", 2, 1, 2 * 64 // 2),
        (lambda x: jnp.tile(jax.lax.psum_scatter(x, "b", scatter_dimension=1, tiled=True), 4), "reduce-scatter", 4, 4, 48),  # noqa: E501
        (lambda x: jax.lax.all_to_all(x, "b", 1, 1, tiled=True), "all-to-all", 4, 4, 48),
        (lambda x: jax.lax.ppermute(x, "b", [(0, 1), (1, 2), (2, 3), (3, 0)]), "collective-permute", 2, 2, 64),
    ],
)  # fmt: skip
def test_bytes_and_groups(function, kind, group, neighbours, wire_bytes) -> None:
    (one,) = sent(function, P(("a", "b")))
    assert (one.kind, one.group, one.wire_bytes) == (kind, group, wire_bytes)
    assert one.neighbours == neighbours
    assert not one.asynchronous


def test_alone_nothing_is_sent() -> None:
    assert sent(lambda x: jax.lax.psum(x, "b"), P(("a", "b")), devices=2) == []


def varint(field: int, number: int) -> bytes:
    return bytes([field << 3, number])


def nested(field: int, data: bytes) -> bytes:
    key = field << 3 | 2
    return (bytes([key]) if key < 128 else bytes([key & 127 | 128, key >> 7])) + bytes([len(data)]) + data


def instruction(**raw: list) -> Instruction:
    fields = {int(field.removeprefix("f")): value for field, value in raw.items()}
    return Instruction(1, "x", "all-reduce", Shape("float32", 32), 0, "", fields)


IOTA = varint(1, 4) + varint(2, 2) + nested(3, bytes([2, 4])) + nested(4, bytes([1, 0]))
X_AND_Y = nested(1, nested(1, b"x") + varint(2, 2)) + nested(1, nested(1, b"y") + varint(2, 4))
AXES = nested(1, X_AND_Y)
TURNED = nested(1, X_AND_Y + nested(3, nested(1, bytes([4, 2])) + nested(2, bytes([1, 0]))))
ACROSS = [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("one", "groups"),
    [
        (instruction(), [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (instruction(f49=[nested(1, bytes([0, 4])), nested(1, bytes([1, 5]))]), [[0, 4], [1, 5]]),
        (
            instruction(f87=[nested(1, nested(1, bytes([0, 1]))) + nested(1, nested(1, bytes([2, 3])))]),
            [[0, 1], [2, 3]],
        ),
        (instruction(f87=[nested(2, IOTA)]), ACROSS),
        (instruction(f92=[IOTA]), ACROSS),
        (instruction(f93=[AXES + nested(2, b"")]), ACROSS),
        (instruction(f93=[AXES + nested(2, varint(1, 1))]), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (instruction(f93=[AXES + nested(2, b"") + nested(2, varint(1, 1))]), [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (instruction(f93=[TURNED + nested(2, b"")]), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        # Of the second axis, 4 = 2 x 2, only the outer half or only the inner.
        (
            instruction(f93=[AXES + nested(2, varint(1, 1) + nested(2, varint(1, 1) + varint(2, 2)))]),
            [[0, 2], [1, 3], [4, 6], [5, 7]],
        ),
        (
            instruction(f93=[AXES + nested(2, varint(1, 1) + nested(2, varint(1, 2) + varint(2, 2)))]),
            [[0, 1], [2, 3], [4, 5], [6, 7]],
        ),
    ],
)
def test_groups_however_they_are_written(one: Instruction, groups: list[list[int]]) -> None:
    assert _groups(one, 8).tolist() == groups


def test_messages_between_hosts_are_slower_and_share_their_networks() -> None:
    gpu, size = GPUS["h100-80gb"], 10**9
    seconds = [
        Collective("all-gather", 16, neighbours, size, asynchronous=True).seconds(gpu) - LATENCY
        for neighbours in (16, 8, 2, 1)
    ]
    within, eight, two, one = seconds
    assert within == pytest.approx(size / (450e9 * 0.8))
    assert eight == pytest.approx(size / (400e9 * 0.8))  # 8 networks of 50 GB/s
    assert (two / eight, one / eight) == pytest.approx((4, 8))
