"""What may change, by word; every candidate is a valid config and equals its overrides applied to the given one."""

import itertools
import math
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from jaxmem.config import MESH_AXES, Memory, Save, load_config
from jaxmem.config.devices import for_devices
from jaxmem.errors import UserError
from jaxmem.planning.targets import Target, parse_target
from jaxmem.search.candidates import MAX_SIZE, pareto_front
from jaxmem.search.knobs import DEFAULT_ALLOW, allowed, values

from .conftest import candidates, config

TWO, FOUR, EIGHT = (parse_target(f"h100-80gb:{count}") for count in (2, 4, 8))


def test_values_come_from_the_config() -> None:
    assert set(get_args(Memory.model_fields["attention"].annotation)) <= set(values("memory.attention"))


def test_no_setting_that_is_searched_changes_the_mathematics() -> None:
    kept = {key for knob in allowed(DEFAULT_ALLOW) for change in knob.choices(config(), EIGHT) for key in change}
    memory = {f"memory.{field}" for field in ("remat", "offload", "update", "loss_chunk", "mlp_chunk")}
    assert kept == memory | {"zero", "batch.accumulate", "pipeline.rounds", "pipeline.schedule"} | {
        *(f"mesh.{axis}" for axis in MESH_AXES if axis != "expert")
    }


@pytest.mark.parametrize(
    ("word", "said"),
    [("reamt", "did you mean remat"), ("colour", "expected one of batch, chunks"), ("", "expected one of batch")],
)
def test_an_unknown_word_is_refused(word: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        allowed([word])


@pytest.mark.exhaustive
def test_overrides_reproduce_every_candidate() -> None:
    cfg = config()
    for words in (["mesh", "batch"], ["batch", "chunks"]):
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
    found = candidates(config(), TWO, allowed(["mesh"]))
    idle = [one for one in found if one.cfg.mesh.fsdp == 1 and one.cfg.mesh.context == 1]
    assert {one.cfg.zero for one in idle} == {3}


@pytest.mark.exhaustive
def test_offloading_moves_bytes_to_the_host() -> None:
    found = candidates(config(memory={"remat": "full"}), EIGHT, allowed(["offload"]))
    by_offload = {one.cfg.memory.offload: one.estimate for one in found}
    here, away, state = by_offload["none"], by_offload["activations"], by_offload["optimizer"]
    both = by_offload["activations", "optimizer"]
    saved = here.kinds["saved for backward"]
    assert away.total <= here.total - saved
    assert away.host == here.host + saved
    moved = here.categories["optimizer"] - state.categories["optimizer"]
    assert 0.3 * here.categories["optimizer"] < moved == state.host - here.host
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
@pytest.mark.parametrize("target", [TWO, FOUR], ids=["two", "four"])
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


@pytest.mark.exhaustive
def test_a_large_space_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_SIZE > 1000
    monkeypatch.setattr("jaxmem.search.candidates.MAX_SIZE", 8)
    some = candidates(config(), EIGHT, allowed(DEFAULT_ALLOW))
    again = candidates(config(), EIGHT, allowed(DEFAULT_ALLOW))
    assert [one.cfg for one in some] == [one.cfg for one in again]
    singles = candidates(config(), EIGHT, allowed(["remat"]))
    assert {one.cfg for one in singles} <= {one.cfg for one in some}
    assert len(some) < 100


def test_a_front_has_what_needs_a_hundredth_less_memory_than_all_that_is_faster() -> None:
    sizes = [100.0, 100.5, 99.5, 98.0, 99.0]
    compared: Any = [SimpleNamespace(seconds=at, total=size, refusal=None) for at, size in enumerate(sizes)]
    assert [candidate.total for candidate in pareto_front(compared[::-1])] == [100.0, 98.0]


def test_zero_shards_over_context_without_fsdp() -> None:
    found = candidates(config(mesh={"fsdp": 1, "context": 2}), TWO, allowed(["mesh"]))
    assert {one.cfg.zero for one in found if one.cfg.mesh.context == 2} == {0, 1, 2, 3}
