"""One model under every table: the same losses and weights as on one device, the bytes that the tables promise."""

import collections
import itertools
import re

import jax
import numpy as np
import pytest

from jaxmem.config import MESH_AXES
from jaxmem.errors import UserError
from jaxmem.planning.breakdown import sorted_dims
from jaxmem.planning.communication import collective
from jaxmem.planning.hlo import read_module
from jaxmem.sharding.layout import Layout, layout_for
from jaxmem.sharding.leaves import StateArray, axes_of_state
from jaxmem.sharding.table import Axis, assign_mesh_axes, make_tables
from jaxmem.step.programs import program
from tests.step.conftest import SMALL, Trained, config
from tests.support.tiers import cases

# Every two axes together in some row, and every ZeRO stage.
LAYOUTS = {
    "replica x fsdp x tensor": ({"replica": 2, "fsdp": 2, "tensor": 2}, 3),
    "replica x context x tensor": ({"replica": 2, "context": 2, "tensor": 2}, 2),
    "stage x replica x tensor": ({"stage": 2, "replica": 2, "tensor": 2}, 1),
    "stage x fsdp x context": ({"stage": 2, "fsdp": 2, "context": 2}, 3),
    "fsdp x context": ({"fsdp": 2, "context": 2}, 0),
}


# Those that go through the vocabulary in slices, as one device does not.
SLICED = ("fsdp x context", "replica x fsdp x tensor", "stage x fsdp x context")


def test_every_two_axes_meet():
    met = {pair for mesh, _ in LAYOUTS.values() for pair in itertools.combinations(sorted(mesh), 2)}
    # tests/step/test_experts.py has `expert`, which dense models do not support.
    assert met == set(itertools.combinations(sorted({*MESH_AXES} - {"expert"}), 2))


# The communication of attention, where it is not ulysses.
METHODS = {"fsdp x context": "ring"}
# Those that go back by a schedule of boundaries.
SCHEDULED = {"replica x fsdp x tensor": "sqrt"}


# Those that go through each layer in chunks of so many tokens of a device's time and groups of so many heads.
IN_PIECES = {
    "replica x context x tensor": {"mlp_chunk": 4, "head_groups": 2},
    "stage x fsdp x context": {"mlp_chunk": 7},
}


# What XLA calls messages; on CPUs it writes a reduce-scatter as an all-reduce of which each device takes its part.
KINDS = {
    "all-reduce": "reduce",
    "reduce-scatter": "reduce",
    "all-gather": "gather",
    "all-to-all": "exchange",
    "collective-permute": "pass on",
}


def claimed(mesh, zero, method):
    """The kinds of messages along each axis, as docs/layouts.md has them."""
    kinds = {axis: {"reduce"} for axis in mesh}
    for axis in {"fsdp", "context"} & set(mesh):
        kinds[axis] |= {"gather"} if zero >= 1 else set()  # weights
        kinds[axis] |= {"exchange"} if zero >= 2 else set()  # rows of the embedding
    of_context = {"ring": {"pass on"}, "ulysses": {"exchange", "gather"}}[method]  # of ids
    more = {"tensor": {"gather"}, "context": of_context, "stage": {"pass on", "gather"}}  # of stages: their norms
    for axis in more.keys() & mesh.keys():
        kinds[axis] |= more[axis]
    return kinds


def messages(built, compiled):
    """The kinds of messages along each axis of the mesh, and the shapes that are gathered."""
    mesh = built.layout.mesh
    module = read_module(compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto())
    kinds, gathered = collections.defaultdict(set), set()
    for one in module.walk():
        if (found := collective(one, mesh.size, mesh.size)) is None:
            continue
        places = zip(*(np.unravel_index(member, mesh.devices.shape) for member in found.members), strict=True)
        for axis, place in zip(mesh.axis_names, places, strict=True):
            if len(set(place)) > 1:
                kinds[axis].add(KINDS[found.kind])
        if found.kind == "all-gather":
            gathered |= {sorted_dims(shape.dims) for shape in one.shape.parts or [one.shape]}
    return dict(kinds), gathered


def devices_of(mesh):
    return int(np.prod(list(mesh.values())))


def dropping(**layout):
    """With what depends on where rows and tokens lie: dropout, micro-batches, two documents in each row."""
    model = {"preset": "tiny", **SMALL, "vocab": 264, "dropout": 0.2}
    return config(model=model, batch={"global_size": 16, "accumulate": 2}, **layout)


@pytest.fixture(scope="module")
def alone():
    return Trained(dropping(), updates=2)


@pytest.mark.parametrize("name", cases(LAYOUTS, "replica x fsdp x tensor"))
def test_every_layout_trains_as_one_device_in_the_bytes_of_its_table(name, alone):
    mesh, zero = LAYOUTS[name]
    memory = {"loss_chunk": 50 if name in SLICED else "auto", "remat": SCHEDULED.get(name, "none")}
    memory |= IN_PIECES.get(name, {})
    method = METHODS.get(name, "ulysses")
    named = {"context_method": method} if "context" in mesh else {}
    cfg = dropping(mesh=mesh | named, zero=zero, memory=memory)
    trained = Trained(cfg, devices_of(mesh), updates=2, begin=alone)
    trained.agrees_with(alone)
    for real, promised in zip(jax.tree.leaves(trained.state), jax.tree.leaves(trained.built.spec.state), strict=True):
        assert real.sharding.is_equivalent_to(promised.sharding, real.ndim)
        assert real.addressable_shards[0].data.shape == promised.sharding.shard_shape(real.shape)
    fsdp, others = mesh.get("fsdp", 1) * mesh.get("context", 1), mesh.get("tensor", 1) * mesh.get("stage", 1)
    weight, moment = trained.state.params, trained.state.opt_state[1][0].mu
    for key in ("blocks", "mlp", "up", "weight"):
        weight, moment = weight[key], moment[key]
    held = lambda x: x.size // x.addressable_shards[0].data.size  # noqa: E731
    assert held(weight) == others * (fsdp if zero >= 3 else 1)
    assert held(moment) == others * (fsdp if zero >= 1 else 1)
    kinds, gathered = messages(trained.built, trained.compiled)
    assert kinds == claimed(mesh, zero, method)
    stacks = {sorted_dims(x.shape) for x in jax.tree.leaves(trained.params["blocks"]) if x.ndim == 3}
    assert zero in (1, 2) or not stacks & gathered  # all layers of a weight are sent where they are new, or never


@pytest.mark.exhaustive
def test_state_is_created_sharded():
    mesh, zero = LAYOUTS["replica x fsdp x tensor"]
    built = program(config(mesh=mesh, zero=zero), jax.devices())
    for born, promised in zip(jax.tree.leaves(built.initialise()), jax.tree.leaves(built.spec.state), strict=True):
        assert born.sharding.is_equivalent_to(promised.sharding, born.ndim)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("tied", "mesh"),
    [(False, {"fsdp": 2, "tensor": 2}), (True, {"tensor": 8})],
    ids=["separate", "tied"],
)
def test_a_vocabulary_that_does_not_divide_is_padded(tied, mesh):
    """In the computation only: weights, counts and logits are those of one device, and so is what is restored."""
    model = {"preset": "tiny", **SMALL, "vocab": 261, "tie_embeddings": tied}
    one = Trained(config(model=model), updates=2)
    cfg = config(model=model, mesh=mesh, memory={"loss_chunk": 20 if tied else "auto"})
    Trained(cfg, devices_of(mesh), updates=2, begin=one).agrees_with(one)


@pytest.mark.exhaustive
def test_no_device_holds_all_logits_and_no_table_is_gathered():
    cfg = config(mesh={"fsdp": 2, "tensor": 4}, model={"preset": "tiny", **SMALL, "vocab": 1024})
    built = program(cfg, jax.devices())
    compiled = built.lower_step().compile()
    text = compiled.as_text()
    rows, time, vocab = 4, 24, 1024  # of a device's batch
    largest = max(int(np.prod([int(n) for n in dims.split(",")])) for dims in re.findall(r"\[([\d,]+)\]", text))
    assert largest == rows * time * vocab // 4  # the logits
    whole_table = SMALL["embed"] * vocab
    _, gathered = messages(built, compiled)
    assert not [dims for dims in gathered if np.prod(dims) >= whole_table]


def test_a_weight_without_axes_is_named():
    from flax import nnx

    from jaxmem.step.model import axes_of

    with pytest.raises(UserError, match=r"weight blocks\.up\.weight of shape \(3, 4\) has the axes None"):
        axes_of(("blocks", "up", "weight"), nnx.Param(np.zeros((3, 4), np.float32)))


@pytest.fixture
def layout():
    return layout_for(config(mesh={"fsdp": 4, "tensor": 2}), jax.devices())


def test_an_uncovered_axis_is_named(layout):
    with pytest.raises(
        UserError, match=r"blocks\.w: no rule for logical axis 'embd' among weights; did you mean embed"
    ):
        layout.sharding("weights", ("embd", "mlp"), (8, 8), "blocks.w")


def test_a_dimension_that_does_not_divide_is_named(layout):
    with pytest.raises(
        UserError, match=r"blocks\.w: dimension 1 \(mlp\) of size 7 is not divisible by mesh.tensor = 2"
    ):
        layout.sharding("weights", ("embed", "mlp"), (8, 7), "blocks.w")


def test_what_the_table_leaves_whole_need_not_divide(layout):
    assert layout.sharding("weights", ("layer", "norm"), (3, 7)).shard_shape((3, 7)) == (3, 7)


def test_what_two_dimensions_name_the_first_of_them_has(layout):
    assert layout.sharding("weights", ("mlp", "heads"), (8, 8), "w").shard_shape((8, 8)) == (4, 8)


def test_every_table_covers_the_same_axes():
    for zero in range(4):
        table = make_tables(zero)
        assert set(table.weights) == set(table.compute) == set(table.gradients) == set(table.optimizer)
        assert all(axis in MESH_AXES for over in table.activations.values() for axis in over)


# ------------------------------------------------------------------ the optimizer's state


def test_state_of_the_parameters_shape_takes_its_axes():
    params, axes = {"a": {"w": np.zeros((2, 3))}}, {"a": {"w": ("embed", "mlp")}}
    state = ({"count": np.zeros(())}, {"mu": params})
    assert axes_of_state(state, params, axes) == ({"count": ()}, {"mu": axes})


def test_declared_state_says_which_dimensions_it_keeps():
    params, axes = {"w": np.zeros((5, 2, 3))}, {"w": ("layer", "embed", "mlp")}
    low, row = StateArray(np.zeros((5, 4, 3)), ("rank", 1)), StateArray(np.zeros((5, 2)), (0,))
    state = {"low": {"w": low}, "row": {"w": row}}
    named = axes_of_state(state, params, axes)
    assert named["low"]["w"] == ("layer", Axis("rank", if_even=True), "mlp")
    assert named["row"]["w"] == ("layer", "embed")


def test_undeclared_state_is_an_error_that_names_it():
    params, axes = {"w": np.zeros((2, 3))}, {"w": ("embed", "mlp")}
    with pytest.raises(UserError, match=r"optimizer state row\.w of shape \(2,\) has no known relation"):
        axes_of_state({"row": {"w": np.zeros((2,))}}, params, axes)


def test_a_layout_only_acts_inside_it():
    from jaxmem.sharding.arrays import constrain
    from jaxmem.sharding.layout import current

    x = np.zeros((3, 5), np.float32)
    assert constrain(x, "no", "such") is x
    layout = Layout(layout_for(config(), jax.devices()[:1]).mesh, make_tables(3))
    with layout:
        assert current() is layout
        with pytest.raises(UserError, match="no rule"):
            constrain(x, "no", "such")
    assert current() is None


@pytest.mark.parametrize(("role", "over"), [("weights", ("fsdp", "expert")), ("compute", ())])
def test_an_adapter_is_sharded_over_expert_only_where_it_is_stored(role, over):
    """It computes whole; experts are sharded in every role."""
    mesh = {"fsdp": 2, "expert": 2, "context": 1}
    axes = (Axis("embed", like_storage=True), "rank")
    rows, rank = assign_mesh_axes(axes, (32, 8), getattr(make_tables(3), role), mesh)
    assert tuple(axis for axis in rows if mesh[axis] > 1) == over
    assert rank == ()
    experts, *_ = assign_mesh_axes(("expert", *axes), (4, 32, 8), getattr(make_tables(3), role), mesh)
    assert experts == ("expert",)
