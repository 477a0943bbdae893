"""What may change, by word; every candidate is a valid config and equals its overrides applied to the given one."""

import itertools
import math
from typing import get_args

import pytest

from jaxmem.config import MESH_AXES, Adapter, Memory, Rules, Save, load_config
from jaxmem.config.devices import for_devices
from jaxmem.config.optimizers import OPTIMIZERS
from jaxmem.errors import UserError
from jaxmem.planning import Target, parse_target
from jaxmem.search.candidates import MAX_SIZE, Space, candidates, pareto_front
from jaxmem.search.knobs import DEFAULT_ALLOW, KNOBS, allowed, values
from tests.support.tiers import exhaustive

from .conftest import config

TWO, EIGHT = parse_target("h100-80gb:2"), parse_target("h100-80gb:8")
FIRST = ("tensor", "fsdp", "context")


def test_values_come_from_the_config() -> None:
    assert set(get_args(Memory.model_fields["attention"].annotation)) <= set(values("memory.attention"))
    assert values("zero") == (0, 1, 2, 3)


def test_by_default_the_mathematics_does_not_change() -> None:
    kept = {key for knob in allowed(DEFAULT_ALLOW) for change in knob.choices(config(), EIGHT) for key in change}
    memory = {f"memory.{field}" for field in ("remat", "offload", "update", "loss_chunk", "mlp_chunk")}
    kernels = {"memory.attention", "optimizer.kernel"}
    assert kept == memory | kernels | {"zero", "batch.accumulate", "pipeline.rounds", "pipeline.schedule"} | {
        *(f"mesh.{axis}" for axis in MESH_AXES if axis != "expert")
    }
    assert {knob.allow for knob in KNOBS} >= {*DEFAULT_ALLOW, "precision", "optimizer", "adapter"}


@pytest.mark.parametrize(
    ("word", "said"),
    [("reamt", "did you mean remat"), ("colour", "expected one of adapter, batch"), ("", "expected one of adapter")],
)
def test_an_unknown_word_is_refused(word: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        allowed([word])


@pytest.mark.exhaustive
def test_overrides_reproduce_every_candidate() -> None:
    cfg = config()
    for words in (["mesh", "batch"], ["batch", "precision"]):
        found = candidates(cfg, TWO, allowed(words))
        assert found[0].cfg == for_devices(cfg, 2)
        assert found[0].overrides == []
        assert len({one.cfg for one in found}) == len(found)
        for one in found[:: max(len(found) // 20, 1)]:
            again = for_devices(load_config(cfg.model_dump(mode="json"), one.overrides), 2)
            assert again == one.cfg
            assert one.cfg.batch.global_size == cfg.batch.global_size
            assert one.cfg.model == cfg.model


@pytest.mark.exhaustive
def test_equivalent_programs_are_one_candidate() -> None:
    found = candidates(config(), TWO, allowed(["mesh", "precision"]))
    idle = [one for one in found if one.cfg.mesh.fsdp == 1 and one.cfg.mesh.context == 1]
    assert {one.cfg.zero for one in idle} == {3}
    formats = {(one.cfg.precision.parameters, one.cfg.precision.compute) for one in found}
    assert ("float32", "bfloat16") not in formats, "auto resolves to bfloat16 here"


def test_another_optimizer_has_its_own_defaults() -> None:
    found = candidates(config(optimizer={"beta1": 0.8}), EIGHT, allowed(["optimizer"]))
    assert {one.cfg.optimizer.name for one in found} == set(OPTIMIZERS)
    assert found[0].cfg.optimizer.beta1 == 0.8
    for one in found[1:]:
        plain = config(optimizer={"name": one.cfg.optimizer.name}).optimizer
        assert one.cfg.optimizer == plain
        assert load_config(config().model_dump(mode="json"), one.overrides).optimizer == plain
    assert "optimizer={name: lion}" in [" ".join(one.overrides) for one in found]


def test_adapters_keep_the_config_fields() -> None:
    ours = {"kind": "qlora", "rank": 4, "base": "int8"}
    found = {one.cfg.adapter: one for one in candidates(config(adapter=ours), EIGHT, allowed(["adapter"]))}
    assert [(one.kind, one.rank, one.base) for one in found] == [
        ("qlora", 4, "int8"), ("none", Adapter().rank, None), ("lora", 4, None),
    ]  # fmt: skip
    totals = {adapter.kind: one.estimate.total for adapter, one in found.items()}
    assert totals["qlora"] < totals["lora"] < totals["none"]
    lora = next(one for adapter, one in found.items() if adapter.kind == "lora")
    assert lora.overrides == ["adapter.kind=lora", "adapter.base=null"]


def test_offloading_moves_bytes_to_the_host() -> None:
    found = candidates(config(memory={"remat": "full"}), EIGHT, allowed(["offload"]))
    by_offload = {one.cfg.memory.offload: one.estimate for one in found}
    here, away, state = by_offload["none"], by_offload["activations"], by_offload["optimizer"]
    both = by_offload["activations", "optimizer"]
    saved = here.kinds["saved for backward"]
    assert away.total <= here.total - saved
    assert away.host == here.host + saved
    moved = here.parts["optimizer"] - state.parts["optimizer"]
    assert 0.3 * here.parts["optimizer"] < moved == state.host - here.host
    assert both.total < min(away.total, state.total)
    assert both.host == here.host + saved + moved
    found = candidates(config(memory={"remat": "dots"}), EIGHT, allowed(["offload"]))
    kept = [one.estimate.seconds for one in found if one.cfg.memory.offload in ("none", "activations")]
    assert kept[0] < kept[1]  # type: ignore[operator]  # a layer's products come back when they are needed, not before
    assert len(candidates(config(memory={"remat": "full"}), parse_target("cpu:8"), allowed(["offload"]))) == 1


def test_the_given_value_stays_a_choice() -> None:
    found = candidates(config(memory={"remat": {"save": ["attention"]}}), EIGHT, allowed(["remat", "update"]))
    kept = [one for one in found if one.cfg.memory.remat == Save(save=("attention",))]
    assert len(kept) > 1


@pytest.mark.exhaustive
def test_equivalent_sharding_rules_are_one_candidate() -> None:
    """With tensor=1 and replica=1: the stored dimensions of attention and MLP, the logits, and the replicated kinds."""
    space = Space(config(), EIGHT, allowed(["rules"]))
    [given] = space.start()
    found = [given, *space.with_other_rules(given)]
    tables = {one.cfg.rules for one in found}
    assert len(tables) == len(found) <= 1 + 1 + 1 + 1 + len(pareto_front(found)) * 2**4
    assert {Rules(), Rules(heads=FIRST), Rules(logits=("fsdp",)), Rules(replicated=("attention", "down"))} <= tables
    assert not space.with_other_rules(given), "no config is estimated twice"


@pytest.mark.parametrize("target", [TWO, exhaustive(EIGHT)], ids=["two", "eight"])
def test_every_valid_mesh_is_a_candidate(target: Target) -> None:
    found = {
        tuple(getattr(one.cfg.mesh, axis) for axis in MESH_AXES)
        for one in candidates(config(), target, allowed(["mesh"]))
    }
    expected = set()
    for size in itertools.product((1, 2, 4, 8), repeat=len(MESH_AXES)):
        if math.prod(size) != target.count:
            continue
        overrides = [f"mesh.{axis}={n}" for axis, n in zip(MESH_AXES, size, strict=True)]
        try:
            cfg = for_devices(load_config(config().model_dump(mode="json"), overrides), target.count)
        except UserError:
            continue
        expected.add(tuple(getattr(cfg.mesh, axis) for axis in MESH_AXES))
    assert found == expected


def test_an_invalid_config_is_refused_with_the_reason() -> None:
    with pytest.raises(UserError, match=r"is not divisible by mesh.fsdp=3|devices; found 8"):
        candidates(config(mesh={"fsdp": 3}), EIGHT, allowed(["remat"]))


def test_a_large_space_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_SIZE > 1000
    monkeypatch.setattr("jaxmem.search.candidates.MAX_SIZE", 20)
    some = candidates(config(), EIGHT, allowed(DEFAULT_ALLOW))
    again = candidates(config(), EIGHT, allowed(DEFAULT_ALLOW))
    assert [one.cfg for one in some] == [one.cfg for one in again]
    singles = candidates(config(), EIGHT, allowed(["remat"]))
    assert {one.cfg for one in singles} <= {one.cfg for one in some}
    assert len(some) < 100
