"""What `memory.remat: auto` chooses: by jax's own trace, by what is compiled, against every policy with a name."""

import os
import subprocess
import sys

import pytest

from jaxmem.config import Config, Save, load_config
from jaxmem.config.devices import for_devices
from jaxmem.estimate.layers import Layer, layers_of
from jaxmem.estimate.memory import estimate
from jaxmem.estimate.passes import passes_of
from jaxmem.machine.gpus import GPUS
from jaxmem.planning import budget
from jaxmem.planning.budget import BYTES_PER_ELEMENT, PolicyCandidate, candidates, largest_that_fits, resolve_remat
from jaxmem.planning.compile import compile_program
from jaxmem.planning.hlo import total_flops
from jaxmem.planning.result import plan
from jaxmem.planning.targets import parse_target, target_devices, usable_memory
from jaxmem.step.categories import ROLE_OF_CATEGORY, SAVED
from jaxmem.step.programs import program
from tests.planning.conftest import SMALL, config
from tests.support.tiers import exhaustive

DEEP = {**SMALL, "layers": 8, "embed": 64, "mlp": 192, "head_dim": 16}
NAMED = ("dots", "recursive")


def given(**memory: object) -> Config:
    return for_devices(config(model=DEEP, data={"sequence_length": 128}, batch={"global_size": 1}, memory=memory), 1)


def traced(cfg: Config) -> tuple[int, int]:
    """Bytes kept and FLOPs of both passes."""
    passes = passes_of(cfg, "gpu")
    return passes.saved, sum(one.times * one.flops for one in passes.matmuls)


@pytest.mark.exhaustive
def test_rungs_keep_and_repeat_what_jax_does_and_no_policy_beats_them() -> None:
    cfg = given()
    gpu = GPUS["h100-80gb"]
    ladder, layers = candidates(cfg, "gpu", gpu)
    least = traced(cfg)[1]
    assert 0 < layers < least / gpu.matmul_rate("bfloat16")
    assert [rung.recomputed for rung in ladder] == sorted({rung.recomputed for rung in ladder}, reverse=True)
    assert ladder[0].remat == "slots_1"
    assert ladder[-1].remat == "none"
    named = [rung for rung in ladder if isinstance(rung.remat, Save)]
    for rung in (ladder[-1], named[len(named) // 2]):
        kept, flops = traced(cfg.replace(memory={"remat": rung.remat}))
        assert kept == rung.saved
        (layer,) = layers_of(cfg.replace(memory={"remat": rung.remat}), "gpu")
        again = 0 if rung.remat == "none" else layer.count * layer.saving(rung.remat.save)[2]
        seconds = (flops - least) / gpu.matmul_rate("bfloat16") + BYTES_PER_ELEMENT * again / gpu.memory_rate
        assert rung.recomputed == pytest.approx(seconds)
    others = BYTES_PER_ELEMENT * layer.count * layer.saving(())[2] / gpu.memory_rate  # all but matmuls
    for remat in NAMED:
        kept, flops = traced(cfg.replace(memory={"remat": remat}))
        seconds = (flops - least) / gpu.matmul_rate("bfloat16") + others
        assert [rung for rung in ladder if rung.saved <= kept][-1].recomputed <= seconds, remat


@pytest.mark.parametrize(("stages", "rounds"), [exhaustive(4, 1), exhaustive(4, 2), (8, 4)])
def test_policies_of_a_pipeline_save_what_the_estimate_says(stages: int, rounds: int) -> None:
    sections = {"data": {"sequence_length": 128}, "batch": {"global_size": 8, "accumulate": 8}}
    pipelined = {"mesh": {"stage": stages}, "pipeline": {"rounds": rounds}}
    cfg = for_devices(config(model={**DEEP, "layers": 32}, **sections, **pipelined), stages)
    ladder, _ = candidates(cfg, "gpu", GPUS["h100-80gb"])
    assert len(ladder) > 1
    for policy in (ladder[0], ladder[len(ladder) // 2]):
        assert policy.saved == estimate(cfg.replace(memory={"remat": policy.remat}), "gpu").kinds[SAVED], policy.remat


@pytest.mark.parametrize(("slope", "beside"), [(1.0, 1000), (0.6, 900), (1.1, 1100)])
def test_the_last_that_fits_is_found_in_few_tries(slope: float, beside: int) -> None:
    ladder = [PolicyCandidate(str(i), 10 * i, 100.0 - i) for i in range(50)]
    for limit in (beside - 1, beside, beside + 203, beside + 10_000):
        tried = []

        def needed(rung: PolicyCandidate, tried: list[PolicyCandidate] = tried) -> int:
            tried.append(rung)
            return round(beside + slope * rung.saved)

        found = largest_that_fits(ladder, limit, needed, 1050)
        fitting = [rung for rung in ladder if round(beside + slope * rung.saved) <= limit]
        assert found == (fitting or ladder)[-1 if fitting else 0]
        assert len(tried) <= 5


@pytest.mark.exhaustive
def test_a_budget_a_tenth_below_none_costs_next_to_nothing() -> None:
    """Compiled for a GPU; what comes out is the config of a run."""
    target = "h100-80gb"
    wide = {"family": "mlp", "layers": 8, "embed": 32, "mlp": 128}
    asked = config(model=wide, data={"source": "digits"}, objective="classify", batch={"global_size": 512})
    devices = target_devices(parse_target(target), 2**40)
    none = compile_program(program(asked, devices).lower_step(), here=False)
    memory = asked.memory.model_copy(update={"remat": "auto", "budget": 0.9 * none.total / 2**30})
    auto = plan(asked.model_copy(update={"memory": memory}), target)
    assert auto.fits
    assert isinstance(auto.program.cfg.memory.remat, Save)
    assert auto.choices[0].startswith(f"recompute: saves {auto.program.cfg.memory.remat.save[0]}")
    assert "auto: the fastest that fits" in auto.as_json()["remat_why"]
    assert auto.timeline.flops < 1.02 * total_flops(none.module)
    assert load_config(auto.program.cfg.model_dump(mode="json")) == auto.program.cfg


def test_where_nothing_fits_the_plan_says_so() -> None:
    ladder = [PolicyCandidate("a", 1, 9.0), PolicyCandidate("b", 2, 0.0)]
    assert largest_that_fits(ladder, 0, lambda rung: rung.saved, 0).remat == "a"


def test_a_small_gain_is_not_compiled() -> None:
    ladder = [PolicyCandidate(str(i), 10 * i, 100.0 - i) for i in range(50)]
    tried = []
    found = largest_that_fits(ladder, 400, lambda one: tried.append(one) or one.saved + 50, 100, worth=20.0)
    assert (found.remat, len(tried)) == ("30", 1)


@pytest.mark.parametrize(("gib", "remat"), [(64, "none"), (1e-4, "slots_1")])
def test_on_a_cpu_the_estimate_decides(gib: float, remat: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without devices, which jax may not have any more if it runs."""
    monkeypatch.delattr(budget, "target_devices")
    asked = given(remat="auto", budget=gib)
    chosen, why = resolve_remat(asked, parse_target("cpu:1"))
    assert chosen.memory.remat == remat
    assert why is not None
    assert resolve_remat(chosen, parse_target("cpu:1")) == (chosen, None)


@pytest.mark.exhaustive
def test_a_plan_simulates_devices_before_it_estimates() -> None:
    """In a new process, since jax then has as many devices as at its start."""
    given = {"name": "small", "model": SMALL, "batch": {"global_size": 8}, "mesh": {"fsdp": -1}}
    given |= {"memory": {"remat": "auto"}, "train": {"steps": 1}}
    code = f"import jaxmem; print(jaxmem.plan({given}, 'cpu:2'))"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "2 x cpu" in done.stdout, done.stderr


@pytest.mark.exhaustive
def test_the_share_that_xla_does_not_fill_stays_free(monkeypatch) -> None:
    """Above it XLA recomputes by itself and overlaps less communication."""
    limits: list[int] = []
    monkeypatch.setattr(budget, "largest_that_fits", lambda ladder, limit, *_: limits.append(limit) or ladder[0])
    asked = given(remat="auto")
    target = parse_target("h100-80gb:1")
    resolve_remat(asked, target)
    categories = estimate(given(remat="full"), "gpu").categories
    state = sum(categories[category] for category in ROLE_OF_CATEGORY)
    usable = usable_memory(target, asked.memory)
    assert limits == [state + round(0.95 * (usable - state))]


@pytest.mark.parametrize(("mesh", "is_saved"), [({}, True), ({"expert": 2}, False)])
def test_experts_are_saved_where_their_kernel_can(mesh: dict[str, int], is_saved: bool) -> None:
    """Along `mesh.expert` the backward pass recomputes them."""
    model = {**SMALL, "experts": {"count": 4, "top_k": 2}}
    cfg = config(model=model, mesh=mesh, memory={"experts": "triton", "attention": "blockwise"})
    ladder, _ = candidates(cfg, "gpu", GPUS["h100-80gb"])
    names = {name for policy in ladder if isinstance(policy.remat, Save) for name in policy.remat.save}
    assert ({"mlp_gate", "mlp_up"} <= names) == is_saved


def test_automatic_recompute_knows_the_kernels_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    policy = PolicyCandidate("full", 1, 0.0)
    monkeypatch.setattr(budget, "candidates", lambda cfg, *_: (seen.append(cfg.memory.experts), ([policy], 1.0))[1])
    model = {**SMALL, "experts": {"count": 4, "top_k": 2}}
    resolve_remat(config(model=model, memory={"remat": "auto"}), parse_target("h100-80gb:1"), compiles=False)
    assert seen == ["triton"]


def _bytes_of(layer: Layer, name: str) -> int:
    return sum(operation.bytes for operation in layer.operations if operation.name == name)


@pytest.mark.exhaustive
def test_what_is_split_counts_for_one_device() -> None:
    whole = given()
    halves = whole.model_copy(update={"mesh": whole.mesh.model_copy(update={"tensor": 2})})
    (one,), (half,) = (layers_of(cfg, "gpu") for cfg in (whole, halves))
    assert one.boundary == 2 * half.boundary
    names = {operation.name for operation in one.operations if operation.name}
    assert names
    assert all(_bytes_of(one, name) == 2 * _bytes_of(half, name) for name in names)
