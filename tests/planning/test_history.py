"""Memory over a step: it adds up to the plan, passes come in order, loops take their time, lines are the source's."""

import inspect
import itertools

import jax
import jax.numpy as jnp
import pytest

from jaxmem.models.block import GatedMlp
from jaxmem.planning.breakdown import Breakdown
from jaxmem.planning.buffers import read_allocations
from jaxmem.planning.compile import total_of
from jaxmem.planning.history import BANDS, PASSES, _passes, history, source_of
from jaxmem.planning.hlo import read_module
from jaxmem.planning.result import Plan
from jaxmem.planning.targets import parse_target
from jaxmem.planning.timeline import timeline


@pytest.mark.exhaustive
def test_the_peak_adds_up_to_the_plan(cpu_plan: Plan) -> None:
    parts, (_, *peak) = cpu_plan.bytes_per_device, cpu_plan.history["peak"]
    held = dict(zip(BANDS, peak, strict=True))
    assert sum(peak) == parts["total"] == max(sum(sizes) for _, *sizes in cpu_plan.history["columns"])
    assert held["weights"] == parts["parameters"] + parts["quantization"]
    assert held["optimizer"] == parts["optimizer"] + parts["master"]
    assert held["gradients"] == parts["gradients"]
    assert held["other"] == parts["batch"] + parts["other"]
    kinds = cpu_plan.breakdown.kinds["activations"]
    assert held["saved for backward"] == kinds["saved for backward"]
    assert held["logits"] == kinds.get("logits", 0)
    assert sum(held.values()) == parts["total"]


@pytest.mark.exhaustive
def test_columns_cover_the_step(cpu_plan: Plan) -> None:
    found = cpu_plan.history
    begins = [at for at, *_ in found["columns"]]
    assert begins[0] == 0
    assert begins == sorted(set(begins))
    assert begins[-1] < 1
    assert found["seconds"] is None
    low = min(sum(sizes) for _, *sizes in found["columns"])
    assert sum(cpu_plan.bytes_per_device[part] for part in ("parameters", "optimizer")) <= low < sum(found["peak"][1:])


def test_passes_come_in_their_order(cpu_plan: Plan) -> None:
    passes = cpu_plan.history["passes"]
    names = [one["name"] for one in passes]
    assert names == [name for name in PASSES if name in names]
    assert {"forward", "loss", "backward"} <= set(names)
    assert passes[0]["begin"] == 0
    assert passes[-1]["end"] == 1
    assert all(one["end"] == following["begin"] for one, following in itertools.pairwise(passes))
    lasts = {one["name"]: one["end"] - one["begin"] for one in passes}
    assert lasts["backward"] > lasts["forward"] > lasts["loss"]


def test_passes_that_mix_a_little_are_cut_where_most_agree() -> None:
    labels = ["forward", None, "forward", "update", "backward", "backward", "forward", "backward"]
    edges = [n / len(labels) for n in range(len(labels) + 1)]
    assert [tuple(one.values()) for one in _passes(labels, edges)] == [
        ("forward", 0.0, 0.5),
        ("backward", 0.5, 1.0),
    ]


def test_the_largest_are_named_by_their_source(cpu_plan: Plan) -> None:
    found = cpu_plan.history
    assert [one["size"] for one in found["largest"]] == sorted((one["size"] for one in found["largest"]), reverse=True)
    assert len(found["largest"]) == len(found["largest_made"]) == 10
    assert found["largest"][0]["size"] == cpu_plan.breakdown.buffers[0].size
    lines, first = inspect.getsourcelines(GatedMlp.__call__)
    within = {f"jaxmem/models/block.py:{first + n}" for n in range(len(lines))}
    items = [item for item in cpu_plan.breakdown.buffers if item.region]
    sources = [source_of(item, 2) for item in items]
    assert any(one["where"] in within and one["inside"].endswith("Block > GatedMlp") for one in sources)
    assert any(one["layers"] == "all 2 layers" for one in sources)
    weights = {source_of(item, 2)["where"] for item in cpu_plan.breakdown.buffers}
    assert "params.blocks.mlp.gate.weight" in weights


def test_a_loop_s_body_stands_over_all_its_time() -> None:
    """Half of the work lies in a loop, which holds a stack that is let go of after it."""

    def step(x: jax.Array) -> jax.Array:
        _, stack = jax.lax.scan(lambda x, _: (jnp.sin(x @ x), x), x, length=16)
        x = jax.lax.optimization_barrier(stack.sum(0))  # or jax 0.12 makes one kernel of all that follows
        for _ in range(16):
            x = jnp.sin(x @ x)
        return x

    compiled = jax.jit(step).lower(jnp.ones((256, 256))).compile()
    module = read_module(compiled.runtime_executable().hlo_modules()[0].as_serialized_hlo_module_proto())
    allocations = read_allocations(module, compiled.memory_analysis().serialized_buffer_assignment_proto)
    target = parse_target("cpu:1")
    broken = Breakdown(module, allocations)
    found = history(broken, total_of(compiled), target, timeline(module, None, 1, 1))
    stack = 16 * 256 * 256 * 4
    columns = found["columns"]
    ends = [at for at, *_ in columns[1:]] + [1.0]
    held = sum(end - at for (at, *sizes), end in zip(columns, ends, strict=True) if sum(sizes) > stack)
    assert held == pytest.approx(0.5, abs=0.15)
    assert sum(columns[-1][1:]) < stack
    assert found["peak"][0] < 0.65
    assert sum(found["peak"][1:]) == total_of(compiled)
