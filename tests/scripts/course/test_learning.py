"""The stops that train here: their runs are configs, their arithmetic is right, their cheapest parts are run."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxmem.config import load_config
from jaxmem.config.devices import for_devices
from jaxmem.errors import UserError
from scripts.course import STOPS, adapters, experts, galore, networks, parallel, precision

SOURCE = '''
"""A module."""

def read(file):
    """Read all that is in a file.

    And more.
    """

class Box:
    """Hold things together."""

    def put(self, thing):
        """Put one more thing into it."""

    def _hidden(self):
        """Not a thing that is asked for."""

def terse():
    """Short."""

def bare():
    pass
'''


@pytest.mark.parametrize("topic", ["networks", "precision", "adapters"])
def test_what_trains_here_takes_no_target(topic: str) -> None:
    with pytest.raises(UserError, match=f"{topic} does not support --target h100-80gb: it runs on this machine"):
        STOPS[topic].visit("h100-80gb")


def test_every_run_is_a_config(tmp_path) -> None:
    own = {"name": "run", "output": str(tmp_path)}
    for config in networks.RUNS.values():
        load_config({**config, **own})
    for overrides in precision.RUNS.values():
        load_config({**precision.BASE, **own}, overrides)
    for overrides in adapters.KINDS.values():
        load_config({**adapters.BASE, **own, "data": {"source": "text", "path": ".", "sequence_length": 64}}, overrides)
    for overrides in experts.RUNS.values():
        load_config({**experts.BASE, **own}, overrides)
    for overrides in galore.STEPS.values():
        load_config(galore.BASE, overrides)
    for overrides in galore.RUNS.values():
        load_config({**galore.SMALL, **own}, overrides)
    for overrides in parallel.LAYOUTS.values():
        for_devices(load_config(parallel.BASE, overrides), parallel.GPUS)


def test_the_loss_before_fine_tuning_is_that_of_the_batches_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the packed and of the other rows, as a run evaluates them."""
    cfg = load_config({**adapters.BASE, "name": "run"})
    asked = []

    def losses(_params, batches):
        asked.append(batches)
        return {"loss": 3.0}

    monkeypatch.setattr(adapters, "open_model", lambda *_: (SimpleNamespace(cfg=cfg), None))
    monkeypatch.setattr(adapters, "Evaluator", lambda _: contextlib.nullcontext(losses))
    assert adapters._loss("run", {"source": "text"}) == 3.0
    assert asked == [cfg.train.evaluate_batches]


@pytest.mark.exhaustive
def test_a_subset_is_trained_at_every_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "SUBSET_STEPS", 1)
    monkeypatch.setattr(adapters, "WIDTH", 8)
    monkeypatch.setattr(adapters, "RANK", 1)
    monkeypatch.setattr(adapters, "RATES", adapters.RATES[::3])
    everything, low_rank, subset = adapters.compare_subsets()
    assert low_rank["parameters"] == pytest.approx(subset["parameters"], rel=0.05)
    assert subset["parameters"] < everything["parameters"]
    for row in (everything, low_rank, subset):
        accuracies = [row[f"accuracy at {rate:g}"] for rate in adapters.RATES]
        assert row["best"] == max(accuracies)
        assert len(set(accuracies)) > 1  # the rate is used


def test_what_formats_represent() -> None:
    found = {name: precision.describe(name) for name in precision.FORMATS}
    assert [row["bytes"] for row in found.values()] == [4, 2, 2, 1, 1]
    assert (found["bfloat16"]["step at 1"], found["float16"]["largest"]) == ("0.0078", "6.55e+04")
    assert found["float32"][precision.SUM] == pytest.approx(2, abs=1e-3)
    assert found["bfloat16"][precision.SUM] == found["float8_e5m2"][precision.SUM] == 1  # every update lost
    assert found["float16"][precision.SMALL] == 0
    assert found["float16"][precision.SCALED] == pytest.approx(1e-8, rel=1e-3)
    assert precision.stochastic_sum() == pytest.approx(2, abs=0.05)


def test_layouts_are_for_eight() -> None:
    with pytest.raises(UserError, match="its layouts are for 8 GPUs; remove the number"):
        parallel.measure("h100-80gb:4")


def test_questions_are_about_public_names_with_a_summary(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    for name, text in {"pack/__init__.py": SOURCE, "_own.py": SOURCE, "broken.py": "def ("}.items():
        (tmp_path / name).write_text(text)
    assert list(adapters.questions(sorted(tmp_path.rglob("*.py")), tmp_path).items()) == [
        ("What does pack.read do?", "Read all that is in a file."),
        ("What does pack.Box do?", "Hold things together."),
        ("What does pack.Box.put do?", "Put one more thing into it."),
    ]
