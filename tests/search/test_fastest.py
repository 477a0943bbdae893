"""The search compiles few configs and finds what compiling everything would find."""

import dataclasses
import functools
import io
import json

import pytest
from rich.console import Console

from jaxmem.config import Config
from jaxmem.errors import UserError
from jaxmem.estimate.memory import Estimate
from jaxmem.planning.result import plan_program
from jaxmem.planning.targets import Target
from jaxmem.search.compilers import CompilerPool, RefusedError
from jaxmem.search.fit import Fit, search
from jaxmem.search.knobs import allowed
from jaxmem.search.worker import StepCost
from jaxmem.step.programs import program

from .conftest import FakeCompilers, candidates, config, estimate_once, with_memory

WORDS = ("mesh", "remat", "batch")


def skewed(cfg: Config) -> tuple[float, float]:
    """A compiler that the estimates misjudge, as they would a new recomputation policy or axis."""
    size = {"none": 1.3, "dots": 0.8}.get(cfg.memory.remat, 1.1) * (1.2 if cfg.mesh.tensor > 1 else 1.0)
    return size, 1.5 if cfg.memory.remat == "dots" else 1.0


@functools.cache
def typical() -> int:
    """A limit that about half of the candidates keep."""
    target = with_memory("h100-80gb:2", 1 << 40)
    sizes = sorted(one.estimate.total for one in candidates(config(), target, allowed(WORDS)))
    return sizes[len(sizes) // 2]


@pytest.fixture(scope="module")
def found() -> tuple[Fit, FakeCompilers]:
    target = with_memory("h100-80gb:2", typical())
    with FakeCompilers(target, skewed) as compilers:
        return search(config(), WORDS, compilers), compilers


@pytest.mark.exhaustive
def test_the_true_best_is_found(found: tuple[Fit, FakeCompilers]) -> None:
    fit, told = found
    truth = {one.cfg: told.truth(one.cfg) for one in fit.trials.all}
    fitting = {cfg: facts for cfg, facts in truth.items() if facts.total <= fit.trials.limit}
    assert 0 < len(fitting) < len(truth)
    assert fit.best is not None
    assert fit.best.seconds <= 1.005 * min(facts.seconds for facts in fitting.values())  # many are as good as alike
    # And so is the whole front.
    for one in fit.front:
        faster = [facts for facts in fitting.values() if facts.seconds < 0.99 * one.seconds]
        assert all(facts.total > 0.97 * one.total for facts in faster)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("estimate", "best"), [(1.04, "dots"), (1.2, "none")])
def test_a_policy_that_may_be_faster_than_estimated_is_tried(
    estimate: float, best: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two are compiled in any case."""
    target = with_memory("h100-80gb:2", 1 << 40)

    def estimated(cfg: Config, target: Target) -> Estimate:
        seconds = {"none": 1.0, "sqrt": 1.01, "dots": estimate}.get(cfg.memory.remat, 2.0)
        return dataclasses.replace(estimate_once(cfg, target), seconds=seconds)

    def faster_dots(cfg: Config) -> tuple[float, float]:
        seconds = {"none": 1.0, "sqrt": 1.01, "dots": 0.95}.get(cfg.memory.remat, 2.0)
        return 1.0, seconds / (estimate_once(cfg, target).seconds or 1.0)

    monkeypatch.setattr("jaxmem.search.candidates.estimated", estimated)
    with FakeCompilers(target, faster_dots) as compilers:
        fit = search(config(), ("remat",), compilers)
    assert fit.best is not None
    assert fit.best.cfg.memory.remat == best


@pytest.mark.exhaustive
def test_few_are_compiled_and_the_whole_front_is(found: tuple[Fit, FakeCompilers]) -> None:
    fit, told = found
    assert len(fit.trials.all) > 100
    assert len(fit.trials.compiled) == len(told.asked) <= 20
    assert all(one.cost and one.phases for one in fit.front)
    assert [one.total for one in fit.front] == sorted((one.total for one in fit.front), reverse=True)


@pytest.mark.exhaustive
def test_json(found: tuple[Fit, FakeCompilers]) -> None:
    result = json.loads(json.dumps(found[0].as_json()))
    assert {"considered", "compiled", "candidates", "best", "seconds"} <= set(result)
    assert result["considered"] == len(result["candidates"])
    for one in result["candidates"]:
        assert set(one) == {"config", "total", "estimated_step_seconds", "fits", "compiled", "why"}
        assert one["fits"] == (one["total"] <= result["target"]["limit_bytes"])
        assert one["why"]
    losers = [one for one in result["candidates"] if not one["fits"]]
    assert all(one["why"].startswith("needs ") for one in losers)
    assert result["best"]["why"] == "fastest that fits"


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [40, 120])
def test_the_table_fits(found: tuple[Fit, FakeCompilers], width: int) -> None:
    console = Console(width=width, file=io.StringIO())
    console.print(found[0].table())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= width
    assert "configs considered" in " ".join(text.split())


@pytest.mark.exhaustive
def test_a_sampled_space_is_searched_around_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    target = with_memory("h100-80gb:8", 1 << 40)
    seconds = []
    for most in (10**6, 10):
        monkeypatch.setattr("jaxmem.search.candidates.MAX_SIZE", most)
        with FakeCompilers(target) as compilers:
            fit = search(config(), ["mesh", "batch"], compilers, compiles=2)
        assert fit.best is not None
        seconds.append(min(one.estimate.seconds or 0.0 for one in fit.trials.all))
    assert seconds[1] == pytest.approx(seconds[0], rel=0.01)


def test_where_nothing_fits_the_smallest_is_named() -> None:
    target = with_memory("h100-80gb:8", 1000)
    with FakeCompilers(target) as compilers:
        fit = search(config(), ["remat", "batch"], compilers)
    assert fit.best is None
    assert fit.front == []
    assert fit.smallest.total == min(one.estimate.total for one in fit.trials.all)
    with pytest.raises(UserError, match="no config fits"):
        fit.write("nowhere.yaml")


@pytest.mark.exhaustive
def test_memory_budget_limits_the_search() -> None:
    target = with_memory("h100-80gb:4", 1 << 40)
    gib = typical() / 2**30
    with FakeCompilers(target) as compilers:
        fit = search(config(memory={"budget": gib}), ["remat", "batch"], compilers)
    assert fit.trials.limit == int(gib * 2**30)
    assert fit.best is not None
    assert fit.best.total <= fit.trials.limit


def test_a_config_that_does_not_compile_is_refused() -> None:
    """All others are searched; where nothing at all compiles, there is no result but the reason."""
    target = with_memory("h100-80gb:8", 1 << 40)

    class Failing(FakeCompilers):
        fails: frozenset[str] = frozenset()

        def step(self, cfg: Config) -> StepCost:
            if cfg.memory.remat in self.fails:
                raise RefusedError("XLA does not compile this program: INTERNAL: no layout")
            return super().step(cfg)

    with Failing(target) as compilers:
        compilers.fails = frozenset({"none"})
        fit = search(config(), ["remat"], compilers)
        lost = next(one for one in fit.trials.all if one.cfg.memory.remat == "none")
        assert fit.reason(lost) == "XLA does not compile this program: INTERNAL: no layout"
        assert fit.best is not None
        assert lost not in (*fit.front, *fit.trials.compiled)
        compilers.fails = frozenset({"none", "dots", "full", "sqrt"})
        with pytest.raises(UserError, match=r"all 4 configs failed to compile: XLA does not compile"):
            search(config(), ["remat"], compilers)


def test_other_phases_count() -> None:
    """A config that does not fit while it is initialised is not a result."""
    target = with_memory("h100-80gb:4", 1 << 40)

    class Greedy(FakeCompilers):
        def phases(self, cfg: Config) -> dict[str, int]:
            return {"initialise": target.memory + 1 if cfg.memory.remat == "none" else 1}

    with Greedy(target) as compilers:
        fit = search(config(), ["remat"], compilers)
    assert fit.best is not None
    assert all(one.cfg.memory.remat != "none" for one in fit.front)


@pytest.mark.exhaustive
def test_a_small_space_compiled_whole() -> None:
    """The real compiler on everything: the search, which compiled less, has the same best."""
    cfg = config(batch={"global_size": 2})
    target = with_memory("cpu:1", 1 << 40)
    words = ["remat"]
    with CompilerPool(target, processes=1) as compilers:  # a process starts as long as it compiles all of them
        every = [one.cfg for one in candidates(cfg, target, allowed(words))]
        truth = dict(compilers.ask_all(compilers.step, every))
        limit = sorted(facts.total for facts in truth.values())[len(truth) // 2]
        compilers.target = with_memory("cpu:1", limit)
        fit = search(cfg, words, compilers, compiles=3)
    assert len(fit.trials.compiled) <= 3 < len(every)
    assert fit.best is not None
    assert fit.best.seconds == min(facts.seconds for facts in truth.values() if facts.total <= limit)
    built = program(fit.best.cfg, jax_devices(1))
    assert plan_program(built).compiled_step.total == fit.best.cost.total  # type: ignore[union-attr]


def jax_devices(count: int) -> list:
    import jax

    return jax.devices()[:count]
