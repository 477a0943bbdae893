"""A run that does not fit stops and names the search for one that does; measured memory stands beside planned."""

import contextlib
import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxmem.config import load_config
from jaxmem.distributed import join, rendezvous
from jaxmem.distributed.cluster import Cluster
from jaxmem.estimate.state import bytes_on_device
from jaxmem.inference import load
from jaxmem.machine import devices
from jaxmem.machine.gpus import GIB, GPUS, reserved
from jaxmem.planning import result
from jaxmem.planning.result import Plan, plan_program
from jaxmem.planning.targets import local_target
from jaxmem.planning.units import format_bytes
from jaxmem.search.fit import fit
from jaxmem.step.programs import program
from jaxmem.training import memory_check, run
from jaxmem.training.memory_check import (
    DoesNotFitError,
    OutOfMemoryError,
    PeakCheck,
    check_fits,
    explained_out_of_memory,
)

CONFIG = {
    "name": "small",
    "model": {"preset": "tiny", "layers": 2, "embed": 32, "mlp": 64, "heads": 4, "kv_heads": 4, "head_dim": 8},
    "data": {"sequence_length": 64},
    "batch": {"global_size": 8},
    "mesh": {"fsdp": -1},
    "train": {"steps": 10},
}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_program(program(load_config(CONFIG), jax.devices()[:2]))


def cramped(plan: Plan, share: float) -> Plan:
    limit = int(share * plan.compiled_step.total)
    return dataclasses.replace(plan, target=dataclasses.replace(plan.target, memory=limit))


@pytest.mark.exhaustive
def test_what_fits_is_left_alone(plan: Plan) -> None:
    check_fits(plan)


@pytest.mark.exhaustive
def test_a_run_that_does_not_fit_prints_its_plan_and_names_the_search(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DoesNotFitError, match=r"small does not fit: .* is activations .*`jaxmem fit CONFIG`"):
        check_fits(cramped(plan, 0.75))
    assert "Memory per device, planned" in capsys.readouterr().err


def budget_of(refused: pytest.ExceptionInfo[OutOfMemoryError]) -> float:
    found = re.search(r"jaxmem fit CONFIG memory\.budget=(\S+)`", str(refused.value))
    assert found
    return float(found[1]) * GIB


@pytest.mark.exhaustive
def test_memory_that_runs_out_in_spite_of_the_plan(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned and available memory, and a search within as much as was available."""
    total = plan.peak
    monkeypatch.setattr(memory_check, "device_memory", lambda: {"bytes_in_use": total // 2})
    asked = f"RESOURCE_EXHAUSTED: Out of memory while trying to allocate {total // 4} bytes."
    with pytest.raises(OutOfMemoryError) as caught, explained_out_of_memory(plan):
        raise jax.errors.JaxRuntimeError(asked)
    assert caught.value.exit_code == 3
    takes, there, more = (format_bytes(size) for size in (total, total // 2, total // 4))
    assert str(caught.value).startswith(
        f"small: out of memory although the plan fits: planned {takes} of {format_bytes(plan.limit)} per device"
    )
    assert f"; {there} were in use; {more} more were requested" in str(caught.value)
    assert budget_of(caught) == pytest.approx(total // 2 + total // 4, rel=0.01)
    # It needed half as much again as planned: another must be smaller by that.
    monkeypatch.setattr(memory_check, "device_memory", lambda: {"bytes_in_use": total + total // 4})
    with pytest.raises(OutOfMemoryError) as caught, explained_out_of_memory(cramped(plan, 1.2)):
        raise jax.errors.JaxRuntimeError(asked)
    assert budget_of(caught) == pytest.approx(0.7 * total, rel=0.01)
    monkeypatch.setattr(memory_check, "device_memory", dict)
    with pytest.raises(OutOfMemoryError) as caught, explained_out_of_memory(plan):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    assert budget_of(caught) == pytest.approx(0.9 * total, rel=0.01)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), explained_out_of_memory(plan):
        raise jax.errors.JaxRuntimeError("INTERNAL: another")


@pytest.mark.parametrize("gib", [79.96, 1.005, 0.012349])  # with three digits the first is 80.0
def test_the_budget_of_a_search_is_not_rounded_up(gib: float, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "_available", lambda *_: int(gib * GIB))
    with pytest.raises(OutOfMemoryError) as caught, explained_out_of_memory(plan):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")
    assert 0.98 * gib * GIB < budget_of(caught) < int(gib * GIB)


def test_no_search_is_proposed_if_no_memory_was_available(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_check, "device_memory", lambda: {"bytes_in_use": plan.limit + 2 * plan.peak})
    with pytest.raises(OutOfMemoryError) as caught, explained_out_of_memory(plan):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12 bytes.")
    assert str(caught.value).endswith("see `jaxmem doctor`.")


def test_host_memory_that_runs_out_names_xla_s_limit(plan: Plan) -> None:
    text = (
        "RESOURCE_EXHAUSTED: Out of host memory while trying to allocate 1 bytes. Please set the environment variable"
        " XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB to allocate larger host memory than the default 64 GB."
    )
    line = f"out of pinned host memory; set {devices.HOST_LIMIT} to more than"
    with pytest.raises(OutOfMemoryError, match=line), explained_out_of_memory(plan):
        raise jax.errors.JaxRuntimeError(text)


def test_a_budget_is_a_limit_of_one_s_own(plan: Plan) -> None:
    gib = 0.5 * plan.compiled_step.total / GIB
    cfg = plan.program.cfg.model_copy(update={"memory": plan.program.cfg.memory.model_copy(update={"budget": gib})})
    within = dataclasses.replace(plan, program=dataclasses.replace(plan.program, cfg=cfg))
    assert plan.fits
    assert not within.fits
    assert within.limit == int(gib * GIB)
    with pytest.raises(DoesNotFitError, match=r"allowed by memory\.budget"):
        check_fits(within)


def test_a_host_that_overflows_does_not_fit(plan: Plan) -> None:
    """What is offloaded, and the copy of the state that a checkpoint is written from; on a CPU also the step."""
    assert plan.host_bytes == plan.compiled_step.total + bytes_on_device(plan.program.spec.state)
    for host, fits in ((plan.host_bytes, True), (plan.host_bytes - 1, False)):
        assert dataclasses.replace(plan, target=dataclasses.replace(plan.target, host_memory=host)).fits is fits
    short = dataclasses.replace(plan, target=dataclasses.replace(plan.target, host_memory=plan.host_bytes // 2))
    assert short.as_json()["peak_host_bytes_per_device"] > short.as_json()["target"]["host_memory_bytes"]
    needed = re.escape(f"the step and a checkpoint's copy need {format_bytes(plan.host_bytes)} of host memory")
    with pytest.raises(DoesNotFitError, match=needed):
        check_fits(short)


def test_measured_stands_beside_planned(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = {"bytes_in_use": 100, "peak_bytes_in_use": 2 * plan.compiled_step.total}
    device = SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan.as_json()))
    measured = PeakCheck(plan, file)
    said = [measured.after_step() for _ in range(6)]
    assert [line is not None for line in said] == [False, False, True, False, False, False]
    assert "measured peak" in str(said[2])
    told = json.loads(file.read_text())
    planned = max(told["phases"]["step"], told["phases"]["initialise"])
    assert told["measured"]["peak_bytes"] == stats["peak_bytes_in_use"]
    assert told["measured"]["planned_bytes"] == planned
    assert told["measured"]["difference"] == pytest.approx(stats["peak_bytes_in_use"] / planned - 1)
    assert told["bytes_per_device"] == plan.bytes_per_device


def test_devices_that_do_not_tell_are_not_asked_again(plan: Plan, tmp_path: Path) -> None:
    measured = PeakCheck(plan, tmp_path / "plan.json")
    assert [measured.after_step() for _ in range(5)] == [None] * 5


# ------------------------------------------------------------------ one number for what is left over


def test_jax_takes_what_a_plan_counts_on(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = GPUS["a100-80gb"]
    monkeypatch.setattr(devices, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(devices, "nvidia_gpus", lambda: [{"memory": gpu.memory}] * 8)
    monkeypatch.setattr(devices, "host_memory", lambda: {"available": 2000 * GIB})
    for name in (*devices._FRACTIONS, "CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.setenv(devices.HOST_LIMIT, "100")
    devices.reserve_gpu_memory()
    assert devices.os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.5"  # the user's own
    assert devices.os.environ[devices.HOST_LIMIT] == "100"
    monkeypatch.delenv(devices.HOST_LIMIT)
    devices.reserve_gpu_memory()
    assert devices.os.environ[devices.HOST_LIMIT] == "225"  # of nine tenths, shared by 8
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")
    devices.reserve_gpu_memory()
    share = float(devices.os.environ["XLA_CLIENT_MEM_FRACTION"])
    assert share * gpu.memory == pytest.approx(gpu.memory - reserved(8), rel=1e-4)


def stopped(*_: object) -> None:
    raise InterruptedError


@pytest.mark.parametrize("processes", [1, 2])
def test_a_gpu_of_several_processes_has_room_for_nccl(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if each process sees one GPU, as with Slurm's --gpus-per-task=1: plans of several GPUs subtract as much."""
    gpu = GPUS["a100-80gb"]
    monkeypatch.setattr(devices.os, "environ", {})
    monkeypatch.setattr(devices, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(devices, "nvidia_gpus", lambda: [{"memory": gpu.memory}])
    cluster = Cluster("localhost:1234", processes, 0)
    monkeypatch.setattr(join, "find", lambda _: cluster if processes > 1 else None)
    monkeypatch.setattr(rendezvous, "rendezvous", stopped)  # before jax starts
    with contextlib.suppress(InterruptedError):
        join.join()
    share = float(devices.os.environ["XLA_CLIENT_MEM_FRACTION"])
    assert share * gpu.memory == pytest.approx(gpu.memory - reserved(processes), rel=1e-4)


def test_functions_for_scripts_reserve_before_jax_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (load, result, run):
        monkeypatch.setattr(module, "reserve_gpu_memory", stopped)
    monkeypatch.setattr(devices, "reserve_gpu_memory", stopped)
    monkeypatch.setattr(jax, "devices", lambda: pytest.fail("jax has started"))
    cfg = load_config(CONFIG)
    for call in (lambda: run.run(cfg), lambda: result.plan(cfg), lambda: fit(cfg), lambda: load._program(cfg, True)):
        with pytest.raises(InterruptedError):
            call()


def test_a_plan_for_a_device_that_is_here_takes_off_what_jax_leaves(plan: Plan) -> None:
    gpu = GPUS["a100-80gb"]
    limit = gpu.memory - 3 * GIB
    one = SimpleNamespace(
        device_kind="NVIDIA A100-SXM4-80GB",
        platform="gpu",
        process_index=0,
        memory_stats=lambda: {"bytes_limit": limit},
    )
    here = dataclasses.replace(plan, target=local_target([one, one]))
    assert here.reserved == 3 * GIB
    assert here.target.memory - here.reserved == limit
    # jax does not use what it leaves, so a smaller reserve has no effect.
    assert dataclasses.replace(here, reserve_gib=1.0).reserved == 3 * GIB
    assert dataclasses.replace(here, reserve_gib=4.0).reserved == 4 * GIB
