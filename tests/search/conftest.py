"""Small spaces to search, and compilers whose answers the tests choose."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxmem.config import Config
from jaxmem.estimate.memory import Estimate
from jaxmem.planning.budget import estimated
from jaxmem.planning.targets import Target, parse_target
from jaxmem.search.candidates import Candidate, Space
from jaxmem.search.compilers import CompilerPool
from jaxmem.search.knobs import Knob
from jaxmem.search.worker import StepCost
from tests.planning.conftest import SMALL as TINY
from tests.planning.conftest import config as planned

SMALL = {**TINY, "vocab": 512, "embed": 64, "mlp": 128, "kv_heads": 4, "head_dim": 16}


def config(**sections: Any) -> Config:
    usual: dict[str, Any] = {"model": SMALL, "data": {"sequence_length": 64}, "mesh": {"fsdp": -1}}
    # cuDNN's workspace would be most of the memory of so small a model.
    memory = {"attention": "blockwise", **sections.pop("memory", {})}
    return planned(**{**usual, "memory": memory, **sections})


def candidates(cfg: Config, target: Target, knobs: list[Knob]) -> list[Candidate]:
    return Space(cfg, target, knobs).start()


_estimate = functools.cache(estimated)


def estimate_once(cfg: Config, target: Target) -> Estimate:
    """An estimate does not depend on how much memory the target has, so targets of any size share it."""
    return _estimate(cfg, dataclasses.replace(target, memory=0))


def with_memory(name: str, size: int) -> Target:
    return dataclasses.replace(parse_target(name), memory=size)


class FakeCompilers(CompilerPool):
    """Answers with the estimate, times one factor for bytes and one for seconds."""

    def __init__(self, target: Target, factors: Callable[[Config], tuple[float, float]] = lambda _: (1.0, 1.0)) -> None:
        super().__init__(target, 0.0, processes=2)
        self.factors, self.asked = factors, []

    def truth(self, cfg: Config) -> StepCost:
        guess = estimate_once(cfg, self.target)
        size, time = self.factors(cfg)
        assert guess.seconds
        return StepCost(int(size * guess.total), 0, time * guess.seconds, {"logits": 1}, 0)

    def step(self, cfg: Config) -> StepCost:
        self.asked.append(cfg)
        self.compiled += 1
        return self.truth(cfg)

    def phases(self, _: Config) -> dict[str, int]:
        return {"initialise": 1}


@pytest.fixture(autouse=True, scope="session")
def shared_estimates() -> Iterator[None]:
    """The tests search the same spaces under several limits of memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxmem.search.candidates.estimated", estimate_once)
        yield


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
