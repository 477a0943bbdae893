"""What jax is told before it starts, and the peaks that MFU is measured against."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxmem.errors import UserError
from jaxmem.machine import devices, gpus
from jaxmem.machine.gpus import GPUS


def test_the_tests_run_on_eight_devices() -> None:
    assert [device.platform for device in jax.devices()] == ["cpu"] * 8


@pytest.mark.exhaustive
@pytest.mark.parametrize("imports", ["", "import jax; "], ids=["before jax", "after import jax"])
def test_simulate_decides_how_many_devices_there_are(imports: str) -> None:
    code = f"{imports}from jaxmem.machine import devices; devices.simulate(3); import jax; print(len(jax.devices()))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "3"


def test_simulate_another_number_once_jax_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(UserError, match="cannot simulate 4 devices: jax already runs with 8 cpu devices"):
        devices.simulate(4)


def test_simulate_keeps_the_flags_that_were_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given = "--xla_cpu_collective_call_terminate_timeout_seconds=7 --xla_cpu_enable_fast_math=false"
    monkeypatch.setattr(os, "environ", {"XLA_FLAGS": given})
    devices.simulate(8)
    assert os.environ["XLA_FLAGS"] == f"{given} --xla_cpu_collective_call_warn_stuck_timeout_seconds=120"


@pytest.mark.parametrize(
    ("wheels", "gpu", "expected"),
    [({"jax-cuda13-plugin": "1"}, False, "cpu"), ({"jax-cuda13-plugin": "1"}, True, None), ({}, False, None)],
)
def test_cuda_wheels_without_a_gpu_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, wheels: dict[str, str], gpu: bool, expected: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(devices, "cuda_wheels", lambda: wheels)
    monkeypatch.setattr(devices, "has_nvidia_gpu", lambda: gpu)
    devices.use_cpu_without_gpu()
    assert os.environ.get("JAX_PLATFORMS") == expected


@pytest.mark.parametrize(("only_compile", "kept"), [(False, 1), (True, 0)])
def test_compiling_alone_leaves_malloc_its_pools(
    monkeypatch: pytest.MonkeyPatch, only_compile: bool, kept: int
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(devices, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(devices, "keep_freed_memory", lambda: calls.append(None))
    devices.use_cpu_without_gpu(only_compile=only_compile)
    assert len(calls) == kept


@pytest.mark.parametrize(
    ("kind", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA L40S", "l40s-48gb"),
        ("NVIDIA L4", "l4-24gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090-24gb"),
    ],
)
def test_peak_flops_are_those_of_the_gpu_with_the_name_of_the_driver(kind: str, gpu: str) -> None:
    assert devices.peak_flops(SimpleNamespace(device_kind=kind)) == GPUS[gpu].flops


@pytest.mark.parametrize(
    "kind",
    ["cpu", "NVIDIA GeForce RTX 3080 Ti", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"],
)
def test_the_peak_flops_of_unknown_devices_are_unknown(kind: str) -> None:
    assert devices.peak_flops(SimpleNamespace(device_kind=kind)) is None


@pytest.mark.parametrize(
    ("kind", "gib", "gpu"),
    [
        ("NVIDIA A100-PCIE-40GB", 39, "a100-pcie-40gb"),
        ("NVIDIA A100 80GB PCIe", 79, "a100-pcie-80gb"),
        ("NVIDIA A100-SXM4-40GB", 39, "a100-40gb"),
    ],
)
def test_cards_without_nvlink_are_other_gpus(kind: str, gib: int, gpu: str) -> None:
    assert gpus.find(kind, gib * gpus.GIB) is GPUS[gpu]


def test_what_is_compiled_for_accelerators_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = {}
    monkeypatch.setattr(jax.config, "update", told.__setitem__)
    devices.cache_compiled_programs(tmp_path)  # the tests' own place was given by JAX_COMPILATION_CACHE_DIR, and stays
    assert told == {}
    monkeypatch.setattr(type(jax.config), "jax_compilation_cache_dir", None, raising=False)
    devices.cache_compiled_programs(tmp_path)
    assert told == {"jax_compilation_cache_dir": str(tmp_path / ".compiled")}


def test_gpus_are_those_that_the_driver_reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert devices.nvidia_gpus() == []
    program.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 580.65.06, 512, 81559'\n")
    program.chmod(0o755)
    [card] = devices.nvidia_gpus()
    assert (card["name"], card["driver"]) == ("NVIDIA H100 80GB HBM3", "580.65.06")
    assert (card["memory_in_use"], card["memory"]) == (512 << 20, 81559 << 20)
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert devices.nvidia_gpus() == []


def test_a_program_is_lowered_for_an_absent_gpu_since_jax_0_11(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3", core_count=132)
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 0))
    with devices.lowering_for(gpu):
        known = jax.sharding.get_abstract_mesh().abstract_device
        assert (known.device_kind, known.num_cores, known.platform) == (gpu.device_kind, 132, "gpu")
    with devices.lowering_for(jax.devices()[0]):
        assert getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None) is None


def test_gpus_whose_memory_is_the_host_s_are_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    rows = "NVIDIA GB10, 580.65.06, [N/A], [N/A]\\nNVIDIA L4, 580.65.06, 0, 23034"
    program.write_text(f"#!/bin/sh\nprintf '{rows}\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert [gpu["name"] for gpu in devices.nvidia_gpus()] == ["NVIDIA L4"]

    def wait(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("nvidia-smi", 60)

    monkeypatch.setattr(subprocess, "run", wait)
    assert devices.nvidia_gpus() == []


@pytest.mark.parametrize(("listed", "count"), [(None, 8), ("", 0), ("-1", 0), ("3", 1), ("0,2,-1,4", 2)])
def test_the_gpus_that_jax_may_use(monkeypatch: pytest.MonkeyPatch, listed: str | None, count: int) -> None:
    environment = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    monkeypatch.setattr(os, "environ", environment)
    assert devices.visible_count(8) == count


def test_a_child_that_simulates_more_devices_has_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    os.environ.update(devices.simulation_environment(2))
    assert devices.simulation_environment(8)["PJRT_NPROC"] == "24"
    os.environ["PJRT_NPROC"] = ""
    assert devices.simulation_environment(2)["PJRT_NPROC"] == "6"


@pytest.mark.parametrize(
    ("groups", "folder", "names"),
    [
        ("0::/\n", "", ("memory.max", "memory.current")),  # a container
        (
            "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n",
            "system.slice/slurmstepd.scope/job_7",
            ("memory.max", "memory.current"),
        ),
        (
            "3:cpuset:/slurm\n2:cpu,memory:/slurm/uid_1/job_7/step_0\n0::/\n",
            "memory/slurm/uid_1/job_7",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ),
    ],
)
def test_host_memory_is_that_of_the_container_or_job(
    groups: str, folder: str, names: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "sys/fs/cgroup" / folder
    for directory in (tmp_path / "proc/self", place):
        directory.mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1048576 kB\nMemFree: 1024 kB\nMemAvailable: 524288 kB\n")
    (tmp_path / "proc/self/cgroup").write_text(groups)
    monkeypatch.setattr(devices, "Path", lambda path: tmp_path / path.removeprefix("/"))
    assert devices.host_memory() == {"total": 1 << 30, "available": 512 << 20}, "the page cache can be freed"
    for name, size in zip(names, (256, 100), strict=True):
        (place / name).write_text(f"{size << 20}\n")
    assert devices.host_memory() == {"total": 256 << 20, "available": 156 << 20}
