"""The stop of the largest models: what is called the most fits, and little more does."""

import itertools
import math
from typing import Any

import pytest

from jaxmem.config.presets import PRESETS
from jaxmem.errors import UserError
from jaxmem.planning.targets import parse_target
from scripts.course import STOPS, common, frontier
from scripts.course.frontier import METHODS, SHAPES

GIB = 2**30
LAYER = {"AdamW": GIB, "APOLLO-Mini, int8": GIB // 3, "LoRA": GIB // 4, "QLoRA": GIB // 16}


def estimate(method: str, layers: int, gpus: int) -> int:
    """Tables, layers that all GPUs split, and boundaries, which grow with the root of their number."""
    return 2 * GIB + layers * LAYER[method] // gpus + int(math.sqrt(layers) * GIB / 50)


def test_the_most_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_formula(aim: Any, overrides: Any, width: int, layers: int) -> dict[str, Any]:
        (method,) = (name for name in METHODS if METHODS[name] == tuple(overrides))
        found = {
            "overrides": [f"model.layers={layers}"],
            "embed": width,
            "layers": layers,
            "parameters": layers * 10**9,
        }
        return {**found, "predicted": estimate(method, layers, aim.count), "limit": aim.memory}

    monkeypatch.setattr(frontier, "_row_of_shape", by_formula)
    held = {"bytes_per_device": {"total": 20 * GIB}}
    monkeypatch.setattr(common, "plans", lambda _target, _base, rows: dict.fromkeys(rows, held))
    targets = ("a100-40gb", "h100-80gb", "h100-80gb:8x8")
    found = frontier.measure("rtx4090-24gb", targets)
    largest, checked = (table.rows for table in found.tables)
    assert [row["target"] for row in largest] == ["rtx4090-24gb", *targets]
    end = SHAPES[-1][1]
    for row in largest:
        aim, sizes = parse_target(row["target"]), []
        for method in METHODS:
            layers = round(row[method])
            assert estimate(method, layers, aim.count) <= aim.memory
            assert layers == end or estimate(method, layers + 1, aim.count) > aim.memory
            sizes.append(layers)
        assert sizes == sorted(sizes)
    note = STOPS["frontier"].note.format(**found.facts)
    assert "search ends at 1,028 B" in note
    assert "beyond the limit of the GPU when compiled: none" in note
    held["bytes_per_device"]["total"] = 24 * GIB
    assert frontier.measure("rtx4090-24gb", ()).facts["beyond"] == "AdamW, QLoRA"
    assert [row["method"] for row in checked] == ["AdamW", "QLoRA"]
    assert largest[-1]["QLoRA"] == end
    (checked,) = (table.rows for table in frontier.measure("h100-80gb:8", ()).tables[1:])
    limit = parse_target("h100-80gb").memory
    assert checked[0]["bytes per parameter"] == 8 * limit / (1e9 * checked[0]["billions of parameters"])


def test_the_frontier_is_empty_where_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontier, "_row_of_shape", lambda *_: {"limit": GIB, "predicted": 2 * GIB})
    assert frontier.largest_model(parse_target("rtx4090-24gb"), ()) is None


def test_models_grow_in_width_and_depth_through_the_published_shapes() -> None:
    assert list(SHAPES) == sorted(set(SHAPES))
    assert all(layers <= later for (_, layers), (_, later) in itertools.pairwise(SHAPES))
    for preset in ("llama3-8b", "llama3-70b", "llama3-405b"):
        assert (PRESETS[preset]["embed"], PRESETS[preset]["layers"]) in SHAPES


def test_a_cpu_is_no_target() -> None:
    with pytest.raises(UserError, match="frontier does not support --target cpu:8"):
        STOPS["frontier"].visit("cpu:8")
