"""Whatever the config: what a plan counts as arguments is what real arrays take, and its categories are the whole."""

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.step.categories import CATEGORIES
from tests.planning.conftest import plan_here

MESHES = ({"fsdp": 8}, {"fsdp": 4, "tensor": 2}, {"replica": 2, "fsdp": 2, "tensor": 2}, {"tensor": 4}, {"fsdp": 1})
PRECISIONS = (
    {"parameters": "float32"},
    {"parameters": "bfloat16", "compute": "bfloat16"},
    {"parameters": "bfloat16", "master": "float32"},
)


@st.composite
def sections(draw: st.DrawFn) -> dict[str, Any]:
    rows, accumulate = draw(st.sampled_from([8, 16])), draw(st.sampled_from([1, 2]))
    return {
        "mesh": draw(st.sampled_from(MESHES)),
        "zero": draw(st.integers(0, 3)),
        "memory": {"remat": draw(st.sampled_from(["none", "dots", "full"]))},
        "precision": draw(st.sampled_from(PRECISIONS)),
        "batch": {"global_size": rows * accumulate, "accumulate": accumulate},
        "data": {"sequence_length": draw(st.sampled_from([8, 24]))},
    }


@pytest.mark.exhaustive
@settings(max_examples=4)
@given(sections())
def test_planned_bytes_are_those_of_real_arrays(sections: dict[str, Any]) -> None:
    devices = int(np.prod(list(sections["mesh"].values())))
    plan = plan_here(devices, **sections)
    wanted = jax.tree.leaves((plan.program.spec.state, plan.program.spec.batch))
    arrays = [jax.device_put(np.zeros(x.shape, x.dtype), x.sharding) for x in wanted]
    held = sum(x.addressable_shards[0].data.nbytes for x in arrays)
    assert plan.compiled_step.sizes["arguments"] == held
    sizes = plan.bytes_per_device
    assert sum(sizes[category] for category in CATEGORIES) == sizes["total"]
    assert all(sizes[category] >= 0 for category in CATEGORIES)
    state = sum(x.addressable_shards[0].data.nbytes for x in arrays[: len(jax.tree.leaves(plan.program.spec.state))])
    assert sizes["parameters"] + sizes["master"] + sizes["optimizer"] >= state - 4  # all but the count of steps
