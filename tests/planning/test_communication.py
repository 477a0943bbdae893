"""Messages between devices: kinds, groups and bytes, from real programs and from XLA's ways of writing groups."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.errors import UserError
from jaxmem.kernels.scopes import run_count
from jaxmem.machine.gpus import GPUS
from jaxmem.machine.links import collective_seconds
from jaxmem.planning.communication import Transfer, _groups, collective
from jaxmem.planning.compile import check_stages
from jaxmem.planning.hlo import HloInstructionProto, HloShape, Instruction
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
    assert not one.is_asynchronous


@pytest.mark.parametrize(("exchanges", "is_refused"), [(True, True), (False, False)])
def test_a_pipeline_whose_stages_would_wait_for_each_other_is_refused(exchanges, is_refused) -> None:
    """A stage exchanges within itself by a collective-permute, in a branch that the other stage does not take."""

    def exchange(x: jax.Array) -> jax.Array:
        swapped = jax.lax.ppermute(x, "b", [(0, 1), (1, 0)]) if exchanges else jax.lax.psum(x, "b")
        return jnp.sin(swapped)

    def step(x: jax.Array) -> jax.Array:
        with jax.named_scope(run_count(1, 2, 1)):
            return jax.lax.cond(jax.lax.axis_index("a") == 0, exchange, lambda x: x, x)

    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    spec = P(("a", "b"))
    mapped = jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    module = module_of(mapped, jax.ShapeDtypeStruct((8, 16), jnp.float32, sharding=NamedSharding(mesh, spec)))
    check_stages(module, 1)
    if not is_refused:
        check_stages(module, 2)
        return
    with pytest.raises(UserError, match=r"mesh.stage=2: XLA moves float32.2,16. within a stage"):
        check_stages(module, 2)


def test_alone_nothing_is_sent() -> None:
    assert sent(lambda x: jax.lax.psum(x, "b"), P(("a", "b")), devices=2) == []


def instruction(**fields: Any) -> Instruction:
    return Instruction(1, "x", "all-reduce", HloShape("float32", 32), 0, "", HloInstructionProto(**fields))


def over(*axes: dict[str, Any], **mesh: Any) -> Instruction:
    """Along these axes of a mesh of 2 x and 4 y."""
    x_and_y = [{"name": "x", "size": 2}, {"name": "y", "size": 4}]
    return instruction(mesh_axes_replica_group_list={"mesh": {"axes": x_and_y, **mesh}, "axes": list(axes)})


IOTA = {
    "num_replica_groups": 4, "num_devices_per_group": 2, "iota_reshape_dims": [2, 4], "iota_transpose_perm": [1, 0]
}  # fmt: skip
TRANSPOSED = {"dims": [4, 2], "transpose_perm": [1, 0]}
X, Y = {}, {"mesh_axis_index": 1}
ACROSS = [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("one", "groups"),
    [
        (instruction(), [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (instruction(replica_groups=[{"replica_ids": [0, 4]}, {"replica_ids": [1, 5]}]), [[0, 4], [1, 5]]),
        (
            instruction(collective_device_list={"replica_groups": [{"replica_ids": [0, 1]}, {"replica_ids": [2, 3]}]}),
            [[0, 1], [2, 3]],
        ),
        (instruction(collective_device_list={"iota_replica_group_list": IOTA}), ACROSS),
        (instruction(iota_collective_device_list=IOTA), ACROSS),
        (over(X), ACROSS),
        (over(Y), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (over(X, Y), [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (over(X, iota=TRANSPOSED), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        # Of the second axis, 4 = 2 x 2, only the outer half or only the inner.
        (over({**Y, "sub_axis_info": {"pre_size": 1, "size": 2}}), [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (over({**Y, "sub_axis_info": {"pre_size": 2, "size": 2}}), [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_groups_however_they_are_written(one: Instruction, groups: list[list[int]]) -> None:
    assert _groups(one.proto, 8).tolist() == groups


def test_communication_between_hosts_is_slower_and_shares_the_network() -> None:
    gpu, size = GPUS["h100-80gb"], 10**9
    seconds = [Transfer("all-gather", size, True, 16, neighbours).seconds(gpu) for neighbours in (16, 8, 2, 1)]
    assert seconds == [collective_seconds(gpu, "all-gather", size, 16, neighbours) for neighbours in (16, 8, 2, 1)]
    within, eight, two, single = seconds
    assert within < eight < two < single
    assert single / two == pytest.approx(2, rel=0.05)
    assert Transfer("all-gather", size, True, 16, 1).seconds(gpu, one_host=True) == within


def test_a_ring_over_hosts_is_as_slow_as_its_slowest_pair() -> None:
    """The first pair, 0 and 1, shares a host; 7 and 8 do not."""
    ring = HloInstructionProto()
    for device in range(16):
        pair = ring.source_target_pairs.add()
        pair.source = device
        pair.target = (device + 1) % 16
    shape = HloShape("float32", 32, (1024,))
    operand = Instruction(1, "x", "parameter", shape, 0, "")
    permute = Instruction(2, "permute", "collective-permute", shape, 0, "", ring, [], [operand])
    neighbours = []
    for per_host in (16, 8):
        transfer = collective(permute, 16, per_host)
        assert transfer is not None
        neighbours.append(transfer.neighbours)
    assert neighbours == [2, 1]
