"""Methods of training compared on a target, and what is advised where a config does not fit or is slow."""

import functools
import io
import json
import shlex
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from jaxmem.cli import main
from jaxmem.config import Config, load_config
from jaxmem.config.devices import for_devices
from jaxmem.config.methods import METHODS, run_config
from jaxmem.errors import UserError
from jaxmem.planning.targets import Target
from jaxmem.planning.units import format_bytes
from jaxmem.search import fit
from jaxmem.search.comparison import Comparison, compare
from jaxmem.search.fit import search

from .conftest import SMALL, FakeCompilers, config, estimate_once, with_memory

MODEL = {"name": "small", "model": {**SMALL, "layers": 4}, "data": {"sequence_length": 64}, "mesh": {"fsdp": -1}}
OPTIONS: dict[str, Any] = {"batch": 2, "devices": 2}


def limit_between(smaller: str, larger: str) -> int:
    """Memory that one method needs with everything saved, and the other does not."""
    wide = with_memory("h100-80gb:2", 1 << 40)
    sizes = [
        estimate_once(for_devices(run_config(MODEL, ["memory.remat=full"], method=name, **OPTIONS), 2), wide).total
        for name in (smaller, larger)
    ]
    assert sizes[0] < sizes[1]
    return sum(sizes) // 2


@functools.cache
def compared(target: Target, progress: Callable[[str], None] = lambda _: None) -> Comparison:
    with FakeCompilers(target) as pool:
        make = functools.partial(run_config, MODEL, **OPTIONS)
        return compare(make, ("small.yaml", "--batch", "2"), pool, progress)


@pytest.mark.exhaustive
def test_a_list_of_methods_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    target = with_memory("h100-80gb:2", 1 << 20)
    monkeypatch.setattr(fit, "compile_target", lambda _: target)
    monkeypatch.setattr(fit, "CompilerPool", lambda aim, *_: FakeCompilers(aim))
    found = fit.fit(MODEL, "h100-80gb:2", batch=2, method="qlora, full")
    assert isinstance(found, Comparison)
    assert [one.name for one in found.results] == ["qlora", "full"]
    found = fit.fit(MODEL, "h100-80gb:2", batch=2, method="qlora,full,qlora")
    assert [one.name for one in found.results] == ["qlora", "full"]  # type: ignore[union-attr]
    with pytest.raises(UserError, match="--method lor is unknown"):
        fit.fit(MODEL, "h100-80gb:2", batch=2, method="qlora,lor")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("options", "code"), [((), 3), (("--maximize", "model.layers"), 2), (("--allow", "batch"), 2)])
def test_the_command_compares_a_list_of_methods(
    options: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(fit, "compile_target", lambda _: with_memory("h100-80gb:2", 1 << 20))
    monkeypatch.setattr(fit, "CompilerPool", lambda aim, *_: FakeCompilers(aim))
    with pytest.raises(SystemExit) as ended:
        main(["fit", "tiny", "--target", "h100-80gb:2", "--method", "lora, qlora", "--json", *options])
    assert ended.value.code == code
    if not options:
        assert [one["name"] for one in json.loads(capsys.readouterr().out)["methods"]] == ["lora", "qlora"]


def test_commands_plan_what_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reserve of the search, and the policy that it chose for `memory.remat: auto`."""
    monkeypatch.setattr(fit, "compile_target", lambda _: with_memory("h100-80gb:2", 1 << 40))
    monkeypatch.setattr(fit, "CompilerPool", lambda aim, *_: FakeCompilers(aim))
    given = ["memory.remat=auto"]
    found = fit.fit(MODEL, "h100-80gb:2", batch=2, method="full, lora", overrides=given, reserve_gib=0.5)
    assert isinstance(found, Comparison)
    for result in found.fitting:
        words = shlex.split(found.plan_command(result))
        assert words[words.index("--reserve") + 1] == "0.5"
        settings = [word for word in words if "=" in word]
        assert result.candidate
        planned = run_config(MODEL, settings, method=result.name, batch=2)
        assert for_devices(planned, 2).memory == result.candidate.cfg.memory


@pytest.mark.exhaustive
def test_every_method_has_a_row_and_those_that_fit_are_compiled() -> None:
    lines: list[str] = []
    found = compared.__wrapped__(with_memory("h100-80gb:2", limit_between("qlora", "full")), lines.append)
    assert [one.name for one in found.results] == list(METHODS)
    assert [line.partition(":")[0] for line in lines[: len(METHODS)]] == list(METHODS), "estimates come first"
    fitting = {one.name for one in found.fitting}
    assert "qlora" in fitting
    for one in found.fitting:
        assert one.candidate
        assert one.candidate.cost
        assert one.candidate.phases
        assert one.candidate.total <= found.limit
        words = shlex.split(found.plan_command(one))
        assert words[:6] == ["jaxmem", "plan", "small.yaml", "--batch", "2", "--method"]
        overrides = [word for word in words if "=" in word]
        assert for_devices(run_config(MODEL, overrides, method=one.name, **OPTIONS), 2) == one.candidate.cfg
    for one in found.results:
        assert (
            one.fits
            or one.candidate is None
            or f"of device memory ({format_bytes(found.limit)} available" in one.reason
        )
    told = json.loads(json.dumps(found.as_json()))
    assert told["best"] == found.fitting[0].name
    assert [one["fits"] for one in told["methods"]] == [one.fits for one in found.results]


@pytest.mark.exhaustive
def test_a_method_that_crashes_loses_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(cfg: Config, target: Target) -> Any:
        if cfg.precision.parameters == "int8" or cfg.memory.remat == "sqrt":
            raise TypeError("Custom VJP bwd rule\nand a page more")
        return estimate_once(cfg, target)

    monkeypatch.setattr("jaxmem.search.candidates.estimated", broken)
    found = {one.name: one for one in compared.__wrapped__(with_memory("h100-80gb:2", 1 << 40)).results}
    assert found["full-int8"].reason == "TypeError: Custom VJP bwd rule"
    assert all(one.fits for name, one in found.items() if name != "full-int8")
    with FakeCompilers(with_memory("h100-80gb:8", 1 << 40)) as compilers:
        fit = search(config(), ["remat"], compilers)
    assert {fit.reason(one) for one in fit.trials.all if one.cfg.memory.remat == "sqrt"} == {
        "TypeError: Custom VJP bwd rule"
    }
    assert fit.best


@pytest.mark.exhaustive
@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits(width: int) -> None:
    for memory in (1 << 40, limit_between("qlora", "full"), 1000):
        found = compared(with_memory("h100-80gb:2", memory))
        assert "small on" in repr(found)
        console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None)
        console.print(found.table(), crop=False)
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        lines = shown.splitlines()
        commands = [found.plan_command(one) for one in found.fitting]
        assert set(commands) <= set(lines), "a command is one line"
        assert all(len(line) <= width for line in lines if line not in commands)
        assert all(one.fits or one.reason.split()[-1] in shown for one in found.results)
        for name in METHODS:
            assert any(line.split()[:1] == [name] and len(line.split()) >= 4 for line in lines)
    with pytest.raises(UserError, match="no config fits"):
        compared(with_memory("h100-80gb:2", 1000)).write("nowhere.yaml")


@pytest.mark.exhaustive
def test_recompute_is_tried_before_offloading() -> None:
    """The copies of an offloading config take longer than estimated, which only compiling it shows."""
    wide = with_memory("h100-80gb:2", 1 << 40)
    full, none = (
        estimate_once(
            for_devices(run_config(MODEL, [f"memory.remat={remat}"], method="lora", **OPTIONS), 2), wide
        ).total
        for remat in ("full", "none")
    )
    target = with_memory("h100-80gb:2", (full + none) // 2)
    with FakeCompilers(target, lambda cfg: (1.0, 1.0 if cfg.memory.offload == "none" else 3.0)) as pool:
        result = compare(functools.partial(run_config, MODEL, **OPTIONS), (), pool, lambda _: None, methods=["lora"])
        [lora] = result.results
        assert lora.candidate
        assert lora.candidate.cfg.memory.offload == "none"
        assert any(cfg.memory.offload == "none" for cfg in pool.asked[:1])
        [row] = result.as_json()["methods"]
        assert row["tokens_per_second"] == pytest.approx(2 * 64 / lora.candidate.seconds)


def test_where_nothing_fits_other_methods_replace_what_the_user_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "compile_target", lambda _: with_memory("h100-80gb:2", 1 << 10))
    monkeypatch.setattr(fit, "CompilerPool", lambda aim, *_: FakeCompilers(aim))
    for name in METHODS.keys() - {"full", "qlora"}:
        monkeypatch.delitem(METHODS, name)
    given = ["optimizer.name=sgd", "optimizer.learning_rate=0.5"]
    found = fit.fit(MODEL, "h100-80gb:2", batch=2, overrides=given, allow=["update"])
    assert isinstance(found, fit.Fit)
    assert found.other_methods
    names = {"full": "adamw", "qlora": "sgd"}  # only the method full sets it
    for result in found.other_methods.results:
        assert result.candidate
        assert result.candidate.cfg.optimizer.name == names[result.name]
        assert result.candidate.cfg.optimizer.learning_rate == 0.5
        words = shlex.split(found.other_methods.plan_command(result))
        assert ("optimizer.name=sgd" in words) == (result.name == "qlora")
        assert "optimizer.learning_rate=0.5" in words


def test_a_config_that_was_not_compiled_has_a_reason() -> None:
    cfg = config(data={"sequence_length": 512})
    total = estimate_once(for_devices(cfg, 8), with_memory("h100-80gb:8", 0)).total
    with FakeCompilers(with_memory("h100-80gb:8", total), lambda _: (1.02, 1.0)) as compilers:
        result = search(cfg, ["remat"], compilers, compiles=1)
    assert result.best is None
    assert any(row["fits"] and row["why"].endswith("not compiled") for row in result.as_json()["candidates"])


def test_changes_name_the_policy_in_place_of_auto() -> None:
    with FakeCompilers(with_memory("h100-80gb:8", 1 << 40)) as compilers:
        result = search(config(memory={"remat": "auto"}), ["update"], compilers, compiles=1)
    assert result.best
    assert "memory.remat" in result.best.changes


def test_a_model_of_images_has_no_tokens() -> None:
    vit = {"family": "vit", "layers": 2, "embed": 64, "mlp": 128, "heads": 4, "outputs": 10}
    raw = {**MODEL, "model": vit, "data": {"source": "digits"}, "objective": {"name": "classify"}}
    with FakeCompilers(with_memory("h100-80gb:2", 1 << 40)) as pool:
        make = functools.partial(run_config, raw, **OPTIONS)
        result = compare(make, (), pool, lambda _: None, methods=["full"])
    assert result.as_json()["methods"][0]["tokens_per_second"] is None
    assert "2 examples per step" in str(result)


@pytest.mark.exhaustive
def test_a_suggested_command_replaces_what_the_user_gave() -> None:
    given = ("small.yaml", "memory.remat=sqrt")
    with FakeCompilers(with_memory("h100-80gb:2", 1 << 40)) as pool:
        make = functools.partial(run_config, MODEL, given[1:], **OPTIONS)
        [full] = (result := compare(make, given, pool, lambda _: None, methods=["full"])).results
    assert full.candidate
    assert "memory.remat" in full.candidate.changes
    assert result.plan_command(full).count("memory.remat=") == 1


@pytest.mark.exhaustive
def test_fit_names_a_slow_setting_that_it_does_not_change() -> None:
    """The norm of all gradients needs a second backward pass with updates during the first."""
    raw = {"name": "x", "model": {"preset": "llama3.2-1b"}, "batch": {"global_size": 1}, "train": {"steps": 10}}
    slow = load_config(raw, ["memory.update=during", "memory.remat=full"])
    with FakeCompilers(with_memory("a100-80gb:1", 1 << 40)) as compilers:
        found = search(slow, ["batch"], compilers)
        [line] = found.as_json()["slow_settings"]
        assert line.startswith("optimizer.clip_by=global makes a step")
        assert "optimizer.clip_by=global makes a step" in " ".join(str(found).split())
        changed = slow.replace(optimizer={"clip_by": "previous"})
        assert not search(changed, ["batch"], compilers).slow_settings
        comparison = compare(lambda **_: slow, (), compilers, lambda _: None, methods=["full"])
        [row] = comparison.as_json()["methods"]
        is_during = comparison.results[0].candidate.cfg.memory.update == "during"
        assert len(row["slow_settings"]) == is_during
