"""The largest value that fits: exact, and both of its bounds compiled."""

import json
from pathlib import Path
from typing import Any

import optax
import pytest

from jaxmem.cli import main
from jaxmem.config import Config, load_config
from jaxmem.config.devices import for_devices
from jaxmem.config.methods import config_with
from jaxmem.errors import UserError
from jaxmem.estimate.memory import Estimate
from jaxmem.planning.budget import estimated
from jaxmem.planning.targets import Target
from jaxmem.search import largest
from jaxmem.search.largest import UNITS, search_largest
from jaxmem.typing import JsonDict

from .conftest import SMALL, FakeCompilers, config, estimate_once, with_memory

PAIRS = {"source": "preference", "path": "pairs.jsonl", "sequence_length": 64, "packing": False}
HEADS = {**SMALL, "embed": 96, "heads": 6, "kv_heads": 3, "mlp": 192, "vocab": 513}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("key", "value", "factor"),
    [
        ("model.layers", 7, 1.6),
        ("data.sequence_length", 384, 0.7),
        ("batch.global_size", 40, 1),
    ],
)
def test_the_largest_is_exact_however_wrong_the_estimate(key: str, value: int, factor: float) -> None:
    """The memory is what `value` needs, so that fits and nothing above it does."""
    cfg = config(memory={"remat": "full"})
    wide = with_memory("h100-80gb:8", 1 << 40)
    with FakeCompilers(wide, lambda _: (factor, 1.0)) as compilers:
        needs = compilers.truth(for_devices(load_config(cfg.model_dump(mode="json"), [f"{key}={value}"]), 8)).total
    with FakeCompilers(with_memory("h100-80gb:8", needs), lambda _: (factor, 1.0)) as compilers:
        found = search_largest(cfg, key, [], compilers)
    assert found.best is not None
    assert found.beyond is not None
    assert found.best.value == value
    assert found.beyond.value == value + (8 if key == "batch.global_size" else UNITS[key])
    assert found.best.candidate.total <= found.limit < found.beyond.candidate.total
    asked = set(compilers.asked)
    assert {found.best.candidate.cfg, found.beyond.candidate.cfg} <= asked
    assert len(compilers.asked) <= 8
    assert json.loads(json.dumps(found.as_json()))["best"]["value"] == value
    assert f"{key}={value}" in found.table()


@pytest.mark.exhaustive
def test_the_curve_of_batch_sizes() -> None:
    cfg = config(memory={"remat": "full"})
    with FakeCompilers(with_memory("h100-80gb:8", 1 << 40)) as compilers:
        needs = compilers.truth(
            for_devices(load_config(cfg.model_dump(mode="json"), ["batch.global_size=40"]), 8)
        ).total
    with FakeCompilers(with_memory("h100-80gb:8", needs)) as compilers:
        found = search_largest(cfg, "batch.global_size", [], compilers)
    assert {8, 16, 32, 40, 48} <= {one.value for one in found.points}
    totals = [one.candidate.total for one in found.points]
    assert totals == sorted(totals)
    for point, row in zip(found.points, json.loads(json.dumps(found.as_json()))["points"], strict=True):
        assert row["rate"] == pytest.approx(point.value * 64 / point.candidate.seconds)
        assert f"{row['rate']:,.0f}" in found.table()


@pytest.mark.exhaustive
def test_what_may_change_makes_room() -> None:
    """With recomputation and micro-batches allowed, more layers fit, in the config that needs least."""
    limit = int(1.2 * estimated(for_devices(config(), 8), with_memory("h100-80gb:8", 1)).total)
    layers = []
    for allow in ([], ["remat", "batch"]):
        with FakeCompilers(with_memory("h100-80gb:8", limit)) as compilers:
            found = search_largest(config(), "model.layers", allow, compilers)
        assert found.best is not None
        layers.append(found.best.value)
    assert layers[1] > layers[0]
    assert found.best.candidate.cfg.model.layers == layers[1]  # type: ignore[union-attr]


@pytest.mark.exhaustive
def test_memory_of_other_phases_limits_the_largest_value() -> None:
    target = with_memory("h100-80gb:8", 1 << 40)

    class Initializing(FakeCompilers):
        def phases(self, cfg: Config) -> dict[str, int]:
            return {"initialise": target.memory + 1 if cfg.batch.global_size > 16 else 1}

    with Initializing(target) as compilers:
        found = search_largest(config(memory={"remat": "full"}), "batch.global_size", [], compilers)
    assert found.best is not None
    assert found.best.value == 16


@pytest.mark.parametrize(
    ("key", "sections", "devices", "values"),
    [
        ("model.layers", {"mesh": {"fsdp": -1, "stage": 2}}, 2, [6, 7]),
        ("model.layers", {"model": {"preset": "gemma3-1b", "vocab": 512}}, 1, [7, 8]),
        ("batch.global_size", {"objective": {"name": "dpo"}, "data": PAIRS, "batch": {"global_size": 2}}, 1, [4, 6]),
        ("data.sequence_length", {"mesh": {"fsdp": 1, "tensor": 3}, "model": HEADS}, 3, [768, 1152]),
    ],
    ids=["stages", "kinds of layers", "pairs", "three parts of a sequence"],
)
def test_values_that_are_not_valid(key: str, sections: dict[str, Any], devices: int, values: list[int]) -> None:
    """Below the first valid value, and between two, no value is valid."""
    cfg = config(**{**sections, "memory": {"remat": "full"}})
    name = f"h100-80gb:{devices}"
    with FakeCompilers(with_memory(name, 1 << 40)) as compilers:
        largest_cfg = load_config(cfg.model_dump(mode="json"), [f"{key}={values[0]}"])
        needs = compilers.truth(for_devices(largest_cfg, devices)).total
    with FakeCompilers(with_memory(name, needs)) as compilers:
        found = search_largest(cfg, key, [], compilers)
    assert found.best is not None
    assert found.beyond is not None
    assert [found.best.value, found.beyond.value] == values


def test_the_policy_in_place_of_auto_is_printed() -> None:
    with FakeCompilers(with_memory("h100-80gb:8", 1000)) as compilers:
        found = search_largest(config(memory={"remat": "auto"}), "model.layers", [], compilers)
    assert found.beyond is not None
    assert found.beyond.candidate.overrides[-1] == "memory.remat=full"


def test_the_optimizer_of_a_script_is_in_each_config() -> None:
    cfg = config_with(config(memory={"remat": "full"}), optimizer=optax.sgd(1e-3))
    with FakeCompilers(with_memory("h100-80gb:8", 1000)) as compilers:
        search_largest(cfg, "model.layers", [], compilers)
    assert {asked.user for asked in compilers.asked} == {cfg.user}


def test_where_not_even_one_fits() -> None:
    with FakeCompilers(with_memory("h100-80gb:8", 1000)) as compilers:
        found = search_largest(config(), "model.layers", [], compilers)
    assert found.best is None
    assert found.beyond is not None
    assert found.beyond.value == 1
    with pytest.raises(UserError, match="no config fits"):
        found.write("nowhere.yaml")


@pytest.mark.parametrize(
    ("key", "allow", "said"),
    [
        ("model.layer", [], r"model.layer is unknown; did you mean model.layers"),
        ("batch.global_size", ["batch"], "does not support --allow batch"),
        ("model.layers", ["zzz"], "unknown"),
    ],
)
def test_what_cannot_be_asked(key: str, allow: list[str], said: str) -> None:
    with FakeCompilers(with_memory("h100-80gb:8", 1 << 30)) as compilers, pytest.raises(UserError, match=said):
        search_largest(config(), key, allow, compilers)


def test_the_limit_of_a_key_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """From some value on no config is valid: it is the largest that fits, and the reason is printed."""
    valid = largest.read_config

    def limited(raw: Any, overrides: list[str]) -> JsonDict:
        if int(overrides[0].partition("=")[2]) > 5:
            raise UserError("model.layers is at most 5")
        return valid(raw, overrides)

    monkeypatch.setattr(largest, "read_config", limited)
    with FakeCompilers(with_memory("h100-80gb:8", 1 << 40)) as compilers:
        found = search_largest(config(), "model.layers", [], compilers)
    assert found.best is not None
    assert found.best.value == 5
    assert found.beyond is None
    assert found.table().endswith("model.layers=6 is not valid with this config: model.layers is at most 5")


def test_a_config_that_a_kernel_does_not_support_is_not_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its estimate has no bytes."""

    def partly(cfg: Config, target: Target) -> Estimate:
        if cfg.memory.remat == "full":
            raise UserError("the kernel does not support it")
        return estimate_once(cfg, target)

    monkeypatch.setattr("jaxmem.search.candidates.estimated", partly)
    with FakeCompilers(with_memory("h100-80gb:8", 1 << 40)) as compilers:
        search = largest._Search(config(), "model.layers", ["remat"], compilers)
        candidate = search._candidate(1)
        assert candidate is not None
        assert candidate.refusal is None
        with pytest.raises(UserError, match=r"model\.layers=1 is not valid .* the kernel does not support it"):
            largest._Search(config(memory={"remat": "full"}), "model.layers", [], compilers).run()


def test_the_command_writes_the_config_of_the_largest_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / "given.yaml"
    best = tmp_path / "best.yaml"
    cfg = config(memory={"remat": "full"})
    given.write_text(json.dumps(cfg.model_dump(mode="json")))
    target = with_memory("h100-80gb:8", estimate_once(for_devices(cfg, 8), with_memory("h100-80gb:8", 0)).total)
    monkeypatch.setattr(largest, "compile_target", lambda _: target)
    monkeypatch.setattr(largest, "CompilerPool", lambda aim, *_: FakeCompilers(aim))
    with pytest.raises(SystemExit) as ended:
        main(["fit", str(given), "--target", "h100-80gb:8", "--maximize", "model.layers", "--write", str(best)])
    assert ended.value.code == 0
    assert f"wrote {best}; next: jaxmem train {best}" in capsys.readouterr().err
    assert load_config(best).model.layers == cfg.model.layers
