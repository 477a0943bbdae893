"""Compiler processes, and the cache of their answers."""

import dataclasses
import importlib.metadata
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import optax
import pytest

from jaxmem.cli import main
from jaxmem.config import load_config
from jaxmem.config.devices import for_devices
from jaxmem.config.optimizers import OPTIMIZERS, AdamWSettings, Entry
from jaxmem.errors import UserError
from jaxmem.planning.result import plan
from jaxmem.planning.targets import local_target, parse_target, usable_memory
from jaxmem.search import compilers as compilers_module
from jaxmem.search import worker
from jaxmem.search.compilers import CompilerPool, RefusedError, compile_target
from jaxmem.search.fit import fit
from jaxmem.search.worker import serve

from .conftest import SMALL, config

TWO = parse_target("cpu:2")


def test_cache_keys_depend_on_content() -> None:
    cfg = config()
    name = worker.config_key("step", cfg, TWO, None)
    assert name == worker.config_key("step", config(name="another", output="elsewhere", seed=7), TWO, None)
    others = [
        worker.config_key("phases", cfg, TWO, None),
        worker.config_key("step", config(memory={"remat": "full"}), TWO, None),
        worker.config_key("step", config(model={**SMALL, "layers": 3}), TWO, None),
        worker.config_key("step", cfg, parse_target("cpu:4"), None),
        worker.config_key("step", cfg, parse_target("h100-80gb:2"), None),
        worker.config_key("step", cfg, parse_target("h100-80gb:2"), 3.0),
        worker.config_key("step", cfg, dataclasses.replace(parse_target("h100-80gb:2"), per_host=1), None),
    ]
    assert len({name, *others}) == 1 + len(others)
    gpus = parse_target("h100-80gb:2")
    programs = [worker.program_key(text, gpus, limit) for text in ("a", "b") for limit in (1 << 30, 2 << 30)]
    assert len(set(programs)) == 4, "XLA reduces the memory of a program to the limit"
    assert worker.program_key("a", TWO, 1 << 30) == worker.program_key("a", TWO, 2 << 30)


def test_programs_of_other_phases_are_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`memory.remat` changes the step, not the initialization."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled = []

    def compile_once(lowered: jax.stages.Lowered, **_: bool) -> SimpleNamespace:
        compiled.append(lowered.as_text())
        return SimpleNamespace(total=len(compiled))

    monkeypatch.setattr(worker, "compile_program", compile_once)
    cfgs = [for_devices(config(memory={"remat": remat}), 2) for remat in ("none", "full")]
    assert worker.other_phases(cfgs[0], TWO, None) == worker.other_phases(cfgs[1], TWO, None) == {"initialise": 1}
    assert len(compiled) == 1


def test_cache_keys_depend_on_the_sources_versions_and_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [worker.config_key("step", config(), TWO, None)]
    monkeypatch.setattr(worker, "_sources", lambda: "others")
    keys.append(worker.config_key("step", config(), TWO, None))
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_latency_hiding_scheduler=false")
    keys.append(worker.config_key("step", config(), TWO, None))
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    keys.append(worker.config_key("step", config(), TWO, None))
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0" if name == "jax-triton" else version(name))
    keys.append(worker.config_key("step", config(), TWO, None))
    assert len(set(keys)) == len(keys)


def test_the_cache_lies_in_xdg_cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert worker.read_answer("x") is None
    worker.write_answer("x", {"total": 3})
    assert worker.read_answer("x") == {"total": 3}
    assert [file.name for file in (tmp_path / "jaxmem" / "fit").iterdir()] == ["x.json"]
    (tmp_path / "jaxmem" / "fit" / "x.json").write_text('{"tot')
    assert worker.read_answer("x") is None


def test_an_unwritable_cache_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    worker.write_answer("x", {"total": 3})
    assert worker.read_answer("x") is None


@pytest.mark.exhaustive
def test_a_command_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real compiler, a file that loads and resolves; a second time nothing is compiled."""
    monkeypatch.setattr(compilers_module, "WORKER_BYTES", 1 << 60)  # one process, on whatever machine
    given, best = tmp_path / "given.yaml", tmp_path / "best.yaml"
    given.write_text(json.dumps(config(batch={"global_size": 2}).model_dump(mode="json")))
    arguments = ["fit", str(given), "--target", "cpu:2", "--allow", "remat", "--compiles", "2", "--json"]
    results = []
    for _ in range(2):
        with pytest.raises(SystemExit) as exit_:
            main([*arguments, "--write", str(best)])
        assert exit_.value.code == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0] | {"seconds": 0} == results[1] | {"seconds": 0}
    assert results[0]["considered"] == 4  # none, full, dots, sqrt
    assert 1 <= results[0]["compiled"] <= 2  # none after the fastest, if no estimate can win
    cfg = for_devices(load_config(best), 2)
    assert cfg.memory.remat == results[0]["best"]["config"].get("memory.remat", "none")
    with CompilerPool(TWO) as compilers:
        assert compilers.step(cfg).total <= results[0]["best"]["total"]
        assert compilers.compiled == 0


@pytest.mark.exhaustive
def test_a_compile_failure_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's loop, in this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # another test's initialiser may be the same program
    failures = iter(["INTERNAL: no layout\nand a page more", "INTERNAL: nor here"])

    def fail(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError(next(failures))

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    cfg, answers = for_devices(config(batch={"global_size": 2}), 2), io.StringIO()
    asked = ({"question": question, "config": cfg.model_dump(mode="json")} for question in ("step", "phases"))
    serve(map(json.dumps, asked), answers, local_target(jax.devices()[:2]))
    assert [json.loads(line)["refused"] for line in answers.getvalue().splitlines()] == [
        "XLA cannot compile this program: INTERNAL: no layout",
        "XLA cannot compile this program: INTERNAL: nor here",
    ]


def test_a_killed_process_refuses_only_its_config(monkeypatch: pytest.MonkeyPatch) -> None:
    with CompilerPool(TWO, processes=1) as compilers:
        with compilers._process() as first:
            first.kill()
        [(_, answer)] = compilers.ask_all(compilers.step, [config()])
        assert isinstance(answer, RefusedError)
        assert "was killed by SIGKILL; it needs 1.5 GiB of memory" in str(answer)
        with compilers._process() as second:
            assert second is not first
        monkeypatch.setattr(worker, "read_answer", lambda _: {"refused": "no program"})
        with pytest.raises(RefusedError, match="no program"):
            compilers.step(config())


def test_evaluation_with_frozen_weights_in_host_memory_counts_as_in_a_plan() -> None:
    target = "h100-80gb"
    sections = {"adapter": {"kind": "lora"}, "memory": {"offload": ["frozen"]}}
    train = {"steps": 2, "evaluate_every": 1}
    data = {"source": "jsonl", "path": "texts.jsonl", "sequence_length": 64, "held_out": 0.1}
    cfg = for_devices(config(**sections, data=data, train=train), 1)
    sizes = worker.other_phases(cfg, parse_target(target), None)
    assert sizes["evaluate"] == plan(cfg, target=target).phases["evaluate"]


def test_a_search_counts_on_the_memory_that_jax_has_here(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(
        device_kind="NVIDIA A100-SXM4-80GB",
        platform="gpu",
        process_index=0,
        memory_stats=lambda: {"bytes_limit": 60 << 30},
    )
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    target = compile_target(None)
    assert target.here is None
    with CompilerPool(target, processes=1) as compilers:
        assert usable_memory(target, config().memory, compilers.reserve_gib) == 60 << 30
        in_process = usable_memory(parse_target(target.name), config().memory, compilers.reserve_gib)
        assert in_process == 60 << 30, "as the compiler processes see it"


@pytest.mark.parametrize("error", [MemoryError(), OSError(28, "No space left on device"), UserError("not for this")])
def test_temporary_failures_are_not_cached(error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setitem(worker.QUESTIONS, "step", fail)
    reply = worker.answer("step", config(), TWO)
    monkeypatch.setattr(compilers_module._CompilerProcess, "ask", lambda *_: dict(reply))
    with CompilerPool(TWO, processes=1) as compilers, pytest.raises(RefusedError):
        compilers.step(config())
    assert len(list(tmp_path.rglob("*.json"))) == isinstance(error, UserError)


def test_what_a_script_registers_is_compiled_in_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler process knows neither its optimizers nor its families of models."""
    monkeypatch.setitem(OPTIMIZERS, "mine", Entry(AdamWSettings, lambda *_, **__: optax.identity(), ""))
    monkeypatch.setattr(worker, "answer", lambda *_: {"refused": "asked here"})
    with CompilerPool(TWO, processes=1) as compilers:
        with pytest.raises(RefusedError, match="asked here"):
            compilers.step(config(optimizer={"name": "mine"}))
        assert compilers._started == []


def test_a_config_that_a_compiler_process_does_not_know_is_refused() -> None:
    answers = io.StringIO()
    unknown = {**config().model_dump(mode="json"), "optimizer": {"name": "mine"}}
    serve([json.dumps({"question": "step", "config": unknown})], answers, TWO)
    reply = json.loads(answers.getvalue())
    assert "mine" in reply["refused"]
    assert reply["is_temporary"], "another process may know it"


def test_a_comparison_of_methods_has_no_settings_of_one_method() -> None:
    for option in ({"allow": ["remat"]}, {"compiles": 3}):
        with pytest.raises(UserError, match=f"{next(iter(option))}=.* supports a single method only"):
            fit("tiny", "cpu:2", **option)
    for override in ("adapter.kind=dora", "precision.parameters=bfloat16", "optimizer={name: lion}"):
        with pytest.raises(UserError, match=f"^{re.escape(override)} supports a single method only"):
            fit("tiny", "cpu:2", overrides=["memory.update=during", override])
