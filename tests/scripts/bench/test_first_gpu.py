"""The program of a first GPU, driven on a CPU with tiny sizes."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxmem.config import load_config
from scripts.bench import first_gpu
from scripts.bench.first_gpu import CLAIM_STEPS, SETTINGS, UNREAD, Measurement, overrides_of

STEPS = SETTINGS["steps"]
HERE = {"date": "2026-01-01T00:00:00", "device": "H100", "driver": "580", "gpus": ["one"], "versions": {"jax": "0.11"}}


@pytest.mark.parametrize("tiny", [False, True])
def test_every_step_is_a_config_and_they_differ(tiny: bool) -> None:
    configs = [load_config({"name": "step"}, [*UNREAD, *overrides_of(step, tiny=tiny)]) for step in STEPS.values()]
    assert len({cfg.model_dump_json() for cfg in configs}) == len(configs) >= 12


def test_costs_compare_steps_that_run() -> None:
    assert {name for pair in SETTINGS["costs"].values() for name in pair} <= set(STEPS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", sorted(SETTINGS["claims"]))
def test_a_claim_runs_in_a_process_of_its_own(name: str) -> None:
    (claim,) = (wanted for wanted in first_gpu.measurements(None, tiny=True) if wanted.name == name)
    (row,) = claim.run(300.0)
    assert row["planned"] > row["parameters"]
    assert row["measured"] is row["planned_seconds"] is None  # what a CPU does not know
    assert len(row["losses"]) == CLAIM_STEPS
    assert row["losses"][-1] < row["losses"][0]
    assert row["tokens_per_second"] == pytest.approx(4 * 16 / row["seconds"])


@pytest.mark.exhaustive
def test_what_goes_wrong_in_a_step_is_a_line() -> None:
    overrides = [*overrides_of(STEPS["float32"], tiny=True), "zero=9"]
    (row,) = first_gpu.step_rows("wrong", {}, overrides, 1, tiny=True)(60.0)
    assert row["error"].startswith("error: zero=9 must be")


def test_a_measurement_is_stopped_after_its_seconds() -> None:
    assert first_gpu.kernel_rows("int8_add")(0.1) == [{"error": "not ended within 0 s"}]


def test_each_measurement_is_written_and_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def measured(name: str, rows: list[dict[str, Any]]) -> Measurement:
        return Measurement("steps", name, 5.0, lambda seconds: (calls.append((name, seconds)), rows)[1])

    planned = [measured("a", [{"seconds": 1.0}]), measured("b", [{"error": "no memory"}])]
    monkeypatch.setattr(first_gpu, "measurements", lambda *_, **__: iter(planned))
    monkeypatch.setattr(first_gpu, "this_machine", lambda: HERE)
    folder = str(tmp_path / "results")
    assert first_gpu.main(["--output", folder]) == 0
    assert first_gpu.main(["--output", folder]) == 0
    assert [name for name, _ in calls] == ["a", "b"]
    assert all(0 < seconds <= 5.0 for _, seconds in calls)
    content = json.loads((tmp_path / "results" / "steps-b.json").read_text())
    assert content["rows"] == [{"error": "no memory"}]
    assert content["driver"] == "580"


def test_nothing_starts_after_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never = Measurement("steps", "a", 5.0, lambda _: pytest.fail("started"))
    monkeypatch.setattr(first_gpu, "measurements", lambda *_, **__: iter([never]))
    monkeypatch.setattr(first_gpu, "this_machine", lambda: HERE)
    assert first_gpu.main(["--output", str(tmp_path), "--minutes", "-1"]) == 1
    assert not list(tmp_path.iterdir())


def test_a_measurement_that_had_too_little_time_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = Measurement("steps", "a", 300.0, lambda seconds: [{"error": f"not ended within {seconds:.0f} s"}])
    monkeypatch.setattr(first_gpu, "measurements", lambda *_, **__: iter([stopped]))
    monkeypatch.setattr(first_gpu, "this_machine", lambda: HERE)
    assert first_gpu.main(["--output", str(tmp_path), "--minutes", "1"]) == 1
    assert not list(tmp_path.iterdir())
    assert first_gpu.main(["--output", str(tmp_path)]) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["steps-a.json"]


@pytest.mark.exhaustive
def test_kernels_without_a_gpu_are_checked_on_tiny_shapes() -> None:
    (added,) = (wanted for wanted in first_gpu.measurements(None, tiny=True) if wanted.name == "int8_add-results")
    device, *rows = added.run(120.0)
    assert device["dry_run"]
    assert any(row.get("right") for row in rows)
    assert not any(row.get("right") is False for row in rows)


def test_the_report_compares_planned_and_measured(tmp_path: Path) -> None:
    row = {
        "planned": 10 * 2**30,
        "measured": 11 * 2**30,
        "planned_seconds": 2.0,
        "seconds": 1.5,
        "mfu": 0.5,
        "tokens_per_second": 4096.0,
        "losses": [5.0, 4.0, 3.0],
    }
    other = row | {"seconds": 3.0, "measured": 22 * 2**30}
    saver, without = SETTINGS["costs"]["GaLore"]
    wrong = {"operation": "attention", "contestant": "triton", "pass": "forward", "check": "full", "right": False}
    timed = {"shape": "2048x64", "pass": "forward", "rate": 400.0}
    results = {
        ("steps", saver): [other],
        ("steps", without): [row],
        ("claims", "llama3-8b-10gb"): [row],
        ("kernels", "attention-results"): [wrong | {"error": 9.5}],
        ("kernels", "attention-2048x64"): [timed | {"contestant": "jax.nn cudnn"}],
        ("torch", "attention"): [timed | {"contestant": "torch", "rate": 380.0}],
    }
    for (part, name), rows in results.items():
        content = HERE | {"part": part, "name": name, "rows": rows}
        first_gpu.write(tmp_path / f"{part}-{name}.json", content)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in first_gpu.report(tmp_path).splitlines()]
    cells = {line[0]: line[1:] for line in lines if line}
    assert cells[without] == ["10.00", "11.00", "10.0", "2.000", "1.500", "-25.00", "4,096", "50.00"]
    assert cells["GaLore"] == ["100.0", "100.0"]
    assert cells["llama3-8b-10gb within 9.0 GiB"][-1] == "no"
    assert cells["2048x64 forward"] == ["400.0", "380.0"]
    assert cells["attention, triton forward"] == ["full", "9.500"]
