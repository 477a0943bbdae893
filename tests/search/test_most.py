"""The largest value that fits: exact, and both of its bounds compiled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxmem.config import load_config
from jaxmem.config.devices import for_devices
from jaxmem.errors import UserError
from jaxmem.search.candidates import estimated
from jaxmem.search.most import UNITS, check_drawn, maximize

from .conftest import Told, config, with_memory


@pytest.mark.parametrize(
    ("key", "value", "bent"),
    [
        ("model.layers", 7, 1.0),
        ("model.layers", 7, 1.6),
        ("data.sequence_length", 384, 0.7),
        ("batch.global_size", 40, 1),
    ],
)
def test_the_largest_is_exact_however_wrong_the_estimate(key: str, value: int, bent: float) -> None:
    """The memory is what `value` needs, so that fits and nothing above it does."""
    cfg = config(memory={"remat": "full"})
    wide = with_memory("h100-80gb:8", 1 << 40)
    with Told(wide, lambda _: (bent, 1.0)) as told:
        needs = told.truth(for_devices(load_config(cfg.model_dump(mode="json"), [f"{key}={value}"]), 8)).total
    with Told(with_memory("h100-80gb:8", needs), lambda _: (bent, 1.0)) as compilers:
        found = maximize(cfg, compilers.target, key, [], compilers)
    assert found.best is not None
    assert found.beyond is not None
    assert found.best.value == value
    assert found.beyond.value == value + (8 if key == "batch.global_size" else UNITS[key])
    assert found.best.total <= found.limit < found.beyond.total
    asked = set(compilers.asked)
    assert {found.best.candidate.cfg, found.beyond.candidate.cfg} <= asked
    assert len(compilers.asked) <= 8
    assert bool(found.curve) == (key == "batch.global_size")
    assert json.loads(json.dumps(found.as_json()))["best"]["value"] == value
    assert f"{key}={value}" in found.table()


def test_the_curve_of_batch_sizes(tmp_path: Path) -> None:
    cfg = config(memory={"remat": "full"})
    with Told(with_memory("h100-80gb:8", 1 << 40)) as told:
        needs = told.truth(for_devices(load_config(cfg.model_dump(mode="json"), ["batch.global_size=40"]), 8)).total
    with Told(with_memory("h100-80gb:8", needs)) as compilers:
        found = maximize(cfg, compilers.target, "batch.global_size", [], compilers)
    assert {8, 16, 32, 40, 48} <= {one.value for one in found.curve}
    totals = [one.total for one in found.curve]
    assert totals == sorted(totals)
    for one, said in zip(found.curve, json.loads(json.dumps(found.as_json()))["curve"], strict=True):
        assert said["rate"] == one.rate == pytest.approx(one.value * 64 / one.seconds)
        assert f"{one.rate:,.0f} a second" in found.table()
    with pytest.raises(UserError, match=r"--maximize model.layers draws none; .* maximize batch.global_size"):
        check_drawn("model.layers", "layers.png")
    found.figure(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"


def test_what_may_change_makes_room() -> None:
    """With recomputation and micro-batches allowed, more layers fit, in the config that needs least."""
    limit = int(1.2 * estimated(for_devices(config(), 8), with_memory("h100-80gb:8", 1)).total)
    layers = []
    for allow in ([], ["remat", "batch"]):
        with Told(with_memory("h100-80gb:8", limit)) as compilers:
            found = maximize(config(), compilers.target, "model.layers", allow, compilers)
        assert found.best is not None
        layers.append(found.best.value)
    assert layers[1] > layers[0]
    assert found.best.candidate.cfg.model.layers == layers[1]  # type: ignore[union-attr]


def test_where_not_even_one_fits() -> None:
    with Told(with_memory("h100-80gb:8", 1000)) as compilers:
        found = maximize(config(), compilers.target, "model.layers", [], compilers)
    assert found.best is None
    assert found.beyond is not None
    assert found.beyond.value == 1
    with pytest.raises(UserError, match="nothing fits"):
        found.write("nowhere.yaml")


@pytest.mark.parametrize(
    ("key", "allow", "said"),
    [
        ("model.layer", [], r"not among .*did you mean model.layers"),
        ("batch.global_size", ["batch"], "grows without end"),
        ("model.layers", ["zzz"], "nothing that a search can change"),
    ],
)
def test_what_cannot_be_asked(key: str, allow: list[str], said: str) -> None:
    with Told(with_memory("h100-80gb:8", 1 << 30)) as compilers, pytest.raises(UserError, match=said):
        maximize(config(), compilers.target, key, allow, compilers)
